"""Build the page of a ladder: gain, stages, training parity and cost of each rung."""

from typing import Final

from paceline.core.experiments.ladder import LadderResult, RungResult
from paceline.core.stages import STAGES
from paceline.core.units import count, milliseconds, number, seconds, size
from paceline.report import parts
from paceline.report.blocks import (
    BarRow,
    Bars,
    Block,
    Cell,
    Column,
    Figure,
    Page,
    Paragraph,
    Part,
    Section,
    Table,
    Tone,
)
from paceline.report.experiments.frame import MANY, Rate, Told, bounds_of, rates, verdict_of
from paceline.report.experiments.parity import PARITY, parity_cells
from paceline.report.experiments.take import take
from paceline.report.sections import cells, intervals
from paceline.report.words import clean

_STATUS: Final = {"kept": "kept", "dropped": "dropped", "failed": "failed", "left_out": "left out"}
_COLOURS: Final = (("kept", "c-kept"), ("dropped", "c-dropped"))


def summary(result: LadderResult) -> Table:
    """Return a row per rung: its change, gain and outcome."""
    has_ranks = _ranks_differ(result)
    columns = [Column("rung", is_number=False), Column("changes", is_number=False, is_wide=True)]
    columns += [*([Column("ranks")] if has_ranks else []), Column("images/s"), *_long(result)]
    columns += [Column("over below"), Column("over first"), Column("peak memory"), Column("start-up")]
    columns += [Column("loss", is_number=False), Column("outcome", is_number=False, is_wide=True)]
    return Table("Rungs", columns, [_row(result, rung) for rung in result.rungs])


def ladder_page(report: Told, result: LadderResult) -> Page:
    """Return the report of a ladder."""
    kept_rungs, status = _kept(result), (f"{len(_kept(result))} of {len(result.rungs)} rungs kept", _tone(result))
    subtitle = [f"ladder {result.ladder}", f"recipe {result.recipe} {result.recipe_hash}"]
    subtitle += [count(result.ranks, "rank"), f"batch {result.batch_size:,}"]
    sections = [_rungs(result), _steps(result), _parity(result), _costs(result), take(report, result)]
    facts = [
        ("ladder", cells.text(result.ladder)),
        ("counted steps per run", cells.count(result.steps)),
        ("warm-up steps", cells.count(result.warmup_steps)),
        ("interleaved runs of each", cells.count(result.repeats)),
        ("total time of runs and data preparation", cells.of_seconds(result.wall_s)),
    ]
    runs = [(rung.name, rung.runs) for rung in result.rungs]
    sections.append(report.origin(result.command, facts, result.provenance, runs))
    best = next((rung for rung in kept_rungs if rung.name == result.best), None)
    verdict = None if best is None else verdict_of("the best rung", best.verdict)
    return report.page("Ladder report", status, subtitle, _figures(result, best), sections, verdict)


def _kept(result: LadderResult) -> list[RungResult]:
    return [rung for rung in result.rungs if rung.status == "kept"]


def _tone(result: LadderResult) -> Tone:
    if any(rung.status == "failed" for rung in result.rungs):
        return "warning"
    return "good" if len(_kept(result)) > 1 else "warning"


def _figures(result: LadderResult, best: RungResult | None) -> list[Figure]:
    others = [f"{sum(rung.status == status for rung in result.rungs)} {_STATUS[status]}"
              for status in ("dropped", "failed", "left_out")
              if any(rung.status == status for rung in result.rungs)]  # fmt: skip
    figures = []
    if best is not None and best.over_first is not None:
        times = best.over_first
        cell = Cell(f"{times.value:,.2f}x", times.value)
        figures.append(Figure("as fast as the first rung", cell, bounds_of(times)))
    if best is not None and best.images_per_s is not None:
        first = result.rungs[0].images_per_s
        note = f"the first rung: {number(round(first.value, 1))}" if first else ""
        rate = best.images_per_s
        figures.append(Figure("images/s", Cell(intervals.rate(rate.value), rate.value), note))
    figures.append(Figure("rungs kept", Cell(f"{len(_kept(result))} of {len(result.rungs)}"), ", ".join(others)))
    num_runs = sum(len(rung.runs) for rung in result.rungs)
    note = f"{count(num_runs, 'run')} of {count(result.steps, 'counted step')}" if num_runs else ""
    figures.append(Figure("runs took", cells.of_seconds(result.wall_s), note))
    return figures


def _rungs(result: LadderResult) -> Section:
    blocks: list[Block] = [Paragraph(clean(result.summary, 1000))] if result.summary else []
    bars = [
        Rate(clean(rung.name), rung.images_per_s, intervals.rate(rung.images_per_s.value), _colour(rung))
        for rung in result.rungs
        if rung.images_per_s is not None
    ]
    if bars:
        blocks.append(rates("Images/s of each rung", "means, 95 % intervals", bars, _COLOURS))
    rule = (
        "Each rung extends the last one that was kept, and is compared with it in pairs of fresh runs on the same "
        "samples. It is kept if the whole interval of their ratio is above 1 and it trains the same. “Over first” is "
        "the product of the ratios up to the rung."
    )
    has_ranks = _ranks_differ(result)
    columns = [Column("rung", is_number=False), *([Column("ranks")] if has_ranks else []), Column("images/s")]
    columns += [
        *_long(result),
        Column("over below"),
        Column("over first"),
        Column("outcome", is_number=False, is_wide=True),
    ]
    rows = [
        [intervals.sentence(rung.name), *([_ranks(rung)] if has_ranks else []), intervals.of_rate(rung.images_per_s),
         *_took(result, rung), intervals.of_ratio(rung.over_below), intervals.of_ratio(rung.over_first), outcome(rung)]
        for rung in result.rungs
    ]  # fmt: skip
    changes = [
        [intervals.sentence(rung.name), intervals.sentence(rung.explains),
         intervals.words(rung.patch, "the recipe as it is"), intervals.sentence(rung.below)]
        for rung in result.rungs
    ]  # fmt: skip
    titles = ("rung", "description", "changes", "over")
    headings = [Column(each, is_number=False, is_wide=each in ("description", "changes")) for each in titles]
    blocks += [Paragraph(rule), Table("Gain of each rung", columns, rows, MANY, "more rungs")]
    blocks.append(Table("Changes of each rung", headings, changes, MANY, "more rungs"))
    if result.stopped:
        blocks.append(Paragraph(f"The ladder ends here: {clean(result.stopped, 500)}"))
    return Section("rungs", "Rungs", blocks)


def _steps(result: LadderResult) -> Section | None:
    measured = [rung for rung in result.rungs if rung.stages]
    if not measured:
        return None
    longest = max(max(rung.step_s or 0.0, sum(rung.stages.values())) for rung in measured) or 1.0
    names = [name for name in STAGES if any(name in rung.stages for rung in measured)]
    names += sorted({name for rung in measured for name in rung.stages} - set(names))
    rows = [BarRow(clean(rung.name), _stages(rung, names, longest), _step(rung)) for rung in measured]
    legend = [(parts.name(name), parts.colour(name)) for name in [*names, "residual"]]
    blocks: list[Block] = [Bars("Time per step by stage", rows, legend, "device time, means", has_table=True)]
    blocks.append(_in_ms(measured, names))
    shrunk = [row for rung in result.rungs for row in _shrank(rung)]
    columns = [Column("rung", is_number=False), Column("expected to shrink", is_number=False)]
    columns += [Column("rung below"), Column("this rung"), Column("change")]
    blocks += [Table("Expectations", columns, shrunk, MANY, "more stages")] if shrunk else []
    return Section("steps", "Time per step", blocks)


def _in_ms(rungs: list[RungResult], names: list[str]) -> Table:
    names = [name for name in names if any(rung.stages.get(name, 0.0) > 0 for rung in rungs)]
    titles = ["rung", "step", *map(parts.name, names)]
    columns = [Column(title, is_number=index > 0) for index, title in enumerate(titles)]
    rows = [[intervals.sentence(rung.name), _ms(rung.step_s), *(_ms(rung.stages.get(name)) for name in names)]
            for rung in rungs]  # fmt: skip
    return Table("Time per step by stage, in milliseconds of device time", columns, rows, MANY, "more rungs")


def _ms(value_s: float | None) -> Cell:
    return intervals.NOTHING if value_s is None else Cell(f"{1000 * value_s:,.2f}", value_s)


def _stages(rung: RungResult, names: list[str], longest: float) -> list[Part]:
    times = {name: rung.stages[name] for name in names if rung.stages.get(name, 0.0) > 0}
    rest = (rung.step_s or 0.0) - sum(rung.stages.values())
    if rest > 0:
        times["residual"] = rest
    return [Part(parts.name(name), value / longest, milliseconds(value), parts.colour(name))
            for name, value in times.items()]  # fmt: skip


def _step(rung: RungResult) -> str:
    return seconds(rung.step_s if rung.step_s is not None else sum(rung.stages.values()))


def _shrank(rung: RungResult) -> list[list[Cell]]:
    rows = []
    for stage in rung.expects:
        below, now = rung.shrank.get(stage, (None, None))
        if below is None or now is None:
            row = [cells.text("not measured"), Cell(""), Cell("")]
        else:
            change = now / below - 1 if below else None
            row = [cells.of_milliseconds(below), cells.of_milliseconds(now)]
            row.append(Cell("" if change is None else f"{100 * change:+.1f} %", change))
        rows.append([intervals.sentence(rung.name), cells.text(parts.name(stage)), *row])
    return rows


def _parity(result: LadderResult) -> Section:
    rows = [[intervals.sentence(rung.name), *parity_cells(rung.parity)] for rung in result.rungs if rung.parity]
    columns = [Column("rung", is_number=False), *PARITY]
    table = Table("", columns, rows, MANY, "more rungs")
    nothing = cells.missing("No losses were compared.")
    return Section("parity", "Training parity", [table if rows else nothing])


def _costs(result: LadderResult) -> Section:
    has_gpu = any(rung.device_bytes is not None for rung in result.rungs)
    columns = [Column("rung", is_number=False), Column("host memory")]
    columns += [Column("GPU memory")] if has_gpu else []
    columns += [Column("start-up"), Column("compilation"), Column("data preparation")]
    rows = [
        [intervals.sentence(rung.name), _bytes(rung.host_bytes), *([_bytes(rung.device_bytes)] if has_gpu else []),
         intervals.maybe_seconds(rung.startup_s), intervals.maybe_seconds(rung.compile_s or None),
         intervals.maybe_seconds(rung.prepare_s or None)]
        for rung in result.rungs
        if rung.startup_s is not None or rung.host_bytes is not None
    ]  # fmt: skip
    note = "Memory is the peak of rank 0. Start-up is the time from the start of the process to the first step."
    nothing = cells.missing("No rung's memory or start-up was measured.")
    table = Table("", columns, rows, MANY, "more rungs")
    return Section("costs", "Memory and start-up", [Paragraph(note), table] if rows else [nothing])


def _ranks_differ(result: LadderResult) -> bool:
    return any(rung.ranks not in (None, result.ranks) for rung in result.rungs)


def _ranks(rung: RungResult) -> Cell:
    return intervals.NOTHING if rung.ranks is None else cells.count(rung.ranks)


def _long(result: LadderResult) -> list[Column]:
    # Results of older versions have neither epochs nor steps.
    epoch = [Column("per epoch")] if any(rung.epoch_s is not None for rung in result.rungs) else []
    steps = [Column(count(result.steps, "step"))] if any(rung.steps_s is not None for rung in result.rungs) else []
    return [*epoch, *steps]


def _took(result: LadderResult, rung: RungResult) -> list[Cell]:
    times = {"per epoch": rung.epoch_s, count(result.steps, "step"): rung.steps_s}
    return [intervals.maybe_seconds(times[column.title]) for column in _long(result)]


def _row(result: LadderResult, rung: RungResult) -> list[Cell]:
    return [
        intervals.sentence(rung.name),
        intervals.words(rung.patch, "the recipe"),
        *([_ranks(rung)] if _ranks_differ(result) else []),
        intervals.of_rate(rung.images_per_s),
        *_took(result, rung),
        intervals.of_ratio(rung.over_below),
        intervals.of_ratio(rung.over_first),
        _bytes(rung.device_bytes if rung.device_bytes is not None else rung.host_bytes),
        intervals.maybe_seconds(rung.startup_s),
        intervals.sentence(rung.parity.verdict if rung.parity else ""),
        outcome(rung),
    ]


def outcome(rung: RungResult) -> Cell:
    """Return whether a rung was kept, and why."""
    return intervals.sentence(": ".join(filter(None, (_STATUS[rung.status], rung.why))))


def _colour(rung: RungResult) -> str:
    return "c-kept" if rung.status == "kept" else "c-dropped"


def _bytes(num_bytes: int | None) -> Cell:
    return intervals.NOTHING if num_bytes is None else Cell(size(num_bytes), num_bytes)
