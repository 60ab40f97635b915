"""What a clock measured, as values. Nothing here reads the time or formats it."""

from dataclasses import dataclass
from typing import Final

OTHER: Final = "other"
"""The row of what no stage covers."""


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
    """Totals of a clock, in seconds; the host seconds of `stages` (with `other`) add up to `wall_s`.

    `n` counted steps took `wall_s` and trained `images` images, as told to `end_step`. Left out of them:
    `warmup_s`, the first steps; `pauses`, by name; `unfinished_s`, what follows the last step and belongs to
    none. `step_s` is the wall clock of each counted step, of the last 100,000 when there are more.
    """

    n: int
    images: int
    wall_s: float
    stages: dict[str, StageTotal]
    warmup_s: float
    pauses: dict[str, float]
    unfinished_s: float
    step_s: tuple[float, ...]

    @property
    def excluded_s(self) -> float:
        """Seconds of warm-up steps and pauses."""
        return self.warmup_s + sum(self.pauses.values())

    @property
    def elapsed_s(self) -> float:
        """Seconds since the clock was built: counted, excluded and unfinished."""
        return self.wall_s + self.excluded_s + self.unfinished_s
