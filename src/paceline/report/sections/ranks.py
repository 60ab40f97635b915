"""Report on ranks: gradient communication, time per stage and stragglers."""

from collections.abc import Sequence

from paceline.core.results import CommunicationResult, RankResult, StragglerResult
from paceline.core.units import milliseconds, number, share, size
from paceline.report import parts
from paceline.report.blocks import Block, KeyValueList, PageSection, Paragraph, Table, TableCell, TableColumn
from paceline.report.run import RunData
from paceline.report.sections import cells

_NUM_OPEN_RANKS = 16


def ranks_section(run: RunData) -> PageSection:
    """Return communication, ranks and straggler, or why there are none."""
    result = run.result
    title = "Communication and ranks"
    if result is None:
        return PageSection(
            "ranks", title, [cells.missing_paragraph("The run has not finished: its ranks are compared at its end.")]
        )
    if result.world_size == 1:
        return PageSection(
            "ranks",
            title,
            [cells.missing_paragraph("The run had one rank: there was no communication and no straggler.")],
        )
    blocks: list[Block] = []
    if result.communication is None:
        blocks.append(cells.missing_paragraph("Communication was not measured (set measure.clock=on and use ddp)."))
    else:
        blocks += _communication_blocks(_profiled_communication(run) or result.communication)
    if result.straggler is not None:
        blocks.append(_straggler_paragraph(result.straggler))
    blocks += [_rank_table(result.ranks, on_gpu=result.provenance.get("device") == "cuda")] if result.ranks else []
    return PageSection("ranks", title, blocks)


def _profiled_communication(run: RunData) -> CommunicationResult | None:
    # `paceline profile` times buckets in a run of their own, and combines that with its base run.
    try:
        result = CommunicationResult.model_validate((run.profile or {}).get("communication"))
    except ValueError:
        return None
    return result if result.buckets else None


def _communication_blocks(result: CommunicationResult) -> list[Block]:
    facts = [
        (
            "exposed",
            TableCell(f"{milliseconds(result.exposed_s)} per step, {share(result.share)} of it", result.exposed_s),
        ),
    ]
    if result.wire_s is not None:
        facts.append(("on the wire", TableCell(f"{milliseconds(result.wire_s)} per step", result.wire_s)))
    if result.overlap is not None:
        facts.append(("hidden behind backward", TableCell(f"{share(result.overlap)} of that", result.overlap)))
    if result.bytes is not None:
        facts.append(("sent", TableCell(f"{size(result.bytes)} per step and rank", result.bytes)))
    if result.bytes is not None and result.wire_s:
        rate = result.bytes / result.wire_s
        facts.append(("rate on the wire", TableCell(f"{size(rate)}/s", rate)))
    blocks: list[Block] = [KeyValueList(facts)]
    if not result.buckets:
        note = (
            "Exposed time is the time per step spent waiting for gradients. "
            "Set measure.communication=on to time each bucket."
        )
        return [*blocks, cells.missing_paragraph(note)]
    rows = [
        [cells.count_cell(index), cells.bytes_cell(each.bytes), cells.milliseconds_cell(each.ready_s),
         cells.milliseconds_cell(each.wire_s), TableCell(f"{size(each.bytes / each.wire_s)}/s") if each.wire_s else TableCell(""),
         cells.count_cell(each.n)]
        for index, each in enumerate(result.buckets)
    ]  # fmt: skip
    titles = ("bucket", "bytes", "ready after", "on the wire", "rate", "steps")
    table = Table(
        "Buckets of gradients, means", [TableColumn(each) for each in titles], rows, _NUM_OPEN_RANKS, "all buckets"
    )
    return [*blocks, table]


def _straggler_paragraph(result: StragglerResult) -> Paragraph:
    lost = f"Waiting for the straggler costs {milliseconds(result.lost_s)} per step, {share(result.share)} of it."
    if result.rank is None:
        often = f"in {share(result.late_steps)} of the steps" if result.late_steps else ""
        return Paragraph(" ".join(filter(None, [lost, "The straggler changes from step to step", often])) + ".")
    where = f", mostly in {parts.stage_label(result.stage)}" if result.stage else ""
    return Paragraph(
        f"{lost} The straggler is rank {result.rank}, {milliseconds(result.late_s)} later than the others{where}."
    )


def _rank_table(results: Sequence[RankResult], *, on_gpu: bool) -> Table:
    stages = list(dict.fromkeys(name for each in results for name, each_s in each.stages.items() if each_s))
    rows = [
        [cells.count_cell(each.rank), _milliseconds_cell(each.step_s), _milliseconds_cell(each.late_s),
         *(_milliseconds_cell(each.stages[name]) if name in each.stages else TableCell("") for name in stages)]
        for each in results
    ]  # fmt: skip
    titles = ["rank", "per step", "late by", *map(parts.stage_label, stages)]
    clock = "; stages by the device's clock" if on_gpu else ""
    title = f"Ranks: mean ms per step{clock}"
    return Table(title, [TableColumn(each) for each in titles], rows, _NUM_OPEN_RANKS, f"all {len(results):,} ranks")


def _milliseconds_cell(value_s: float) -> TableCell:
    return TableCell(number(round(1000 * value_s, 4)), value_s)
