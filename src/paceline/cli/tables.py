"""Print results: tables for people, JSON for programs."""

import json
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from paceline.core.results import (
    AccountResult,
    CheckpointResult,
    ClassCount,
    EvalReport,
    EvalResult,
    Finding,
    GoodputResult,
    RunResult,
    StageResult,
    worst_classes,
)
from paceline.core.run_dir import RunDir, checkpoint_name
from paceline.core.stages import display_name
from paceline.core.units import accuracy, count, milliseconds, parameters, seconds, share, size
from paceline.data.files import printable, printable_lines
from paceline.recipe.consent import consent_arguments
from paceline.recipe.load import LoadedRecipe
from paceline.recipe.schema import Recipe
from paceline.report.document import KeyValueList, Table, TableCell, TableColumn
from paceline.report.render_terminal import print_blocks

_NUM_WORST_CLASSES = 3
_MIN_CPU_LOSS_SHARE = 0.02
"""CPU share of other processes from which it is printed for a run that was not starved: speed-ups of a few percent
would drown in it.
"""
_MIN_LOSS_SHARE = 0.002
"""Share of wall-clock time from which a loss is printed."""


def print_table(
    title: str,
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    text_columns: Collection[str] = (),
    *,
    num_names: int = 1,
) -> None:
    """Print a table whose first column and `text_columns` are text, the others numbers."""
    columns = [
        TableColumn(heading, is_number=index > 0 and heading not in text_columns)
        for index, heading in enumerate(headings)
    ]
    print_blocks(Table(title, columns, [[*map(TableCell, row)] for row in rows], num_names=num_names))


def show_result(result: RunResult, rundir: RunDir, loaded: LoadedRecipe, *, as_json: bool) -> None:
    """Print the result of a run of `loaded`, and its run directory."""
    if as_json:
        print(result.model_dump_json(indent=2))
        return
    print_rows(
        [
            ("model", _model_text(result, loaded)),
            *_result_rows(result, rundir),
            *_checkpoint_rows(result, rundir, loaded.recipe),
        ],
        _result_title(result, rundir),
    )
    _print_health(result.health or ())
    if result.throughput.n and result.stages and result.account is not None:
        print_stages(result.stages, result.account.counted_steps, "rank 0" if result.world_size > 1 else "")
    print_run_dir(rundir)


def _result_title(result: RunResult, rundir: RunDir) -> str:
    return f"{result.how_it_ended(rundir.total_steps())}: recipe {result.recipe_hash}"


def print_run_dir(rundir: RunDir) -> None:
    """Print the run directory, and the report if it exists."""
    print(f"run directory: {printable(rundir.path)}")
    if rundir.report.is_file():
        print(f"report: {printable(rundir.report)}")


def show_evaluation(report: EvalReport, checkpoint: Path, *, as_json: bool, per_class: bool = False) -> None:
    """Print an evaluation of `checkpoint`; `per_class` adds all classes."""
    classes = report.classes.classes if report.classes else ()
    if as_json:
        print(json.dumps(evaluation_json(report, classes if per_class else ()), indent=2))
        return
    rows = _eval_rows(report.val, report.ema, report.train, classes)
    print_rows(rows, f"{checkpoint.parent.parent.name}, {checkpoint.name}")
    _print_health(report.health)
    if per_class:
        _print_classes(classes)


def evaluation_json(report: EvalReport, classes: Iterable[ClassCount]) -> dict[str, Any]:
    """Return an evaluation as plain values, raw weights at the top level."""
    values = report.model_dump(mode="json", exclude_none=True)
    table = [{"class": each.name, "images": each.images, "correct": each.correct} for each in classes]
    output = {**values.pop("val"), **values}
    if report.gap is not None:
        output["gap"] = report.gap
    if report.health:
        output["health"] = [each.model_dump(mode="json") for each in report.health]
    return {**output, "classes": table} if table else output


def _model_text(result: RunResult, loaded: LoadedRecipe) -> str:
    """Return `resnet18_cifar, 11.2 M parameters (digits)`."""
    num, trained = result.parameters, result.trained_parameters
    size = "" if num is None else f", {parameters(num)} parameters"
    if trained is not None and trained != num:
        size += f", {parameters(trained)} of them trained"
    return printable(f"{loaded.recipe.model.name}{size} ({loaded.name})")


def _result_rows(result: RunResult, rundir: RunDir) -> list[tuple[str, str]]:
    rates, times = result.throughput, result.time
    rows: list[tuple[str, str]] = []
    if result.eval:
        rows = _eval_rows(result.eval, result.ema, result.train_eval, rundir.read_classes())
        below = 1 if result.ema is None else 2
        rows[below:below] = _best_row(result, result.ema or result.eval, rundir)
    if rates.n:
        low, high = rates.spread
        speed = f"{rates.images_per_s:,.0f} images/s ({low:,.0f} to {high:,.0f}; {count(rates.n, 'window')})"
        rows.append(("throughput", f"{speed}, without {seconds(rates.excluded_s)} of warm-up and pauses"))
    parts = {
        "start-up": times.startup_s,
        "training": times.train_s,
        display_name("evaluate"): times.eval_s,
        display_name("checkpoint"): times.checkpoint_s,
    }
    texts = ", ".join(f"{name} {seconds(each_s)}" for name, each_s in parts.items())
    rows.append(("time", f"{seconds(times.wall_s)} ({texts})"))
    if times.to_target_s is not None:
        rows.append(("to target", seconds(times.to_target_s)))
    trained = (
        f"{count(result.steps, 'step')}, {count(result.images_seen, 'image')}, "
        f"{count(round(result.epochs, 2), 'epoch')}, {count(result.world_size, 'rank')}"
    )
    rows.append(("trained", trained))
    if result.skipped_steps:
        rows.append(
            ("skipped", f"{count(result.skipped_steps, 'step')}, whose gradient was NaN, infinite or overflowed")
        )
    rows.append(("learning rate", result.lr))
    if result.account is not None:
        rows.append(("wall clock", account_line(result.account)))
    if result.host_to_device is not None and result.host_to_device.copied_bytes:
        rows.append(("copy to device", str(result.host_to_device)))
    rows.append(("bottleneck", bottleneck_line(result.verdict)))
    if result.cpu is not None and result.starved is None and result.cpu.share >= _MIN_CPU_LOSS_SHARE:
        rows.append(
            ("other programs", f"used the cores for {share(result.cpu.share)} of the time that training could have run")
        )
    rows.append(("weights", f"sha256 {result.weights_sha256[:16]}"))
    return rows


def _best_row(result: RunResult, last: EvalResult, rundir: RunDir) -> list[tuple[str, str]]:
    """Return the best evaluation if it was not the last, and how to load its weights."""
    best, step = result.best, result.best_step
    if best is None or step is None or best.top1 <= last.top1:
        return []
    position = f"at step {step:,}" + ("" if result.best_epoch is None else f", epoch {round(result.best_epoch, 2):g}")
    is_kept = (rundir.checkpoints / checkpoint_name(step)).is_dir()
    return [("best top-1", f"{accuracy(best.top1)} {position} ({'--checkpoint best' if is_kept else 'not kept'})")]


def bottleneck_line(verdict: Mapping[str, str]) -> str:
    """Return bottleneck, evidence, potential gain and advice, as far as known."""
    ceiling, to_try = verdict.get("ceiling", ""), verdict["try"]
    parts = [f"{verdict['bottleneck']}. {verdict['evidence']}"]
    if ceiling:
        parts.append(f"{ceiling[0].upper()}{ceiling[1:]}.")
    if to_try:
        parts.append(f"Try {to_try}.")
    return " ".join(parts)


def _checkpoint_rows(result: RunResult, rundir: RunDir, recipe: Recipe) -> list[tuple[str, str]]:
    rows = []
    if result.goodput is not None and result.goodput.wall_s:
        rows.append(("goodput", goodput_line(result.goodput)))
    if result.checkpoints is not None and (result.checkpoints.saved or result.checkpoints.failed):
        rows.append(("checkpoints", saving_line(result.checkpoints)))
    if result.bad_images:
        rows.append(("bad images", f"{count(result.bad_images, 'image')} left out (see {rundir.bad_images})"))
    if result.status in ("preempted", "failed"):
        command = ("paceline", "train", str(rundir.path), "--resume", *consent_arguments(recipe))
        rows.append(("resume with", shlex.join(command)))
    return rows


def goodput_line(goodput: GoodputResult) -> str:
    """Return `97.1 % of 12:30 min; start-up 4.10 s`, with the losses that matter."""
    losses = {
        "start-up": goodput.startup_s,
        display_name("data_wait"): goodput.data_wait_s,
        display_name("evaluate"): goodput.eval_s,
        display_name("checkpoint"): goodput.checkpoint_s,
        "steps done again": goodput.rework_s,
        "down": goodput.down_s,
        "other": goodput.other_s,
    }
    texts = [
        f"{name} {seconds(lost_s)}" for name, lost_s in losses.items() if lost_s >= _MIN_LOSS_SHARE * goodput.wall_s
    ]
    over = f" over {count(goodput.starts, 'start')}" if goodput.starts > 1 else ""
    return "; ".join(
        [f"{share(goodput.share)} of {seconds(goodput.wall_s)}{over}", *([", ".join(texts)] if texts else [])]
    )


def saving_line(saving: CheckpointResult) -> str:
    """Return `12 saved, 307 MB each: training stood still for 30 ms, on disk after 500 ms (614 MB/s); 1 failed`."""
    parts = [f"{saving.saved:,} saved"]
    if saving.saved:
        speed = f" ({size(saving.bytes / saving.write_s)}/s)" if saving.write_s else ""
        stall = f"training stood still for {seconds(saving.stall_s)}, on disk after {seconds(saving.write_s)}{speed}"
        parts = [f"{parts[0]}, {size(saving.bytes)} each: {stall}"]
    if saving.failed:
        parts.append(f"{saving.failed:,} failed")
    return "; ".join(parts)


def _eval_rows(
    raw: EvalResult, averaged: EvalResult | None, train: EvalResult | None, classes: Iterable[ClassCount]
) -> list[tuple[str, str]]:
    rows = [("top-1", f"{_eval_text(raw)} ({raw.images:,} images)")]
    if averaged is not None:
        rows.append(("averaged weights", _eval_text(averaged)))
    if train is not None:
        points = f"{100 * (train.top1 - raw.top1):+.2f}"
        rows.append(
            ("on training images", f"{accuracy(train.top1)}, a gap of {points} points ({train.images:,} images)")
        )
    classes = list(classes)
    mistaken = worst_classes(classes, _NUM_WORST_CLASSES) if len(classes) > 2 else []
    if mistaken:
        texts = (f"{each.name}: {accuracy(each.accuracy)} of {each.images:,}" for each in mistaken)
        rows.append(("worst classes", ", ".join(texts)))
    return rows


def _eval_text(result: EvalResult) -> str:
    """Return the metrics; the class mean only if it differs from top-1."""
    figures = [accuracy(result.top1), f"top-5 {accuracy(result.top5)}", f"loss {result.loss:.4f}"]
    if result.mean_class_accuracy is not None and abs(result.mean_class_accuracy - result.top1) >= 5e-5:
        figures.append(f"mean of classes {accuracy(result.mean_class_accuracy)}")
    if result.ece is not None:
        figures.append(f"calibration error {result.ece:.4f}")
    return ", ".join(figures)


def print_rows(rows: Sequence[tuple[str, ...]], title: str) -> None:
    """Print rows of equal length under a title; the first column is the row's name."""
    columns = [TableColumn("", is_number=False, is_wide=index > 1) for index in range(len(rows[0]))]
    if len(columns) > 2:
        print_blocks(Table(title, columns, [[*map(TableCell, row)] for row in rows]))
    else:
        print_blocks(KeyValueList([(name, TableCell(value)) for name, value in rows], title))


def _print_health(findings: Sequence[Finding]) -> None:
    if findings:
        print_rows([(each.title, printable(f"{each.evidence} {each.advice}")) for each in findings], "health")


def _print_classes(classes: Iterable[ClassCount]) -> None:
    table = _titled_table("classes")
    table.add_column("class", style="bold", overflow="fold")
    for heading in ("images", "correct", "accuracy"):
        table.add_column(heading, justify="right")
    for each in classes:
        top1 = accuracy(each.accuracy) if each.images else "no images"
        table.add_row(printable(each.name), f"{each.images:,}", f"{each.correct:,}", top1)
    _build_console().print(table)


def print_stages(stages: Mapping[str, StageResult], num_steps: int, whose: str = "") -> None:
    """Print the stages of a mean step, longest first, and the residual last.

    `whose` names the clock. The device column appears only if its times differ from the host's.
    """
    covered, covered_s = sum(stage.share for stage in stages.values()), sum(stage.host_s for stage in stages.values())
    wall_s = covered_s / covered if covered else 0.0
    has_device = any(stage.device_s != stage.host_s for stage in stages.values())
    rest = ("residual", wall_s - covered_s, "", 1 - covered)
    rows = [
        (name, stage.host_s, _ms_per_step(stage.device_s, num_steps), stage.share) for name, stage in stages.items()
    ]
    where = ", ".join(filter(None, [f"mean of {count(num_steps, 'step')}", whose]))
    table = _titled_table("")
    table.add_column("stage", style="bold")
    for heading in ("ms", *(["ms of the device"] if has_device else []), "share"):
        table.add_column(heading, justify="right")
    for name, host_s, device, each_share in [*sorted(rows, key=lambda row: -row[1]), rest]:
        shown = [_ms_per_step(host_s, num_steps), *([device] if has_device else []), share(max(0.0, each_share))]
        table.add_row(display_name(name), *shown)
    title = f"a step: {milliseconds(wall_s / num_steps)} ({where})"
    _build_console().print(title, style="bold", soft_wrap=True)  # a table would fold its title to its own width
    _build_console().print(table)


def _ms_per_step(whole_s: float, num_steps: int) -> str:
    return f"{1000 * whole_s / num_steps:,.2f}"


def account_line(account: AccountResult) -> str:
    """Return `start-up 12.2 s + ... = 25.1 s; 99.6 % attributed`."""
    parts = {
        "start-up": account.start_up_s,
        "compiling": account.compile_s,
        "warm-up": account.warmup_s,
        "stages": account.stages_s,
        **{display_name(name): each_s for name, each_s in account.pauses.items()},
        "finish": account.finish_s,
        "closing": account.closing_s,
        display_name("residual"): account.residual_s,
    }
    texts = [f"{name} {seconds(each_s)}" for name, each_s in parts.items() if abs(each_s) >= 0.05]
    return f"{' + '.join(texts)} = {seconds(account.wall_s)}; {share(account.explained)} attributed"


def _titled_table(title: str, *, show_header: bool = True) -> RichTable:
    return RichTable(
        title=printable_lines(title), title_justify="left", title_style="bold", box=box.ROUNDED, show_header=show_header
    )


def _build_console() -> Console:
    return Console(highlight=False, markup=False)
