"""Check what a job would run, and build its command; experiments can be arrays of tasks."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from paceline.cli.args import count_ranks, refuse_length, split_recipe_args
from paceline.cli.scale_options import measuring_options
from paceline.cli.scale_settings import ScaleOptions, read_nodes, read_ranks
from paceline.cli.submit_args import RANK_VERBS, JobShape, SubmitRequest, read_options, refuse_few_gpus
from paceline.cluster.job import ClusterJob
from paceline.core.errors import RecipeError, WorldError
from paceline.core.run_dir import RunDir, is_run
from paceline.lab.repeat import ArrayTask
from paceline.recipe.consent import OWN_CODE, has_plugins, require_consent, settings_have_plugins
from paceline.recipe.load import DEFAULT, PRESETS, Patch, find_recipe, load
from paceline.recipe.plan import divide_batch, resolve_batch, small_batch_warning
from paceline.recipe.schema import Recipe

_AUTO_RANKS: Final = "auto"
_NON_ARRAY_OPTIONS: Final = ("run_dir", "task", "list_only")
"""Options that the starter of a task sets, or that start none."""
_DEFAULT_LADDER: Final = "auto"


@dataclass(frozen=True)
class TaskArray:
    """Arguments of `paceline` for a whole experiment, and its tasks.

    `--run-dir DIR --task K` runs task K; `--run-dir DIR` alone runs missing runs, and concludes.
    """

    args: tuple[str, ...]
    tasks: tuple[ArrayTask, ...]


@dataclass(frozen=True)
class PreparedJob:
    """Checked job; `name` is the base name of a new run directory.

    `recipe` is frozen into the job's folder if `is_frozen`, else loaded again at the start. `ladder` is the text of
    a ladder to freeze, empty for a shipped one. `own_code`: a file of the job names code, with consent. `run` is
    the run directory that the arguments name. A stopped job is requeued only if `can_resume`. `note` is a warning
    to print.
    """

    request: SubmitRequest
    shape: JobShape
    name: str
    recipe: Recipe | None = None
    is_frozen: bool = False
    ladder: str = ""
    own_code: bool = False
    run: Path | None = None
    can_resume: bool = True
    note: str = ""

    @property
    def ladder_file(self) -> str:
        """Path of the ladder's file below the job's folder, in a folder named by the hash of its text."""
        if not self.ladder:
            return ""
        digest = hashlib.sha256(self.ladder.encode("utf-8", "surrogateescape")).hexdigest()[:12]
        return f"ladder-{digest}/{self.name.removeprefix('ladder-')}.yaml"


def prepare_job(request: SubmitRequest, shape: JobShape, run_dir: Path | None, stage: str) -> PreparedJob:
    """Check everything that needs neither data nor torch; `stage` is the site's staging folder, or off.

    Raise `RecipeError` or `WorldError` for errors that the job would hit.
    """
    match request.verb:
        case "train":
            return _prepare_train(request, shape, run_dir, stage)
        case "eval":
            return _prepare_eval(request, shape, run_dir)
        case "ladder":
            return _prepare_ladder(request, shape)
        case _:
            return _prepare_experiment(request, shape)


def refuse_local_run(prepared: PreparedJob, mount: str) -> None:
    """Raise `RecipeError` for a local run that pods, which mount the claim at `mount`, cannot read."""
    run = prepared.run
    if run is not None and not run.is_relative_to(mount):
        raise RecipeError(f"{run}: is not on the claim, which pods mount at {mount} (move it there)")


def build_jobs(
    prepared: PreparedJob, run_dir: Path, folder: Path, comments: Sequence[str], *, array: bool
) -> list[ClusterJob]:
    """Return the jobs; with `array`, tasks are separate jobs, and the main one runs after them and concludes.

    `folder` is the working directory, `comments` are for the scripts. Raise `RecipeError` for an `array` of a verb
    without tasks.
    """
    request, shape, recipe = prepared.request, prepared.shape, prepared.recipe
    main = ClusterJob(
        name=prepared.name,
        args=(),
        run_dir=run_dir,
        folder=folder,
        nodes=shape.nodes,
        ranks_per_node=shape.ranks_per_node,
        gpus_per_node=shape.gpus_per_node,
        starts_ranks=request.verb in RANK_VERBS,
        comments=tuple(comments),
    )
    if recipe is not None:
        frozen_hash = recipe.hash if prepared.is_frozen else ""
        main = replace(main, grace_s=recipe.checkpoint.grace.seconds, recipe_hash=frozen_hash)
    main = replace(main, ladder=prepared.ladder_file)
    main = replace(main, args=_job_args(prepared, main))
    if not array:
        return [main]

    parts = build_array(request.verb, request.args, request.options, shape.ranks_per_node)
    verb, *args = parts.args
    main = replace(
        main, args=(verb, *_frozen_args(prepared, main, args), *_consent_args(prepared), "--run-dir", str(run_dir))
    )
    # All tasks get the cores that the largest needs: a run on fewer cores would not be reused on more.
    most = max(-(-task.ranks // task.nodes) for task in parts.tasks)
    main = replace(main, ranks_per_node=max(main.ranks_per_node, most))
    return [*_build_array_jobs(main, parts.tasks), main]


def _build_array_jobs(main: ClusterJob, tasks: Sequence[ArrayTask]) -> list[ClusterJob]:
    jobs = []
    for nodes in sorted({task.nodes for task in tasks}):
        numbers = tuple(task.number for task in tasks if task.nodes == nodes)
        jobs.append(replace(main, name=f"{main.name}-tasks", nodes=nodes, tasks=numbers))
    return jobs


def _prepare_train(request: SubmitRequest, shape: JobShape, run_dir: Path | None, stage: str) -> PreparedJob:
    name, overrides = split_recipe_args(list(request.args))
    if name == DEFAULT and run_dir is not None and is_run(run_dir):
        name = str(run_dir)  # the run to resume, as in `train --resume`
    loaded = load(name, overrides)
    require_consent(loaded, own_code=request.own_code)
    if stage != "off" and loaded.stack.origin("data.stage") == "default":
        loaded = load(name, Patch((("data.stage", stage), *overrides.assignments)))
    if loaded.recipe.parallel.strategy == "dataparallel" and shape.num_ranks > 1:
        raise RecipeError("parallel.strategy: dataparallel is one process (write --nodes 1 --ranks-per-node 1)")
    refuse_few_gpus(shape, loaded.recipe.parallel.device)
    recipe = loaded.recipe
    if run_dir is not None and is_run(run_dir) and not loaded.is_from_command_line("data.rank_batch_size"):
        from paceline.training.resume import keep_batch_size

        recipe, _ = keep_batch_size(recipe, RunDir(run_dir), shape.num_ranks)  # the job prints the note itself
    recipe = resolve_batch(recipe, shape.num_ranks)
    divide_batch(recipe, shape.num_ranks)
    device = "cpu" if loaded.recipe.parallel.device == "cpu" or not shape.gpus_per_node else "cuda"
    note = small_batch_warning(loaded.recipe.data, shape.num_ranks, device)
    needs_consent = has_plugins(recipe)
    return PreparedJob(request, shape, loaded.name, recipe, is_frozen=True, own_code=needs_consent, note=note)


def _prepare_eval(request: SubmitRequest, shape: JobShape, run_dir: Path | None) -> PreparedJob:
    if not request.args or "=" in request.args[0]:
        raise RecipeError("eval: needs a run directory (write paceline submit eval RUN)")
    run = Path(request.args[0]).expanduser()
    RunDir.existing(run)
    if run_dir is not None:
        raise RecipeError(f"--run-dir: {run_dir} has no effect on eval, which writes to its run (leave it out)")
    loaded = load(str(run), Patch.parse(list(request.args[1:])))
    require_consent(loaded, own_code=request.own_code, paths=("model", "data.source"))
    refuse_few_gpus(shape, loaded.recipe.parallel.device)
    name = f"eval-{loaded.name}"
    return PreparedJob(request, shape, name, loaded.recipe, own_code=request.own_code, run=run.absolute())


def _prepare_ladder(request: SubmitRequest, shape: JobShape) -> PreparedJob:
    from paceline.lab.ladder_file import dump_ladder, list_ladders, load_ladder, require_consent_to_rungs

    given = read_options("ladder", [*request.args, *request.options])
    names = [word for word in request.args if "=" not in word]
    named = [word.removeprefix("recipe=") for word in request.args if word.startswith("recipe=")]
    recipes = [*names[1:], *named, *([given["recipe"]] if given["recipe"] is not None else [])]
    overrides = Patch.parse([word for word in request.args if "=" in word and not word.startswith("recipe=")])
    if len(recipes) > 1:
        raise RecipeError(f"{recipes[1]!r}: a ladder varies one recipe, and {recipes[0]!r} is one (drop one of them)")
    refuse_length(overrides, "a ladder", purpose="compare")
    name = names[0] if names else _DEFAULT_LADDER
    ladder = load_ladder(name)
    recipe = recipes[0] if recipes else ladder.recipe
    loaded = load(recipe, overrides)
    require_consent(loaded, own_code=request.own_code)
    require_consent_to_rungs(ladder, name, own_code=request.own_code)
    count_ranks(given["ranks"], {})
    is_frozen = not _is_preset(recipe)
    whole = replace(ladder, recipe=str(find_recipe(recipe).absolute()) if is_frozen else recipe)
    text = "" if name in list_ladders() else dump_ladder(whole)
    if is_frozen or text:
        recipe_args = (word for word in request.args if "=" in word and not word.startswith("recipe="))
        request = replace(request, args=(name, recipe, *recipe_args), options=_without_recipe(request.options))
    request = _with_ranks(request, shape)
    needs_consent = (is_frozen and has_plugins(loaded.recipe)) or any(
        settings_have_plugins(rung.patch.values()) for rung in ladder.rungs
    )
    name = f"ladder-{ladder.name}"
    return PreparedJob(request, shape, name, loaded.recipe, is_frozen=is_frozen, ladder=text, own_code=needs_consent)


def _without_recipe(options: Sequence[str]) -> tuple[str, ...]:
    """Return a ladder's options without `--recipe`."""
    frozen = [word for word in options if not word.startswith("--recipe=")]
    if "--recipe" in frozen:
        index = frozen.index("--recipe")
        del frozen[index : index + 2]
    return tuple(frozen)


def _prepare_experiment(request: SubmitRequest, shape: JobShape) -> PreparedJob:
    recipe_name, overrides = split_recipe_args(list(request.args))
    loaded = load(recipe_name, overrides)
    require_consent(loaded, own_code=request.own_code)
    name, is_frozen = f"{request.verb}-{loaded.name}", not _is_preset(recipe_name)
    needs_consent = is_frozen and has_plugins(loaded.recipe)
    if request.verb == "scale":
        shape = _with_nodes(request, shape)
        return PreparedJob(
            _with_ranks_and_nodes(request, shape), shape, name, loaded.recipe, is_frozen, own_code=needs_consent
        )
    can_resume = request.verb != "profile" or request.has_option("--vary")
    request = _with_ranks(request, shape)
    return PreparedJob(request, shape, name, loaded.recipe, is_frozen, own_code=needs_consent, can_resume=can_resume)


def _is_preset(name: str) -> bool:
    return find_recipe(name).is_relative_to(PRESETS)


def _with_nodes(request: SubmitRequest, shape: JobShape) -> JobShape:
    """Return the shape with the nodes that a study needs. Raise `WorldError` if fewer were requested."""
    most = max(
        read_nodes(measuring_options(read_options("scale", [*request.args, *request.options]))["nodes"]), default=1
    )
    if 1 < shape.nodes < most:
        raise WorldError(f"--nodes: {shape.nodes}, but the study goes to {most} (write --nodes {most} before `--`)")
    return replace(shape, nodes=max(shape.nodes, most))


def _with_ranks(request: SubmitRequest, shape: JobShape) -> SubmitRequest:
    if request.has_option("--ranks"):
        return request
    return replace(request, options=(*request.options, "--ranks", str(shape.ranks_per_node)))


def _with_ranks_and_nodes(request: SubmitRequest, shape: JobShape) -> SubmitRequest:
    """Return a study with ranks and nodes: unless given, powers of two up to all."""
    options = list(request.options)
    is_study = any(map(request.has_option, ("--batch-sizes", "--warmups", "--lr-rules")))
    if not request.has_option("--ranks"):
        options += ["--ranks", str(shape.ranks_per_node) if is_study else _doubling(shape.ranks_per_node)]
    if shape.nodes > 1 and not request.has_option("--nodes"):
        options += ["--nodes", str(shape.nodes) if is_study else _doubling(shape.nodes)]
    return replace(request, options=tuple(options))


def _doubling(most: int) -> str:
    return ",".join(map(str, sorted({*(2**power for power in range(most.bit_length()) if 2**power <= most), most})))


def _job_args(prepared: PreparedJob, job: ClusterJob) -> tuple[str, ...]:
    request, run_dir = prepared.request, str(job.run_dir)
    match request.verb:
        case "train":
            return (
                "train",
                str(job.frozen_recipe),
                *request.options,
                *_consent_args(prepared),
                "--run-dir",
                run_dir,
                "--resume",
            )
        case "eval":
            return ("eval", run_dir, *request.args[1:], *request.options, *_consent_args(prepared))
        case verb:
            args = (*_frozen_args(prepared, job, request.args), *request.options, *_consent_args(prepared))
            return (verb, *args, "--run-dir", run_dir)


def _consent_args(prepared: PreparedJob) -> tuple[str, ...]:
    """Return `--own-code` if the job's files name code."""
    # A frozen recipe is a file, so consent given here is passed on with it.
    return (OWN_CODE,) if prepared.own_code else ()


def _frozen_args(prepared: PreparedJob, job: ClusterJob, args: Sequence[str]) -> tuple[str, ...]:
    """Return the arguments with frozen files in place of names; a ladder has two."""
    frozen = [
        *([str(job.frozen_ladder)] if job.ladder else []),
        *([str(job.frozen_recipe)] if prepared.is_frozen else []),
    ]
    # Overrides stay: a value given explicitly also overrides settings of a measurement.
    index = 1 if prepared.request.verb == "ladder" and not job.ladder else 0
    return (*args[:index], *frozen, *args[index + len(frozen) :])


def build_array(verb: str, args: Sequence[str], options: Sequence[str], ranks_per_node: int) -> TaskArray:
    """Return the array of `ladder` or `scale` with its arguments and options.

    `ranks_per_node` is the default for `--ranks`. Raise `PacelineError` for arguments that do not fit, and typer's
    usage error for unknown options.
    """
    match verb:
        case "ladder":
            return _ladder_array([*args, *options], ranks_per_node)
        case "scale":
            return _scale_array([*args, *options], ranks_per_node)
    raise RecipeError(f"--array: {verb} has no independent tasks (it is for ladder and scale)")


def _ladder_array(args: list[str], ranks_per_node: int) -> TaskArray:
    from paceline.cli.ladder import plan_ladder_tasks

    given = _read_verb_options("ladder", args)
    ranks, command_args = given["ranks"], args
    if ranks == _AUTO_RANKS:
        ranks, command_args = str(ranks_per_node), [*args, "--ranks", str(ranks_per_node)]
    request = {name: given[name] for name in ("recipe", "steps", "repeats")}
    return TaskArray(("ladder", *command_args), plan_ladder_tasks(list(given["args"] or []), ranks, **request))


def _scale_array(args: list[str], ranks_per_node: int) -> TaskArray:
    from paceline.cli.scale import list_scale_tasks

    given = _read_verb_options("scale", args)
    request = {
        name: value for name, value in measuring_options(given).items() if name not in (*_NON_ARRAY_OPTIONS, "own_code")
    }
    options, command_args = ScaleOptions(**request), args
    if options.ranks == _AUTO_RANKS:
        known = [ranks_per_node] if options.is_study else read_ranks(_AUTO_RANKS, ranks_per_node)
        ranks = ",".join(map(str, known))
        options, command_args = ScaleOptions(**request | {"ranks": ranks}), [*args, "--ranks", ranks]
    return TaskArray(("scale", *command_args), list_scale_tasks(list(given["args"] or []), options))


def _read_verb_options(verb: str, args: Sequence[str]) -> dict[str, Any]:
    """Return a verb's options by parameter name. Raise `RecipeError` for one that no array has."""
    given = read_options(verb, args)
    for name in _NON_ARRAY_OPTIONS:
        if given.get(name):
            option = "--list" if name == "list_only" else f"--{name.replace('_', '-')}"
            raise RecipeError(f"{option}: is not an option of an array (leave it out)")
    return given
