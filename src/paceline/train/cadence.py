"""Step intervals."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StepInterval:
    """A step interval: every `every` steps and after step `last`; 0 means never."""

    every: int
    last: int

    def is_due(self, step: int) -> bool:
        """Return whether the interval is due after `step` steps."""
        return self.every > 0 and (step % self.every == 0 or step == self.last)
