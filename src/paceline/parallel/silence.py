"""How long something that counts has stood still, as one sees it who looks now and then. Values in, values out."""

from dataclasses import dataclass
from typing import final


@final
@dataclass
class StallTimer:
    """A count that is looked at every `interval_s` seconds or so.

    No look adds more than twice that: who looks late has been suspended, and what counts may have been with it.
    """

    interval_s: float
    lasted_s: float = 0.0
    _count: int = -1
    _looked_s: float = 0.0

    def update(self, count: int, now_s: float) -> float:
        """Return for how long it has stood at `count`, which it does at `now_s`."""
        passed_s = min(now_s - self._looked_s, 2 * self.interval_s)
        self.lasted_s = self.lasted_s + passed_s if count == self._count else 0.0
        self._count, self._looked_s = count, now_s
        return self.lasted_s
