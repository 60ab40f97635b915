"""Where the main thread of a rank is, for whoever watches over it."""

from collections.abc import Callable
from dataclasses import dataclass

Where = Callable[[], tuple[int, str]]
"""Returns the steps done and the stage of the clock, or "" between two."""


def _at_the_start() -> tuple[int, str]:
    return 0, "start"


@dataclass
class Whereabouts:
    """The step and the stage of this rank, and a count within a stage; a change of any of them is progress."""

    where: Where = _at_the_start
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
