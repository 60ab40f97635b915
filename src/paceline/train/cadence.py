"""How often something is done, in steps."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Cadence:
    """Every so many steps, and at the end; 0 means never."""

    every: int
    last: int

    def due(self, step: int) -> bool:
        """Whether something is to be done after `step` steps."""
        return self.every > 0 and (step % self.every == 0 or step == self.last)
