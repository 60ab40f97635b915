"""Draw curves of runs over one another: accuracy, losses and the generalization gap. Runs of a group look the same."""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, zip_longest
from statistics import fmean
from typing import Final

from paceline.report.blocks import Block, Chart, ChartLine, ChartRow, Paragraph
from paceline.report.compare.read import ComparedRun, EvalPoint
from paceline.report.compare.sentences import format_target
from paceline.report.plot import MAX_LINES, NUM_LINE_STYLES
from paceline.report.sections import cells
from paceline.report.sections.clock import choose_time_unit
from paceline.report.thin import Point, downsample_points

_MAX_CURVE_POINTS = 300
_METRIC_TITLES: Final = {
    "top1": "Top-1 accuracy",
    "top5": "Top-5 accuracy",
    "mean_class_accuracy": "Mean accuracy of classes",
}

_GAP_NOTE: Final = (
    "The generalization gap is the validation loss minus the training loss. The training loss is the mean over the "
    "steps since the previous evaluation, on augmented images and with the recipe's label smoothing. With "
    "train.eval_train=on it is that of training images, evaluated like validation images."
)

NamedRuns = Sequence[tuple[str, Sequence[ComparedRun]]]


def build_curves(groups: NamedRuns, target: float | None, metric: str) -> Iterator[Block]:
    """Yield the charts of runs in named groups, and a note if some runs are not drawn."""
    runs = _choose_drawn_runs(groups)
    gaps = [*_train_val_charts(groups, metric), *_gap_charts(runs)]
    charts = [*_accuracy_charts(runs, target, metric), *_loss_charts(runs), *gaps]
    if charts:
        yield ChartRow(charts)
        if gaps:
            yield Paragraph(_GAP_NOTE)
    else:
        yield cells.missing_paragraph("There are no curves: no run was evaluated or logged a step.")
    num_runs = sum(len(members) for _, members in groups)
    if num_runs > len(runs):
        yield cells.missing_paragraph(f"{len(runs)} of the {num_runs} runs are drawn, equally many per group.")


def _choose_drawn_runs(groups: NamedRuns) -> list[tuple[str, ComparedRun]]:
    # Round-robin, so that every group has curves if there are too many runs.
    turns = zip_longest(*([(name, run) for run in members] for name, members in groups))
    chosen = [each for each in chain.from_iterable(turns) if each is not None][:MAX_LINES]
    order = {name: index for index, (name, _) in enumerate(groups)}
    return sorted(chosen, key=lambda each: order[each[0]])


def _accuracy_charts(runs: Sequence[tuple[str, ComparedRun]], target: float | None, metric: str) -> Iterator[Chart]:
    longest_s = max((each.trained_s for _, run in runs for each in run.evals), default=0.0)
    clock = choose_time_unit(longest_s)
    rule = None if target is None else (100 * target, format_target(target))
    title = _METRIC_TITLES[metric]
    axes: list[tuple[str, str, Callable[[EvalPoint], float]]] = [
        ("over time", f"trained, {clock.unit}", lambda each: clock.convert(each.trained_s)),
        ("over epochs", "epoch", lambda each: each.epoch),
    ]
    for over, x_label, at in axes:
        lines = [
            _run_line(name, run, runs, [(at(each), 100 * each.accuracy) for each in run.evals if at(each)], marked=True)
            for name, run in runs
        ]
        lines = [line for line in lines if line.points]
        if lines:
            yield Chart(f"{title} {over}", x_label, "%", lines, low=None, rule=rule)


def _loss_charts(runs: Sequence[tuple[str, ComparedRun]]) -> Iterator[Chart]:
    over = "epoch" if all(run.steps.has_key("epoch") for _, run in runs if run.steps.num_records) else "step"
    drawn = [_run_line(name, run, runs, run.steps.xy_points(over, "loss")) for name, run in runs]
    lines = [line for line in drawn if line.points]
    if lines:
        yield Chart("Training loss", over, "cross-entropy", lines)
    drawn = [_run_line(name, run, runs, _val_losses(run), marked=True) for name, run in runs]
    lines = [line for line in drawn if line.points]
    if lines:
        yield Chart("Validation loss", "epoch", "cross-entropy", lines)


def _train_val_charts(groups: NamedRuns, metric: str) -> Iterator[Chart]:
    """Yield learning curves of each group's first run: validation solid, training dashed."""
    first = [(name, members[0]) for name, members in groups if members][: MAX_LINES // 2]
    note = "dashed: training" + (
        "" if all(len(members) == 1 for _, members in groups) else ", of each group's first run"
    )
    lines = [
        line
        for name, run in first
        for line in (
            _group_line(name, "validation", _val_losses(run), marked=True),
            _group_line(name, "training", _train_losses(run), dashed=True),
        )
        if line.points
    ]
    if _has_train_and_val(lines):
        yield Chart("Training and validation loss", "epoch", "cross-entropy", lines, note=note)
    lines = [
        line
        for name, run in first
        for line in (
            _group_line(name, "validation", _known_points(run, lambda each: 100 * each.accuracy), marked=True),
            _group_line(name, "training", _known_points(run, _train_percent), dashed=True),
        )
        if line.points
    ]
    if _has_train_and_val(lines):
        title = f"Training and validation, {_METRIC_TITLES[metric].lower()}"
        yield Chart(title, "epoch", "%", lines, low=None, note=note)


def _gap_charts(runs: Sequence[tuple[str, ComparedRun]]) -> Iterator[Chart]:
    drawn = [_run_line(name, run, runs, _generalization_gap(run), marked=True) for name, run in runs]
    lines = [line for line in drawn if line.points]
    if lines:
        yield Chart("Generalization gap", "epoch", "cross-entropy", lines, rule=(0.0, "none"))


def _generalization_gap(run: ComparedRun) -> list[Point]:
    steps = sorted(run.steps.xy_points("epoch", "loss"))
    start, gaps = 0, []
    for each in run.evals:
        end = bisect_right(steps, each.epoch, key=lambda step: step[0])
        since = [loss for _, loss in steps[start:end]]
        training = each.train_loss if each.train_loss is not None else fmean(since) if since else None
        if each.epoch and each.loss is not None and training is not None:
            gaps.append((each.epoch, each.loss - training))
        start = end
    return gaps


def _val_losses(run: ComparedRun) -> list[Point]:
    return _known_points(run, lambda each: each.loss)


def _train_losses(run: ComparedRun) -> Sequence[Point]:
    return _known_points(run, lambda each: each.train_loss) or run.steps.xy_points("epoch", "loss")


def _train_percent(each: EvalPoint) -> float | None:
    return None if each.train_accuracy is None else 100 * each.train_accuracy


def _known_points(run: ComparedRun, read: Callable[[EvalPoint], float | None]) -> list[Point]:
    points = [(each.epoch, read(each)) for each in run.evals]
    return [(epoch, value) for epoch, value in points if epoch and value is not None]


def _has_train_and_val(lines: Sequence[ChartLine]) -> bool:
    return len({line.is_dashed for line in lines}) == 2


def _group_line(
    group: str, split: str, points: Sequence[Point], *, marked: bool = False, dashed: bool = False
) -> ChartLine:
    thinned = downsample_points(points, _MAX_CURVE_POINTS)
    return ChartLine(
        f"{group}, {split}", thinned, has_markers=marked, group=group, label=_group_number(group), is_dashed=dashed
    )


def _run_line(
    name: str,
    run: ComparedRun,
    runs: Sequence[tuple[str, ComparedRun]],
    points: Sequence[Point],
    *,
    marked: bool = False,
) -> ChartLine:
    # Name the seed only if the group has several runs.
    is_alone = sum(other == name for other, _ in runs) == 1
    seed = "" if is_alone or run.seed is None else f", seed {run.seed}"
    label = _group_number(name) + (seed if len(runs) <= NUM_LINE_STYLES else "")
    return ChartLine(
        name + seed, downsample_points(points, _MAX_CURVE_POINTS), has_markers=marked, group=name, label=label
    )


def _group_number(name: str) -> str:
    # The number stands for the group's name where there is no room for it.
    return name.partition(":")[0]
