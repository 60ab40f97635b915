"""Parse the options that both kinds of prediction share."""

import math
from collections.abc import Mapping
from typing import Final

from paceline.core.errors import RecipeError

DEFAULT_RANKS: Final = "8,16,32,64,128,256,512,1024,2048,4096"
RANKS_PER_NODE: Final = 8
"""Default ranks per node for predictions from a run; a table states its own."""
_MAX_RANKS: Final = 1_000_000


def parse_ranks(text: str) -> tuple[int, ...]:
    """Return the rank counts of `8,64,512`, in order. Raise `RecipeError` for an invalid one."""
    items = [word.strip() for word in text.split(",")]
    wrong = next((word for word in items if not (word.isdecimal() and 0 < int(word) <= _MAX_RANKS)), None)
    if wrong is not None:
        raise RecipeError(f"--at: {wrong!r} is not a number of ranks (write a list such as 8,64,512)")
    return tuple(dict.fromkeys(int(word) for word in items))


def refuse_invalid_numbers(options: Mapping[str, float | None], *, allow_zero: bool = False) -> None:
    """Raise `RecipeError` for a given option that is not a finite number above 0, or at least 0 with `allow_zero`."""
    for option, value in options.items():
        if value is not None and not (math.isfinite(value) and (value > 0 or (allow_zero and value == 0))):
            least = "0 or more" if allow_zero else "a number above 0"
            raise RecipeError(f"{option}: {value:g} is out of range (write {least})")
