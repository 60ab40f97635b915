"""Build the page of a search for the fastest settings."""

from typing import Final

from paceline.core.experiments.tuning import TriedResult, TuneResult
from paceline.core.interval import Interval
from paceline.core.units import count
from paceline.report.blocks import Block, Cell, Column, Figure, Page, Paragraph, Section, Table, Tone
from paceline.report.experiments.frame import MANY, Rate, Told, bounds_of, rates, shell, verdict_of
from paceline.report.experiments.parity import PARITY, parity_cells
from paceline.report.sections import cells, intervals
from paceline.report.words import clean

_STATUS: Final = {
    "won": "won",
    "lost": "slower",
    "no_gain": "no gain",
    "starved": "CPU-starved",
    "differs": "trains differently",
    "no_room": "out of memory",
    "failed": "failed",
}
_COLOURS: Final = (("won", "c-kept"), ("not taken", "c-dropped"))


def summary(result: TuneResult) -> Table:
    """Return a row per trial setting, in the order of trials."""
    columns = [Column("round"), Column("settings", is_number=False), Column("changes", is_number=False, is_wide=True)]
    columns += [Column("over", is_number=False), Column("images/s"), Column("ratio"), Column("steps"), Column("trials")]
    columns += [Column("outcome", is_number=False, is_wide=True)]
    return Table("Tried", columns, [_row(tried) for tried in result.tried], MANY, "more settings")


def tune_page(report: Told, result: TuneResult) -> Page:
    """Return the report of a search for the fastest settings."""
    subtitle = [f"recipe {result.recipe} {result.recipe_hash}", count(result.ranks, "rank")]
    facts = [
        ("counted steps per run", cells.count(result.steps)),
        ("warm-up steps", cells.count(result.warmup_steps)),
        ("runs of the final pairs", cells.count(result.repeats)),
        ("runs in all", cells.count(result.trials)),
        ("settings in the space searched", cells.count(result.grid)),
        ("total time of runs", cells.of_seconds(result.wall_s)),
    ]
    runs = [(tried.name, tried.runs) for tried in result.tried]
    origin = report.origin(result.command, facts, result.provenance, runs)
    sections = [_take(result), _tried(result), _explained(result), _parity(result), origin]
    verdict = verdict_of("the tuned recipe" if result.best_patch else "the recipe", result.verdict)
    return report.page("Tuning report", _status(result), subtitle, _figures(result), sections, verdict)


def _status(result: TuneResult) -> tuple[str, Tone]:
    if not result.best_patch:
        return "nothing faster was found", "warning"
    return f"{count(len(result.best_patch), 'setting')} changed", "good"


def _figures(result: TuneResult) -> list[Figure]:
    figures = []
    if result.gain is not None:
        cell = Cell(f"{result.gain.value:,.2f}x", result.gain.value)
        figures.append(Figure("as fast as the recipe was", cell, bounds_of(result.gain)))
    rate = result.best.value
    note = f"the recipe as it was: {intervals.rate(result.first.value)}"
    figures.append(Figure("images/s", Cell(intervals.rate(rate), rate), note))
    note = f"{count(result.grid, 'setting')} in the space that was searched"
    figures.append(Figure("runs", cells.count(result.trials), note))
    figures.append(Figure("total time of runs", cells.of_seconds(result.wall_s), clean(result.stopped)))
    return figures


def _take(result: TuneResult) -> Section:
    if not result.best_patch:
        return Section("take", "Next steps", [cells.missing("No setting is faster: keep the recipe.")])
    pairs = [word.partition("=") for word in result.best_patch]
    rows = [[cells.text(key), intervals.sentence(value)] for key, _, value in pairs]
    columns = [Column("setting", is_number=False), Column("best", is_number=False)]
    blocks: list[Block] = [Table("", columns, rows)]
    if result.recipe_file:
        own_code = ["--own-code"] if result.provenance.get("own_parts") else []
        command = ["paceline", "train", result.recipe_file, "--ranks", str(result.ranks), *own_code]
        blocks += [Paragraph("To train the tuned recipe:"), shell(command)]
    return Section("take", "Next steps", blocks)


def _tried(result: TuneResult) -> Section:
    measured_bars = [
        Rate(clean(f"{each.round}: {each.name}"), Interval(value=each.images_per_s), intervals.rate(each.images_per_s),
             "c-kept" if each.status == "won" else "c-dropped")
        for each in result.tried
        if each.images_per_s is not None
    ]  # fmt: skip
    most = f"; the first {MANY} of {len(measured_bars)} are drawn" if len(measured_bars) > MANY else ""
    first = Rate("the recipe as it was", result.first, intervals.rate(result.first.value), "c-other")
    best = Rate("the tuned recipe", result.best, intervals.rate(result.best.value), "c-kept")
    note = f"of the longest run of each, with intervals for several runs{most}"
    bars = rates("Images/s of trials", note, [first, *measured_bars[:MANY], best], _COLOURS)
    rule = (
        "Each setting is compared with the best one so far. It wins if the whole interval of their ratio is above 1 "
        "and it trains the same. Ratios decide instead of images/s, since the speed of a machine varies over time."
    )
    before = verdict_of("The recipe as it was", result.first_verdict)
    bottleneck = [Paragraph(" ".join(filter(None, (f"{before.bottleneck}.", before.evidence))))] if before else []
    return Section("tried", "Trials", [bars, *bottleneck, Paragraph(rule), summary(result)])


def _explained(result: TuneResult) -> Section | None:
    descriptions = {tried.name: tried.explains for tried in result.tried if tried.explains}
    if not descriptions:
        return None
    rows = [[intervals.sentence(name), intervals.sentence(explains)] for name, explains in descriptions.items()]
    columns = [Column("settings", is_number=False), Column("description", is_number=False, is_wide=True)]
    return Section("settings", "Description of settings", [Table("", columns, rows, MANY, "more settings")])


def _parity(result: TuneResult) -> Section | None:
    rows = [[intervals.sentence(tried.name), *parity_cells(tried.parity)] for tried in result.tried if tried.parity]
    table = Table("", [Column("settings", is_number=False), *PARITY], rows, MANY, "more settings")
    return Section("parity", "Training parity", [table]) if rows else None


def _row(tried: TriedResult) -> list[Cell]:
    return [
        cells.count(tried.round),
        intervals.sentence(tried.name),
        intervals.words(tried.patch, "nothing"),
        intervals.sentence(tried.over),
        intervals.of_rate(None if tried.images_per_s is None else Interval(value=tried.images_per_s)),
        intervals.of_ratio(tried.ratio),
        cells.count(tried.steps),
        cells.count(tried.trials),
        outcome(tried),
    ]


def outcome(tried: TriedResult) -> Cell:
    """Return the outcome and its reason."""
    return intervals.sentence(": ".join(filter(None, (_STATUS[tried.status], tried.why))))
