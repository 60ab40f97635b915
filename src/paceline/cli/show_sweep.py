"""Print a sweep: a table of values for people, `experiment.json` for programs."""

from collections.abc import Callable

from paceline.cli.show import print_rows
from paceline.cli.tables import print_table
from paceline.core.experiments.folder import ExperimentDir
from paceline.core.experiments.sweep import SweepPoint, SweepResult
from paceline.core.units import count, milliseconds, seconds
from paceline.data.sources.places import printable


def show_sweep(result: SweepResult, folder: ExperimentDir, *, as_json: bool) -> None:
    """Print the speed of each value."""
    if as_json:
        print(result.model_dump_json(indent=2))
        return
    headings = ("value", "images/s", "from", "to", "step", "data wait", "epoch", "note")
    title = f"{result.key} of {result.recipe}, on {count(result.ranks, 'rank')}"
    print_table(title, headings, map(_sweep_row, result.points), text_columns=("note",))
    rows = [("fastest", result.sentence), ("table", printable(folder.markdown)), ("report", printable(folder.report))]
    print_rows(rows, f"{count(result.repeats, 'run')} of {count(result.steps, 'counted step')} for each value")


def _sweep_row(point: SweepPoint) -> tuple[str, ...]:
    if point.images_per_s is None:
        return point.value, "", "", "", "", "", "", point.error
    note = ", ".join(filter(None, ("fastest" if point.is_fastest else "", point.bottleneck)))
    rates = [f"{each:,.0f}" for each in (point.images_per_s.value, *(point.spread or ()))]
    times = (
        _format_or_blank(point.step_s, milliseconds),
        _format_or_blank(point.data_wait_s, milliseconds),
        _format_or_blank(point.epoch_s, seconds),
    )
    return point.value, *rates, *([""] * (3 - len(rates))), *times, note


def _format_or_blank(value_s: float | None, unit: Callable[[float], str]) -> str:
    return "" if value_s is None else unit(value_s)
