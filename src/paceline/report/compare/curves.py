"""Draw curves of runs over one another: accuracy, losses and the generalization gap. Runs of a group look the same."""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, zip_longest
from statistics import fmean
from typing import Final

from paceline.report.blocks import Block, Chart, Charts, Line, Paragraph
from paceline.report.compare.read import Judged, Trained
from paceline.report.compare.sentences import level
from paceline.report.plot import MAX_LINES, NUM_DISTINCT
from paceline.report.sections import cells
from paceline.report.sections.clock import clock_for
from paceline.report.thin import Point, thin_points

_MAX_POINTS = 300
_TITLES: Final = {
    "top1": "Top-1 accuracy",
    "top5": "Top-5 accuracy",
    "mean_class_accuracy": "Mean accuracy of classes",
}

_WHICH: Final = (
    "The generalization gap is the validation loss minus the training loss. The training loss is the mean over the "
    "steps since the previous evaluation, on augmented images and with the recipe's label smoothing. With "
    "train.eval_train=on it is that of training images, evaluated like validation images."
)

Named = Sequence[tuple[str, Sequence[Trained]]]


def curves(groups: Named, target: float | None, metric: str) -> Iterator[Block]:
    """Yield the charts of runs in named groups, and a note if some runs are not drawn."""
    runs = _drawn(groups)
    gaps = [*_against_validation(groups, metric), *_gaps(runs)]
    charts = [*_accuracies(runs, target, metric), *_losses(runs), *gaps]
    if charts:
        yield Charts(charts)
        if gaps:
            yield Paragraph(_WHICH)
    else:
        yield cells.missing("There are no curves: no run was evaluated or logged a step.")
    num_runs = sum(len(members) for _, members in groups)
    if num_runs > len(runs):
        yield cells.missing(f"{len(runs)} of the {num_runs} runs are drawn, equally many per group.")


def _drawn(groups: Named) -> list[tuple[str, Trained]]:
    # Round-robin, so that every group has curves if there are too many runs.
    turns = zip_longest(*([(name, run) for run in members] for name, members in groups))
    chosen = [each for each in chain.from_iterable(turns) if each is not None][:MAX_LINES]
    order = {name: index for index, (name, _) in enumerate(groups)}
    return sorted(chosen, key=lambda each: order[each[0]])


def _accuracies(runs: Sequence[tuple[str, Trained]], target: float | None, metric: str) -> Iterator[Chart]:
    longest_s = max((each.trained_s for _, run in runs for each in run.evals), default=0.0)
    clock = clock_for(longest_s)
    rule = None if target is None else (100 * target, level(target))
    title = _TITLES[metric]
    axes: list[tuple[str, str, Callable[[Judged], float]]] = [
        ("over time", f"trained, {clock.unit}", lambda each: clock.of(each.trained_s)),
        ("over epochs", "epoch", lambda each: each.epoch),
    ]
    for over, x_label, at in axes:
        lines = [
            _line(name, run, runs, [(at(each), 100 * each.accuracy) for each in run.evals if at(each)], marked=True)
            for name, run in runs
        ]
        lines = [line for line in lines if line.points]
        if lines:
            yield Chart(f"{title} {over}", x_label, "%", lines, low=None, rule=rule)


def _losses(runs: Sequence[tuple[str, Trained]]) -> Iterator[Chart]:
    over = "epoch" if all(run.steps.has("epoch") for _, run in runs if run.steps.num_records) else "step"
    drawn = [_line(name, run, runs, run.steps.line(over, "loss")) for name, run in runs]
    lines = [line for line in drawn if line.points]
    if lines:
        yield Chart("Training loss", over, "cross-entropy", lines)
    drawn = [_line(name, run, runs, _losses_over_epochs(run), marked=True) for name, run in runs]
    lines = [line for line in drawn if line.points]
    if lines:
        yield Chart("Validation loss", "epoch", "cross-entropy", lines)


def _against_validation(groups: Named, metric: str) -> Iterator[Chart]:
    """Yield learning curves of each group's first run: validation solid, training dashed."""
    first = [(name, members[0]) for name, members in groups if members][: MAX_LINES // 2]
    note = "dashed: training" + (
        "" if all(len(members) == 1 for _, members in groups) else ", of each group's first run"
    )
    lines = [
        line
        for name, run in first
        for line in (
            _of_group(name, "validation", _losses_over_epochs(run), marked=True),
            _of_group(name, "training", _training_losses(run), dashed=True),
        )
        if line.points
    ]
    if _has_both(lines):
        yield Chart("Training and validation loss", "epoch", "cross-entropy", lines, note=note)
    lines = [
        line
        for name, run in first
        for line in (
            _of_group(name, "validation", _known(run, lambda each: 100 * each.accuracy), marked=True),
            _of_group(name, "training", _known(run, _train_percent), dashed=True),
        )
        if line.points
    ]
    if _has_both(lines):
        title = f"Training and validation, {_TITLES[metric].lower()}"
        yield Chart(title, "epoch", "%", lines, low=None, note=note)


def _gaps(runs: Sequence[tuple[str, Trained]]) -> Iterator[Chart]:
    drawn = [_line(name, run, runs, _gap(run), marked=True) for name, run in runs]
    lines = [line for line in drawn if line.points]
    if lines:
        yield Chart("Generalization gap", "epoch", "cross-entropy", lines, rule=(0.0, "none"))


def _gap(run: Trained) -> list[Point]:
    steps = sorted(run.steps.line("epoch", "loss"))
    start, gaps = 0, []
    for each in run.evals:
        end = bisect_right(steps, each.epoch, key=lambda step: step[0])
        since = [loss for _, loss in steps[start:end]]
        training = each.train_loss if each.train_loss is not None else fmean(since) if since else None
        if each.epoch and each.loss is not None and training is not None:
            gaps.append((each.epoch, each.loss - training))
        start = end
    return gaps


def _losses_over_epochs(run: Trained) -> list[Point]:
    return _known(run, lambda each: each.loss)


def _training_losses(run: Trained) -> Sequence[Point]:
    return _known(run, lambda each: each.train_loss) or run.steps.line("epoch", "loss")


def _train_percent(each: Judged) -> float | None:
    return None if each.train_accuracy is None else 100 * each.train_accuracy


def _known(run: Trained, read: Callable[[Judged], float | None]) -> list[Point]:
    points = [(each.epoch, read(each)) for each in run.evals]
    return [(epoch, value) for epoch, value in points if epoch and value is not None]


def _has_both(lines: Sequence[Line]) -> bool:
    return len({line.dashed for line in lines}) == 2


def _of_group(group: str, split: str, points: Sequence[Point], *, marked: bool = False, dashed: bool = False) -> Line:
    thinned = thin_points(points, _MAX_POINTS)
    return Line(f"{group}, {split}", thinned, marked=marked, group=group, label=_short(group), dashed=dashed)


def _line(
    name: str, run: Trained, runs: Sequence[tuple[str, Trained]], points: Sequence[Point], *, marked: bool = False
) -> Line:
    # Name the seed only if the group has several runs.
    is_alone = sum(other == name for other, _ in runs) == 1
    seed = "" if is_alone or run.seed is None else f", seed {run.seed}"
    label = _short(name) + (seed if len(runs) <= NUM_DISTINCT else "")
    return Line(name + seed, thin_points(points, _MAX_POINTS), marked=marked, group=name, label=label)


def _short(name: str) -> str:
    # The number stands for the group's name where there is no room for it.
    return name.partition(":")[0]
