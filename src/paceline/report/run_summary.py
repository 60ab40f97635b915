"""Describe the outcome of a run: its key figures, and facts below them."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from paceline.core.metric import (
    better_than_last,
    default_monitor,
    describe_metrics,
    describe_monitored,
    describe_result,
    metric_label,
    monitor_of,
)
from paceline.core.quote_result import QuoteTruth
from paceline.core.results import (
    AccountResult,
    CheckpointResult,
    ClassCount,
    EstimateResult,
    EvalResult,
    GoodputResult,
    RunResult,
    worst_classes,
)
from paceline.core.run_dir import RunDir, checkpoint_name
from paceline.core.statistics import Interval
from paceline.core.units import accuracy, count, energy, number, per_second, seconds, share, size
from paceline.report import cells
from paceline.report.document import KeyFigure, TableCell
from paceline.report.text import clean_text

ATTRIBUTED: Final = "attributed"
_NUM_WORST_CLASSES: Final = 3
# CPU share of other processes from which it is named for a run that was not starved: speed-ups of a few percent would
# drown in it.
_MIN_CPU_LOSS_SHARE: Final = 0.02
# Share of the wall clock from which a part is named.
_MIN_TIME_SHARE: Final = 0.002


def _result_cell(result: EvalResult) -> TableCell:
    """Return the metric that sums up an evaluation."""
    is_top1 = default_monitor(result) == "top1"
    return cells.accuracy_cell(result.top1) if is_top1 else TableCell(describe_result(result).split()[-1])


def _describe_evaluation(result: EvalResult) -> str:
    parts = [*([] if math.isnan(result.top1) else [f"top-5 {accuracy(result.top5)}"]), f"loss {result.loss:,.4f}"]
    if result.mean_class_accuracy is not None and abs(result.mean_class_accuracy - result.top1) >= 5e-5:
        parts.append(f"balanced accuracy {accuracy(result.mean_class_accuracy)}")
    if result.ece is not None:
        parts.append(f"ECE {result.ece:.4f}")
    parts += describe_metrics(result, all_of_them=True)
    return ", ".join([*parts, count(result.images, "image")])


def worst_classes_rows(classes: Iterable[ClassCount]) -> Iterator[tuple[str, TableCell]]:
    """Yield the classes of the lowest accuracy, of more than two."""
    classes = list(classes)
    mistaken = worst_classes(classes, _NUM_WORST_CLASSES) if len(classes) > 2 else []
    if mistaken:
        texts = (f"{clean_text(each.name, 60)}: {accuracy(each.accuracy)} of {each.images:,}" for each in mistaken)
        yield "worst classes", TableCell(", ".join(texts))


def result_figures(result: RunResult, rundir: Path) -> Iterator[KeyFigure]:
    """Yield the key figures of the run in `rundir`: accuracy, images/s and time."""
    if result.eval is None:
        why = "not evaluated: the recipe has train.eval_every=off, or the run ended before the first"
        yield KeyFigure("top-1", cells.NOT_MEASURED, why)
    else:
        name = metric_label(default_monitor(result.eval))
        yield KeyFigure(name, _result_cell(result.eval), _describe_evaluation(result.eval))
        if result.ema is not None:
            yield KeyFigure("averaged weights", _result_cell(result.ema), _describe_evaluation(result.ema))
        yield from _best_figure(result, rundir)
        if result.train_eval is not None and result.gap is not None:
            note = f"a gap of {100 * result.gap:+.2f} points, {count(result.train_eval.images, 'image')}"
            yield KeyFigure("on training images", cells.accuracy_cell(result.train_eval.top1), note)
    rates = result.throughput
    if rates.n:
        low, high = map(per_second, rates.spread)
        without = f"without {seconds(rates.excluded_s)} of measurement warm-up and pauses"
        note = f"{low} to {high} over {count(rates.n, 'window')}, {without}"
        yield KeyFigure("images/s", cells.rate_cell(rates.images_per_s), note)
    else:
        why = "not measured: no step after the measurement warm-up was counted"
        yield KeyFigure("images/s", cells.NOT_MEASURED, why)
    times = result.time
    parts = [f"target reached after {seconds(times.to_target_s)}"] if times.to_target_s is not None else []
    if result.account is None:
        phases = {"start_up": times.startup_s, "evaluate": times.eval_s, "checkpoint": times.checkpoint_s}
        parts += (f"{cells.stage_label(key)} {seconds(each_s)}" for key, each_s in phases.items())
    else:
        parts += name_times(wall_clock_parts(result.account), result.account.wall_s)
    yield KeyFigure("wall clock", cells.seconds_cell(times.wall_s), ", ".join(parts))
    if result.account is not None:
        residual = f"{seconds(abs(result.account.residual_s))} of the wall clock are not attributed"
        yield KeyFigure(ATTRIBUTED, cells.share_cell(result.account.explained), residual)


def _best_figure(result: RunResult, rundir: Path) -> Iterator[KeyFigure]:
    best, step = result.best, result.best_step
    title, cell = "best top-1", cells.accuracy_cell(best.top1 if best else None)
    if monitored := describe_monitored(result):
        name, value, best_value = monitored
        title, cell = (f"best {name}", TableCell(best_value)) if best_value else (name, TableCell(value))
    if best is None or (monitored is None and better_than_last(result) is None):
        return
    last = result.ema or result.eval
    is_last_better = last is not None and monitor_of(result).is_better(last, best)
    if step is None or is_last_better:
        yield KeyFigure(title, cell)
        return
    epoch = "" if result.best_epoch is None else f", epoch {round(result.best_epoch, 2):g}"
    is_kept = (RunDir(rundir).checkpoints / checkpoint_name(step)).is_dir()
    note = f"at step {step:,}{epoch}, {'--checkpoint best' if is_kept else 'not kept'}"
    yield KeyFigure(title, cell, note)


def wall_clock_parts(account: AccountResult) -> dict[str, float]:
    """Return the seconds of each part of the process; `stages` are those of all measured steps."""
    return {
        "start_up": account.start_up_s,
        "compile": account.compile_s,
        "warmup": account.warmup_s,
        "stages": account.stages_s,
        **account.pauses,
        "finish": account.finish_s,
        "closing": account.closing_s,
        "residual": account.residual_s,
    }


def name_times(parts: Mapping[str, float], wall_s: float) -> list[str]:
    """Return `start-up 4.10 s` for each part that matters in `wall_s` seconds."""
    shown = {key: each_s for key, each_s in parts.items() if abs(each_s) >= _MIN_TIME_SHARE * wall_s}
    return [
        f"{'steps' if key == 'stages' else cells.stage_label(key)} {seconds(each_s)}" for key, each_s in shown.items()
    ]


def training_rows(result: RunResult) -> Iterator[tuple[str, TableCell]]:
    """Yield what was trained, and which weights came out."""
    amounts = (
        count(result.steps, "step"),
        count(result.images_seen, "image"),
        count(round(result.epochs, 2), "epoch"),
        count(result.world_size, "rank"),
    )
    yield "trained", TableCell(", ".join(amounts), result.steps)
    if result.skipped_steps:
        skipped = f"{count(result.skipped_steps, 'step')}, whose gradient was NaN, infinite or overflowed"
        yield "skipped", TableCell(skipped, result.skipped_steps)
    yield "learning rate", cells.text_cell(result.lr, 300)
    yield "weights", TableCell(f"sha256 {clean_text(result.weights_sha256[:16])}")


def reliability_rows(result: RunResult) -> Iterator[tuple[str, TableCell]]:
    """Yield goodput, checkpoints and the CPU time of other programs, as far as they were measured.

    The goodput of a run that was never restarted says no more than its wall clock.
    """
    if result.goodput is not None and result.goodput.wall_s and result.goodput.starts > 1:
        yield "goodput", TableCell(describe_goodput(result.goodput), result.goodput.share)
    if result.checkpoints is not None and (result.checkpoints.saved or result.checkpoints.failed):
        yield "checkpoints", TableCell(describe_checkpoints(result.checkpoints), result.checkpoints.saved)
    if result.cpu is not None and result.starved is None and result.cpu.share >= _MIN_CPU_LOSS_SHARE:
        text = f"used the cores for {share(result.cpu.share)} of the time that training could have run"
        yield "other programs", TableCell(text, result.cpu.share)


def estimate_rows(result: RunResult) -> Iterator[tuple[str, TableCell]]:
    """Yield the time that the run predicted for itself, compared with the truth."""
    if result.estimate is not None and result.estimate.error is not None:
        yield "estimate", TableCell(describe_estimate(result.estimate), result.estimate.error)


def describe_estimate(estimate: EstimateResult) -> str:
    """Return `12 min 05 s predicted at step 140 (11 min 10 s to 13 min 40 s), 12 min 30 s taken: 3.3 % too short`."""
    forecast = estimate.forecast
    predicted, low, high = map(seconds, (forecast.predicted_s, forecast.low_s, forecast.high_s))
    text = f"{predicted} predicted at step {estimate.step:,} ({low} to {high})"
    if estimate.actual_s is None or estimate.error is None:
        return text
    direction = "long" if estimate.error > 0 else "short"
    return f"{text}, {seconds(estimate.actual_s)} taken: {share(abs(estimate.error))} too {direction}"


def quote_rows(result: RunResult) -> Iterator[tuple[str, TableCell]]:
    """Yield the quote of `log.quote`, compared with the truth, or why it was not."""
    if result.quote is not None:
        yield "quote", TableCell("; ".join(quote_pieces(result.quote)))


def quote_pieces(truth: QuoteTruth) -> Iterator[str]:
    """Yield `1,340 images/s, quoted 1,230 for 1 x h100 (1,020 to 1,400): within the interval`, time, and gaps."""
    gpu = clean_text(truth.gpu, 60)
    if truth.images_per_s is not None and truth.measured_images_per_s is not None:
        measured = f"{per_second(truth.measured_images_per_s)} images/s"
        yield _compare_pieces(
            measured, f" for {truth.ranks:,} x {gpu}", truth.images_per_s, per_second, truth.is_speed_within
        )
    if truth.hours is not None and truth.measured_hours is not None:
        taken = seconds(3600 * truth.measured_hours)
        yield _compare_pieces(taken, "", truth.hours, lambda hours: seconds(3600 * hours), truth.is_time_within)
    if truth.why:
        yield clean_text(truth.why, 400)


def _compare_pieces(
    measured: str, what_for: str, quoted: Interval, write: Callable[[float], str], is_within: bool | None
) -> str:
    text = f"{measured}, quoted {write(quoted.value)}{what_for}"
    if quoted.low is None or quoted.high is None:
        return text
    outcome = {True: ": within the interval", False: ": outside the interval", None: ""}[is_within]
    return f"{text} ({write(quoted.low)} to {write(quoted.high)}){outcome}"


def energy_rows(result: RunResult) -> Iterator[tuple[str, TableCell]]:
    """Yield the energy and the cost of a run, as far as they are known."""
    used = result.energy
    if used is not None and used.kwh is not None:
        parts = {"GPUs": used.gpu_kwh, "CPUs": used.cpu_kwh}
        known = [f"{name} {energy(kwh)}" for name, kwh in parts.items() if kwh is not None]
        missing = [f"{kind.upper()}s not measured: {clean_text(why, 200)}" for kind, why in used.missing.items()]
        rate = [f"{number(used.images_per_kwh)} images per kWh"] if used.images_per_kwh else []
        yield "energy", TableCell("; ".join([", ".join(known), *rate, *missing]), used.kwh)
    if result.cost is not None:
        yield "cost", TableCell(number(result.cost), result.cost, note="log.price_per_hour times rank-hours")


def goodput_parts(goodput: GoodputResult) -> dict[str, float]:
    """Return the seconds of each part of the time since the first start."""
    return {
        "useful": goodput.useful_s,
        "start_up": goodput.startup_s,
        "data_wait": goodput.data_wait_s,
        "evaluate": goodput.eval_s,
        "checkpoint": goodput.checkpoint_s,
        "rework": goodput.rework_s,
        "down": goodput.down_s,
        "other": goodput.other_s,
    }


def describe_goodput(goodput: GoodputResult) -> str:
    """Return `97.1 % of 12 min 30 s over 2 starts; start-up 4.10 s`, with the losses that matter."""
    losses = {key: each_s for key, each_s in goodput_parts(goodput).items() if key != "useful"}
    over = f" over {count(goodput.starts, 'start')}" if goodput.starts > 1 else ""
    whole = f"{share(goodput.share)} of {seconds(goodput.wall_s)}{over}"
    return "; ".join(filter(None, [whole, ", ".join(name_times(losses, goodput.wall_s))]))


def describe_checkpoints(saving: CheckpointResult) -> str:
    """Return `12 saved, 307 MB each: paused training for 30 ms, written in 500 ms (614 MB/s); 1 failed`."""
    text = f"{saving.saved:,} saved"
    if saving.saved:
        speed = f" ({size(saving.bytes / saving.write_s)}/s)" if saving.write_s else ""
        stall = f"paused training for {seconds(saving.stall_s)}, written in {seconds(saving.write_s)}{speed}"
        text += f", {size(saving.bytes)} each: {stall}"
    return f"{text}; {saving.failed:,} failed" if saving.failed else text
