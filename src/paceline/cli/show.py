"""Show a result: a table for a person, JSON for a program."""

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from paceline.core.class_table import ClassCount, worst
from paceline.core.results import AccountResult, CheckpointResult, EvalReport, EvalResult, GoodputResult, RunResult
from paceline.core.rundir import RunDir
from paceline.core.units import count, duration
from paceline.data.sources.places import printable

_WORST = 3
_MATTERS = 0.002
"""Share of the wall clock from which a loss is worth a word."""


def show_result(result: RunResult, rundir: RunDir, *, as_json: bool) -> None:
    """Print what a run amounts to, and where it is."""
    if as_json:
        print(result.model_dump_json(indent=2))
        return
    print_rows(
        [*_rows(result, rundir.read_classes()), *_kept(result, rundir)],
        f"{result.status.replace('_', ' ')}: recipe {result.recipe_hash}",
    )
    if result.throughput.n and result.stages:
        _print_stages(result)
    print(f"run directory: {printable(rundir.path)}")
    if rundir.report.is_file():
        print(f"report: {printable(rundir.report)}")


def show_evaluation(report: EvalReport, checkpoint: Path, *, as_json: bool, per_class: bool = False) -> None:
    """Print an evaluation of `checkpoint`, with all of its classes when `per_class` asks for them."""
    classes = report.classes.classes if report.classes else ()
    if as_json:
        print(json.dumps(_evaluation_json(report, classes if per_class else ()), indent=2))
        return
    rows = _judged(report.val, report.ema, report.train, classes)
    print_rows(rows, f"{checkpoint.parent.parent.name}, {checkpoint.name}")
    if per_class:
        _print_classes(classes)


def _evaluation_json(report: EvalReport, classes: Iterable[ClassCount]) -> dict[str, Any]:
    """Return the weights as they are at the top level; averages, training images and classes where there are any."""
    values = report.model_dump(mode="json", exclude_none=True)
    table = [{"class": each.name, "images": each.images, "correct": each.correct} for each in classes]
    found = {**values.pop("val"), **values}
    if report.gap is not None:
        found["gap"] = report.gap
    return {**found, "classes": table} if table else found


def _rows(result: RunResult, classes: Iterable[ClassCount]) -> list[tuple[str, str]]:
    rates, times = result.throughput, result.time
    rows = _judged(result.eval, result.ema, result.train_eval, classes) if result.eval else []
    if rates.n:
        low, high = rates.spread
        speed = f"{rates.images_per_s:,.0f} images/s ({low:,.0f} to {high:,.0f}; {count(rates.n, 'window')})"
        rows.append(("throughput", f"{speed}, without {rates.excluded_s:.1f} s of warm-up and pauses"))
    parts = f"start {times.startup_s:.1f} s, train {times.train_s:.1f} s, eval {times.eval_s:.1f} s"
    rows.append(("time", f"{duration(times.wall_s)} ({parts}, checkpoints {times.checkpoint_s:.1f} s)"))
    if times.to_target_s is not None:
        rows.append(("to target", duration(times.to_target_s)))
    trained = (
        f"{count(result.steps, 'step')}, {count(result.images_seen, 'image')}, "
        f"{count(round(result.epochs, 2), 'epoch')}, {count(result.world_size, 'rank')}"
    )
    rows.append(("trained", trained))
    if result.skipped_steps:
        rows.append(("skipped", f"{count(result.skipped_steps, 'step')}, whose gradient was no number or overflowed"))
    rows.append(("learning rate", result.lr))
    if result.account is not None:
        rows.append(("accounted", account_line(result.account)))
    rows.append(("verdict", verdict_line(result.verdict)))
    rows.append(("weights", f"sha256 {result.weights_sha256[:16]}"))
    return rows


def verdict_line(verdict: Mapping[str, str]) -> str:
    """Return what held a run back, why, what there is to win, and what to try, as far as that is known."""
    ceiling, to_try = verdict.get("ceiling", ""), verdict["try"]
    parts = [f"{verdict['bottleneck']}. {verdict['evidence']}"]
    if ceiling:
        parts.append(f"{ceiling[0].upper()}{ceiling[1:]}.")
    if to_try:
        parts.append(f"Try {to_try}.")
    return " ".join(parts)


def _kept(result: RunResult, rundir: RunDir) -> list[tuple[str, str]]:
    """Return the rows on what was saved, what was lost, and how to go on, where there is anything to tell."""
    rows = []
    if result.goodput is not None and result.goodput.wall_s:
        rows.append(("goodput", goodput_line(result.goodput)))
    if result.checkpoints is not None and (result.checkpoints.saved or result.checkpoints.failed):
        rows.append(("checkpoints", saving_line(result.checkpoints)))
    if result.bad_images:
        rows.append(("bad images", f"{count(result.bad_images, 'image')} left out (see {rundir.bad_images})"))
    if result.status == "preempted":
        rows.append(("to go on", f"paceline train {shlex.quote(str(rundir.path))} --resume"))
    return rows


def goodput_line(goodput: GoodputResult) -> str:
    """Return the share of useful time and what losses matter: `97.1 % of 12:30; start-up 4.1 s, data wait 2.0 s`."""
    losses = {
        "start-up": goodput.startup_s,
        "data wait": goodput.data_wait_s,
        "evaluation": goodput.eval_s,
        "checkpoints": goodput.checkpoint_s,
        "steps done again": goodput.rework_s,
        "down": goodput.down_s,
        "other": goodput.other_s,
    }
    told = [f"{name} {_seconds(lost_s)}" for name, lost_s in losses.items() if lost_s >= _MATTERS * goodput.wall_s]
    over = f" over {count(goodput.starts, 'start')}" if goodput.starts > 1 else ""
    return "; ".join([f"{100 * goodput.share:.1f} % of {duration(goodput.wall_s)}{over}", ", ".join(told)]).rstrip("; ")


def saving_line(saving: CheckpointResult) -> str:
    """Return `12 saved, 307.0 MB each: training stood still for 30 ms, on disk after 500 ms (614 MB/s); 1 failed`."""
    parts = [f"{saving.saved:,} saved"]
    if saving.saved:
        megabytes = saving.bytes / 1e6
        speed = f" ({megabytes / saving.write_s:,.0f} MB/s)" if saving.write_s else ""
        stall = f"training stood still for {_brief(saving.stall_s)}, on disk after {_brief(saving.write_s)}{speed}"
        parts = [f"{parts[0]}, {megabytes:,.1f} MB each: {stall}"]
    if saving.failed:
        parts.append(f"{saving.failed:,} failed")
    return "; ".join(parts)


def _brief(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else duration(seconds)


def _judged(
    raw: EvalResult, averaged: EvalResult | None, train: EvalResult | None, classes: Iterable[ClassCount]
) -> list[tuple[str, str]]:
    """Return the rows of an evaluation; of `classes` only those worth a look."""
    rows = [("top-1", f"{_figures(raw)} ({raw.images:,} images)")]
    if averaged is not None:
        rows.append(("averaged weights", _figures(averaged)))
    if train is not None:
        points = f"{100 * (train.top1 - raw.top1):+.2f}"
        rows.append(("on training images", f"{train.top1:.2%}, a gap of {points} points ({train.images:,} images)"))
    classes = list(classes)
    mistaken = worst(classes, _WORST) if len(classes) > 2 else []
    if mistaken:
        told = (f"{each.name}: {each.accuracy:.2%} of {each.images:,}" for each in mistaken)
        rows.append(("worst classes", ", ".join(told)))
    return rows


def _figures(result: EvalResult) -> str:
    """Return the figures of an evaluation; the mean over the classes where it is not that over the images."""
    figures = [f"{result.top1:.2%}", f"top-5 {result.top5:.2%}", f"loss {result.loss:.4f}"]
    if result.mean_class_accuracy is not None and abs(result.mean_class_accuracy - result.top1) >= 5e-5:
        figures.append(f"mean of classes {result.mean_class_accuracy:.2%}")
    if result.ece is not None:
        figures.append(f"calibration error {result.ece:.4f}")
    return ", ".join(figures)


def print_rows(rows: Sequence[tuple[str, ...]], title: str) -> None:
    """Print rows of equal length under a title; the first column is what each is about."""
    table = _table(title, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    for _ in rows[0][1:]:
        table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    _console().print(table)


def _print_classes(classes: Iterable[ClassCount]) -> None:
    table = _table("classes")
    table.add_column("class", style="bold", overflow="fold")
    for heading in ("images", "correct", "accuracy"):
        table.add_column(heading, justify="right")
    for each in classes:
        accuracy = f"{each.accuracy:.2%}" if each.images else "none to judge"
        table.add_row(each.name, f"{each.images:,}", f"{each.correct:,}", accuracy)
    _console().print(table)


def _print_stages(result: RunResult) -> None:
    """Print the stages in the order of a step; the device's own seconds only where they are not the host's."""
    has_device = any(stage.device_s != stage.host_s for stage in result.stages.values())
    num_steps = result.account.counted_steps if result.account else 0
    per_step = 1000 / max(1, num_steps)
    table = _table("where the time of a step went")
    table.add_column("stage", style="bold")
    for heading in ("ms a step", "host s", *(("device s",) if has_device else ()), "share"):
        table.add_column(heading, justify="right")
    for name, stage in result.stages.items():
        device = (f"{stage.device_s:.2f}",) if has_device else ()
        host_s = stage.host_s
        table.add_row(spoken(name), f"{host_s * per_step:.2f}", f"{host_s:.2f}", *device, f"{stage.share:.1%}")
    _console().print(table)


def account_line(account: AccountResult) -> str:
    """Return `start-up 12.2 s + compile ... + residual 0.1 s = 25.1 s; 99.6 % explained`, without what took nothing."""
    parts = {
        "start-up": account.start_up_s,
        "compiling": account.compile_s,
        "warm-up": account.warmup_s,
        "stages": account.stages_s,
        **{spoken(name): seconds for name, seconds in account.pauses.items()},
        "finish": account.finish_s,
        "residual": account.residual_s,
    }
    told = [f"{name} {_seconds(seconds)}" for name, seconds in parts.items() if abs(seconds) >= 0.05]
    return f"{' + '.join(told)} = {_seconds(account.wall_s)}; {account.explained:.1%} explained"


def spoken(name: str) -> str:
    """Return a stage or pause as it is said: `exposed communication`."""
    return name.replace("_", " ")


def _table(title: str, *, show_header: bool = True) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=box.ROUNDED, show_header=show_header)


def _console() -> Console:
    return Console(highlight=False, markup=False)
