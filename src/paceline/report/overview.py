"""The top of the run report: what was trained, four tiles, and the findings on health, speed and reliability."""

from collections.abc import Iterator, Sequence
from typing import Final

from paceline.core.health import RULES
from paceline.core.metric import default_monitor, describe_result, metric_label, value_of
from paceline.core.results import EvalResult, RunResult
from paceline.core.statistics import wilson_interval
from paceline.core.units import accuracy, count, per_second, seconds
from paceline.report import cells
from paceline.report.document import BottleneckSummary, PageFinding, Severity, TableCell, Tile
from paceline.report.read_run import RunData
from paceline.report.run_summary import goodput_parts, wall_clock_parts
from paceline.report.series import downsample
from paceline.report.text import clean_text

_SEVERITY_ORDER: Final = ("error", "warning", "note")
# Bottlenecks that no setting of the run removes: more of the same hardware does.
_EXPECTED_BOTTLENECKS: Final = ("compute-bound",)
_MAX_SPARK_POINTS: Final = 60


def build_tiles(run: RunData) -> list[Tile]:
    """Return accuracy, throughput, time and goodput of a finished run."""
    result = run.result
    if result is None:
        return []
    return [_accuracy_tile(run, result), _throughput_tile(run, result), _time_tile(result), *_goodput_tile(result)]


def page_heading(run: RunData) -> str:
    """Return the title of the browser's tab: `digits: 99.44 % in 21.7 s`, or the run's name."""
    result = run.result
    evaluation = None if result is None else _shown_evaluation(result)
    if result is None or evaluation is None:
        return run.name
    name = clean_text(run.plan.get("recipe_name") or run.name, 60)
    return f"{name}: {describe_result(evaluation, with_name=False)} in {seconds(result.time.wall_s)}"


def _shown_evaluation(result: RunResult) -> EvalResult | None:
    """Return the evaluation whose accuracy stands for the run: the last, or the best if its top-1 is higher.

    With several labels per image it is the macro AP that is compared.
    """
    last, best = result.ema or result.eval, result.best
    name = default_monitor(best) if best is not None else ""
    is_best_higher = best is not None and (last is None or value_of(best, name) > value_of(last, name))
    return result.best if is_best_higher else last


def _accuracy_tile(run: RunData, result: RunResult) -> Tile:
    last, best = result.ema or result.eval, _shown_evaluation(result)
    if last is None or best is None:
        return Tile("accuracy", cells.NOT_MEASURED, "not evaluated")
    evals = downsample(run.evals, _MAX_SPARK_POINTS)
    if default_monitor(best) != "top1":
        name = default_monitor(best)
        key = f"ema_{name}" if evals.has_key(f"ema_{name}") else name
        label, value = f"accuracy ({metric_label(name)})", describe_result(best).split()[-1]
        return Tile(label, TableCell(value), count(best.images, "image"), evals.xy_points("step", key))
    interval = wilson_interval(round(best.top1 * best.images), best.images)
    assert interval.low is not None and interval.high is not None
    notes = [f"{100 * interval.low:.1f} to {100 * interval.high:.1f} % for {count(best.images, 'image')}"]
    if best is not last:
        epoch = "" if result.best_epoch is None else f" of epoch {round(result.best_epoch, 2):g}"
        notes.append(f"best{epoch}, last {accuracy(last.top1)}")
    key = "ema_top1" if evals.has_key("ema_top1") else "top1"
    weights = "averaged weights, top-1" if result.ema is not None else "top-1"
    return Tile(f"accuracy ({weights})", cells.accuracy_cell(best.top1), "; ".join(notes), evals.xy_points("step", key))


def _throughput_tile(run: RunData, result: RunResult) -> Tile:
    rates = result.throughput
    if not rates.n:
        return Tile("images/s", cells.NOT_MEASURED, "no step after the measurement warm-up")
    low, high = map(per_second, rates.spread)
    note = f"{low} to {high} over {count(rates.n, 'window')}"
    points = downsample(run.steps.points, _MAX_SPARK_POINTS).xy_points("step", "images_per_s")
    return Tile("images/s", cells.rate_cell(rates.images_per_s), note, points)


def _time_tile(result: RunResult) -> Tile:
    account, times = result.account, result.time
    text = f"{count(round(result.epochs, 2), 'epoch')}, {count(result.steps, 'step')}"
    if times.to_target_s is not None:
        text += f"; target reached after {seconds(times.to_target_s)}"
    parts = cells.time_segments(wall_clock_parts(account), account.wall_s) if account is not None else []
    return Tile("time", cells.seconds_cell(times.wall_s), text, parts=parts)


def _goodput_tile(result: RunResult) -> Iterator[Tile]:
    goodput = result.goodput
    if goodput is None or goodput.wall_s <= 0:
        return
    over = count(goodput.starts, "start") if goodput.starts > 1 else "the process"
    note = f"{seconds(goodput.useful_s)} of {seconds(goodput.wall_s)} of {over} went to useful steps"
    parts = cells.time_segments(goodput_parts(goodput), goodput.wall_s)
    yield Tile("goodput", cells.share_cell(goodput.share), note, parts=parts)


def build_findings(
    run: RunData, health: Sequence[PageFinding], bottleneck: BottleneckSummary | None
) -> list[PageFinding]:
    """Return the findings on health, speed and reliability, the most severe first."""
    found = [*health, *_speed_findings(bottleneck), *_reliability_findings(run)]
    return sorted(found, key=lambda each: _SEVERITY_ORDER.index(each.severity))


def passed_checks(run: RunData, health: Sequence[PageFinding]) -> list[str]:
    """Return the names of the health checks that found nothing; none if nothing was evaluated."""
    if not run.evals or run.is_multi_label:
        return []
    found = {each.title for each in health}
    names = (name.replace("_", " ") for name, _, _ in RULES)
    return [name for name in names if name not in found]


def _speed_findings(bottleneck: BottleneckSummary | None) -> Iterator[PageFinding]:
    if bottleneck is None:
        return
    severity: Severity = "note" if bottleneck.bottleneck in _EXPECTED_BOTTLENECKS else "warning"
    evidence = " ".join(filter(None, (bottleneck.evidence, bottleneck.ceiling)))
    advice = f"To try: {bottleneck.advice}" if bottleneck.advice else ""
    title = f"Bottleneck: {bottleneck.bottleneck}"
    yield PageFinding(title, severity, "speed", evidence, advice, bottleneck.command, "explanation/verdict")


def _reliability_findings(run: RunData) -> Iterator[PageFinding]:
    result = run.result
    restarts = sum(each.get("event") == "start" for each in run.attempts.rows) - 1
    if restarts > 0:
        lost = ""
        if result is not None and result.goodput is not None:
            lost_s = result.goodput.rework_s + result.goodput.down_s
            lost = f" Repeated steps and the time between processes took {seconds(lost_s)}."
        text = f"The run was resumed {count(restarts, 'time')}.{lost}"
        yield PageFinding("restarts", "note", "reliability", text, guide="how-to/survive")
    if result is not None and result.checkpoints is not None and result.checkpoints.failed:
        failed = f"{count(result.checkpoints.failed, 'checkpoint')} could not be written."
        yield PageFinding(
            "failed checkpoints", "error", "reliability", failed, "See the warnings below.", guide="how-to/survive"
        )
    if result is not None and result.bad_images:
        text = f"{count(result.bad_images, 'image')} could not be read and were left out."
        yield PageFinding(
            "bad images", "warning", "reliability", text, "bad_images.jsonl lists them.", guide="how-to/data"
        )
    if run.warnings.total:
        first = clean_text(run.warnings.rows[0].get("message", ""), 300) if run.warnings.rows else ""
        text = f"{count(run.warnings.total, 'warning')}. The first: {first}"
        yield PageFinding("warnings", "warning", "reliability", text, guide="help/troubleshooting")
