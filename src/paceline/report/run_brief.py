"""Describe the outcome of a run or of an evaluation in a few lines; `run_summary` has the figures in full."""

import math
import shlex
from collections.abc import Iterable, Iterator
from typing import Final

from paceline.core.metric import better_than_last, describe_metrics, describe_monitored, describe_result
from paceline.core.results import Calibration, ClassCount, EvalReport, EvalResult, RunResult, worst_classes
from paceline.core.run_dir import RunDir, checkpoint_name
from paceline.core.stages import COMPUTE, DATA_WAIT, EXPOSED
from paceline.core.units import accuracy, count, energy, number, parameters, per_second, percent, seconds, share
from paceline.report import cells
from paceline.report.document import BarSegment, Brief, BriefRow, PageFinding, ReportPage
from paceline.report.read_run import RunData
from paceline.report.run_summary import quote_pieces, wall_clock_parts
from paceline.report.text import clean_text

# Share of the wall clock from which a part is named, and the number of parts named.
_MIN_PART_SHARE: Final = 0.05
_MAX_PARTS: Final = 4
_MAX_FINDINGS: Final = 2
_MIN_CLASSES: Final = 3
# Difference to the accuracy from which the balanced accuracy of a run is shown.
_MIN_BALANCED_GAP: Final = 0.005


def run_brief(run: RunData, page: ReportPage) -> Brief:
    """Return the outcome of a finished run, from its data and its report."""
    result = run.result
    assert result is not None
    name = clean_text(run.plan.get("recipe_name") or run.name, 60)
    ended = {
        "completed": f"trained {name}",
        "target_reached": f"trained {name} to its target",
        "patience_reached": f"trained {name} until it stopped improving",
        "time_reached": f"trained {name} for its time",
        "diverged": f"{name}: range test ended as the loss diverged",
    }
    headline = [
        ended.get(result.status) or f"{name}: {page.status.partition(';')[0]}",
        _describe_model(result, run.settings.get("model.name", "")),
        f"{count(round(result.epochs, 2), 'epoch')} on {count(result.world_size, 'rank')} "
        f"in {seconds(result.time.wall_s)}",
    ]
    rows = [
        BriefRow("accuracy", [[*_accuracy_pieces(result, run)]]),
        BriefRow("throughput", [_throughput_pieces(result)]),
        _time_row(result),
        *_goodput_row(result),
        *_energy_row(result),
        *_quote_row(result),
        *_bottleneck_row(page, result),
        *_health_row(page),
        _report_row(run),
        BriefRow("next", [*_next_commands(run, page, result)], is_command=True),
    ]
    place = clean_text(str(run.path), 2000)  # which the report's path repeats
    return Brief([each for each in headline if each], page.tone, [row for row in rows if any(row.lines)], place)


def evaluation_brief(
    report: EvalReport, name: str, classes: Iterable[ClassCount], health: Iterable[PageFinding]
) -> Brief:
    """Return the outcome of an evaluation of the checkpoint `name`."""
    rows = [
        _evaluation_row("accuracy", report.val),
        *([] if report.ema is None else [_evaluation_row("averaged weights", report.ema)]),
        *([] if report.train is None else [_evaluation_row("training images", report.train, report.gap)]),
        *([] if report.calibration is None else [_calibration_row(report.calibration)]),
        BriefRow("weakest", [[*_weakest_pieces(classes, 3)]]),
        _findings_row(list(health), ""),
    ]
    headline = [f"evaluated {clean_text(name)}", count(report.val.images, "image")]
    return Brief(headline, "good", [row for row in rows if any(row.lines)])


def _evaluation_row(label: str, result: EvalResult, gap: float | None = None) -> BriefRow:
    is_multi_label = math.isnan(result.top1)
    pieces = [] if is_multi_label else [accuracy(result.top1), f"top-5 {accuracy(result.top5)}"]
    pieces += _balanced_pieces(result, 5e-5)
    pieces.append(f"loss {result.loss:,.4f}")
    if result.ece is not None:
        pieces.append(f"ECE {result.ece:.4f}")
    pieces += describe_metrics(result, all_of_them=True)
    if gap is not None:
        pieces.append(f"a gap of {100 * gap:+.2f} points")
    return BriefRow(label, [pieces])


def _calibration_row(calibration: Calibration) -> BriefRow:
    pairs = {"loss": (calibration.loss, calibration.calibrated_loss)}
    if calibration.ece is not None and calibration.calibrated_ece is not None:
        pairs["ECE"] = (calibration.ece, calibration.calibrated_ece)
    changes = [f"{name} {before:,.4f} -> {after:,.4f}" for name, (before, after) in pairs.items()]
    return BriefRow("calibration", [[f"temperature {calibration.temperature:.4f}", *changes, "by two-fold validation"]])


def _balanced_pieces(result: EvalResult, least: float = _MIN_BALANCED_GAP) -> Iterator[str]:
    if result.mean_class_accuracy is not None and abs(result.mean_class_accuracy - result.top1) >= least:
        yield f"balanced accuracy {accuracy(result.mean_class_accuracy)}"


def _describe_model(result: RunResult, name: str) -> str:
    amount = result.parameters or 0
    # 0.70 M: shorter than the number in full, which `-v` has.
    size = f"({amount / 1e6:.2f} M)" if 10_000 <= amount < 1e6 else f"({parameters(amount)})" if amount else ""
    return clean_text(" ".join(filter(None, [name, size])), 80)


def _accuracy_pieces(result: RunResult, run: RunData) -> Iterator[str]:
    if result.eval is None:
        yield "not evaluated: the recipe has train.eval_every=off, or the run ended before the first"
        return
    last = result.ema or result.eval
    yield describe_result(last, with_name=False)
    if result.ema is not None:
        yield f"averaged weights (raw {describe_result(result.eval, with_name=False)})"
    yield from _balanced_pieces(last)
    epoch = "" if result.best_epoch is None else f" (epoch {round(result.best_epoch, 2):g})"
    if monitored := describe_monitored(result):
        name, value, best = monitored
        yield f"{name} {value}" + (f", best {best}{epoch}" if best else "")
    elif earlier := better_than_last(result):
        yield f"best {describe_result(earlier, with_name=False)}{epoch}"
    if result.train_eval is not None and result.gap is not None:
        yield f"on training images {accuracy(result.train_eval.top1)}"
    if result.time.to_target_s is not None:
        yield f"target reached after {seconds(result.time.to_target_s)}"
    if weakest := [*_weakest_pieces(run.classes, 1)]:
        yield f"weakest class {weakest[0]}"


def _weakest_pieces(classes: Iterable[ClassCount], most: int) -> Iterator[str]:
    classes = list(classes)
    for each in worst_classes(classes, most) if len(classes) >= _MIN_CLASSES else ():
        yield f'"{clean_text(each.name, 40)}" {accuracy(each.accuracy)} of {each.images:,}'


def _throughput_pieces(result: RunResult) -> list[str]:
    rates = result.throughput
    if not rates.n:
        return ["not measured: no step after the measurement warm-up was counted"]
    low, high = map(per_second, rates.spread)
    return [f"{per_second(rates.images_per_s)} images/s", f"({low} to {high})"]


def _time_row(result: RunResult) -> BriefRow:
    """Return the parts of the wall clock in chronological order; small ones are summed as `other`."""
    times, account = result.time, result.account
    if account is None:
        whole_s = times.wall_s
        parts = {
            "start_up": times.startup_s,
            "stages": times.train_s,
            "evaluate": times.eval_s,
            "checkpoint": times.checkpoint_s,
        }
    else:
        whole_s = account.wall_s
        stages = {key: stage.host_s for key, stage in result.stages.items() if key != "other"}
        parts = {}
        for key, each_s in wall_clock_parts(account).items():
            parts |= stages if key == "stages" else {key: each_s}
    if whole_s <= 0:
        return BriefRow("time", [])
    shares = {key: each_s / whole_s for key, each_s in parts.items() if each_s >= _MIN_PART_SHARE * whole_s}
    largest = sorted(shares, key=lambda key: -shares[key])[:_MAX_PARTS]
    named = {key: shares[key] for key in shares if key in largest}
    rest = max(0.0, 1.0 - sum(named.values()))
    bar = [BarSegment(_part_label(key), each, percent(each), "") for key, each in named.items()]
    bar.append(BarSegment("other", rest, percent(rest), ""))
    return BriefRow("time", [[f"{each.name} {each.text}" for each in bar]], bar)


def _part_label(key: str) -> str:
    return {"stages": "steps", EXPOSED: "communication"}.get(key) or cells.stage_label(key)


def _goodput_row(result: RunResult) -> Iterator[BriefRow]:
    """Yield the goodput of a run that was restarted; of others, `time` says as much."""
    goodput = result.goodput
    if goodput is not None and goodput.starts > 1:
        lost = [("repeated steps", goodput.rework_s), ("down", goodput.down_s)]
        of_all = f"{share(goodput.share)} of {seconds(goodput.wall_s)} over {count(goodput.starts, 'start')}"
        yield BriefRow("goodput", [[of_all, *(f"{name} {seconds(each_s)}" for name, each_s in lost if each_s)]])


def _energy_row(result: RunResult) -> Iterator[BriefRow]:
    pieces = [] if result.energy is None or result.energy.kwh is None else [energy(result.energy.kwh)]
    pieces += [] if result.cost is None else [f"cost {number(result.cost)}"]
    yield BriefRow("energy" if result.cost is None else "spent", [pieces])


def _quote_row(result: RunResult) -> Iterator[BriefRow]:
    if result.quote is not None:
        yield BriefRow("quote", [[piece] for piece in quote_pieces(result.quote)])


def _bottleneck_row(page: ReportPage, result: RunResult) -> Iterator[BriefRow]:
    if page.verdict is None:
        return
    shares = {key: stage.share for key, stage in result.stages.items()}
    computing = sum(shares.get(key, 0.0) for key in COMPUTE)
    pieces = [page.verdict.bottleneck]
    if result.starved is not None:  # stage times mean little
        pieces.append(f"other processes held the cores {percent(result.starved)} of the time")
    elif any(shares.values()):
        pieces += [
            f"computing {percent(computing)} of step time",
            f"waiting for data {percent(shares.get(DATA_WAIT, 0))}",
        ]
        if result.world_size > 1:
            pieces.append(f"communication {percent(shares.get(EXPOSED, 0))}")
    yield BriefRow("bottleneck", [pieces])


def _health_row(page: ReportPage) -> Iterator[BriefRow]:
    others = [*page.notices, *(f"could not be read: {problem}" for problem in page.problems)]
    yield _findings_row(page.health, ", ".join(others))


def _findings_row(findings: Iterable[PageFinding], notices: str) -> BriefRow:
    """Return the worst findings, which come first, and how many more there are."""
    findings = [each for each in findings if each.severity != "note"]
    lines = [[f"{each.title}: {each.evidence} {each.advice}"] for each in findings[:_MAX_FINDINGS]]
    more = count(len(findings) - _MAX_FINDINGS, "more finding") if len(findings) > _MAX_FINDINGS else ""
    if rest := ", ".join(filter(None, [more, notices])):
        lines.append([rest])
    return BriefRow("health", lines, is_cut=True)


def _report_row(run: RunData) -> BriefRow:
    report = RunDir(run.path).report
    return BriefRow("report", [[clean_text(str(report), 2000)]] if report.is_file() else [], is_command=True)


def _next_commands(run: RunData, page: ReportPage, result: RunResult) -> Iterator[tuple[str, str]]:
    """Yield commands, and what each does."""
    path = clean_text(shlex.quote(str(run.path)), 2000)
    trust_code = " --trust-code" if result.provenance.get("own_parts") else ""
    if result.status in ("preempted", "failed"):
        yield f"paceline train {path} --resume{trust_code}", "resume"
        return
    checkpoints = RunDir(run.path).checkpoints
    if result.status == "time_reached" and (checkpoints / checkpoint_name(result.steps)).is_dir():
        yield f"paceline train {path} --resume train.max_time=off{trust_code}", "train to the end"
    if page.verdict is not None and page.verdict.command:
        yield page.verdict.command, page.verdict.ceiling.removeprefix("Ceiling: ").rstrip(".").partition(",")[0]
    step = result.best_step
    if better_than_last(result) and step is not None and (checkpoints / checkpoint_name(step)).is_dir():
        yield f"paceline eval {path} --checkpoint best", "evaluate the best checkpoint"
