"""Parse `[RECIPE] [KEY=VALUE ...]` and `--ranks`, which several verbs take."""

from collections.abc import Mapping
from pathlib import Path

from paceline.core.errors import RecipeError, WorldError
from paceline.parallel.environ import count_gpus
from paceline.recipe.load import DEFAULT, Patch


def split_recipe_args(args: list[str]) -> tuple[str, Patch]:
    """Return the recipe's name and the overrides. The name comes first, and may be omitted."""
    name, overrides = (args[0], args[1:]) if args and "=" not in args[0] else (DEFAULT, args)
    extra = next((word for word in overrides if "=" not in word), None)
    if extra is not None and Path(extra).expanduser().is_dir():
        raise RecipeError(f"{extra!r}: is a folder, not an override (write data.source.root={extra})")
    if extra is not None:
        raise RecipeError(
            f"{extra!r}: is not an override (write KEY=VALUE, such as optim.lr=0.4; the recipe comes first)"
        )
    return name, Patch.parse(overrides)


def refuse_length(overrides: Patch, experiment: str, *, purpose: str) -> None:
    """Raise `RecipeError` for overrides of the training length, or if the clock is off, which `purpose` needs."""
    # Short runs set their own length, so these would be ignored.
    for path, value in overrides.assignments:
        if path in ("train.steps", "train.epochs"):
            raise RecipeError(f"{path}: {value} has no effect on {experiment} (leave it out, or set --steps)")
    refuse_no_clock(overrides, purpose)


def refuse_no_clock(overrides: Patch, purpose: str) -> None:
    """Raise `RecipeError` if the clock is off, so that a run has nothing to `purpose`."""
    if ("measure.clock", "off") in overrides.assignments:
        raise RecipeError(f"measure.clock: off leaves nothing to {purpose} (leave it out)")


def count_ranks(text: str, environ: Mapping[str, str]) -> int:
    """Return the number of ranks to start here; `auto` is one per GPU, or one."""
    if text == "auto":
        return max(1, count_gpus(environ))
    if not text.isdecimal() or int(text) < 1:
        raise WorldError(f"--ranks: {text!r} is not a number of processes (write 1, 2, ... or auto)")
    return int(text)
