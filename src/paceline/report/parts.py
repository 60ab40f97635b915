"""Labels and colours of the parts of a run's time, for every bar, table and sentence."""

from typing import Final

from paceline.core.stages import PAUSES, STAGES, display_name

# What a process does outside its counted steps, and time that no stage covers.
_PROCESS_PARTS: Final = {
    "start_up": display_name("start_up"),
    "compile": "compiling",
    "warmup": "warm-up",
    "finish": "finish",
    "closing": "closing",
    "residual": display_name("residual"),
}


def stage_label(key: str) -> str:
    """Return the label of a stage, a pause or another part of a run's time."""
    return _PROCESS_PARTS.get(key) or display_name(key)


def stage_colour(key: str) -> str:
    """Return the CSS class of a part."""
    return f"c-{key.replace('_', '-')}" if key in (*_PROCESS_PARTS, *STAGES, *PAUSES) else "c-unknown"
