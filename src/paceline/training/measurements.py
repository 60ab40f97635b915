"""Build the clock and traces of a run, and collect the measurements of all ranks at its end."""

import contextlib
import os
import resource
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress
from statistics import median

import torch

from paceline.core.process import read_text_or_empty
from paceline.core.results import (
    CommunicationResult,
    CpuResult,
    HostToDeviceResult,
    LoaderResult,
    MemoryResult,
    RankResult,
    StragglerResult,
)
from paceline.core.run_dir import RunDir
from paceline.core.stages import EXPOSED, STAGES
from paceline.core.world import World
from paceline.data.loaders.build import Loader
from paceline.data.transfer import DeviceTransfer, TransferStats
from paceline.measure import Clock, ClockSummary, build_clock
from paceline.measure.chrome_trace import merge_traces
from paceline.measure.clock import RECENT_STEPS
from paceline.measure.cpu import CpuTimes, RankCpu, cpu_result
from paceline.measure.profiler import MarkedClock, NvtxMarks, ProfilerMarks, TraceMarks
from paceline.measure.straggler import RankTimes, communication_result, find_straggler
from paceline.measure.throughput import unix_s
from paceline.parallel.strategy import Strategy
from paceline.training.context import RunContext
from paceline.training.saver import TrainingState

_CLOCK_ROUNDS = 5


@dataclass(frozen=True)
class Measurements:
    """Rank 0's clock, and measurements of all ranks; None or empty if not measured."""

    summary: ClockSummary
    memory: MemoryResult | None = None
    cpu: CpuResult | None = None
    loader: LoaderResult | None = None
    communication: CommunicationResult | None = None
    host_to_device: HostToDeviceResult | None = None
    ranks: tuple[RankResult, ...] = ()
    straggler: StragglerResult | None = None
    clock_offsets_s: tuple[float, ...] = ()
    """Clock offset of each rank's host to rank 0's, in seconds; measured if steps were traced."""


@dataclass(frozen=True)
class RunMeter:
    """The instruments of a rank: clock, loader, transfer (`accumulate` copies per step), and profiler marks `spans`.

    The first `warmup_steps` steps are not counted.
    """

    clock: Clock
    loader: Loader
    transfer: DeviceTransfer
    accumulate: int
    warmup_steps: int
    spans: Sequence[ProfilerMarks]
    strategy: Strategy
    world: World
    device: torch.device
    rundir: RunDir
    is_traced: bool
    warn: Callable[[str], None]

    def collect(self) -> Measurements:
        """Return the measurements, and write the traces. Collective, after the last step."""
        summary = self.clock.drain()
        for spans in self.spans:
            spans.finish()
        memory = peak_memory(self.device)
        if not summary.has_run:
            return Measurements(summary, memory)
        ranks, straggler = self._compare_ranks(summary)
        offsets_s = self._measure_clock_offsets() if self.is_traced else ()
        cpu, waited = self._measure_cpu(summary), self._measure_communication(summary)
        copied = compute_host_to_device(self.transfer.stats(self.warmup_steps * self.accumulate), self.accumulate)
        return Measurements(summary, memory, cpu, self.loader.stats(), waited, copied, ranks, straggler, offsets_s)

    def merge_traces(self, clock_offsets_s: Sequence[float]) -> None:
        """Merge the ranks' traces in this folder onto one time axis, on rank 0, without other ranks."""
        paths = [self.rundir.trace / trace_file_name(rank) for rank in range(len(clock_offsets_s))]
        try:
            existing = [path for path in paths if path.is_file()]
            merge_traces(existing, self.rundir.merged_trace, dict(enumerate(clock_offsets_s)))
        except (OSError, EOFError, ValueError, KeyError) as error:
            what = f"{type(error).__name__}: {error}"
            self.warn(f"measure.trace: the ranks' traces were not merged: {what} (each rank has its own)")

    def _measure_communication(self, summary: ClockSummary) -> CommunicationResult | None:
        exposed = summary.stages.get(EXPOSED)
        if exposed is None or summary.n == 0:
            return None
        hook = self.strategy.comm_hook
        comm = hook.times() if hook else None
        times = (comm.wire_s, comm.buckets) if comm else (None, ())
        return communication_result(exposed.device_s / summary.n, summary.wall_s / summary.n, *times)

    def _compare_ranks(self, summary: ClockSummary) -> tuple[tuple[RankResult, ...], StragglerResult | None]:
        """Return the times per rank, and the straggler if there is one."""
        if self.world.world_size == 1 or summary.n == 0:
            return (), None
        means = [summary.wall_s / summary.n, *(_device_seconds(summary, name) / summary.n for name in STAGES)]
        num_recent = min(summary.n, RECENT_STEPS)  # the same on every rank, and so is the width of a row
        rows = self._all_gather([*means, *summary.recent.get(EXPOSED, (0.0,) * num_recent)])
        width = len(means)
        # Rank 0 pauses longer to write, and the others wait for it in the next step: rank 0 is no straggler.
        is_compared = [not after_pause for after_pause in summary.after_pause]
        times = [
            RankTimes(row[0], dict(zip(STAGES, row[1:width], strict=True)), list(compress(row[width:], is_compared)))
            for row in rows
        ]
        results, straggler = find_straggler(times)
        return results, straggler if any(any(row[width:]) for row in rows) else None

    def _measure_cpu(self, summary: ClockSummary) -> CpuResult | None:
        """Return the CPU use of the most contended rank, or None if a rank cannot measure it."""
        cores = sorted(os.sched_getaffinity(0)) if summary.cpu is not None else []
        # Containers on one machine have different host names, but share its cores.
        machine = read_text_or_empty("/proc/sys/kernel/random/boot_id") or os.uname().nodename
        cores_id = zlib.crc32(f"{machine} {cores}".encode())
        times = CpuTimes() if summary.cpu is None else summary.cpu
        rank = RankCpu(times, cores_id, len(cores), torch.get_num_threads())
        ranks = [rank] if self.world.world_size == 1 else list(map(RankCpu.from_row, self._all_gather(rank.to_row())))
        return cpu_result(ranks) if all(each.cores for each in ranks) else None

    def _measure_clock_offsets(self) -> tuple[float, ...]:
        """Return the clock offset of each rank's host to rank 0's, in seconds."""
        # Right after a collective all ranks read their clocks at nearly the same time; the median drops late ones.
        offsets: list[list[float]] = []
        for _ in range(_CLOCK_ROUNDS):
            self._all_gather([0.0])
            times_s = self._all_gather([unix_s()])
            offsets.append([row[0] - times_s[0][0] for row in times_s])
        return tuple(median(column) for column in zip(*offsets, strict=True))

    def _all_gather(self, values: Sequence[float]) -> list[list[float]]:
        row = torch.tensor(values, dtype=torch.float64, device=self.device)
        rows: list[list[float]] = self.strategy.all_gather(row).tolist()
        return rows


def compute_host_to_device(copied: TransferStats, accumulate: int) -> HostToDeviceResult:
    """Return the transfer per step of `accumulate` copies."""
    steps = copied.sends / accumulate
    batch_bytes, copied_bytes = ((each / steps if steps else 0.0) for each in (copied.bytes, copied.copied_bytes))
    rate = copied.timed_bytes / copied.timed_s if copied.timed_s > 0 else None
    return HostToDeviceResult(
        batch_bytes=batch_bytes,
        copied_bytes=copied_bytes,
        copy_s=copied_bytes / rate if rate else None,
        bytes_per_s=rate,
    )


def peak_memory(device: torch.device) -> MemoryResult:
    """Return the peak memory of this process in bytes: its resident set, and what torch reserved on a GPU."""
    host_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # kilobytes on Linux (getrusage(2))
    device_bytes = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None
    return MemoryResult(host_bytes=host_bytes, device_bytes=device_bytes)


def trace_file_name(rank: int) -> str:
    """Return the trace file name of `rank`."""
    return f"rank{rank}.json.gz"


def build_run_meter(
    context: RunContext, rundir: RunDir, training_state: TrainingState, warn: Callable[[str], None]
) -> RunMeter:
    """Build the training loader and the meter of a run. Its clock starts now, so build it last."""
    measure, world, strategy = context.recipe.measure, context.world, training_state.strategy
    dtype = training_state.precision.dtype
    loader = context.create_train_loader(context.create_transfer(dtype))
    transfer = context.create_transfer(dtype, timed=measure.clock == "on")
    spans: list[ProfilerMarks] = []
    if measure.nvtx != "off":
        spans.append(NvtxMarks(measure.warmup_steps, marks_ops=measure.nvtx == "ops"))
    if measure.trace != "off":
        path = rundir.trace / trace_file_name(world.rank)
        with contextlib.suppress(OSError):
            path.unlink()  # from an earlier process with another clock
        spans.append(
            TraceMarks(
                path,
                first_step=measure.warmup_steps,
                num_steps=measure.trace,
                rank=world.rank,
                world_size=world.world_size,
                warn=warn,
            )
        )
    clock = build_clock(measure.clock, device_type=context.device.type, warmup_steps=measure.warmup_steps)
    for each in spans:
        clock = MarkedClock(clock, each)
    if measure.clock == "on":
        strategy.on_comm_wait(clock.switch_stage, compiled=context.recipe.train.compile != "off")
    is_traced = measure.trace != "off"
    copies = (transfer, context.recipe.train.num_micro_batches, measure.warmup_steps)
    return RunMeter(clock, loader, *copies, spans, strategy, world, context.device, rundir, is_traced, warn)


def _device_seconds(summary: ClockSummary, stage: str) -> float:
    return summary.stages[stage].device_s if stage in summary.stages else 0.0
