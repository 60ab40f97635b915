"""Print a search: a table of trials for people, `experiment.json` for programs."""

import shlex
from collections.abc import Iterator

from paceline.cli.show import print_rows
from paceline.cli.tables import print_table
from paceline.core.experiments.folder import ExperimentDir
from paceline.core.experiments.tuning import TriedResult, TuneResult
from paceline.core.interval import Interval
from paceline.core.units import count
from paceline.data.sources.places import printable
from paceline.lab.times import format_speedup
from paceline.recipe.consent import OWN_CODE


def show_tune(result: TuneResult, folder: ExperimentDir, *, as_json: bool) -> None:
    """Print the result of a search."""
    if as_json:
        print(result.model_dump_json(indent=2))
        return
    if result.tried:
        headings = ("round", "setting", "images/s", "outcome", "why")
        title = f"trials over {result.recipe}, on {count(result.ranks, 'rank')}"
        print_table(title, headings, map(_tried_row, result.tried), text_columns=("setting", "outcome", "why"))
    print_rows(list(_summary_rows(result, folder)), f"tuned {result.recipe}")


def _tried_row(tried: TriedResult) -> tuple[str, ...]:
    speed = "" if tried.images_per_s is None else f"{tried.images_per_s:,.0f}"
    return str(tried.round), tried.name, speed, tried.status.replace("_", " "), tried.why


def _summary_rows(result: TuneResult, folder: ExperimentDir) -> Iterator[tuple[str, str]]:
    yield "original", f"{_interval_text(result.first)} images/s"
    if result.gain is None:
        yield "tuned", "nothing was faster"
    else:
        yield "tuned", f"{_interval_text(result.best)} images/s, {format_speedup(result.gain, word='x as fast')}"
        yield "settings", " ".join(result.best_patch)
    if result.verdict:
        yield "held back by", f"{result.verdict.get('bottleneck', '')}. {result.verdict.get('evidence', '')}"
    consent = f" {OWN_CODE}" if result.provenance.get("own_parts") else ""
    yield "search", f"{count(result.trials, 'run')}, of {result.grid:,} settings; {result.stopped}"
    yield "recipe", f"paceline train {shlex.quote(result.recipe_file)} --ranks {result.ranks}{consent}"
    yield "report", printable(folder.report)


def _interval_text(measured: Interval) -> str:
    if measured.low is None:
        return f"{measured.value:,.0f}"
    return f"{measured.value:,.0f} ({measured.low:,.0f} to {measured.high:,.0f})"
