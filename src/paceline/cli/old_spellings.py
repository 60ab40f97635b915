"""Rewrite command lines of the verb `scale` from before it was split, and say how to write them now."""

from collections.abc import Sequence
from typing import Final

# The options that belong to another verb, and whether they are dropped because the verb says the same.
_VERBS: Final = {
    "--predict": ("predict-scaling", True),
    "--points": ("predict-scaling", False),
    "--collective": ("allreduce", True),
    "--batch-sizes": ("batch-study", False),
    "--warmups": ("batch-study", False),
    "--lr-rules": ("batch-study", False),
}


def rewrite_scale(argv: Sequence[str]) -> tuple[list[str], str]:
    """Return the arguments of the program with the verb that has taken over an option of `scale`, and a note.

    This concerns `scale ...` and `submit scale ...`; the note is "" if nothing changes.
    """
    args = [*argv]
    at = 1 if args[:2] == ["submit", "scale"] else 0
    if args[at : at + 1] != ["scale"]:
        return args, ""
    names = [word.partition("=")[0] for word in args[at + 1 :]]
    option = next((name for name in _VERBS if name in names), "")
    if not option:
        return args, ""
    verb, is_dropped = _VERBS[option]
    rest = [word for word in args[at + 1 :] if not (is_dropped and word == option)]
    note = f"note: scale {option} is now paceline {verb} (the old spelling still works)"
    return [*args[:at], verb, *rest], note
