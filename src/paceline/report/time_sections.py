"""Report sections on time: wall clock, stages of a step, data loading, ranks and probes."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from paceline.core.results import (
    AccountResult,
    CommunicationResult,
    HostToDeviceResult,
    LoaderResult,
    RankResult,
    RunResult,
    StageResult,
    StragglerResult,
)
from paceline.core.stages import DATA_WAIT, EXPOSED, STAGES
from paceline.core.units import count, flops, milliseconds, number, per_second, seconds, share, size
from paceline.report import cells
from paceline.report.document import (
    Block,
    Chart,
    ChartLine,
    ChartRow,
    Fold,
    KeyValueList,
    PageSection,
    Paragraph,
    Table,
    TableCell,
)
from paceline.report.read_run import RunData
from paceline.report.run_summary import estimate_rows, quote_rows, wall_clock_parts
from paceline.report.text import clean_text, finite_or_none

_UNFINISHED_NOTE = "The run has not finished: start-up, evaluations and checkpoints are attributed at its end."
_SHARE_SUFFIX: Final = "_share"
_NUM_OPEN_RANKS = 16
_ROUNDING: Final = 1e-9  # of a sum of shares
_CEILING_LABELS: Final = {
    "free_data": "without data loading",
    "free_copy": "without loading and copies",
    "free_communication": "without communication",
    "free_model": "without the model",
}
_COST_LABELS: Final[dict[str, tuple[str, Callable[[float], str]]]] = {
    "parameters": ("parameters", number),
    "flops_per_image": ("FLOPs per image, forward and backward", flops),
    "achieved_flops_per_s": ("achieved", lambda value: f"{flops(value)}/s"),
    "peak_flops_per_s": ("peak", lambda value: f"{flops(value)}/s"),
    "roofline_images_per_s": ("ceiling of the roofline", lambda value: f"{per_second(value)} images/s"),
}
_SHARE_LABELS: Final = {"mfu": "share of the peak (MFU)", "roofline_share": "share of the roofline"}


def time_section(run: RunData) -> PageSection:
    """Return the breakdown of the wall clock, and the stages of a step."""
    result, title = run.result, "Where the time went"
    if result is None:
        note = cells.missing_paragraph(_UNFINISHED_NOTE)
        return PageSection("time", title, [*_logged_stage_blocks(run), *_share_charts(run), note])
    folds = [*_loader_folds(result.loader), *_rank_folds(run), *_host_to_device_folds(result.host_to_device)]
    account = result.account
    if account is None or account.wall_s <= 0:
        note = cells.missing_paragraph("The wall clock is not attributed: measure.clock is off.")
        return PageSection("time", title, [note, *folds])
    blocks = [*_time_bars(result, account), _time_table(result, account), *_estimate_blocks(result)]
    return PageSection("time", title, [*blocks, *_share_charts(run), *folds])


def _estimate_blocks(result: RunResult) -> list[Block]:
    rows = [*estimate_rows(result)]
    blocks: list[Block] = [KeyValueList(rows, "Time predicted from the first steps")] if rows else []
    quoted = [*quote_rows(result)]
    return [*blocks, KeyValueList(quoted, "Quote against truth")] if quoted else blocks


def logged_stage_seconds(run: RunData) -> dict[str, float]:
    """Return rank 0's seconds by stage in the logged steps so far, in the order of a step, with `residual` last.

    Estimated from the shares in `steps.jsonl`; empty without any.
    """
    total_s: dict[str, float] = {}
    images_before = 0.0
    for point in run.steps.points:
        images, rate = point.get("images_seen", 0.0), point.get("images_per_s", 0.0)
        window_s = (images - images_before) / rate if rate > 0 else 0.0
        images_before = images
        shares = {
            stage: min(1.0, max(0.0, point[key])) for stage in STAGES if (key := f"{stage}{_SHARE_SUFFIX}") in point
        }
        if not shares or window_s <= 0:
            continue
        for stage, each in (*shares.items(), ("residual", max(0.0, 1 - sum(shares.values())))):
            total_s[stage] = total_s.get(stage, 0.0) + each * window_s
    return {stage: total_s[stage] for stage in (*STAGES, "residual") if stage in total_s}


def _logged_stage_blocks(run: RunData) -> list[Block]:
    stages = logged_stage_seconds(run)
    whole_s = sum(stages.values())
    if whole_s <= 0:
        return [cells.missing_paragraph("No logged step has shares of stages yet.")]
    rows = [
        [
            TableCell(cells.stage_label(key), swatch=cells.stage_colour(key)),
            cells.share_cell(each_s / whole_s, bar=True),
            cells.seconds_cell(each_s),
        ]
        for key, each_s in sorted(stages.items(), key=lambda each: (each[0] == "residual", -each[1]))
    ]
    bar = cells.time_bar(f"Steps of rank 0 so far, {seconds(whole_s)}", stages, whole_s, has_legend=False)
    columns = cells.table_columns(["stage"], ["share of a step", "so far"])
    return [bar, Table("Stages so far, from the logged shares", columns, rows)]


def _share_charts(run: RunData) -> list[Block]:
    x_key = "epoch" if run.steps.has_key("epoch") else "step"
    labels = {DATA_WAIT: "", EXPOSED: "communication"}
    shown = [(stage, run.steps.xy_points(x_key, f"{stage}{_SHARE_SUFFIX}")) for stage in labels]
    lines = [
        ChartLine(cells.stage_label(stage), [(x, 100 * share) for x, share in points], label=labels[stage])
        for stage, points in shown
        if len(points) > 1
    ]
    return [ChartRow([Chart("Waiting", x_key, "% of step time", lines)])] if lines else []


def _time_bars(result: RunResult, account: AccountResult) -> list[Block]:
    # In chronological order. The table below them names all parts, so they need no legend.
    stages = {key: stage.host_s for key, stage in result.stages.items()}
    drawn: dict[str, float] = {}
    for key, each_s in wall_clock_parts(account).items():
        drawn |= stages if key == "stages" else {key: each_s}
    title = f"The process of rank 0: {seconds(account.wall_s)}"
    note = f"attributed {share(account.explained)}"
    bars: list[Block] = [cells.time_bar(title, drawn, account.wall_s, note=note, has_legend=False)]
    steps = account.counted_steps
    if steps and sum(stage.share for stage in result.stages.values()) > 0:
        step_s = _step_seconds(result.stages, steps)
        parts = {key: each_s / steps for key, each_s in stages.items()}
        parts["residual"] = step_s - sum(parts.values())
        step_title = f"A step: {milliseconds(step_s)}, the mean of {count(steps, 'measured step')}"
        bars.append(cells.time_bar(step_title, parts, step_s, has_legend=False))
    return bars


def _time_table(result: RunResult, account: AccountResult) -> Table:
    """Return all parts of the wall clock, the stages of the measured steps among them."""
    steps = account.counted_steps
    has_device = any(stage.device_s != stage.host_s for stage in result.stages.values())
    rows: list[list[TableCell]] = []

    def add(key: str, each_s: float, per_step_s: float | None = None, device_s: float | None = None) -> None:
        if not each_s:
            return
        row = [
            TableCell(cells.stage_label(key), swatch=cells.stage_colour(key)),
            cells.seconds_cell(each_s),
            cells.share_cell(each_s / account.wall_s, bar=True),
            cells.milliseconds_cell(per_step_s),
        ]
        rows.append([*row, cells.seconds_cell(device_s)] if has_device else row)

    for part, part_s in wall_clock_parts(account).items():
        if part != "stages":
            add(part, part_s)
            continue
        for key, stage in sorted(result.stages.items(), key=lambda each: -each[1].host_s):
            add(key, stage.host_s, stage.host_s / steps if steps else None, stage.device_s)
    total = [TableCell("wall clock"), cells.seconds_cell(account.wall_s), cells.share_cell(1.0), cells.EMPTY_CELL]
    rows.append([*total, cells.EMPTY_CELL] if has_device else total)
    titles = ["time", "share of the wall clock", "per step", *(["on the device"] if has_device else [])]
    return Table("", cells.table_columns(["part"], titles), rows, has_sum=True)


def _step_seconds(stages: Mapping[str, StageResult], num_steps: int) -> float:
    # The result has no wall clock of the measured steps: it follows from the shares.
    return sum(each.host_s for each in stages.values()) / sum(each.share for each in stages.values()) / num_steps


def stage_table(result: RunResult, whose: str = "rank 0") -> Table | None:
    """Return the stages of a mean step of a run; None if no step was counted."""
    num_steps = result.account.counted_steps if result.account is not None else 0
    return mean_step_table(result.stages, num_steps, whose)


def mean_step_table(stages: Mapping[str, StageResult], num_steps: int, whose: str) -> Table | None:
    """Return the stages of the mean of `num_steps` steps, the longest first; None without any.

    Device times are shown only if they differ from those of the host.
    """
    covered = sum(stage.share for stage in stages.values())
    if not num_steps or covered <= 0:
        return None
    step_s = _step_seconds(stages, num_steps)
    has_device = any(stage.device_s != stage.host_s for stage in stages.values())
    timed = [(key, stage.host_s, stage.device_s, stage.share) for key, stage in stages.items()]
    timed.sort(key=lambda each: -each[1])
    rest_share = 1 - covered if abs(1 - covered) > _ROUNDING else 0.0
    rest = ("residual", rest_share * step_s * num_steps, None, rest_share)
    rows = [
        [
            TableCell(cells.stage_label(key), swatch=cells.stage_colour(key)),
            cells.milliseconds_cell(host_s / num_steps),
            cells.share_cell(each_share, bar=True),
            cells.seconds_cell(host_s),
            *([cells.seconds_cell(device_s)] if has_device else []),
        ]
        for key, host_s, device_s, each_share in [*timed, rest]
    ]
    titles = ["per step", "share of a step", "total", *(["on the device"] if has_device else [])]
    title = f"{milliseconds(step_s)} per step: the mean of {count(num_steps, 'measured step')} on {whose}"
    return Table(title, cells.table_columns(["stage"], titles), rows)


def _host_to_device_folds(copy: HostToDeviceResult | None) -> list[Block]:
    if copy is None or not copy.copied_bytes:
        return []
    rows = [("from the host", cells.text_cell(copy))]
    if copy.bytes_per_s is not None and copy.copy_s is not None:
        rows += [
            ("copied per step", cells.bytes_cell(copy.copied_bytes)),
            ("copying", cells.milliseconds_cell(copy.copy_s)),
            ("rate", TableCell(f"{number(copy.bytes_per_s / 1e9)} GB/s", copy.bytes_per_s)),
        ]
    return [Fold("Host-to-device copies", [KeyValueList(rows)])]


def _loader_folds(result: LoaderResult | None) -> list[Block]:
    if result is None:
        return []
    workers = count(result.workers, "worker") if result.workers else "in the rank itself"
    return [Fold(f"Data loading: {workers}, {seconds(result.wait_s)} waited", loader_blocks(result))]


def loader_blocks(result: LoaderResult | None) -> list[Block]:
    """Return the work and timing of the data loader; nothing if it was not measured."""
    if result is None:
        return []
    made, batches = max(result.images, 1), max(result.batches, 1)
    workers = count(result.workers, "worker") if result.workers else "the rank itself"
    overlap = "overlaps with the steps" if result.workers else "is part of the data wait of steps"
    sentence = (
        f"{workers[0].upper()}{workers[1:]} loaded {count(result.batches, 'batch', 'batches')} "
        f"({count(result.images, 'image')} in total). This time {overlap}: do not add it to that of a step."
    )
    work = {"read": result.read_s, "decode": result.decode_s, "augment": result.augment_s, "collate": result.collate_s}
    total_s = sum(work.values()) or 1.0
    rows = [
        [
            TableCell(name),
            cells.seconds_cell(each_s),
            cells.share_cell(each_s / total_s, bar=True),
            cells.seconds_cell(each_s / batches),
            cells.seconds_cell(each_s / made),
        ]
        for name, each_s in work.items()
    ]
    columns = cells.table_columns(["work"], ["all workers", "share of the work", "per batch", "per image"])
    facts = [
        ("the rank waited", cells.seconds_cell(result.wait_s)),
        ("batches that were ready", cells.share_cell(result.ready)),
        ("queue depth, mean", cells.number_cell(result.queue_depth)),
        *([] if result.busy is None else [("workers busy", cells.share_cell(result.busy))]),
        ("read from the source", _size_per_image(result.bytes_read, made)),
        ("pixels produced", _size_per_image(result.bytes_made, made)),
    ]
    return [Paragraph(sentence), Table("Work of the loader, concurrent", columns, rows), KeyValueList(facts)]


def _size_per_image(num_bytes: int, num_images: int) -> TableCell:
    return TableCell(f"{size(num_bytes)}, {size(num_bytes / num_images)} per image", num_bytes)


def _rank_folds(run: RunData) -> list[Block]:
    blocks = rank_blocks(run)
    return [Fold("Communication and ranks", blocks)] if blocks else []


def rank_blocks(run: RunData) -> list[Block]:
    """Return communication, straggler and ranks, as far as they were measured; nothing for one rank."""
    result = run.result
    if result is None or result.world_size == 1:
        return []
    blocks: list[Block] = []
    if result.communication is not None:
        blocks += _communication_blocks(_profiled_communication(run) or result.communication)
    if result.straggler is not None:
        blocks.append(straggler_paragraph(result.straggler))
    if result.ranks:
        blocks.append(rank_table(result.ranks, on_gpu=result.provenance.get("device") == "cuda"))
    return blocks


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
        [
            cells.count_cell(index),
            cells.bytes_cell(each.bytes),
            cells.milliseconds_cell(each.ready_s),
            cells.milliseconds_cell(each.wire_s),
            TableCell(f"{size(each.bytes / each.wire_s)}/s" if each.wire_s else ""),
            cells.count_cell(each.n),
        ]
        for index, each in enumerate(result.buckets)
    ]
    columns = cells.table_columns([], ["bucket", "bytes", "ready after", "on the wire", "rate", "steps"])
    return [*blocks, Table("Buckets of gradients, means", columns, rows, _NUM_OPEN_RANKS, "all buckets")]


def straggler_paragraph(result: StragglerResult) -> Paragraph:
    """Return the time that is lost by waiting for the latest rank, and which rank that is."""
    lost = f"Waiting for the straggler costs {milliseconds(result.lost_s)} per step, {share(result.share)} of it."
    if result.rank is None:
        often = f"in {share(result.late_steps)} of the steps" if result.late_steps else ""
        return Paragraph(" ".join(filter(None, [lost, "The straggler changes from step to step", often])) + ".")
    where = f", mostly in {cells.stage_label(result.stage)}" if result.stage else ""
    return Paragraph(
        f"{lost} The straggler is rank {result.rank}, {milliseconds(result.late_s)} later than the others{where}."
    )


def rank_table(results: Sequence[RankResult], *, on_gpu: bool) -> Table:
    """Return the mean times of each rank."""
    stages = list(dict.fromkeys(name for each in results for name, each_s in each.stages.items() if each_s))
    rows = [
        [
            cells.count_cell(each.rank),
            _milliseconds_cell(each.step_s),
            _milliseconds_cell(each.late_s),
            *(_milliseconds_cell(each.stages[name]) if name in each.stages else TableCell("") for name in stages),
        ]
        for each in results
    ]
    titles = ["rank", "per step", "late by", *map(cells.stage_label, stages)]
    clock = "; stages by the device's clock" if on_gpu else ""
    title = f"Ranks: mean ms per step{clock}"
    return Table(title, cells.table_columns([], titles), rows, _NUM_OPEN_RANKS, f"all {len(results):,} ranks")


def _milliseconds_cell(value_s: float) -> TableCell:
    return TableCell(number(round(1000 * value_s, 4)), value_s)


def profile_section(run: RunData) -> PageSection | None:
    """Return probes, ceilings and cost; None if the run was not profiled."""
    if not run.profile:
        return None
    nothing = cells.missing_paragraph("profile.json has no known fields.")
    return PageSection("profile", "What would be faster", profile_blocks(run.profile) or [nothing])


def profile_blocks(recorded: dict[str, Any]) -> list[Block]:
    """Return probes, ceilings and cost of a `profile.json` of any version, as far as known."""
    return [
        *_probe_blocks(recorded),
        *_ceiling_blocks(recorded.get("ceilings")),
        *_cost_blocks(recorded.get("cost")),
        *_skipped_probes(recorded),
    ]


def _probe_blocks(profile: dict[str, Any]) -> list[Block]:
    probes = _only_objects(profile.get("probes"))
    if not probes:
        return []
    sentence = "Each probe repeats the run with one part of its work removed. The ratio shows the cost of that part."
    columns = [
        *cells.table_columns(["run", "part removed"], ["images/s", "range", "ratio"]),
        *cells.table_columns(["recipe patch"]),
    ]
    base = profile.get("base")
    first = [{**base, "name": "base", "explains": "nothing", "ratio": 1.0}] if isinstance(base, dict) else []
    rows = [_probe_row(each) for each in [*first, *probes[:50]]]
    return [Paragraph(sentence), Table("Probes", columns, rows)]


def _probe_row(probe: dict[str, Any]) -> list[TableCell]:
    ratio, patch = finite_or_none(probe.get("ratio")), probe.get("patch")
    times = "" if ratio is None else f"{ratio:.2f}x{_format_range(probe.get('ratio_spread'), '.2f')}"
    return [
        cells.text_cell(probe.get("name", "")),
        cells.text_cell(probe.get("explains", ""), 300),
        cells.number_cell(finite_or_none(probe.get("images_per_s"))),
        TableCell(_format_range(probe.get("spread"), ",.0f").strip(" ()")),
        TableCell(times, ratio),
        cells.patch_cell([str(each) for each in patch] if isinstance(patch, list) else []),
    ]


def _format_range(spread: object, spec: str) -> str:
    ends = [finite_or_none(each) for each in spread] if isinstance(spread, list | tuple) else []
    if len(ends) != 2 or ends[0] is None or ends[1] is None:
        return ""
    return f" ({ends[0]:{spec}} to {ends[1]:{spec}})"


def _skipped_probes(profile: dict[str, Any]) -> list[Block]:
    rows = [
        [cells.text_cell(each.get("name", "")), cells.text_cell(each.get("reason", ""), 300)]
        for each in _only_objects(profile.get("left_out"))[:50]
    ]
    return [Table("Not measured", cells.table_columns(["probe", "reason"]), rows)] if rows else []


def _only_objects(values: object) -> list[dict[str, Any]]:
    return [each for each in values if isinstance(each, dict)] if isinstance(values, list) else []


def _ceiling_blocks(ceilings: object) -> list[Block]:
    if not isinstance(ceilings, dict):
        return []
    values = [
        (_CEILING_LABELS.get(key) or clean_text(key).replace("_", " "), finite_or_none(value))
        for key, value in list(ceilings.items())[:20]
    ]
    rows = [(name, TableCell(f"{value:.2f}x", value)) for name, value in values if value is not None]
    return [KeyValueList(rows, "Ceilings: maximum speed-up")] if rows else []


def _cost_blocks(cost: object) -> list[Block]:
    if not isinstance(cost, dict):
        return []
    rows: list[tuple[str, TableCell]] = []
    for key, (name, format_value) in _COST_LABELS.items():
        value = finite_or_none(cost.get(key))
        if value is not None:
            rows.append((name, TableCell(format_value(value), value)))
    shares = [(name, finite_or_none(cost.get(key))) for key, name in _SHARE_LABELS.items()]
    rows += [(name, TableCell(share(value), value)) for name, value in shares if value is not None]
    if isinstance(cost.get("peak_source"), str) and cost["peak_source"]:
        rows.append(("source of the peak", cells.text_cell(cost["peak_source"], 300)))
    return [KeyValueList(rows, "Arithmetic")] if rows else []
