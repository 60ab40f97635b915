"""`paceline eval`: evaluate a checkpoint exactly, on the run's own validation images or others."""

import contextlib
import json
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.options import EvalOptions
from paceline.cli.ranks import enter_world, ranks_to_start, start_ranks
from paceline.cli.start_line import announce, describe_hardware
from paceline.core.errors import PacelineError, RecipeError
from paceline.core.imports import fast_imports
from paceline.core.run_dir import RunDir, checkpoint_name
from paceline.core.units import count
from paceline.data.files import expand_path, printable
from paceline.recipe.consent import EVALUATED, require_consent
from paceline.recipe.load import Patch, load
from paceline.recipe.schema import Recipe
from paceline.recipe.schema.train import check_metric

if TYPE_CHECKING:
    from paceline.core.dataset import Source
    from paceline.core.results import ClassCount, EvalReport
    from paceline.inference.classifier import Classifier
    from paceline.training.explain import ExplainMistakes


def evaluate(options: EvalOptions) -> int:
    """Run `paceline eval`, and return the exit code."""
    rundir = RunDir.existing(options.run)
    name = str(rundir.path)
    original, loaded = load(name).recipe, load(name, Patch.parse(options.overrides))
    require_consent(loaded, trust_code=options.trust_code, paths=EVALUATED)
    recipe = _add_metrics(loaded.recipe, options.metrics or "")
    world = enter_world()
    num_ranks = ranks_to_start(options.ranks, world, recipe.parallel, oversubscribe=options.oversubscribe)
    on = f"{count(num_ranks, 'rank')}, {describe_hardware(recipe.parallel.device)}"
    notes = announce(f"evaluating {rundir.path} on {on}")
    if world.launcher == "single" and num_ranks > 1:
        return start_ranks(num_ranks, options.port, [])
    with notes, fast_imports():
        from paceline.training.calibration import write_temperature
        from paceline.training.checkpoint import CheckpointStorage, KeepPolicy
        from paceline.training.eval_outputs import discard, output_dir
        from paceline.training.eval_run import evaluate as work

    path = CheckpointStorage(rundir.checkpoints, KeepPolicy(1)).by_name(options.checkpoint)
    if world.is_main and options.checkpoint == "last":
        warn_missing_final(rundir, path)
    # The other ranks would write the same files.
    out_folder = expand_path(str(options.out)) if options.out and world.is_main else None
    with output_dir(out_folder) if out_folder else contextlib.nullcontext() as folder:
        predictions = expand_path(str(options.predictions)) if options.predictions else None
        keep = (
            partial(_write_outputs, folder, predictions, path, options.overrides) if folder or predictions else discard
        )
        report = work(
            recipe,
            world,
            path,
            run_recipe=original,
            print_line=_print_note,
            write_report=keep,
            calibrates=options.calibrate,
            lists_predictions=predictions is not None,
        )
        if report.calibration:
            write_temperature(rundir, path, report.calibration, options.overrides)
    if world.is_main:
        show_evaluation(report, path, as_json=options.as_json, per_class=options.classes)
    if out_folder and not options.as_json:
        print(f"outputs: {printable(out_folder)}")
    return 0


def _add_metrics(recipe: Recipe, text: str) -> Recipe:
    """Return `recipe` with the comma-separated metrics of `text` too. Raise `RecipeError` for an unknown one."""
    try:
        named = [check_metric(each.strip()) for each in text.split(",") if each.strip()]
    except ValueError as error:
        raise RecipeError(f"--metrics: {error}") from None
    # After validation, which refuses metrics of a run that was trained without evaluations.
    metrics = tuple(dict.fromkeys((*recipe.train.metrics, *named)))
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"metrics": metrics})})


def show_evaluation(report: "EvalReport", checkpoint: Path, *, as_json: bool, per_class: bool = False) -> None:
    """Print an evaluation of `checkpoint`; `per_class` adds all classes."""
    classes = report.classes.classes if report.classes else ()
    if as_json:
        print(json.dumps(evaluation_json(report, classes if per_class else ()), indent=2))
        return
    from paceline.cli.tables import print_outcome
    from paceline.report.mistake_sections import class_table
    from paceline.report.render_terminal import print_blocks
    from paceline.report.run_brief import evaluation_brief
    from paceline.report.run_page import clean_findings

    name = f"{checkpoint.parent.parent.name}, {checkpoint.name}"
    print_outcome(evaluation_brief(report, name, classes, clean_findings(report.health)))
    if per_class:
        print()
        print_blocks(class_table(classes, report.classes.confusion if report.classes else (), num_open=0))


def evaluation_json(report: "EvalReport", classes: Iterable["ClassCount"]) -> dict[str, Any]:
    """Return an evaluation as plain values, raw weights at the top level."""
    values = report.model_dump(mode="json", exclude_none=True)
    table = [_class_row(each) for each in classes]
    output = {**values.pop("val"), **values}
    if report.gap is not None:
        output["gap"] = report.gap
    if report.health:
        output["health"] = [each.model_dump(mode="json") for each in report.health]
    if report.calibration:
        output["calibration"] = report.calibration.model_dump(mode="json", exclude_none=True)
    return {**output, "classes": table} if table else output


def _class_row(each: "ClassCount") -> dict[str, Any]:
    from paceline.report.text import finite_or_none

    measured = {"predicted": each.predicted, "precision": each.precision, "f1": each.f1}
    scored = {"auroc": finite_or_none(each.auroc), "ap": finite_or_none(each.ap)}
    row = {"class": each.name, "images": each.images, "correct": each.correct}
    return row | {name: value for name, value in (measured | scored).items() if value is not None}


def _write_outputs(
    folder: RunDir | None,
    predictions: Path | None,
    checkpoint: Path,
    overrides: Sequence[str],
    report: "EvalReport",
    source: "Source",
    explain: "ExplainMistakes",
) -> None:
    from paceline.training.eval_outputs import write_eval_outputs, write_predictions
    from paceline.training.explain import explain_or_warn

    if predictions is not None:
        write_predictions(predictions, report.predictions, source)
    if folder is None:
        return
    origin = {"run": printable(checkpoint.parent.parent), "checkpoint": checkpoint.name, "overrides": list(overrides)}
    overlays = explain_or_warn(explain, report.worst, _print_note)
    write_eval_outputs(folder, {**origin, **evaluation_json(report, ())}, report, source, overlays)


def warn_missing_final(rundir: RunDir, checkpoint: Path) -> None:
    """Print a note if `checkpoint` replaces a missing checkpoint of the last step."""
    from paceline.training.resume import describe_missing_checkpoint

    with contextlib.suppress(PacelineError):
        if checkpoint.name == checkpoint_name(rundir.read_result().steps):
            return  # cheap: reads no checkpoint
    if missing := describe_missing_checkpoint(rundir):
        _print_note(f"{missing}; {checkpoint.name} is used")


def warn_uncalibrated(rundir: RunDir, classifier: "Classifier") -> None:
    """Print a note if other checkpoints of the run were calibrated, but not that of `classifier`."""
    if classifier.temperature is None and rundir.temperatures.is_file():
        name = classifier.checkpoint.name
        _print_note(
            f"{rundir.temperatures}: has no temperature for {name}, so its probabilities are not calibrated "
            f"(paceline eval RUN --calibrate --checkpoint {int(name.removeprefix('step-'))})"
        )


def _print_note(sentence: str) -> None:
    print(f"note: {printable(sentence)}", file=sys.stderr)
