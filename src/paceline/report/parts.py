"""Labels and colours of the parts of a run's time, for every bar, table and sentence."""

from typing import Final

from paceline.core.stages import PAUSES, STAGES, spoken

# What a process does outside its counted steps, and time that no stage covers.
_AROUND: Final = {
    "start_up": spoken("start_up"),
    "compile": "compiling",
    "warmup": "warm-up",
    "finish": "finish",
    "closing": "closing",
    "residual": spoken("residual"),
}


def name(key: str) -> str:
    """Return the label of a stage, a pause or another part of a run's time."""
    return _AROUND.get(key) or spoken(key)


def colour(key: str) -> str:
    """Return the CSS class of a part."""
    return f"c-{key.replace('_', '-')}" if key in (*_AROUND, *STAGES, *PAUSES) else "c-unknown"
