"""Where the time went: the whole process's wall clock, a step's stages, and beside them how its batches were made."""

from paceline.core.results import AccountResult, HostToDeviceResult, LoaderResult, RunResult
from paceline.core.units import count, milliseconds, number, seconds, share, size
from paceline.report import parts
from paceline.report.blocks import Bar, Block, Cell, Column, Facts, Paragraph, Part, Section, Table
from paceline.report.files import setting
from paceline.report.run import Run
from paceline.report.sections import cells

_UNFINISHED = "The run has not finished, so its time is not accounted for: that is done at its end."


def time(run: Run) -> Section:
    """Return the account of the wall clock, and the stages of a step."""
    result = run.result
    if result is None:
        return Section("time", "Where the time went", [cells.missing(_UNFINISHED)])
    return Section("time", "Where the time went", [*_account(result), *_stages(result)])


def loader(run: Run) -> Section:
    """Return how the batches were made."""
    result = run.result
    if result is None or result.loader is None:
        why = _why_no_loader(run)
        return Section("loader", "Data loading", [cells.missing(f"How batches were made was not measured: {why}.")])
    return Section("loader", "Data loading", _loader(result.loader))


def _account(result: RunResult) -> list[Block]:
    account = result.account
    if account is None or account.wall_s <= 0:
        return [_no_account(result), _times(result)]
    pieces = _pieces(account, result)
    bar = Bar(
        f"One process of rank 0, {seconds(account.wall_s)} from its start to its end",
        [Part(parts.name(key), max(0.0, each_s) / account.wall_s, seconds(each_s), parts.colour(key))
         for key, each_s in pieces if each_s > 0],
        ["0 s", seconds(account.wall_s / 2), seconds(account.wall_s)],
        f"explained {share(account.explained)}",
    )  # fmt: skip
    return [bar, _account_table(account)]


def _pieces(account: AccountResult, result: RunResult) -> list[tuple[str, float]]:
    """Return what the wall clock is made of, in the order in which a run goes through it."""
    stages = [(name, stage.host_s) for name, stage in result.stages.items()]
    before = [("start_up", account.start_up_s), ("compile", account.compile_s), ("warmup", account.warmup_s)]
    after = [("finish", account.finish_s), ("closing", account.closing_s), ("residual", account.residual_s)]
    return [*before, *stages, *account.pauses.items(), *after]


def _account_table(account: AccountResult) -> Table:
    pieces = [("start_up", account.start_up_s), ("compile", account.compile_s), ("warmup", account.warmup_s)]
    pieces += [("stages", account.stages_s), *account.pauses.items()]
    pieces += [("finish", account.finish_s), ("closing", account.closing_s), ("residual", account.residual_s)]
    shown = [(key, each_s) for key, each_s in pieces if each_s or key in ("stages", "residual")]
    rows = [_piece_row(key, each_s, account) for key, each_s in shown]
    total = [Cell("wall clock"), cells.of_seconds(account.wall_s), cells.of_share(1.0)]
    columns = [Column("part", is_number=False), Column("time"), Column("share of the wall clock")]
    return Table("The whole process", columns, [*rows, total], has_sum=True)


def _piece_row(key: str, each_s: float, account: AccountResult) -> list[Cell]:
    name = f"stages of {count(account.counted_steps, 'step')}" if key == "stages" else parts.name(key)
    swatch = "c-stages" if key == "stages" else parts.colour(key)
    return [Cell(name, swatch=swatch), cells.of_seconds(each_s), cells.of_share(each_s / account.wall_s, bar=True)]


def _no_account(result: RunResult) -> Paragraph:
    why = f"the result is of schema version {result.schema_version}, which had none" if result.stages else "clock off"
    return cells.missing(f"There is no account of the whole wall clock: {why}.")


def _times(result: RunResult) -> Facts:
    times = result.time
    rows = [("wall clock", times.wall_s), ("start-up", times.startup_s), ("training", times.train_s)]
    rows += [(parts.name("evaluate"), times.eval_s), (parts.name("checkpoint"), times.checkpoint_s)]
    return Facts([(name, cells.of_seconds(each_s)) for name, each_s in rows])


def _stages(result: RunResult) -> list[Block]:
    stages = result.stages
    shares = sum(stage.share for stage in stages.values())
    if not stages or shares <= 0:
        return [cells.missing("No step was counted: measure.clock is off, or all steps were warm-up.")]
    wall_s = sum(stage.host_s for stage in stages.values()) / shares
    steps = result.account.counted_steps if result.account is not None else 0
    each = f", {milliseconds(wall_s / steps)}: the mean of {count(steps, 'counted step')}" if steps else ""
    drawn = [(key, stage.host_s / wall_s, stage.host_s) for key, stage in stages.items()]
    drawn.append(("residual", 1 - shares, (1 - shares) * wall_s))
    bar = Bar(
        f"One step of rank 0{each}",
        [Part(parts.name(key), each_share, milliseconds(each_s / steps) if steps else share(each_share),
              parts.colour(key))
         for key, each_share, each_s in drawn if each_share > 0],
        [milliseconds(part * wall_s / steps) for part in (0.0, 0.5, 1.0)] if steps else ["0 %", "50 %", "100 %"],
        has_legend=False,
    )  # fmt: skip
    return [bar, _stage_table(result, wall_s, steps), *_copied(result.host_to_device)]


def _copied(found: HostToDeviceResult | None) -> list[Block]:
    """Return what batches bring from the host, and how fast; nothing in results of before it was recorded."""
    if found is None:
        return []
    rows = [("from the host", cells.text(found))]
    if found.bytes_per_s is not None and found.copy_s is not None:
        rate = Cell(f"{number(found.bytes_per_s / 1e9)} GB/s", found.bytes_per_s)
        rows += [
            ("copied, a step", cells.of_bytes(found.copied_bytes)),
            ("copying", cells.of_milliseconds(found.copy_s)),
        ]
        rows.append(("rate", rate))
    return [Facts(rows, "Batches on their way to the device")]


def _stage_table(result: RunResult, wall_s: float, steps: int) -> Table:
    """Return a row a stage, and what none covers; the device's own seconds only where they are not the host's."""
    has_device = any(stage.device_s != stage.host_s for stage in result.stages.values())
    titles = ["host", *(["device"] if has_device else []), *(["host, a step"] if steps else []), "share of a step"]
    covered = sum(stage.share for stage in result.stages.values())
    found = [(key, stage.host_s, stage.device_s, stage.share) for key, stage in result.stages.items()]
    rows = []
    for key, host_s, device_s, each_share in [*found, ("residual", (1 - covered) * wall_s, None, 1 - covered)]:
        device = [Cell("") if device_s is None else cells.of_seconds(device_s)] if has_device else []
        a_step = [cells.of_milliseconds(host_s / steps)] if steps else []
        name = Cell(parts.name(key), swatch=parts.colour(key))
        rows.append([name, cells.of_seconds(host_s), *device, *a_step, cells.of_share(each_share, bar=True)])
    return Table("Stages of the counted steps", [Column("stage", is_number=False), *map(Column, titles)], rows)


def _why_no_loader(run: Run) -> str:
    if run.result is None:
        return "the run has not finished"
    is_off = setting(run.recipe, "measure", "clock") == "off"
    return "measure.clock is off" if is_off else "this version of paceline did not, or the loader keeps no count"


def _loader(found: LoaderResult) -> list[Block]:
    made = max(found.images, 1)
    workers = count(found.workers, "worker") if found.workers else "the rank itself"
    beside = "The rank does this between its steps: it is its wait for data, seen closer, and no part of the sum above."
    if found.workers:
        beside = "This goes on beside the steps, in all workers at once. Its seconds are no part of the sum above."
    made_by = (
        f"{workers[0].upper()}{workers[1:]} made {found.batches:,} batches of {count(found.images, 'image')} in all."
    )
    sentence = f"{made_by} {beside}"
    work = {"read": found.read_s, "decode": found.decode_s, "augment": found.augment_s, "collate": found.collate_s}
    total_s = sum(work.values()) or 1.0
    rows = [
        [Cell(name), cells.of_seconds(each_s), cells.of_share(each_s / total_s, bar=True),
         cells.of_seconds(each_s / made)]
        for name, each_s in work.items()
    ]  # fmt: skip
    columns = [Column("work", is_number=False), Column("all workers"), Column("share of the work"), Column("an image")]
    busy = [] if found.busy is None else [("workers busy", cells.of_share(found.busy))]
    facts = [
        ("the rank waited", cells.of_seconds(found.wait_s)),
        ("batches that lay ready", Cell(share(found.ready), found.ready)),
        ("queue depth, mean", Cell(number(found.queue_depth), found.queue_depth)),
        *busy,
        ("read from the source", Cell(f"{size(found.bytes_read)}, {size(found.bytes_read / made)} an image",
                                      found.bytes_read)),
        ("pixels handed on", Cell(f"{size(found.bytes_made)}, {size(found.bytes_made / made)} an image",
                                  found.bytes_made)),
    ]  # fmt: skip
    return [Paragraph(sentence), Table("Work of the loader, concurrent", columns, rows), Facts(facts)]
