"""Where the main thread of a rank is, for whoever watches over it."""

from dataclasses import dataclass

from paceline.parallel.beats import Where, at_the_start


@dataclass
class Whereabouts:
    """The step and the stage of this rank, and a count within a stage; a change of any of them is progress."""

    where: Where = at_the_start
    batches: int = 0

    def waits(self) -> None:
        """Note that this rank waits, and well, for one that does something for all."""
        self.batches += 1

    def __call__(self) -> tuple[int, str]:
        """Return the steps done, and the stage in words."""
        step, stage = self.where()
        named = stage or "between stages"
        counts = stage in ("start", "evaluate") or not stage  # a clock that is off names no stage
        return step, f"{named}, {self.batches}" if counts and self.batches else named
