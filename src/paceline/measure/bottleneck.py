"""Find a run's bottleneck, in one word, with one sentence of evidence, a bound of the gain and one override to try.

Pure. Based on device time, which on a CPU is host time: a host that waits for data while its GPU has queued work costs
nothing. No advice changes what is trained, neither batch size nor epochs; what no override does, such as packing a data
set, is advised in a sentence. The rules are in `docs/explanation/verdict.md`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Final, Literal

from paceline.core.results import CPU_STARVED, CommunicationResult, CpuResult, StragglerResult
from paceline.core.stages import COMPUTE, DATA_WAIT, EPOCH_BOUNDARY, EXPOSED, LOG, OTHER, PREPARE, SYNC, display_name
from paceline.core.units import Duration, count
from paceline.measure.clock import ClockSummary

__all__ = ["BottleneckResult", "Ceilings", "RunSettings", "find_bottleneck"]

BottleneckName = Literal[
    "cpu-starved",
    "cpu-throttled",
    "cpu-oversubscribed",
    "input-bound",
    "copy-bound",
    "compute-bound",
    "launch-bound",
    "communication-bound",
    "straggler-bound",
    "evaluation-bound",
    "checkpoint-bound",
    "sync-bound",
    "logging-bound",
    "unknown",
]
PAUSE_SHARE: Final = 0.5
"""Share of the clock's total time above which a pause (starting a loader, evaluating, saving) is the bottleneck."""
WAITING_SHARE: Final = 0.2
"""Share of step time from which waiting for data, copying it, or sending gradients is the bottleneck."""
STRAGGLER_SHARE: Final = 0.1
"""Share of step time from which waiting for one late rank is the bottleneck; lower, as all other ranks pay for it."""
LATE_STEPS: Final = 0.5
"""Share of steps in which some rank must be late if no rank is named: one long stall is not a straggler."""
STARVED_SHARE: Final = 0.5
"""Share of steps that find the GPU without queued work, above which the host launches too slowly."""
LOST_CPU_SHARE: Final = 0.1
"""Share of the CPU time that training needed from which it is starved by other processes, or throttled by a quota: the
run is slower by a ninth, more than many claimed gains. Not tuned: alone on two cores a run lost 0.002 to 0.041, beside
eight busy processes 0.80 to 0.82 (n = 10 each, `cpu-starved.json`).
"""
LOST_CPU_WALL: Final = 0.05
"""Share of the wall clock that must be lost as well: a run that waits for a network disk needs so little CPU that
others can use the cores half of the time at no cost.
"""
LEAST_CPU_WALL_S: Final = 0.5
"""The kernel counts busy time in ticks of 10 ms: below 50 ticks nothing is concluded."""
BUSY_GPU_SHARE: Final = 0.9
"""Share of step time from which a computing GPU is the bottleneck, whatever happens on the CPU."""
OWN_CPU_SHARE: Final = 0.25
"""Share of the CPU time its threads needed from which a run with more threads than cores is held up by itself: three
computing threads on two cores lose a third. Loader workers do not count as threads.
"""
ADVICE_PACK: Final = (
    "packing the images: packs load several times as fast (paceline data pack SRC OUT.pack, then "
    "data.source={name: pack, root: OUT.pack})"
)


@dataclass(frozen=True)
class RunSettings:
    """Settings of a run that an override could change. A setting that is None gets no advice.

    `workers` decode for this rank (0: the rank itself), `cores` are the logical cores it may use. `eval_every` and
    `save_every` are the intervals of evaluations and checkpoints (None: never, or fixed). `augments_on` is `host` or
    `device` (None: no augmentation of batches); `has_files`: samples are image files, read one by one in Python.
    `threads` are those requested per rank. `compression` is None if gradients are not averaged.
    """

    workers: int | None = None
    cores: int | None = None
    eval_every: Duration | None = None
    save_every: Duration | None = None
    saves_in_background: bool | None = None
    augments_on: str | None = None
    has_files: bool = False
    device_type: str = "cpu"
    world_size: int = 1
    strategy: str = "ddp"
    precision: str | None = None
    compile: str | None = None
    compression: str | None = None
    accumulate: int = 1
    threads: int | Literal["auto"] = "auto"

    @property
    def is_gpu(self) -> bool:
        """Whether ranks compute on GPUs."""
        return self.device_type == "cuda"


UNKNOWN_SETTINGS: Final = RunSettings()
"""No settings to advise on; a CPU."""


@dataclass(frozen=True)
class Ceilings:
    """Speed-ups of probes that trained without the cost of one part of the work; None without a probe.

    Free data are the same few batches in host memory, free copies the same on the device; with free communication each
    rank trains alone; a free model is an empty one.
    """

    free_data: float | None = None
    free_copy: float | None = None
    free_communication: float | None = None
    free_model: float | None = None

    def __str__(self) -> str:
        named = {
            "data loading": self.free_data,
            "loading and copies": self.free_copy,
            "communication": self.free_communication,
            "the model": self.free_model,
        }
        known = {name: ratio for name, ratio in named.items() if ratio is not None}
        return "; ".join(f"without {name}: at most {_format_ratio(ratio)}" for name, ratio in known.items())


@dataclass(frozen=True)
class BottleneckResult:
    """The `bottleneck`, the `evidence` for it, the `ceiling` of the speed-up, and `try_`, an override to paste.

    `ceiling` is "" without a bound, `try_` without advice.
    """

    bottleneck: BottleneckName
    evidence: str
    ceiling: str
    try_: str

    def to_dict(self) -> dict[str, str]:
        """Return {bottleneck, evidence, ceiling, try}, as in `result.json`."""
        return {
            "bottleneck": self.bottleneck,
            "evidence": self.evidence,
            "ceiling": self.ceiling,
            "try": self.try_,
        }


@dataclass(frozen=True)
class _TimeLoss:
    """Avoidable seconds of the bottleneck `name`, if they are at least `least_share` of `of_s`."""

    name: BottleneckName
    seconds: float
    of_s: float
    least_share: float
    evidence: str
    without: str
    to_try: str = ""

    @property
    def is_large(self) -> bool:
        return self.seconds > 0 and self.seconds >= self.least_share * self.of_s

    def outlasts(self, lost_s: float) -> bool:
        """Return whether it stays large, and larger than `lost_s`, if all of the lost CPU time was part of it."""
        return self.seconds - lost_s > lost_s and self.seconds - lost_s >= self.least_share * self.of_s

    def to_result(self) -> BottleneckResult:
        ceiling = ""
        if self.seconds < self.of_s:
            speedup = self.of_s / (self.of_s - self.seconds)
            ceiling = f"at most {_format_ratio(speedup)} without {self.without}, all else unchanged"
        return BottleneckResult(self.name, self.evidence, ceiling, self.to_try)


def find_bottleneck(
    summary: ClockSummary,
    settings: RunSettings = UNKNOWN_SETTINGS,
    *,
    straggler: StragglerResult | None = None,
    communication: CommunicationResult | None = None,
    cpu: CpuResult | None = None,
) -> BottleneckResult:
    """Find the bottleneck in the summary of rank 0: the largest loss above its threshold, else computing.

    Lack of CPU time comes first, unless a GPU was busy all the same or a wait is too long to come from it; then pauses,
    which take more than half of all time, and then steps. `straggler`, `communication` and `cpu` are of the measured
    steps; without `straggler`, waiting between ranks counts as communication.
    """
    if summary.n == 0:
        to_try = "measure.warmup_steps=0" if summary.warmup_s > 0 else ""
        return BottleneckResult("unknown", "No step was counted.", "", to_try)
    late = _Lateness.of(straggler, summary.n)
    waits = [loss for loss in _wait_losses(summary, settings, late, communication) if loss.is_large]
    # Without CPU time, stage times mean little: check it first.
    starved = None if cpu is None or _keeps_gpu_busy(summary, settings) else _cpu_starved_loss(cpu, settings, waits)
    if starved is not None:
        return starved
    for large in ([loss for loss in _pause_losses(summary, settings) if loss.is_large], waits):
        if large:
            return max(large, key=lambda loss: loss.seconds).to_result()
    # Last, as ranks that wait for data or for one another do not compete for cores.
    oversubscribed = None if cpu is None else _oversubscribed_loss(cpu, settings)
    return oversubscribed or _busy_loss(summary, settings, late)


def _keeps_gpu_busy(summary: ClockSummary, used: RunSettings) -> bool:
    # If the GPU computed nearly all the time, lost CPU time cost nothing.
    if not used.is_gpu or summary.starved > STARVED_SHARE:
        return False
    return _device_s(summary, *COMPUTE) >= BUSY_GPU_SHARE * summary.wall_s


def _cpu_starved_loss(cpu: CpuResult, used: RunSettings, waits: Sequence[_TimeLoss]) -> BottleneckResult | None:
    if cpu.wall_s < LEAST_CPU_WALL_S:
        return None
    rank = f" rank {cpu.rank} wanted" if used.world_size > 1 else " training wanted"
    cores = count(cpu.cores, "core")
    is_starved = cpu.share >= LOST_CPU_SHARE and cpu.lost_s >= LOST_CPU_WALL * cpu.wall_s
    if is_starved and not any(loss.outlasts(cpu.lost_s) for loss in waits):
        evidence = (
            f"Other processes held the cores {_format_share(cpu.share)} of the time that{rank} to run: they kept "
            f"{cpu.others_cores:.1f} of {cores} busy. Measure again when nothing else runs here."
        )
        return BottleneckResult(CPU_STARVED, evidence, "", "")
    if cpu.throttled_share >= LOST_CPU_SHARE:
        evidence = (
            f"A quota of CPU time (control group) stopped the run {_format_share(cpu.throttled_share)} of the time "
            f"that{rank} to run."
        )
        return BottleneckResult("cpu-throttled", evidence, "", advise_fewer_threads(used))
    return None


def _oversubscribed_loss(cpu: CpuResult, used: RunSettings) -> BottleneckResult | None:
    if cpu.wall_s < LEAST_CPU_WALL_S:
        return None
    cores = count(cpu.cores, "core")
    if cpu.ranks * cpu.threads > cpu.cores and cpu.own_share >= OWN_CPU_SHARE:
        evidence = (
            f"{count(cpu.ranks, 'rank')} of {count(cpu.threads, 'thread')} oversubscribe {cores}: their threads waited "
            f"for one another {_format_share(cpu.own_share)} of the time that they wanted to run."
        )
        return BottleneckResult("cpu-oversubscribed", evidence, "", advise_fewer_threads(used) or _fewer_ranks(cpu))
    return None


def _fewer_ranks(cpu: CpuResult) -> str:
    return f"starting {count(cpu.cores, 'rank')} at most (--ranks {cpu.cores})" if cpu.ranks > cpu.cores else ""


def _pause_losses(summary: ClockSummary, used: RunSettings) -> Iterator[_TimeLoss]:
    elapsed_s = summary.elapsed_s
    start_s, evaluate_s, save_s = (summary.pauses.get(name, 0.0) for name in (EPOCH_BOUNDARY, "evaluate", "checkpoint"))

    def loss(name: BottleneckName, what: str, seconds: float, without: str, to_try: str = "") -> _TimeLoss:
        evidence = f"{what} took {seconds:.3g} s of {elapsed_s:.3g} s ({_format_share(seconds / elapsed_s)})."
        return _TimeLoss(name, seconds, elapsed_s, PAUSE_SHARE, evidence, without, to_try)

    # More workers do not start sooner, so there is no advice for the start of a loader.
    yield loss("input-bound", "Starting the loader, up to its first batch,", start_s, "starting it")
    to_try = advise_eval_interval(evaluate_s, elapsed_s, used)
    yield loss("evaluation-bound", "Evaluation", evaluate_s, "evaluation", to_try)
    to_try = advise_checkpoint_interval(save_s, elapsed_s, used)
    yield loss("checkpoint-bound", "Training stood still for checkpoints, which", save_s, "checkpoints", to_try)


def _wait_losses(
    summary: ClockSummary, used: RunSettings, late: "_Lateness", communication: CommunicationResult | None
) -> Iterator[_TimeLoss]:
    def loss(name: BottleneckName, what: str, seconds: float, without: str, to_try: str = "") -> _TimeLoss:
        return _TimeLoss(
            name, seconds, summary.wall_s, WAITING_SHARE, _stage_evidence(what, seconds, summary), without, to_try
        )

    data_wait_s, h2d_s = (late.common_s(name, _device_s(summary, name)) for name in (DATA_WAIT, "h2d"))
    to_try = advise_faster_data(data_wait_s, summary.wall_s, used)
    yield loss("input-bound", "Waiting for data", data_wait_s, "waiting for data", to_try)
    yield loss("copy-bound", "Copying to the device", h2d_s, "copying")
    # The next three are told apart in a watched script only. A GPU that computes while the host waits loses nothing.
    prepare_s = late.common_s(PREPARE, _device_s(summary, PREPARE))
    yield loss("input-bound", "Preparing batches, from their arrival to forward,", prepare_s, "it")
    sync_s = late.common_s(SYNC, sum(total.host_s for name, total in summary.stages.items() if name == SYNC))
    if used.is_gpu:
        sync_s = min(sync_s, max(0.0, summary.wall_s - _device_s(summary, *COMPUTE, EXPOSED, "h2d")))
    yield loss("sync-bound", "Waiting for values of tensors, as .item() does,", sync_s, "it")
    log_s = late.common_s(LOG, _device_s(summary, LOG))
    yield loss("logging-bound", "Logging", log_s, "logging")
    # Waiting for a late rank is counted as a straggler, not as communication.
    wire_s = max(0.0, _device_s(summary, EXPOSED) - late.waited_s)
    wire_loss = loss("communication-bound", "Exposed communication", wire_s, "it", advise_compression(used))
    yield replace(wire_loss, evidence=wire_loss.evidence[:-1] + late.exclusion + _communication_evidence(communication))
    straggler_loss = loss("straggler-bound", "Waiting for the latest rank", 0.0 if late.is_rare else late.lost_s, "it")
    yield replace(
        straggler_loss, evidence=straggler_loss.evidence[:-1] + late.rank_suffix, least_share=late.least_share
    )


@dataclass(frozen=True)
class _Lateness:
    """Cost of the latest rank, in seconds over all measured steps.

    `lost_s` is what steps would save without it, `waited_s` the part of rank 0's exposed communication that waits for
    it. If rank 0 itself is late, it is by `own_s` in `own_stage`. `is_rare`: neither one rank repeatedly nor some rank
    in most steps is late.
    """

    lost_s: float = 0.0
    least_share: float = STRAGGLER_SHARE
    waited_s: float = 0.0
    own_s: float = 0.0
    own_stage: str | None = None
    is_rare: bool = False
    rank_suffix: str = "."
    exclusion: str = ", waiting for late ranks left out"

    @classmethod
    def of(cls, straggler: StragglerResult | None, num_steps: int) -> "_Lateness":
        if straggler is None:
            return cls(exclusion=", waiting for late ranks with it")
        lost_s, late_s = straggler.lost_s * num_steps, straggler.late_s * num_steps
        if straggler.rank is None:  # no rank to check, so the threshold is that of any other wait
            rank_suffix = ", a different one from step to step."
            is_rare = straggler.late_steps < LATE_STEPS
            return cls(lost_s, WAITING_SHARE, waited_s=lost_s, is_rare=is_rare, rank_suffix=rank_suffix)
        where = f", which loses it in {display_name(straggler.stage)}" if straggler.stage else ""
        rank_suffix = f": most often rank {straggler.rank}{where}."
        if straggler.rank == 0:
            return cls(
                lost_s, waited_s=lost_s - late_s, own_s=late_s, own_stage=straggler.stage, rank_suffix=rank_suffix
            )
        return cls(lost_s, waited_s=lost_s, rank_suffix=rank_suffix)

    def common_s(self, stage: str, seconds: float) -> float:
        """Return the part of rank 0's `seconds` in `stage` that the other ranks have too."""
        return max(0.0, seconds - self.own_s) if stage == self.own_stage else seconds


def _busy_loss(summary: ClockSummary, used: RunSettings, late: _Lateness) -> BottleneckResult:
    if used.is_gpu and summary.starved > STARVED_SHARE:
        evidence = (
            f"In {_format_share(summary.starved)} of {count(summary.n, 'step')} the GPU had nothing left to do: it "
            "waits for the host to launch work."
        )
        return BottleneckResult("launch-bound", evidence, "", advise_fewer_launches(used))
    # Computing is the bottleneck only if it takes longer than all that the stages do not explain.
    compute_s = _device_s(summary, *COMPUTE)
    unclear_s = {
        "What no stage covers": max(0.0, summary.wall_s - _device_s(summary, *summary.stages)),
        "Logging and agreement between ranks": _device_s(summary, OTHER),
        "Waiting for ranks that were late now and then": min(late.waited_s, _device_s(summary, EXPOSED)) * late.is_rare,
    }
    if compute_s < sum(unclear_s.values()):
        what, seconds = max(unclear_s.items(), key=lambda item: item[1])
        return BottleneckResult("unknown", _stage_evidence(what, seconds, summary), "", "")
    return BottleneckResult(
        "compute-bound", _stage_evidence("Computing", compute_s, summary), "", advise_less_compute(used)
    )


def _communication_evidence(communication: CommunicationResult | None) -> str:
    if communication is None or communication.bytes is None:
        return "."
    overlap = communication.overlap
    hidden = "" if overlap is None else f", {_format_share(overlap)} of the time hidden by backward"
    return f"; {communication.bytes / 1e6:,.3g} MB a step{hidden}."


def _device_s(summary: ClockSummary, *stages: str) -> float:
    return sum(total.device_s for name, total in summary.stages.items() if name in stages)


def _stage_evidence(what: str, seconds: float, summary: ClockSummary) -> str:
    share, steps = _format_share(seconds / summary.wall_s), count(summary.n, "step")
    return f"{what} took {seconds:.3g} s of the {summary.wall_s:.3g} s of {steps} ({share})."


def _format_ratio(ratio: float) -> str:
    # One more digit near one: 1.04x, but 3.9x.
    return f"{ratio:.2f}x" if ratio < 1.2 else f"{ratio:.1f}x"


def _format_share(share: float) -> str:
    return f"{100 * share:.0f} %"


def advise_fewer_threads(used: RunSettings) -> str:
    """Advise `auto` threads if another number was requested."""
    return "" if used.threads == "auto" else "parallel.threads=auto"


def advise_faster_data(waiting_s: float, wall_s: float, used: RunSettings) -> str:
    """Advise enough workers to decode a batch in the time that a step does not wait, or less work for them."""
    return _advise_more_workers(waiting_s, wall_s, used) or (
        ADVICE_PACK if used.has_files else _advise_device_augment(used)
    )


def advise_compression(used: RunSettings) -> str:
    """Advise gradients of half the bytes, if they are sent in 32 bits."""
    in_16_bits = (used.precision or "").endswith(("_master", "_pure"))
    is_sent_whole = used.world_size > 1 and used.strategy == "ddp" and used.compression == "off"
    return "parallel.compression=bf16" if is_sent_whole and not in_16_bits else ""


def advise_less_compute(used: RunSettings) -> str:
    """Advise 16 bits on GPUs, then compiling: each about halves the memory traffic of most of these models."""
    if not used.is_gpu or used.strategy == "dataparallel":  # its threads neither autocast to bf16 nor compile
        return ""
    # fp64 was chosen for its precision, so it is kept.
    if used.precision in ("fp32", "torch_default", "tf32"):
        return "train.precision=amp"
    return "train.compile=default" if used.precision is not None and used.compile == "off" else ""


def advise_fewer_launches(used: RunSettings) -> str:
    """Advise compiling, or on a single rank one CUDA graph for all kernels."""
    if used.strategy == "dataparallel":  # its replicas are not compiled
        return ""
    # With several ranks or micro-batches, DDP or accumulation reads gradients that a CUDA graph overwrites.
    takes_graphs = used.world_size == 1 and used.accumulate == 1
    match used.compile:
        case "off" | "default" if takes_graphs:
            return "train.compile=reduce-overhead"
        case "off":
            return "train.compile=default"
        case _:
            return ""


def advise_eval_interval(evaluate_s: float, elapsed_s: float, used: RunSettings) -> str:
    """Advise an interval at which evaluation takes no longer than the rest."""
    return _advise_longer_interval("train.eval_every", used.eval_every, evaluate_s, elapsed_s)


def advise_checkpoint_interval(checkpoint_s: float, elapsed_s: float, used: RunSettings) -> str:
    """Advise background saving, or an interval at which it takes no longer than the rest."""
    if used.saves_in_background is False:
        return "checkpoint.background=on"
    return _advise_longer_interval("checkpoint.every", used.save_every, checkpoint_s, elapsed_s)


def _advise_more_workers(waiting_s: float, wall_s: float, used: RunSettings) -> str:
    workers, cores = used.workers, used.cores
    if workers is None or cores is None or waiting_s >= wall_s:
        return ""
    # Without workers decoding took the wait; with some, each of them was decoding all the time.
    decoding_s = waiting_s if workers == 0 else workers * wall_s
    needed = min(ceil(decoding_s / (wall_s - waiting_s)), cores if used.is_gpu else cores - 1)  # the rank computes too
    return f"data.workers={needed}" if needed > workers else ""


def _advise_device_augment(used: RunSettings) -> str:
    return "data.augment_on=device" if used.is_gpu and used.augments_on == "host" else ""


def _advise_longer_interval(field: str, every: Duration | None, taken_s: float, elapsed_s: float) -> str:
    if every is None or every.value == 0 or taken_s >= elapsed_s:
        return ""
    factor = ceil(taken_s / (elapsed_s - taken_s))
    return f"{field}={Duration(every.value * factor, every.unit)}"
