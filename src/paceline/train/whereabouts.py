"""Progress of this rank, read by the watchdog."""

from dataclasses import dataclass

from paceline.parallel.beats import ReadProgress, progress_at_start


@dataclass
class ProgressReporter:
    """Report the step and stage of this rank, and a counter within a stage. Any change counts as progress."""

    read_progress: ReadProgress = progress_at_start
    batches: int = 0

    def on_wait(self) -> None:
        """Count as progress that this rank waits for another one."""
        self.batches += 1

    def __call__(self) -> tuple[int, str]:
        """Return the number of finished steps, and a description of the stage."""
        step, stage = self.read_progress()
        name = stage or "between stages"
        has_count = stage in ("start", "evaluate") or not stage  # a clock that is off names no stage
        return step, f"{name}, {self.batches}" if has_count and self.batches else name
