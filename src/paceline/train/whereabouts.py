"""Progress of this rank, read by the watchdog."""

from dataclasses import dataclass

from paceline.parallel.beats import Where, at_the_start


@dataclass
class Whereabouts:
    """Report the step and stage of this rank, and a counter within a stage. Any change counts as progress."""

    where: Where = at_the_start
    batches: int = 0

    def waits(self) -> None:
        """Count as progress that this rank waits for another one."""
        self.batches += 1

    def __call__(self) -> tuple[int, str]:
        """Return the number of finished steps, and a description of the stage."""
        step, stage = self.where()
        name = stage or "between stages"
        has_count = stage in ("start", "evaluate") or not stage  # a clock that is off names no stage
        return step, f"{name}, {self.batches}" if has_count and self.batches else name
