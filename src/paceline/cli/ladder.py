"""`paceline ladder`: add settings one by one, and keep each that makes training faster."""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from paceline.cli.args import count_ranks, refuse_length
from paceline.cli.experiment import Session, ShortRuns, refuse_launcher, run_experiment, run_task, with_steps_time
from paceline.cli.options import LadderOptions
from paceline.cli.ranks import refuse_too_many
from paceline.cli.tables import print_rows
from paceline.core.errors import RecipeError
from paceline.core.experiments.experiment_dir import ExperimentDir
from paceline.core.experiments.results import LadderResult
from paceline.core.host import usable_cores
from paceline.core.run_dir import RunDir
from paceline.core.units import count, seconds
from paceline.lab.ladder import LadderHardware, LadderOutcome, LadderRunner
from paceline.lab.ladder_file import Ladder, Rung, list_ladders, load_ladder, require_consent_to_rungs
from paceline.lab.patches import REDUCED_LR_SHARE, build_measurement_patch, expand_equivalent_paths
from paceline.lab.repeat import ArrayTask, find_task, list_ladder_tasks
from paceline.lab.trial import Trial, TrialOutcome, apply_patch, format_patch
from paceline.models.weights_recipe import with_weights_defaults
from paceline.parallel.environ import count_gpus
from paceline.recipe.consent import require_consent
from paceline.recipe.load import Patch, load
from paceline.recipe.plan import resolve_batch

AUTO_LADDER: Final = "auto"


@dataclass(frozen=True)
class LadderRequest:
    """A ladder, and its short runs."""

    ladder: Ladder
    runs: ShortRuns

    @property
    def tasks(self) -> tuple[ArrayTask, ...]:
        """The tasks of a job array."""
        return list_ladder_tasks(self.ladder, self.runs.repeats, self.runs.ranks)


def ladder(options: LadderOptions) -> int:
    """Run `paceline ladder`, and return the exit code."""
    if options.script is not None:
        from paceline.cli.script_ladder import script_ladder

        return script_ladder(options, options.script)
    if options.list_only:
        if options.task is not None:
            raise RecipeError(f"--task: {options.task} has no effect on a list (leave it out)")
        _print_list(split_ladder_args(options).ladder, as_json=options.as_json)
        return 0
    refuse_launcher("ladder")
    request = build_ladder_request(options)
    runs, rungs = request.runs, request.ladder.rungs
    refuse_too_many(runs.ranks, runs.recipe.parallel.device, oversubscribe=options.oversubscribe)
    key = {
        "verb": "ladder",
        "ladder": request.ladder.name,
        "rungs": [rung.model_dump(mode="json") for rung in rungs],
        "then": request.ladder.is_open_ended,
        "recipe": runs.recipe.to_dict(),
        "ranks": runs.ranks,
        "repeats": runs.repeats,
    }
    if options.task is not None:
        task = find_task(request.tasks, options.task)

        def run_rung(session: Session) -> Sequence[TrialOutcome]:
            return _build_ladder_runner(request, session).run_task(task.index + 1, task.turn)

        return run_task(key, options, task, run_rung)
    total = None if request.ladder.is_open_ended else runs.repeats * (2 * len(rungs) - 1)

    def run(session: Session) -> LadderResult:
        pairs = (
            f"up to {count(total, 'run')}" if total is not None else f"{count(runs.repeats, 'pair')} of runs per rung,"
        )
        session.print_line(f"ladder {request.ladder.name}: {pairs} of {count(runs.total_steps, 'step')}")
        return _build_result(request, _build_ladder_runner(request, session).run(), session.folder)

    return run_experiment(f"ladder-{request.ladder.name}", key, options, run, total=total)


def plan_ladder_tasks(options: LadderOptions) -> tuple[ArrayTask, ...]:
    """Return the tasks of a ladder. Raise `RecipeError` for arguments that it does not take."""
    return build_ladder_request(options).tasks


@dataclass(frozen=True)
class LadderArgs:
    """Arguments of `paceline ladder`: the names of the ladder and of its recipe, None if left out, and overrides."""

    ladder: str | None
    recipe: str | None
    overrides: Patch


def split_ladder_args(options: LadderOptions) -> LadderArgs:
    """Return the arguments. Raise `RecipeError` for two recipes; `recipe=NAME` and `--recipe` name one too."""
    names = [word for word in options.args if "=" not in word]
    named = [word.removeprefix("recipe=") for word in options.args if word.startswith("recipe=")]
    recipes = [*names[1:], *named, *([options.recipe] if options.recipe is not None else [])]
    if len(recipes) > 1:
        raise RecipeError(f"{recipes[1]!r}: a ladder varies one recipe, and {recipes[0]!r} is one (drop one of them)")
    overrides = Patch.parse([word for word in options.args if "=" in word and not word.startswith("recipe=")])
    return LadderArgs(names[0] if names else None, recipes[0] if recipes else None, overrides)


def _print_list(name: str | None, *, as_json: bool) -> None:
    if name is None:
        show_ladders([load_ladder(each) for each in list_ladders()], as_json=as_json)
    else:
        show_rungs(load_ladder(name), as_json=as_json)


def build_ladder_request(options: LadderOptions) -> LadderRequest:
    """Return the checked request. Raise `RecipeError` for arguments that do not fit."""
    args = split_ladder_args(options)
    recipe, overrides = args.recipe, args.overrides
    chosen = load_ladder(args.ladder or AUTO_LADDER)
    refuse_length(overrides, "a ladder", purpose="compare")
    for path, value in overrides.assignments:
        if path in expand_equivalent_paths(chosen.rungs[0].set):
            fix = f"leave it out, or copy the ladder and change its rung {chosen.rungs[0].name!r}"
            raise RecipeError(f"{path}: {value} has no effect on ladder {chosen.name}, which sets it ({fix})")
    loaded = with_weights_defaults(load(recipe or chosen.recipe, overrides))
    require_consent(loaded, trust_code=options.trust_code)
    require_consent_to_rungs(chosen, args.ladder or AUTO_LADDER, trust_code=options.trust_code)
    base = loaded.recipe
    if chosen.warmup_steps is not None and "measure.warmup_steps" not in dict(overrides.assignments):
        base = apply_patch(base, Patch((("measure.warmup_steps", chosen.warmup_steps),)))
    steps = options.steps or chosen.steps
    measured = apply_patch(base, build_measurement_patch(base, steps, overrides, lr_share=REDUCED_LR_SHARE))
    runs = ShortRuns(
        loaded=loaded,
        recipe=measured,
        ranks=count_ranks(options.ranks, os.environ),
        steps=steps,
        repeats=options.repeats or chosen.repeats,
        oversubscribe=options.oversubscribe,
    )
    return LadderRequest(chosen if recipe is None else chosen.model_copy(update={"recipe": recipe}), runs)


def _build_ladder_runner(request: LadderRequest, session: Session) -> LadderRunner:
    from paceline.lab.ladder import propose_rung
    from paceline.lab.page_cache import prepare_page_cache
    from paceline.lab.prepare_data import DataForm, PreparedData, prepare_data
    from paceline.measure.timer import now_s

    runs = request.runs
    hardware = LadderHardware(gpus=count_gpus(os.environ), cores=usable_cores(), ranks=runs.ranks)

    def make(form: DataForm) -> PreparedData:
        waits = partial(session.print_line, f"{form}: waiting for another task that prepares it")
        made = prepare_data(
            form, runs.recipe.data, session.folder.data, workers=hardware.cores, now=now_s, on_wait=waits
        )
        if not made.is_reused:
            session.print_line(f"{form}: prepared in {seconds(made.seconds)}")
        return made

    def prepare_cache(trial: Trial) -> None:
        recipe = resolve_batch(apply_patch(runs.recipe, trial.patch), trial.ranks or runs.ranks)
        prepare_page_cache(recipe, is_cold=trial.is_cold)

    return LadderRunner(
        ladder=request.ladder,
        recipe=runs.recipe,
        runner=runs.build_runner(session, prepare_cache),
        hardware=hardware,
        repeats=runs.repeats,
        prepare=make,
        propose=propose_rung,
        report=session.print_line,
    )


def _build_result(request: LadderRequest, outcome: LadderOutcome, folder: ExperimentDir) -> LadderResult:
    runs, first = request.runs, request.ladder.rungs[0]
    paths = [folder.path / run for rung in outcome.rungs for run in rung.runs]
    measured_s = sum(RunDir(path).read_result().time.wall_s for path in paths)
    lowest = resolve_batch(apply_patch(runs.recipe, first.patch), first.ranks or runs.ranks)
    return LadderResult(
        ladder=request.ladder.name,
        summary=request.ladder.summary,
        **runs.result_fields,
        batch_size=lowest.data.global_batch_size,
        rungs=tuple(with_steps_time(rung, runs.steps) for rung in outcome.rungs),
        best=outcome.best.name,
        best_patch=tuple(format_patch(outcome.best.patch)),
        stopped=outcome.stopped,
        wall_s=measured_s + sum(rung.prepare_s for rung in outcome.rungs),
        provenance=outcome.best.results[-1].provenance,
    )


def show_ladders(ladders: Sequence[Ladder], *, as_json: bool) -> None:
    """Print the name and summary of each ladder."""
    if as_json:
        print(json.dumps({ladder.name: ladder.summary for ladder in ladders}, indent=2))
        return
    width = max(len(ladder.name) for ladder in ladders)
    for ladder in ladders:
        print(f"{ladder.name:{width}}  {ladder.summary}")


def show_rungs(ladder: Ladder, *, as_json: bool) -> None:
    """Print the rungs of a ladder."""
    if as_json:
        rungs = [rung.model_dump(mode="json") for rung in ladder.rungs]
        facts = {"ladder": ladder.name, "summary": ladder.summary, "recipe": ladder.recipe}
        print(json.dumps({**facts, "steps": ladder.steps, "repeats": ladder.repeats, "rungs": rungs}, indent=2))
        return
    rows = [(rung.name, ", ".join(_rung_settings(rung)), rung.explains) for rung in ladder.rungs]
    print_rows(rows, f"{ladder.name}, over {ladder.recipe}: {ladder.summary}")


def _rung_settings(rung: Rung) -> Iterator[str]:
    yield from format_patch(Patch(tuple(rung.set.items())))
    if rung.batch_factor is not None:
        yield f"batch x{rung.batch_factor}"
    others = {"ranks": rung.ranks, "data": rung.data, "cache": rung.cache, "on": rung.on}
    # With a colon, as in the ladder's file: these are not overrides of a recipe.
    yield from (f"{name}: {value}" for name, value in others.items() if value != Rung.model_fields[name].default)
