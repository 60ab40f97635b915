"""Where the main thread of a rank is, for whoever watches over it."""

from collections.abc import Callable
from dataclasses import dataclass

Where = Callable[[], tuple[int, str]]
"""Returns the steps done and the stage of the clock, or "" between two."""


def _at_the_start() -> tuple[int, str]:
    return 0, "start"


@dataclass
class Whereabouts:
    """The step and the stage of this rank, and the batch of an evaluation; a change of any of them is progress."""

    where: Where = _at_the_start
    batches: int = 0

    def __call__(self) -> tuple[int, str]:
        """Return the steps done, and the stage in words."""
        step, stage = self.where()
        return step, f"{stage}, batch {self.batches}" if stage == "evaluate" else stage or "between stages"
