"""Report where the time went: the wall clock of the process, the stages of a step and the data loader."""

from paceline.core.results import AccountResult, HostToDeviceResult, LoaderResult, RunResult
from paceline.core.units import count, milliseconds, number, seconds, share, size
from paceline.report import parts
from paceline.report.blocks import (
    BarSegment,
    Block,
    KeyValueList,
    PageSection,
    Paragraph,
    StackedBar,
    Table,
    TableCell,
    TableColumn,
)
from paceline.report.files import find_setting
from paceline.report.run import RunData
from paceline.report.sections import cells

_UNFINISHED_NOTE = "The run has not finished: its time is attributed at its end."


def time_section(run: RunData) -> PageSection:
    """Return the breakdown of the wall clock, and the stages of a step."""
    result = run.result
    if result is None:
        return PageSection("time", "Where the time went", [cells.missing_paragraph(_UNFINISHED_NOTE)])
    return PageSection("time", "Where the time went", [*_wall_clock_blocks(result), *_stage_blocks(result)])


def loader_section(run: RunData) -> PageSection:
    """Return the work and timing of the data loader."""
    result = run.result
    if result is None or result.loader is None:
        why = _explain_no_loader(run)
        return PageSection(
            "loader", "Data loading", [cells.missing_paragraph(f"The data loader was not measured: {why}.")]
        )
    return PageSection("loader", "Data loading", _loader_blocks(result.loader))


def _wall_clock_blocks(result: RunResult) -> list[Block]:
    account = result.account
    if account is None or account.wall_s <= 0:
        return [_no_account_note(result), _phase_times(result)]
    pieces = _wall_clock_parts(account, result)
    bar = StackedBar(
        f"One process of rank 0, {seconds(account.wall_s)} from its start to its end",
        [BarSegment(parts.stage_label(key), max(0.0, each_s) / account.wall_s, seconds(each_s), parts.stage_colour(key))
         for key, each_s in pieces if each_s > 0],
        ["0 s", seconds(account.wall_s / 2), seconds(account.wall_s)],
        f"attributed {share(account.explained)}",
    )  # fmt: skip
    return [bar, _wall_clock_table(account)]


def _wall_clock_parts(account: AccountResult, result: RunResult) -> list[tuple[str, float]]:
    # In chronological order.
    stages = [(name, stage.host_s) for name, stage in result.stages.items()]
    before = [("start_up", account.start_up_s), ("compile", account.compile_s), ("warmup", account.warmup_s)]
    after = [("finish", account.finish_s), ("closing", account.closing_s), ("residual", account.residual_s)]
    return [*before, *stages, *account.pauses.items(), *after]


def _wall_clock_table(account: AccountResult) -> Table:
    pieces = [("start_up", account.start_up_s), ("compile", account.compile_s), ("warmup", account.warmup_s)]
    pieces += [("stages", account.stages_s), *account.pauses.items()]
    pieces += [("finish", account.finish_s), ("closing", account.closing_s), ("residual", account.residual_s)]
    shown = [(key, each_s) for key, each_s in pieces if each_s or key in ("stages", "residual")]
    rows = [_part_row(key, each_s, account) for key, each_s in shown]
    total = [TableCell("wall clock"), cells.seconds_cell(account.wall_s), cells.share_cell(1.0)]
    columns = [TableColumn("part", is_number=False), TableColumn("time"), TableColumn("share of the wall clock")]
    return Table("The whole process", columns, [*rows, total], has_sum=True)


def _part_row(key: str, each_s: float, account: AccountResult) -> list[TableCell]:
    name = f"stages of {count(account.counted_steps, 'step')}" if key == "stages" else parts.stage_label(key)
    swatch = "c-stages" if key == "stages" else parts.stage_colour(key)
    return [
        TableCell(name, swatch=swatch),
        cells.seconds_cell(each_s),
        cells.share_cell(each_s / account.wall_s, bar=True),
    ]


def _no_account_note(result: RunResult) -> Paragraph:
    why = (
        f"the result has schema version {result.schema_version}, which recorded no attribution"
        if result.stages
        else "clock off"
    )
    return cells.missing_paragraph(f"The wall clock is not attributed: {why}.")


def _phase_times(result: RunResult) -> KeyValueList:
    times = result.time
    rows = [("wall clock", times.wall_s), ("start-up", times.startup_s), ("training", times.train_s)]
    rows += [(parts.stage_label("evaluate"), times.eval_s), (parts.stage_label("checkpoint"), times.checkpoint_s)]
    return KeyValueList([(name, cells.seconds_cell(each_s)) for name, each_s in rows])


def _stage_blocks(result: RunResult) -> list[Block]:
    stages = result.stages
    shares = sum(stage.share for stage in stages.values())
    if not stages or shares <= 0:
        return [cells.missing_paragraph("No step was counted: measure.clock is off, or all steps were warm-up.")]
    wall_s = sum(stage.host_s for stage in stages.values()) / shares
    steps = result.account.counted_steps if result.account is not None else 0
    each = f", {milliseconds(wall_s / steps)}: the mean of {count(steps, 'counted step')}" if steps else ""
    drawn = [(key, stage.host_s / wall_s, stage.host_s) for key, stage in stages.items()]
    drawn.append(("residual", 1 - shares, (1 - shares) * wall_s))
    bar = StackedBar(
        f"One step of rank 0{each}",
        [BarSegment(parts.stage_label(key), each_share, milliseconds(each_s / steps) if steps else share(each_share),
              parts.stage_colour(key))
         for key, each_share, each_s in drawn if each_share > 0],
        [milliseconds(fraction * wall_s / steps) for fraction in (0.0, 0.5, 1.0)]
        if steps
        else ["0 %", "50 %", "100 %"],
        has_legend=False,
    )  # fmt: skip
    return [bar, _stage_table(result, wall_s, steps), *_host_to_device_blocks(result.host_to_device)]


def _host_to_device_blocks(copy: HostToDeviceResult | None) -> list[Block]:
    # Results of older versions have no copies.
    if copy is None:
        return []
    rows = [("from the host", cells.text_cell(copy))]
    if copy.bytes_per_s is not None and copy.copy_s is not None:
        rate = TableCell(f"{number(copy.bytes_per_s / 1e9)} GB/s", copy.bytes_per_s)
        rows += [
            ("copied per step", cells.bytes_cell(copy.copied_bytes)),
            ("copying", cells.milliseconds_cell(copy.copy_s)),
        ]
        rows.append(("rate", rate))
    return [KeyValueList(rows, "Host-to-device copies")]


def _stage_table(result: RunResult, wall_s: float, steps: int) -> Table:
    # Device times are shown only if they differ from host times.
    has_device = any(stage.device_s != stage.host_s for stage in result.stages.values())
    titles = ["host", *(["device"] if has_device else []), *(["host per step"] if steps else []), "share of a step"]
    covered = sum(stage.share for stage in result.stages.values())
    timed = [(key, stage.host_s, stage.device_s, stage.share) for key, stage in result.stages.items()]
    rows = []
    for key, host_s, device_s, each_share in [*timed, ("residual", (1 - covered) * wall_s, None, 1 - covered)]:
        device = [TableCell("") if device_s is None else cells.seconds_cell(device_s)] if has_device else []
        a_step = [cells.milliseconds_cell(host_s / steps)] if steps else []
        name = TableCell(parts.stage_label(key), swatch=parts.stage_colour(key))
        rows.append([name, cells.seconds_cell(host_s), *device, *a_step, cells.share_cell(each_share, bar=True)])
    return Table(
        "Stages of the counted steps", [TableColumn("stage", is_number=False), *map(TableColumn, titles)], rows
    )


def _explain_no_loader(run: RunData) -> str:
    if run.result is None:
        return "the run has not finished"
    is_off = find_setting(run.recipe, "measure", "clock") == "off"
    return (
        "measure.clock is off"
        if is_off
        else "this version of paceline did not measure it, or the loader has no statistics"
    )


def _loader_blocks(result: LoaderResult) -> list[Block]:
    made = max(result.images, 1)
    workers = count(result.workers, "worker") if result.workers else "the rank itself"
    note = (
        "The rank loads data between its steps, so these seconds are its data wait in detail. "
        "Do not add them to the table above."
    )
    if result.workers:
        note = "All workers run concurrently with the steps. Do not add these seconds to the table above."
    made_by = (
        f"{workers[0].upper()}{workers[1:]} made {result.batches:,} batches of {count(result.images, 'image')} in all."
    )
    sentence = f"{made_by} {note}"
    work = {"read": result.read_s, "decode": result.decode_s, "augment": result.augment_s, "collate": result.collate_s}
    total_s = sum(work.values()) or 1.0
    rows = [
        [TableCell(name), cells.seconds_cell(each_s), cells.share_cell(each_s / total_s, bar=True),
         cells.seconds_cell(each_s / made)]
        for name, each_s in work.items()
    ]  # fmt: skip
    columns = [
        TableColumn("work", is_number=False),
        TableColumn("all workers"),
        TableColumn("share of the work"),
        TableColumn("per image"),
    ]
    busy = [] if result.busy is None else [("workers busy", cells.share_cell(result.busy))]
    facts = [
        ("the rank waited", cells.seconds_cell(result.wait_s)),
        ("batches that were ready", TableCell(share(result.ready), result.ready)),
        ("queue depth, mean", TableCell(number(result.queue_depth), result.queue_depth)),
        *busy,
        ("read from the source", TableCell(f"{size(result.bytes_read)}, {size(result.bytes_read / made)} per image",
                                      result.bytes_read)),
        ("pixels produced", TableCell(f"{size(result.bytes_made)}, {size(result.bytes_made / made)} per image",
                                  result.bytes_made)),
    ]  # fmt: skip
    return [Paragraph(sentence), Table("Work of the loader, concurrent", columns, rows), KeyValueList(facts)]
