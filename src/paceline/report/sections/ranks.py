"""Ranks: what averaging gradients took, how each rank spent its steps, and who was waited for."""

from collections.abc import Sequence

from paceline.core.results import CommunicationResult, RankResult, StragglerResult
from paceline.core.units import milliseconds, number, share, size
from paceline.report import parts
from paceline.report.blocks import Block, Cell, Column, Facts, Paragraph, Section, Table
from paceline.report.run import Run
from paceline.report.sections import cells

_NUM_OPEN = 16


def ranks(run: Run) -> Section:
    """Return communication, ranks and straggler, or why there is none."""
    result = run.result
    title = "Communication and ranks"
    if result is None:
        return Section("ranks", title, [cells.missing("The run has not finished, so its ranks are not compared.")])
    if result.world_size == 1:
        return Section("ranks", title, [cells.missing("One rank: there is nothing to send, and nobody to wait for.")])
    blocks: list[Block] = []
    if result.communication is None:
        blocks.append(cells.missing("Communication was not measured: that needs measure.clock=on and ddp."))
    else:
        blocks += _communication(_timed_aside(run) or result.communication)
    if result.straggler is not None:
        blocks.append(_straggler(result.straggler))
    blocks += [_ranks(result.ranks, on_gpu=result.provenance.get("device") == "cuda")] if result.ranks else []
    return Section("ranks", title, blocks)


def _timed_aside(run: Run) -> CommunicationResult | None:
    """Return what a profile put together of its base and the run in which it timed buckets, if it did."""
    try:
        found = CommunicationResult.model_validate((run.profile or {}).get("communication"))
    except ValueError:
        return None
    return found if found.buckets else None


def _communication(found: CommunicationResult) -> list[Block]:
    facts = [
        ("exposed", Cell(f"{milliseconds(found.exposed_s)} a step, {share(found.share)} of it", found.exposed_s)),
    ]
    if found.wire_s is not None:
        facts.append(("on the wire", Cell(f"{milliseconds(found.wire_s)} a step", found.wire_s)))
    if found.overlap is not None:
        facts.append(("hidden behind backward", Cell(f"{share(found.overlap)} of that", found.overlap)))
    if found.bytes is not None:
        facts.append(("sent", Cell(f"{size(found.bytes)} a step and rank", found.bytes)))
    if found.bytes is not None and found.wire_s:
        rate = found.bytes / found.wire_s
        facts.append(("rate on the wire", Cell(f"{size(rate)}/s", rate)))
    blocks: list[Block] = [Facts(facts)]
    if not found.buckets:
        note = "Exposed is what a step waits for. What each bucket takes is measured with measure.communication=on."
        return [*blocks, cells.missing(note)]
    rows = [
        [cells.count(index), cells.of_bytes(each.bytes), cells.of_milliseconds(each.ready_s),
         cells.of_milliseconds(each.wire_s), Cell(f"{size(each.bytes / each.wire_s)}/s") if each.wire_s else Cell(""),
         cells.count(each.n)]
        for index, each in enumerate(found.buckets)
    ]  # fmt: skip
    titles = ("bucket", "bytes", "ready after", "on the wire", "rate", "steps")
    table = Table("Buckets of gradients, means", [Column(each) for each in titles], rows, _NUM_OPEN, "all buckets")
    return [*blocks, table]


def _straggler(found: StragglerResult) -> Paragraph:
    lost = f"Waiting for the latest rank costs {milliseconds(found.lost_s)} a step, {share(found.share)} of it."
    if found.rank is None:
        often = f"in {share(found.late_steps)} of the steps" if found.late_steps else ""
        return Paragraph(" ".join(filter(None, [lost, "It is now one rank and now another", often])) + ".")
    where = f", and spends it in {parts.name(found.stage)}" if found.stage else ""
    return Paragraph(f"{lost} It is rank {found.rank}, {milliseconds(found.late_s)} later than the others{where}.")


def _ranks(found: Sequence[RankResult], *, on_gpu: bool) -> Table:
    stages = list(dict.fromkeys(name for each in found for name, each_s in each.stages.items() if each_s))
    rows = [
        [cells.count(each.rank), _ms(each.step_s), _ms(each.late_s),
         *(_ms(each.stages[name]) if name in each.stages else Cell("") for name in stages)]
        for each in found
    ]  # fmt: skip
    titles = ["rank", "a step", "late by", *map(parts.name, stages)]
    clock = "; stages by the device's clock" if on_gpu else ""
    title = f"Ranks: mean ms per step{clock}"
    return Table(title, [Column(each) for each in titles], rows, _NUM_OPEN, f"all {len(found):,} ranks")


def _ms(value_s: float) -> Cell:
    return Cell(number(round(1000 * value_s, 4)), value_s)
