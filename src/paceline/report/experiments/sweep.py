"""Build the page of a sweep: the speed of a recipe over values of one setting."""

from collections.abc import Sequence
from typing import Final

from paceline.core.experiments.sweep import SweepPoint, SweepResult
from paceline.core.interval import Interval
from paceline.core.stages import spoken
from paceline.core.units import count
from paceline.report.blocks import Block, Cell, Chart, Charts, Column, Figure, Page, Paragraph, Section, Table, Tone
from paceline.report.experiments.curves import measured, plain
from paceline.report.experiments.frame import MANY, Rate, Told, rates
from paceline.report.sections import cells, intervals
from paceline.report.words import clean, finite

# Ratio of the largest to the smallest value from which the x axis is logarithmic.
_WIDE: Final = 8


def summary(result: SweepResult) -> Table:
    """Return a row per value."""
    columns = [Column(clean(result.key), is_number=False), Column("images/s"), Column("spread")]
    columns += [Column("per step"), Column("waits for data"), Column("per epoch")]
    columns += [Column("note", is_number=False, is_wide=True)]
    return Table("Values", columns, [_row(point) for point in result.points], MANY, "more values")


def sweep_page(report: Told, result: SweepResult) -> Page:
    """Return the report of a sweep."""
    facts = [
        ("ranks", cells.count(result.ranks)),
        ("counted steps per run", cells.count(result.steps)),
        ("warm-up steps", cells.count(result.warmup_steps)),
        ("interleaved runs of each", cells.count(result.repeats)),
        ("total time of runs", cells.of_seconds(result.wall_s)),
    ]
    runs = [(clean(f"{result.key}={point.value}"), point.runs) for point in result.points]
    subtitle = [f"speed over {result.key}", f"recipe {result.recipe} {result.recipe_hash}"]
    origin = report.origin(result.command, facts, result.provenance, runs)
    return report.page(
        "Profile over a setting", _status(result), subtitle, _figures(result), [_speed(result), _stages(result), origin]
    )


def _status(result: SweepResult) -> tuple[str, Tone]:
    failed = sum(bool(point.error) for point in result.points)
    if failed:
        return f"{failed} of {len(result.points)} values failed", "bad" if failed == len(result.points) else "warning"
    if any(point.starved for point in result.points):
        return "measured, with a caution", "warning"
    return f"{count(len(result.points), 'value')} measured", "good"


def _figures(result: SweepResult) -> list[Figure]:
    best = next((point for point in result.points if point.value == result.fastest), None)
    if best is None or best.images_per_s is None:
        return []
    rate = best.images_per_s.value
    figures = [Figure(clean(f"images/s, {result.key}={best.value}"), Cell(intervals.rate(rate), rate), _spread(best))]
    if best.epoch_s is not None:
        figures.append(Figure("per epoch", cells.of_seconds(best.epoch_s), "training alone, at that speed"))
    if best.data_wait_s is not None and best.step_s:
        figures.append(Figure("waits for data", cells.of_share(best.data_wait_s / best.step_s), "of a step"))
    return figures


def _speed(result: SweepResult) -> Section:
    points = [point for point in result.points if point.images_per_s is not None]
    blocks: list[Block] = [Paragraph(clean(result.sentence, 500))]
    numbers = [_number(point) for point in points]
    if len(points) > 1 and all(each is not None for each in numbers):
        blocks.append(Charts(_charts(result.key, [each for each in numbers if each is not None], points)))
    elif points:
        bars = [
            Rate(clean(point.value), _bounded(point), intervals.rate(point.images_per_s.value),
                 "c-kept" if point.is_fastest else "c-other")
            for point in points
            if point.images_per_s is not None
        ]  # fmt: skip
        legend = [("fastest, or not distinguishable from it", "c-kept"), ("slower", "c-other")]
        blocks.append(rates(f"Images/s over {clean(result.key)}", "lowest and highest", bars[:MANY], legend))
    blocks.append(summary(result))
    return Section("speed", "Speed", blocks)


def _charts(key: str, xs: Sequence[float], points: Sequence[SweepPoint]) -> list[Chart]:
    log_x = min(xs) > 0 and max(xs) >= _WIDE * min(xs)
    pairs = list(zip(xs, points, strict=True))
    speed = measured("images/s", [(x, _bounded(point)) for x, point in pairs])
    epoch = plain("per epoch", [(x, point.epoch_s) for x, point in pairs])
    step = plain("per step", [(x, _ms(point.step_s)) for x, point in pairs])
    wait = plain("data wait", [(x, _ms(point.data_wait_s)) for x, point in pairs])
    name = clean(key)
    return [
        Chart("Speed", name, "images/s", [speed], note="bars show the lowest and highest", log_x=log_x),
        Chart("Seconds per epoch", name, "s", [epoch], log_x=log_x),
        Chart("Step time", name, "ms", [step, wait], log_x=log_x),
    ]


def _stages(result: SweepResult) -> Section | None:
    names = list(dict.fromkeys(name for point in result.points for name in point.stages))
    if not names:
        return None
    columns = [
        Column(clean(result.key), is_number=False),
        *(Column(spoken(name)) for name in names),
        Column("per step"),
    ]
    rows = [
        [
            cells.text(point.value),
            *(_milliseconds(point.stages.get(name)) for name in names),
            _milliseconds(point.step_s),
        ]
        for point in result.points
        if point.stages
    ]
    note = (
        "Milliseconds per step of rank 0, on a GPU in device time. They are medians over runs, so they need not add up."
    )
    return Section("stages", "Stages of a step", [Paragraph(note), Table("", columns, rows, MANY, "more values")])


def _number(point: SweepPoint) -> float | None:
    try:
        return finite(float(point.value))
    except ValueError:
        return None


def _bounded(point: SweepPoint) -> Interval:
    assert point.images_per_s is not None, point
    low, high = point.spread or (None, None)
    return Interval(value=point.images_per_s.value, low=low, high=high)


def _spread(point: SweepPoint) -> str:
    if point.spread is None:
        return ""
    return f"{intervals.rate(point.spread[0])} to {intervals.rate(point.spread[1])}"


def _ms(value_s: float | None) -> float | None:
    return None if value_s is None else 1000 * value_s


def _milliseconds(value_s: float | None) -> Cell:
    return intervals.NOTHING if value_s is None else cells.of_milliseconds(value_s)


def _row(point: SweepPoint) -> list[Cell]:
    rate = None if point.images_per_s is None else Interval(value=point.images_per_s.value)
    best = "fastest" if point.is_fastest else ""
    return [
        cells.text(point.value),
        intervals.of_rate(rate),
        Cell(_spread(point)),
        _milliseconds(point.step_s),
        _milliseconds(point.data_wait_s),
        intervals.maybe_seconds(point.epoch_s),
        intervals.sentence(point.error or ", ".join(filter(None, (best, point.bottleneck)))),
    ]
