"""The page of a search for the fastest settings: which won, and all that were tried."""

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
    "differs": "trains otherwise",
    "no_room": "out of memory",
    "failed": "failed",
}
_COLOURS: Final = (("won", "c-kept"), ("not taken", "c-dropped"))


def summary(result: TuneResult) -> Table:
    """Return what was tried, in the order in which it was."""
    columns = [Column("round"), Column("settings", is_number=False), Column("changes", is_number=False, is_wide=True)]
    columns += [Column("over", is_number=False), Column("images/s"), Column("ratio"), Column("steps"), Column("trials")]
    columns += [Column("outcome", is_number=False, is_wide=True)]
    return Table("Tried", columns, [_row(tried) for tried in result.tried], MANY, "more settings")


def tune_page(told: Told, result: TuneResult) -> Page:
    """Return the report of a search for the fastest settings."""
    subtitle = [f"recipe {result.recipe} {result.recipe_hash}", count(result.ranks, "rank")]
    facts = [
        ("steps that count, of a run", cells.count(result.steps)),
        ("steps before them", cells.count(result.warmup_steps)),
        ("runs of the last pairs", cells.count(result.repeats)),
        ("runs in all", cells.count(result.trials)),
        ("settings in the space searched", cells.count(result.grid)),
        ("runs took", cells.of_seconds(result.wall_s)),
    ]
    runs = [(tried.name, tried.runs) for tried in result.tried]
    origin = told.origin(result.command, facts, result.provenance, runs)
    sections = [_take(result), _tried(result), _explained(result), _parity(result), origin]
    verdict = verdict_of("the tuned recipe" if result.best_patch else "the recipe", result.verdict)
    return told.page("Tuning report", _status(result), subtitle, _figures(result), sections, verdict)


def _status(result: TuneResult) -> tuple[str, Tone]:
    if not result.best_patch:
        return "nothing faster was found", "warning"
    return f"{count(len(result.best_patch), 'setting')} changed", "good"


def _figures(result: TuneResult) -> list[Figure]:
    found = []
    if result.gain is not None:
        cell = Cell(f"{result.gain.value:,.2f}x", result.gain.value)
        found.append(Figure("as fast as the recipe was", cell, bounds_of(result.gain)))
    rate = result.best.value
    note = f"the recipe as it was: {intervals.rate(result.first.value)}"
    found.append(Figure("images/s", Cell(intervals.rate(rate), rate), note))
    note = f"{count(result.grid, 'setting')} in the space that was searched"
    found.append(Figure("runs", cells.count(result.trials), note))
    found.append(Figure("runs took", cells.of_seconds(result.wall_s), clean(result.stopped)))
    return found


def _take(result: TuneResult) -> Section:
    """Return what to change, as a table and as a command."""
    if not result.best_patch:
        return Section("take", "What to take", [cells.missing("Nothing that was tried is faster: keep the recipe.")])
    pairs = [word.partition("=") for word in result.best_patch]
    rows = [[cells.text(key), intervals.sentence(value)] for key, _, value in pairs]
    columns = [Column("setting", is_number=False), Column("best", is_number=False)]
    blocks: list[Block] = [Table("", columns, rows)]
    if result.recipe_file:
        of_code = ["--own-code"] if result.provenance.get("own_parts") else []
        command = ["paceline", "train", result.recipe_file, "--ranks", str(result.ranks), *of_code]
        blocks += [Paragraph("It is a recipe of its own:"), shell(command)]
    return Section("take", "What to take", blocks)


def _tried(result: TuneResult) -> Section:
    found = [
        Rate(clean(f"{each.round}: {each.name}"), Interval(value=each.images_per_s), intervals.rate(each.images_per_s),
             "c-kept" if each.status == "won" else "c-dropped")
        for each in result.tried
        if each.images_per_s is not None
    ]  # fmt: skip
    most = f"; the first {MANY} of {len(found)} are drawn" if len(found) > MANY else ""
    first = Rate("the recipe as it was", result.first, intervals.rate(result.first.value), "c-other")
    best = Rate("the tuned recipe", result.best, intervals.rate(result.best.value), "c-kept")
    note = f"of the longest run of each; intervals where there were several{most}"
    bars = rates("Images/s of what was tried", note, [first, *found[:MANY], best], _COLOURS)
    how = (
        "Each is measured over the best that was known then. It wins where all of the interval of their ratio lies "
        "above 1 and it trains the same. Ratios count, not images/s, as a machine is not as fast at all times."
    )
    before = verdict_of("The recipe as it was", result.first_verdict)
    held = [Paragraph(" ".join(filter(None, (f"{before.bottleneck}.", before.evidence))))] if before else []
    return Section("tried", "What was tried", [bars, *held, Paragraph(how), summary(result)])


def _explained(result: TuneResult) -> Section | None:
    """Return what the settings are, each once."""
    told = {tried.name: tried.explains for tried in result.tried if tried.explains}
    if not told:
        return None
    rows = [[intervals.sentence(name), intervals.sentence(explains)] for name, explains in told.items()]
    columns = [Column("settings", is_number=False), Column("what they change", is_number=False, is_wide=True)]
    return Section("settings", "What the settings are", [Table("", columns, rows, MANY, "more settings")])


def _parity(result: TuneResult) -> Section | None:
    """Return whether what was tried trains as what it is laid over; None where no losses were compared."""
    rows = [[intervals.sentence(tried.name), *parity_cells(tried.parity)] for tried in result.tried if tried.parity]
    table = Table("", [Column("settings", is_number=False), *PARITY], rows, MANY, "more settings")
    return Section("parity", "Whether it trains the same", [table]) if rows else None


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
    """Return how it went, and why."""
    return intervals.sentence(": ".join(filter(None, (_STATUS[tried.status], tried.why))))
