"""Curves of runs over one another: accuracy over time and over epochs, and loss; those of one group look alike."""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, zip_longest
from typing import Final

from paceline.report.blocks import Block, Chart, Charts, Line
from paceline.report.compare.read import Judged, Trained
from paceline.report.compare.sentences import level
from paceline.report.plot import MAX_LINES
from paceline.report.sections import cells
from paceline.report.sections.clock import clock_for
from paceline.report.thin import Point, thin_points

_MAX_POINTS = 300
_TITLES: Final = {
    "top1": "Top-1 accuracy",
    "top5": "Top-5 accuracy",
    "mean_class_accuracy": "Mean accuracy of classes",
}

Named = Sequence[tuple[str, Sequence[Trained]]]


def curves(groups: Named, target: float | None, metric: str) -> Iterator[Block]:
    """Yield the charts of runs in named groups, and whether some runs are not drawn."""
    runs = _drawn(groups)
    charts = [*_accuracies(runs, target, metric), *_losses(runs)]
    if charts:
        yield Charts(charts)
    else:
        yield cells.missing("There is nothing to draw: no run was evaluated or logged a step.")
    num_runs = sum(len(members) for _, members in groups)
    if num_runs > len(runs):
        yield cells.missing(f"{len(runs)} of the {num_runs} runs are drawn, as many of each group.")


def _drawn(groups: Named) -> list[tuple[str, Trained]]:
    """Return the runs to draw by the name of their group: the first of each, the second of each, and so on."""
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


def _line(
    name: str, run: Trained, runs: Sequence[tuple[str, Trained]], points: Sequence[Point], *, marked: bool = False
) -> Line:
    """Return a run's curve, called after its group where it is drawn alone, and else after its seed as well."""
    is_alone = sum(other == name for other, _ in runs) == 1
    told = name if is_alone or run.seed is None else f"{name}, seed {run.seed}"
    return Line(told, thin_points(points, _MAX_POINTS), marked=marked, group=name)
