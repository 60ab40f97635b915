"""What a clock measured, as values, and as a table for people. Nothing here reads the time."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import fsum
from typing import Final

from paceline.measure.contention import CpuTimes

RECENT_STEPS: Final = 1000
"""Last counted steps whose stages are kept one by one: 8 kB a stage."""


@dataclass(frozen=True)
class StageTotal:
    """Seconds of one stage over the counted steps.

    `host_s` is the time the program spent in the stage. `device_s` is the time between the stage's two ends as
    the device reached them: equal to `host_s` on a CPU; on a GPU the work the stage queued, plus what the GPU
    idled in between, so that `data_wait` is what it really waited. `share` is `host_s` over the wall clock.
    """

    host_s: float
    device_s: float
    share: float


@dataclass(frozen=True)
class ClockSummary:
    """Totals of a clock, in seconds; the host seconds of `stages` and `residual_s` add up to `wall_s`.

    `n` counted steps took `wall_s` and trained `images` images, as told to `end_step`. Left out of them:
    `warmup_s`, the first steps; `pauses`, seconds by name; `unfinished_s`, what follows the last step and belongs to
    none. `step_s` is the wall clock of each counted step, of the last 100,000 when there are more. `recent` has
    the device seconds of each stage in each of the last `RECENT_STEPS` counted steps, oldest first, 0 where a step
    had no such stage, and `after_pause` says of the same steps whether a pause lay in them or since the step before:
    what ranks wait for one another there may be for the pause. `starved` is the share of counted steps before whose
    optimizer (at whose end, in a loop without such a stage) a GPU had already done all that they queued, so that it
    waits for the host; a lower bound, as a GPU takes microseconds to say so. A CPU is never starved. `cpu` are the CPU
    times of the counted steps, None where they are not known. `has_run` is False where the clock is off.
    """

    n: int
    images: int
    wall_s: float
    stages: dict[str, StageTotal]
    warmup_s: float
    pauses: dict[str, float]
    unfinished_s: float
    step_s: tuple[float, ...]
    recent: dict[str, tuple[float, ...]] = field(default_factory=dict)
    after_pause: tuple[bool, ...] = ()
    starved: float = 0.0
    cpu: CpuTimes | None = None
    has_run: bool = True

    @property
    def residual_s(self) -> float:
        """Seconds of counted steps that no stage covers."""
        return self.wall_s - fsum(total.host_s for total in self.stages.values())

    @property
    def excluded_s(self) -> float:
        """Seconds of warm-up steps and pauses."""
        return self.warmup_s + sum(self.pauses.values())

    @property
    def elapsed_s(self) -> float:
        """Seconds since the clock was built: counted, excluded and unfinished."""
        return self.wall_s + self.excluded_s + self.unfinished_s

    def table(self) -> str:
        """Return where every second went, as lines of text; one that begins with `=` sums up those above it.

        Columns are host seconds, device seconds, and the host's share of the counted steps' wall clock.
        """
        rows = [("stage", "host s", "device s", "share"), *self._rows()]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = [
            "  ".join(
                cell.ljust(width) if column == 0 else cell.rjust(width) for column, (cell, width) in each
            ).rstrip()
            for each in (list(enumerate(zip(row, widths, strict=True))) for row in rows)
        ]
        rule = "-" * max(map(len, lines))
        return "\n".join([lines[0], rule, *lines[1:]])

    def _rows(self) -> Iterator[tuple[str, str, str, str]]:
        for name, total in self.stages.items():
            yield name, f"{total.host_s:.3f}", f"{total.device_s:.3f}", f"{total.share:.1%}"
        yield "residual", f"{self.residual_s:.3f}", "", f"{self.residual_s / self.wall_s if self.wall_s else 0.0:.1%}"
        yield f"= {self.n:,} counted steps", f"{self.wall_s:.3f}", "", f"{1.0 if self.wall_s else 0.0:.1%}"
        yield "warm-up", f"{self.warmup_s:.3f}", "", ""
        for name, seconds in self.pauses.items():
            yield f"pause: {name}", f"{seconds:.3f}", "", ""
        yield "after the last step", f"{self.unfinished_s:.3f}", "", ""
        yield "= wall clock", f"{self.elapsed_s:.3f}", "", ""
