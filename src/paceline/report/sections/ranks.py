"""Report on ranks: gradient communication, time per stage and stragglers."""

from collections.abc import Sequence

from paceline.core.results import CommunicationResult, RankResult, StragglerResult
from paceline.core.units import milliseconds, number, share, size
from paceline.report import parts
from paceline.report.blocks import Block, Cell, Column, Facts, Paragraph, Section, Table
from paceline.report.run import Run
from paceline.report.sections import cells

_NUM_OPEN = 16


def ranks(run: Run) -> Section:
    """Return communication, ranks and straggler, or why there are none."""
    result = run.result
    title = "Communication and ranks"
    if result is None:
        return Section("ranks", title, [cells.missing("The run has not finished: its ranks are compared at its end.")])
    if result.world_size == 1:
        return Section(
            "ranks", title, [cells.missing("The run had one rank: there was no communication and no straggler.")]
        )
    blocks: list[Block] = []
    if result.communication is None:
        blocks.append(cells.missing("Communication was not measured (set measure.clock=on and use ddp)."))
    else:
        blocks += _communication(_timed_aside(run) or result.communication)
    if result.straggler is not None:
        blocks.append(_straggler(result.straggler))
    blocks += [_ranks(result.ranks, on_gpu=result.provenance.get("device") == "cuda")] if result.ranks else []
    return Section("ranks", title, blocks)


def _timed_aside(run: Run) -> CommunicationResult | None:
    # `paceline profile` times buckets in a run of their own, and combines that with its base run.
    try:
        result = CommunicationResult.model_validate((run.profile or {}).get("communication"))
    except ValueError:
        return None
    return result if result.buckets else None


def _communication(result: CommunicationResult) -> list[Block]:
    facts = [
        ("exposed", Cell(f"{milliseconds(result.exposed_s)} per step, {share(result.share)} of it", result.exposed_s)),
    ]
    if result.wire_s is not None:
        facts.append(("on the wire", Cell(f"{milliseconds(result.wire_s)} per step", result.wire_s)))
    if result.overlap is not None:
        facts.append(("hidden behind backward", Cell(f"{share(result.overlap)} of that", result.overlap)))
    if result.bytes is not None:
        facts.append(("sent", Cell(f"{size(result.bytes)} per step and rank", result.bytes)))
    if result.bytes is not None and result.wire_s:
        rate = result.bytes / result.wire_s
        facts.append(("rate on the wire", Cell(f"{size(rate)}/s", rate)))
    blocks: list[Block] = [Facts(facts)]
    if not result.buckets:
        note = (
            "Exposed time is the time per step spent waiting for gradients. "
            "Set measure.communication=on to time each bucket."
        )
        return [*blocks, cells.missing(note)]
    rows = [
        [cells.count(index), cells.of_bytes(each.bytes), cells.of_milliseconds(each.ready_s),
         cells.of_milliseconds(each.wire_s), Cell(f"{size(each.bytes / each.wire_s)}/s") if each.wire_s else Cell(""),
         cells.count(each.n)]
        for index, each in enumerate(result.buckets)
    ]  # fmt: skip
    titles = ("bucket", "bytes", "ready after", "on the wire", "rate", "steps")
    table = Table("Buckets of gradients, means", [Column(each) for each in titles], rows, _NUM_OPEN, "all buckets")
    return [*blocks, table]


def _straggler(result: StragglerResult) -> Paragraph:
    lost = f"Waiting for the straggler costs {milliseconds(result.lost_s)} per step, {share(result.share)} of it."
    if result.rank is None:
        often = f"in {share(result.late_steps)} of the steps" if result.late_steps else ""
        return Paragraph(" ".join(filter(None, [lost, "The straggler changes from step to step", often])) + ".")
    where = f", mostly in {parts.name(result.stage)}" if result.stage else ""
    return Paragraph(
        f"{lost} The straggler is rank {result.rank}, {milliseconds(result.late_s)} later than the others{where}."
    )


def _ranks(results: Sequence[RankResult], *, on_gpu: bool) -> Table:
    stages = list(dict.fromkeys(name for each in results for name, each_s in each.stages.items() if each_s))
    rows = [
        [cells.count(each.rank), _ms(each.step_s), _ms(each.late_s),
         *(_ms(each.stages[name]) if name in each.stages else Cell("") for name in stages)]
        for each in results
    ]  # fmt: skip
    titles = ["rank", "per step", "late by", *map(parts.name, stages)]
    clock = "; stages by the device's clock" if on_gpu else ""
    title = f"Ranks: mean ms per step{clock}"
    return Table(title, [Column(each) for each in titles], rows, _NUM_OPEN, f"all {len(results):,} ranks")


def _ms(value_s: float) -> Cell:
    return Cell(number(round(1000 * value_s, 4)), value_s)
