"""What measures a run: its clock with the spans around it, and at its end what all ranks have measured.

Nothing here judges; that is `measure.verdict`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

import torch

from paceline.core.results import CommunicationResult, LoaderResult, RankResult, StragglerResult
from paceline.data.loader import Loader
from paceline.measure import Clock, ClockSummary, build_clock
from paceline.measure.communication import communication
from paceline.measure.rate import unix_s
from paceline.measure.spans import NvtxSpans, SpannedClock, Spans
from paceline.measure.straggler import RankTimes, stragglers
from paceline.measure.trace import TraceSpans, merge_traces
from paceline.parallel.strategy import Strategy
from paceline.train.job import Job
from paceline.train.parts import Parts

EXPOSED: Final = "exposed_communication"
STAGES: Final = (
    "data_wait",
    "h2d",
    "device_augment",
    "forward",
    "loss",
    "backward",
    EXPOSED,
    "optimizer",
    "other",
)
"""What the engine and its strategy charge time to, in the order of a step."""
_ROUNDS = 5


@dataclass(frozen=True)
class Measured:
    """What rank 0's clock came to, and what it takes all ranks to tell; None and empty where nothing was measured."""

    summary: ClockSummary
    loader: LoaderResult | None = None
    communication: CommunicationResult | None = None
    ranks: tuple[RankResult, ...] = ()
    straggler: StragglerResult | None = None


@dataclass(frozen=True)
class Meter:
    """The clock of a rank, the loader that it waits for, and how they are read out when the run is over.

    `spans` are what is told of each stage beside the clock.
    """

    clock: Clock
    loader: Loader
    spans: Sequence[Spans]
    strategy: Strategy
    parts: Parts
    job: Job

    def read(self) -> Measured:
        """Return what was measured, and write what was traced. Every rank must call it, when its steps are over."""
        summary = self.clock.drain()
        for spans in self.spans:
            spans.finish()
        if self.parts.recipe.measure.trace != "off":
            self._merge_traces()
        if summary.elapsed_s <= 0:
            return Measured(summary)
        ranks, straggler = self._compare(summary)
        return Measured(summary, self.loader.stats(), self._communication(summary), ranks, straggler)

    def _communication(self, summary: ClockSummary) -> CommunicationResult | None:
        exposed = summary.stages.get(EXPOSED)
        if exposed is None or summary.n == 0:
            return None
        wire = self.strategy.wire()
        found = (wire.wire_s, wire.buckets) if wire else (None, ())
        return communication(exposed.device_s / summary.n, summary.wall_s / summary.n, *found)

    def _compare(self, summary: ClockSummary) -> tuple[tuple[RankResult, ...], StragglerResult | None]:
        """Return what the ranks took, and who was waited for where that can be told."""
        num_ranks = self.parts.world.world_size
        if num_ranks == 1 or summary.n == 0:
            return (), None
        means = [summary.wall_s / summary.n, *(_device_s(summary, name) / summary.n for name in STAGES)]
        exposed_s = summary.recent.get(EXPOSED, ())
        rows = self._every([*means, *exposed_s])
        width = len(means)
        times = [RankTimes(row[0], dict(zip(STAGES, row[1:width], strict=True)), row[width:]) for row in rows]
        results, straggler = stragglers(times)
        return results, straggler if exposed_s else None

    def _merge_traces(self) -> None:
        """Put the ranks' traces on one time axis, where rank 0 sees the files; hosts' clocks differ."""
        offsets: list[list[float]] = []
        for _ in range(_ROUNDS):
            self._every([0.0])  # all leave it at once, or nearly
            now_s = self._every([unix_s()])
            offsets.append([row[0] - now_s[0][0] for row in now_s])
        if self.parts.world.is_main:
            by_rank = {rank: median(column) for rank, column in enumerate(zip(*offsets, strict=True))}
            paths = [path for rank in by_rank if (path := self.job.rundir.trace / trace_name(rank)).is_file()]
            try:
                merge_traces(paths, self.job.rundir.merged_trace, by_rank)
            except OSError as error:
                what = error.strerror or str(error)
                self.job.warn(f"measure.trace: the ranks' traces were not put together: {what} (each has its own)")

    def _every(self, values: Sequence[float]) -> list[list[float]]:
        row = torch.tensor(values, dtype=torch.float64, device=self.parts.device)
        rows: list[list[float]] = self.strategy.every(row).tolist()
        return rows


def trace_name(rank: int) -> str:
    """Return the name of the file that `rank` traces its steps to."""
    return f"rank{rank}.json.gz"


def build_meter(parts: Parts, job: Job, strategy: Strategy, loader: Loader) -> Meter:
    """Return what measures a run; its clock starts now, so build it last. The run directory is there."""
    measure, world = parts.recipe.measure, parts.world
    spans: list[Spans] = []
    if measure.nvtx == "on":
        spans.append(NvtxSpans(measure.warmup_steps))
    if measure.trace != "off":
        path = job.rundir.trace / trace_name(world.rank)
        spans.append(
            TraceSpans(
                path,
                first_step=measure.warmup_steps,
                num_steps=measure.trace,
                rank=world.rank,
                world_size=world.world_size,
                warn=job.warn,
            )
        )
    clock = build_clock(measure.clock, device_type=parts.device.type, warmup_steps=measure.warmup_steps)
    for each in spans:
        clock = SpannedClock(clock, each)
    if measure.clock == "on":
        strategy.listen(clock.turn, compiled=parts.recipe.train.compile != "off")
    return Meter(clock, loader, spans, strategy, parts, job)


def _device_s(summary: ClockSummary, stage: str) -> float:
    return summary.stages[stage].device_s if stage in summary.stages else 0.0
