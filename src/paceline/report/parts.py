"""Names and colours of the parts of a run's time, the same in every bar, table and sentence."""

from typing import Final

from paceline.core.stages import PAUSES, STAGES, spoken

_AROUND: Final = {
    "start_up": spoken("start_up"),
    "compile": "compiling",
    "warmup": "warm-up",
    "finish": "finish",
    "closing": "closing",
    "residual": spoken("residual"),
}
"""What a process does before and after its counted steps, and what nothing covers."""


def name(part: str) -> str:
    """Return what a stage, a pause or another part of a run's time is called."""
    return _AROUND.get(part) or spoken(part)


def colour(part: str) -> str:
    """Return the style sheet's class of a part; one that nobody knows has that of the unknown."""
    return f"c-{part.replace('_', '-')}" if part in (*_AROUND, *STAGES, *PAUSES) else "c-unknown"
