"""Sum up the records of a watched command. Pure."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from math import fsum
from statistics import fmean, quantiles
from typing import Final, TypeVar

from paceline import __version__
from paceline.core.results import CommunicationResult, CpuResult, RankResult, StageResult, StragglerResult
from paceline.core.secrets import mask_secrets
from paceline.core.stages import DATA_WAIT, EPOCH_BOUNDARY, EXPOSED, OTHER, PREPARE, SYNC, WATCHED
from paceline.core.units import count, join_few, share
from paceline.core.watch_result import RankTimeline, StepPoint, WatchedPause, WatchResult
from paceline.measure.bottleneck import (
    LOST_CPU_SHARE,
    PAUSE_SHARE,
    WAITING_SHARE,
    BottleneckResult,
    RunSettings,
    find_bottleneck,
)
from paceline.measure.clock import ClockSummary, StageTotal
from paceline.measure.straggler import RankTimes, communication_result, find_straggler
from paceline.watch.advice import advise, advise_straggler
from paceline.watch.records import NUM_FIRST_LOSSES, ProcessRecords

WARMUP_STEPS: Final = 10
"""First steps that are left out: they allocate memory, tune kernels and compile."""
START_UP: Final = "start_up"
_MAX_UNKNOWN_SHARE: Final = 0.5
"""Share of step time in code that is not observed from which a wait is not called the bottleneck."""
_MAX_POINTS: Final = 300
_MAX_TIMELINES: Final = 64
_MAX_PAUSES: Final = 200
_NUM_LAST_LOSSES: Final = 32
NumberT = TypeVar("NumberT", int, float)


@dataclass(frozen=True)
class WatchedStep:
    """A step without the pauses inside of it; `has_pause` says whether there are any.

    `device` are the device seconds of its stages: host seconds without a GPU.
    """

    n: int
    step_s: float
    host: Mapping[str, float]
    device: Mapping[str, float]
    samples: int | None
    has_pause: bool


def summarize(
    processes: Sequence[ProcessRecords],
    command: Sequence[str],
    exit_code: int,
    warmup: int = WARMUP_STEPS,
    stray_notes: Sequence[str] = (),
    cpu: CpuResult | None = None,
) -> WatchResult:
    """Return the result of a command that has ended with `exit_code`; `warmup` first steps of each rank are left out.

    Of several trainings, one after the other or side by side, that with the most steps is summed up.
    """
    ranks, notes = choose_ranks(processes)
    if not ranks:
        return WatchResult(
            paceline=__version__,
            command=mask_secrets(command),
            exit_code=exit_code,
            verdict=_no_verdict("No process took an optimizer step of PyTorch that could be watched.").to_dict(),
            notes=tuple(dict.fromkeys(stray_notes)),
        )
    first = ranks[0]
    steps = list(measured_steps(first, warmup))
    has_gpu = any(each.device_stages or each.memory for each in first.steps)
    clock = build_clock_summary(first, steps)
    rows, straggler = compare_ranks(ranks, warmup)
    communication = _communication(steps, len(ranks))
    notes += [*_collect_notes(ranks), *stray_notes]
    bottleneck = _find_bottleneck(clock, straggler, communication, cpu, ranks, has_gpu=has_gpu, warmup=warmup)
    losses = tuple(loss for _, loss in sorted(first.losses.items()))
    samples = _mean_samples(first)
    return WatchResult(
        paceline=__version__,
        command=mask_secrets(command),
        exit_code=exit_code,
        framework=first.process.framework,
        torch=first.process.torch,
        python=first.process.python,
        hosts=tuple(dict.fromkeys(each.process.host for each in ranks)),
        threads=first.process.threads,
        world_size=len(ranks),
        steps=first.num_steps,
        warmup_steps=min(warmup, first.num_steps),
        measured_steps=len(steps),
        step_s=clock.wall_s / len(steps) if steps else 0.0,
        step_spread=_spread(clock.step_s),
        samples_per_s=len(ranks) * samples * len(steps) / clock.wall_s if samples and steps else None,
        memory_bytes=max((each.memory for each in first.steps if each.memory is not None), default=None),
        has_gpu=has_gpu,
        stages={name: StageResult(**asdict(total)) for name, total in clock.stages.items()},
        attributed=_attributed(clock),
        wall_s=first.ended_s - first.process.started_s,
        start_up_s=first.pause_s.get(START_UP, 0.0),
        steps_s=first.steps_s,
        pauses=clock.pauses,
        num_pauses=_without_start_up(first.num_pauses),
        verdict=bottleneck.to_dict(),
        communication=communication,
        straggler=straggler,
        ranks=rows,
        notes=tuple(dict.fromkeys(notes)),
        timeline=tuple(_timeline(each) for each in ranks[:_MAX_TIMELINES]),
        curve=tuple(_curve(list(measured_steps(first, 0)))),
        setup=dict(first.setup),
        first_losses=losses[:NUM_FIRST_LOSSES],
        last_losses=losses[-_NUM_LAST_LOSSES:],
        cpu=cpu,
    )


def choose_ranks(processes: Sequence[ProcessRecords]) -> tuple[list[ProcessRecords], list[str]]:
    """Return the processes of one training in the order of ranks, and notes on what is left out.

    A folder may have the processes of several: restarts by the launcher, or a script that trains one model after the
    other. The Nth processes of all ranks belong together.
    """
    by_rank: dict[int, list[ProcessRecords]] = defaultdict(list)
    for each in sorted(processes, key=lambda each: each.process.started_s + each.process.offset_s):
        by_rank[each.process.rank].append(each)
    trainings = [
        [each for each in together if each is not None]
        for together in zip_longest(*(by_rank[rank] for rank in sorted(by_rank)))
    ]
    if not trainings:
        return [], []
    chosen = max(trainings, key=lambda ranks: sum(each.num_steps for each in ranks))
    notes = []
    if len(trainings) > 1:
        notes.append(
            f"{count(len(trainings), 'training')} were watched, one after the other or side by side: this is the "
            "one with the most steps."
        )
    missing = chosen[0].process.world_size - len(chosen)
    if missing > 0:
        notes.append(
            f"{count(missing, 'rank')} of {chosen[0].process.world_size:,} left no records: all hosts must reach the "
            "folder, and every rank must take optimizer steps."
        )
    return chosen, notes


def measured_steps(records: ProcessRecords, warmup: int) -> Iterator[WatchedStep]:
    """Yield the steps of a process after its first `warmup`, without the pauses inside of them."""
    num_dropped = records.num_steps - len(records.steps)
    for step in records.steps[max(0, warmup - num_dropped) :]:
        yield WatchedStep(
            n=step.n,
            step_s=step.step_s,
            host=step.stages,
            device=step.device_stages or step.stages,
            samples=step.samples,
            has_pause=step.paused_s > 0,
        )


def build_clock_summary(records: ProcessRecords, steps: Sequence[WatchedStep]) -> ClockSummary:
    """Return totals of the measured `steps` of a process, as the clock of `paceline train` has them.

    Other steps are warm-up: the first of a long run too, which are no longer kept.
    """
    wall_s = fsum(each.step_s for each in steps)
    host, device = _sum_stages([each.host for each in steps]), _sum_stages([each.device for each in steps])
    return ClockSummary(
        n=len(steps),
        images=sum(each.samples or 0 for each in steps),
        wall_s=wall_s,
        stages={
            name: StageTotal(
                host.get(name, 0.0), device.get(name, 0.0), host.get(name, 0.0) / wall_s if wall_s else 0.0
            )
            for name in _in_order({**host, **device})
        },
        warmup_s=max(0.0, records.steps_s - wall_s),
        pauses=_without_start_up(records.pause_s),
        unfinished_s=0.0,
        step_s=tuple(each.step_s for each in steps),
    )


def compare_ranks(
    ranks: Sequence[ProcessRecords], warmup: int
) -> tuple[tuple[RankResult, ...], StragglerResult | None]:
    """Return a row per rank, and the straggler; nothing for a single rank, without steps that all ranks have, or if
    waits for other ranks are part of other stages.

    Steps are matched by number, and steps in which any rank paused are left out.
    """
    if len(ranks) == 1 or _hides_waits(ranks):
        return (), None
    measured = [{each.n: each for each in measured_steps(rank, warmup)} for rank in ranks]
    common = set[int].intersection(*(set(each) for each in measured))
    common -= {n for steps in measured for n, each in steps.items() if each.has_pause}
    if not common:
        return (), None
    times = []
    for steps in measured:
        matched = [steps[n] for n in sorted(common)]
        stages = {
            name: each_s / len(matched) for name, each_s in _sum_stages([each.device for each in matched]).items()
        }
        exposed_s = [each.device.get(EXPOSED, 0.0) for each in matched]
        times.append(RankTimes(fmean(each.step_s for each in matched), stages, exposed_s))
    rows, straggler = find_straggler(times)
    numbers = [each.process.rank for each in ranks]
    rows = tuple(row.model_copy(update={"rank": numbers[row.rank]}) for row in rows)
    if straggler.rank is not None:
        straggler = straggler.model_copy(update={"rank": numbers[straggler.rank]})
    return rows, straggler


def _hides_waits(ranks: Sequence[ProcessRecords]) -> bool:
    """Return whether waiting for other ranks is not told apart, as with FSDP."""
    return any(text.startswith("FSDP") for each in ranks for text in each.notes) or not any(
        (step.device_stages or step.stages).get(EXPOSED) for each in ranks for step in each.steps
    )


def _sum_stages(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the seconds of each stage, in the order of a step."""
    totals: dict[str, float] = defaultdict(float)
    for stages in steps:
        for name, each_s in stages.items():
            totals[name] += each_s
    return {name: totals[name] for name in _in_order(totals)}


def _in_order(names: Iterable[str]) -> list[str]:
    """Return stages in the order of a step; unknown ones, of a newer observer, come last."""
    order: list[str] = list(WATCHED)
    return sorted(names, key=lambda name: order.index(name) if name in order else len(order))


def _attributed(clock: ClockSummary) -> float:
    named_s = fsum(total.host_s for name, total in clock.stages.items() if name != OTHER)
    return min(1.0, named_s / clock.wall_s) if clock.wall_s else 0.0


def _communication(steps: Sequence[WatchedStep], num_ranks: int) -> CommunicationResult | None:
    if num_ranks == 1 or not steps:
        return None
    exposed_s = fmean(each.device.get(EXPOSED, 0.0) for each in steps)
    return communication_result(exposed_s, fmean(each.step_s for each in steps))


def _find_bottleneck(
    clock: ClockSummary,
    straggler: StragglerResult | None,
    communication: CommunicationResult | None,
    cpu: CpuResult | None,
    ranks: Sequence[ProcessRecords],
    *,
    has_gpu: bool,
    warmup: int,
) -> BottleneckResult:
    if clock.n == 0:
        fix = f"a longer run, or --warmup 0: all {count(ranks[0].num_steps, 'step')} belong to the measurement warm-up"
        return _no_verdict("No step was counted.", fix if warmup else "")
    # Time in no stage is code that was not observed: it counts as not attributed.
    known = {name: total for name, total in clock.stages.items() if name != OTHER}
    settings = RunSettings(device_type="cuda" if has_gpu else "cpu", world_size=len(ranks))
    summary = ClockSummary(**{**vars(clock), "stages": known})
    found = find_bottleneck(summary, settings, straggler=straggler, communication=communication)
    has_device_times = any(total.device_s != total.host_s for total in clock.stages.values())
    if found.bottleneck == "sync-bound" and has_gpu and not has_device_times:
        sync_s = clock.stages[SYNC].host_s
        return _no_verdict(
            f"The host waited {share(sync_s / clock.wall_s)} of a step for values of tensors. Without times of the "
            "GPU it cannot be told whether the GPU computed meanwhile."
        )
    starts_loader = clock.pauses.get(EPOCH_BOUNDARY, 0.0) >= PAUSE_SHARE * clock.elapsed_s
    is_pause = starts_loader or found.bottleneck in ("evaluation-bound", "checkpoint-bound")
    limit = WAITING_SHARE if found.bottleneck == "compute-bound" else _MAX_UNKNOWN_SHARE
    unknown_s = max(0.0, clock.wall_s - fsum(total.device_s for total in known.values()))
    if unknown_s >= limit * clock.wall_s and not is_pause and found.bottleneck != "straggler-bound":
        return _no_verdict(
            f"Code that paceline does not observe took {share(unknown_s / clock.wall_s)} of a step: such as batches "
            "that no DataLoader makes, metrics, or a training step without an optimizer of PyTorch."
        )
    if found.bottleneck == "compute-bound" and len(ranks) > 1 and _hides_waits(ranks):
        return _no_verdict(
            "Waiting for other ranks cannot be told apart from forward and backward, which take most of a step."
        )
    if found.bottleneck == "straggler-bound" and straggler is not None:
        if straggler.rank is None:
            return _no_verdict(
                f"Waiting for the latest rank, a different one from step to step, took {share(straggler.share)} of a "
                "step. Busy cores cause this, and batches of different sizes do."
            )
        hosts = {each.process.rank: each.process.host for each in ranks}
        several = len(set(hosts.values())) > 1
        if cpu is not None and not several and _may_be_starved(straggler, cpu):
            return _no_verdict(
                f"Waiting for rank {straggler.rank} took {share(straggler.share)} of a step, but other programs or a "
                f"hypervisor held the cores {share(cpu.share)} of the time that the command wanted to run.",
                "measuring again when nothing else runs here",
            )
        to_try = advise_straggler(straggler, hosts[straggler.rank] if several else "")
    else:
        framework = ranks[0].process.framework
        device_s = {name: total.device_s for name, total in known.items()}
        prepares = device_s.get(PREPARE, 0.0) > device_s.get(DATA_WAIT, 0.0)
        to_try = advise(
            found.bottleneck, framework, has_gpu=has_gpu, starts_loader=starts_loader, prepares_batches=prepares
        )
    return BottleneckResult(found.bottleneck, found.evidence, found.ceiling, to_try)


def _may_be_starved(straggler: StragglerResult, cpu: CpuResult) -> bool:
    """Return whether a rank may be late because other programs held its core.

    They held `cpu.share` of the CPU time on average over all ranks, so one rank may have lost twice that.
    """
    return cpu.share >= LOST_CPU_SHARE and straggler.share <= 2 * cpu.share


def _no_verdict(evidence: str, to_try: str = "") -> BottleneckResult:
    return BottleneckResult("unknown", evidence, "", to_try)


def _mean_samples(records: ProcessRecords) -> float | None:
    """Return the samples per step, None if no batch has a length.

    A framework may request batches ahead: two in the first step of an epoch and none in the last.
    """
    samples = sum(each.samples or 0 for each in records.steps)
    return samples / len(records.steps) if samples else None


def _spread(step_s: Sequence[float]) -> tuple[float, float]:
    if len(step_s) < 2:
        return (step_s[0], step_s[0]) if step_s else (0.0, 0.0)
    tenths = quantiles(step_s, n=10, method="inclusive")
    return tenths[0], tenths[-1]


def _without_start_up(pauses: Mapping[str, NumberT]) -> dict[str, NumberT]:
    """Return the pauses in training, as the clock of a run has them."""
    return {name: value for name, value in pauses.items() if name != START_UP}


def _collect_notes(ranks: Sequence[ProcessRecords]) -> list[str]:
    """Return the notes of all ranks, those of several ranks once, and what their records lack."""
    by_text: dict[str, list[int]] = defaultdict(list)
    for each in ranks:
        for text in each.notes:
            by_text[text].append(each.process.rank)
    notes = [
        text if len(numbers) == len(ranks) else f"rank {join_few(list(map(str, numbers)))}: {text}"
        for text, numbers in by_text.items()
    ]
    killed = [str(each.process.rank) for each in ranks if not each.has_ended]
    if killed:
        notes.append(
            f"rank {join_few(killed)}: was killed, or ended by os._exit, so its last half second or step is missing."
        )
    damaged = sum(each.num_damaged for each in ranks)
    if damaged:
        notes.append(f"{count(damaged, 'line')} of the records could not be read.")
    kept = max((len(each.steps) for each in ranks if each.num_steps > len(each.steps)), default=0)
    if kept:
        notes.append(
            f"Step times and stages are those of the last {kept:,} steps of each rank. Pauses count all steps."
        )
    return notes


def _timeline(records: ProcessRecords) -> RankTimeline:
    process = records.process
    longest = sorted(records.pauses, key=lambda each: each.start_s - each.end_s)[:_MAX_PAUSES]
    return RankTimeline(
        rank=process.rank,
        host=process.host,
        started_s=process.started_s + process.offset_s,
        trained_from_s=records.trained_from_s + process.offset_s,
        ended_s=records.ended_s + process.offset_s,
        is_killed=not records.has_ended,
        pauses=tuple(
            WatchedPause(name=each.name, unix_s=each.start_s + process.offset_s, pause_s=each.end_s - each.start_s)
            for each in sorted(longest, key=lambda each: each.start_s)
        ),
    )


def _curve(steps: Sequence[WatchedStep]) -> Iterator[StepPoint]:
    per_point = -(-len(steps) // _MAX_POINTS) or 1
    for begin in range(0, len(steps), per_point):
        some = steps[begin : begin + per_point]
        yield StepPoint(
            step=some[-1].n,
            step_s=fmean(each.step_s for each in some),
            data_wait_s=fmean(each.host.get(DATA_WAIT, 0.0) for each in some),
            exposed_s=fmean(each.host.get(EXPOSED, 0.0) for each in some),
        )
