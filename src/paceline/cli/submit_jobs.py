"""Parse what `paceline submit` is to run, check it, and build its jobs; experiments can be arrays of tasks."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from paceline.cli.args import split_recipe_args
from paceline.cli.options import (
    JOB_VERBS,
    BatchStudyOptions,
    CvOptions,
    LadderOptions,
    ProfileOptions,
    ScaleOptions,
    SubmitOptions,
    parse_options,
)
from paceline.cli.scale_options import powers_of_two, read_nodes
from paceline.cluster.job import ClusterJob
from paceline.core.errors import RecipeError, WorldError
from paceline.core.run_dir import RunDir, is_run
from paceline.core.units import count
from paceline.lab.repeat import ArrayTask
from paceline.models.weights_recipe import with_run_defaults, with_weights_defaults
from paceline.recipe.consent import EVALUATED, TRUST_CODE, has_plugins, require_consent, settings_have_plugins
from paceline.recipe.load import DEFAULT, PRESETS, Patch, find_recipe, load
from paceline.recipe.plan import divide_batch, resolve_batch, small_batch_warning, smallest_batch
from paceline.recipe.schema import Recipe

RANK_VERBS: Final = ("train", "eval")
"""Verbs whose ranks the scheduler starts; the others start their own processes."""
_ONE_NODE_VERBS: Final = ("ladder", "tune", "lr-find", "profile", "cv")
_SITE_FIELD: Final = re.compile(r"(slurm|kubernetes)\.[a-z_.]+=.*", re.DOTALL)
_REFUSED_OPTIONS: Final = {
    "--run-dir": "write it before `--`",
    "--dry-run": "write it before `--`",
    "--resume": "leave it out: a job resumes the run in its run directory",
    "--task": "add --array before `--`",
    "--list": "leave it out, and write paceline ladder --list",
    "--script": "leave it out, and write paceline ladder --script in a job script of your own",
}
_REFUSED_RANK_OPTIONS: Final = {
    "--ranks": "write --ranks-per-node before `--`",
    "--max-restarts": "leave it out: the scheduler restarts a job",
    "--port": "leave it out: ranks rendezvous on the scheduler's nodes",
}
_VERB_SITE_FIELDS: Final = (
    ("slurm.stage", ("train",), "write data.stage=FOLDER"),
    ("slurm.srun", RANK_VERBS, "leave it out: it is started without srun"),
)
"""Site fields that only some verbs use."""


@dataclass(frozen=True)
class SubmitRequest:
    """Verb with its `args` (recipe and overrides), `options` and `site` fields.

    With `trust_code` the job may import code that a file names.
    """

    verb: str
    args: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    site: tuple[str, ...] = ()
    trust_code: bool = False

    def has_option(self, name: str) -> bool:
        """Return whether option `name`, such as --ranks, was given."""
        return any(word.partition("=")[0] == name for word in self.options)

    def parse(self) -> Any:
        """Return the options of the verb. Raise typer's usage error."""
        options: Any = parse_options(self.verb, JOB_VERBS[self.verb], [*self.args, *self.options])
        return replace(options, trust_code=self.trust_code)


@dataclass(frozen=True)
class JobShape:
    """Nodes of a job, and ranks and GPUs per node."""

    nodes: int
    ranks_per_node: int
    gpus_per_node: int

    @property
    def num_ranks(self) -> int:
        """Number of ranks on all nodes."""
        return self.nodes * self.ranks_per_node


def parse_submit_args(args: Sequence[str], *, trust_code: bool = False) -> SubmitRequest:
    """Parse a verb (default: train), its arguments up to the first that begins with `-`, and its options.

    Raise `RecipeError` for an option that `paceline submit` sets itself, and typer's usage error for an unknown one.
    """
    verb, rest = (args[0], args[1:]) if args and args[0] in JOB_VERBS else ("train", args)
    first = next((index for index, word in enumerate(rest) if word.startswith("-")), len(rest))
    site = tuple(word for word in rest[:first] if _SITE_FIELD.fullmatch(word))
    request = SubmitRequest(
        verb, tuple(word for word in rest[:first] if word not in site), tuple(rest[first:]), site, trust_code
    )
    ours = {**_REFUSED_OPTIONS, **_REFUSED_RANK_OPTIONS} if verb in RANK_VERBS else _REFUSED_OPTIONS
    for option, fix in ours.items():
        if request.has_option(option):
            raise RecipeError(f"{option}: is not an option of {verb} in a job ({fix})")
    _refuse_late_args(request)
    if request.has_option(TRUST_CODE):  # consent on either side of `--` counts
        options = tuple(word for word in request.options if word != TRUST_CODE)
        request = replace(request, options=options, trust_code=True)
    _refuse_site_without_effect(request)
    return request


def _refuse_late_args(request: SubmitRequest) -> None:
    """Raise `RecipeError` for an argument among the options, and typer's usage error for unknown options."""
    verb, args = request.verb, request.args
    if verb == "eval" and not args:
        return  # a missing run has a message of its own
    given = request.parse()
    given_args = [given.run, *given.overrides] if verb == "eval" else given.args
    if len(given_args) > len(args):
        raise RecipeError(f"{str(given_args[len(args)])!r}: is among the options of {verb} (write it before `--`)")


def _refuse_site_without_effect(request: SubmitRequest) -> None:
    for field, verbs, fix in _VERB_SITE_FIELDS:
        if request.verb not in verbs and any(word.partition("=")[0] == field for word in request.site):
            raise RecipeError(f"{field}: has no effect on {request.verb} ({fix})")


def build_shape(verb: str, options: SubmitOptions) -> JobShape:
    """Return the shape of a job; by default, one rank per GPU.

    Raise `WorldError` for several nodes if the verb uses one.
    """
    nodes, gpus = options.nodes, options.gpus_per_node
    if nodes > 1 and verb in _ONE_NODE_VERBS:
        raise WorldError(f"--nodes: {nodes}, but {verb} measures on one node (write --nodes 1; scale takes several)")
    return JobShape(nodes, options.ranks_per_node or max(1, gpus), gpus)


@dataclass(frozen=True)
class PreparedJob:
    """Checked job; `name` is the base name of a new run directory.

    `recipe` is frozen into the job's folder if `is_frozen`, else loaded again at the start. `ladder` is the text of
    a ladder to freeze, empty for a shipped one. `trust_code`: a file of the job names code, with consent. `run` is
    the run directory that the arguments name. A stopped job is requeued only if `can_resume`. `note` is a warning
    to print.
    """

    request: SubmitRequest
    shape: JobShape
    name: str
    recipe: Recipe
    is_frozen: bool = False
    ladder: str = ""
    trust_code: bool = False
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


def prepare_job(
    request: SubmitRequest, shape: JobShape, run_dir: Path | None, stage: str, *, array: bool
) -> PreparedJob:
    """Check everything that needs no data, and torch only for published weights.

    `stage` is the site's staging folder, or off. The tasks of an `array` get ranks even if `--ranks` is auto, as this
    machine may have none of the job's GPUs.

    Raise `RecipeError` or `WorldError` for errors that the job would hit.
    """
    match request.verb:
        case "train":
            return _prepare_train(request, shape, run_dir, stage)
        case "eval":
            return _prepare_eval(request, shape, run_dir)
        case "ladder":
            return _prepare_ladder(request, shape, array=array)
        case _:
            return _prepare_experiment(request, shape, array=array)


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
        grace_s=recipe.checkpoint.grace.seconds,
        recipe_hash=recipe.hash if prepared.is_frozen else "",
        ladder=prepared.ladder_file,
    )
    main = replace(main, args=_job_args(prepared, main))
    if not array:
        return [main]

    tasks = list_tasks(request)
    # All tasks get the cores that the largest needs: a run on fewer cores would not be reused on more.
    most = max(-(-task.ranks // task.nodes) for task in tasks)
    main = replace(main, ranks_per_node=max(main.ranks_per_node, most))
    jobs = []
    for nodes in sorted({task.nodes for task in tasks}):
        numbers = tuple(task.number for task in tasks if task.nodes == nodes)
        jobs.append(replace(main, name=f"{main.name}-tasks", nodes=nodes, tasks=numbers))
    return [*jobs, main]


def _refuse_few_gpus(shape: JobShape, device: str) -> None:
    """Raise `WorldError` for more ranks than GPUs per node."""
    if device != "cpu" and 0 < shape.gpus_per_node < shape.ranks_per_node:
        gpus = count(shape.gpus_per_node, "GPU")
        raise WorldError(
            f"--ranks-per-node: {shape.ranks_per_node} on {gpus} per node (write {shape.gpus_per_node}, or set "
            "parallel.device=cpu)"
        )


def _prepare_train(request: SubmitRequest, shape: JobShape, run_dir: Path | None, stage: str) -> PreparedJob:
    name, overrides = split_recipe_args(list(request.args))
    if name == DEFAULT and run_dir is not None and is_run(run_dir):
        name = str(run_dir)  # the run to resume, as in `train --resume`
    loaded = load(name, overrides)
    require_consent(loaded, trust_code=request.trust_code)
    if stage != "off" and loaded.stack.origin("data.stage") == "default":
        loaded = load(name, Patch((("data.stage", stage), *overrides.assignments)))
    if run_dir is not None:
        loaded = with_run_defaults(loaded, run_dir)
    # A frozen recipe names every field, so the job would take them all as set.
    loaded = with_weights_defaults(loaded)
    if loaded.recipe.parallel.strategy == "dataparallel" and shape.num_ranks > 1:
        raise RecipeError("parallel.strategy: dataparallel is one process (write --nodes 1 --ranks-per-node 1)")
    _refuse_few_gpus(shape, loaded.recipe.parallel.device)
    recipe = loaded.recipe
    if run_dir is not None and is_run(run_dir) and not loaded.is_from_command_line("data.rank_batch_size"):
        from paceline.training.resume import keep_batch

        recipe, _ = keep_batch(recipe, RunDir(run_dir), shape.num_ranks)  # the job prints the note itself
    recipe = resolve_batch(recipe, shape.num_ranks)
    divide_batch(smallest_batch(recipe, shape.num_ranks), shape.num_ranks)
    device = "cpu" if loaded.recipe.parallel.device == "cpu" or not shape.gpus_per_node else "cuda"
    note = small_batch_warning(loaded.recipe.data, shape.num_ranks, device)
    needs_consent = has_plugins(recipe)
    return PreparedJob(request, shape, loaded.name, recipe, is_frozen=True, trust_code=needs_consent, note=note)


def _prepare_eval(request: SubmitRequest, shape: JobShape, run_dir: Path | None) -> PreparedJob:
    if not request.args or "=" in request.args[0]:
        raise RecipeError("eval: needs a run directory (write paceline submit eval RUN)")
    run = Path(request.args[0]).expanduser()
    RunDir.existing(run)
    if run_dir is not None:
        raise RecipeError(f"--run-dir: {run_dir} has no effect on eval, which writes to its run (leave it out)")
    loaded = load(str(run), Patch.parse(list(request.args[1:])))
    require_consent(loaded, trust_code=request.trust_code, paths=EVALUATED)
    _refuse_few_gpus(shape, loaded.recipe.parallel.device)
    name = f"eval-{loaded.name}"
    return PreparedJob(request, shape, name, loaded.recipe, trust_code=request.trust_code, run=run.absolute())


def _prepare_ladder(request: SubmitRequest, shape: JobShape, *, array: bool) -> PreparedJob:
    from paceline.cli.ladder import AUTO_LADDER, build_ladder_request, split_ladder_args
    from paceline.lab.ladder_file import dump_ladder, list_ladders

    options = request.parse()
    ladder_request, args = build_ladder_request(options), split_ladder_args(options)
    ladder, loaded, name = ladder_request.ladder, ladder_request.runs.loaded, args.ladder or AUTO_LADDER
    is_frozen = not _is_preset(ladder.recipe)
    recipe = str(find_recipe(ladder.recipe).absolute()) if is_frozen else ladder.recipe
    text = "" if name in list_ladders() else dump_ladder(ladder.model_copy(update={"recipe": recipe}))
    if is_frozen or text:
        overrides = (word for word in request.args if "=" in word and not word.startswith("recipe="))
        request = replace(request, args=(name, ladder.recipe, *overrides), options=_without_recipe(request.options))
    needs_consent = (is_frozen and has_plugins(loaded.recipe)) or any(
        settings_have_plugins(rung.patch.values()) for rung in ladder.rungs
    )
    request = _add_ranks(request, str(shape.ranks_per_node), array=array)
    name = f"ladder-{ladder.name}"
    return PreparedJob(request, shape, name, loaded.recipe, is_frozen=is_frozen, ladder=text, trust_code=needs_consent)


def _without_recipe(options: Sequence[str]) -> tuple[str, ...]:
    """Return a ladder's options without `--recipe`."""
    frozen = [word for word in options if not word.startswith("--recipe=")]
    if "--recipe" in frozen:
        index = frozen.index("--recipe")
        del frozen[index : index + 2]
    return tuple(frozen)


def _prepare_experiment(request: SubmitRequest, shape: JobShape, *, array: bool) -> PreparedJob:
    recipe_name, overrides = split_recipe_args(list(request.args))
    options = request.parse()
    if isinstance(options, ScaleOptions | BatchStudyOptions):
        shape = _with_nodes(options, shape)
        request = _with_ranks_and_nodes(request, options, shape, array=array)
    else:
        request = _add_ranks(request, str(shape.ranks_per_node), array=array)
    loaded = with_weights_defaults(load(recipe_name, overrides))
    require_consent(loaded, trust_code=request.trust_code)
    is_frozen = not _is_preset(recipe_name)
    return PreparedJob(
        request,
        shape,
        f"{request.verb}-{loaded.name}",
        loaded.recipe,
        is_frozen,
        trust_code=is_frozen and has_plugins(loaded.recipe),
        can_resume=not isinstance(options, ProfileOptions) or bool(options.vary),
    )


def _is_preset(name: str) -> bool:
    return find_recipe(name).is_relative_to(PRESETS)


def _with_nodes(options: ScaleOptions | BatchStudyOptions, shape: JobShape) -> JobShape:
    """Return the shape with the nodes that a study needs. Raise `WorldError` if fewer were requested."""
    most = (options.nodes or 1) if isinstance(options, BatchStudyOptions) else max(read_nodes(options.nodes), default=1)
    if 1 < shape.nodes < most:
        raise WorldError(f"--nodes: {shape.nodes}, but the study goes to {most} (write --nodes {most} before `--`)")
    return replace(shape, nodes=max(shape.nodes, most))


def _with_ranks_and_nodes(
    request: SubmitRequest, options: ScaleOptions | BatchStudyOptions, shape: JobShape, *, array: bool
) -> SubmitRequest:
    """Return a study with ranks and nodes: unless given, powers of two up to all."""
    ranks, nodes = (
        str(most) if isinstance(options, BatchStudyOptions) else ",".join(map(str, powers_of_two(most)))
        for most in (shape.ranks_per_node, shape.nodes)
    )
    request = _add_ranks(request, ranks, array=array)
    if shape.nodes > 1 and options.nodes is None:
        request = replace(request, options=(*request.options, "--nodes", nodes))
    return request


def _add_ranks(request: SubmitRequest, ranks: str, *, array: bool) -> SubmitRequest:
    if request.has_option("--ranks") and not (array and request.parse().ranks == "auto"):
        return request
    return replace(request, options=(*request.options, "--ranks", ranks))


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
    """Return `--trust-code` if the job's files name code."""
    # A frozen recipe is a file, so consent given here is passed on with it.
    return (TRUST_CODE,) if prepared.trust_code else ()


def _frozen_args(prepared: PreparedJob, job: ClusterJob, args: Sequence[str]) -> tuple[str, ...]:
    """Return the arguments with frozen files in place of names; a ladder has two."""
    frozen = [
        *([str(job.frozen_ladder)] if job.ladder else []),
        *([str(job.frozen_recipe)] if prepared.is_frozen else []),
    ]
    # Overrides stay: a value given explicitly also overrides settings of a measurement.
    index = 1 if prepared.request.verb == "ladder" and not job.ladder else 0
    return (*args[:index], *frozen, *args[index + len(frozen) :])


def list_tasks(request: SubmitRequest) -> tuple[ArrayTask, ...]:
    """Return the tasks of a ladder, a scaling study or a cross-validation.

    Raise `PacelineError` for arguments that do not fit.
    """
    match request.parse():
        case LadderOptions() as options:
            from paceline.cli.ladder import plan_ladder_tasks

            return plan_ladder_tasks(options)
        case (ScaleOptions() | BatchStudyOptions()) as options:
            from paceline.cli.scale import list_scale_tasks

            return list_scale_tasks(options)
        case CvOptions() as options:
            from paceline.cli.cv import list_cv_tasks

            return list_cv_tasks(options)
    verbs = "ladder, scale, batch-study and cv"
    raise RecipeError(f"--array: {request.verb} has no independent tasks (it is for {verbs})")
