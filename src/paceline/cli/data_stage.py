"""`paceline data stage`: copy a data set into memory or to a local disk, until it is removed.

A run does this itself with `data.stage`; this verb makes one copy for several runs on a machine.
"""

import json

from paceline.cli.data_progress import build_data_progress
from paceline.cli.data_words import read_source, recipe_overrides
from paceline.cli.show import print_rows
from paceline.core.errors import RecipeError
from paceline.core.units import seconds
from paceline.data.sources.places import expand_path, printable
from paceline.data.stage import build_staged_section, stage_permanently, unstage


def stage_data(args: list[str], *, remove: bool, own_code: bool = False, as_json: bool) -> int:
    """Run `paceline data stage`, and return the exit code. `args` are SRC WHERE [KEY=VALUE ...]."""
    if remove:
        return _remove_copies(args, as_json=as_json)
    if len(args) < 2 or "=" in args[1]:
        raise RecipeError("paceline data stage: needs SRC and WHERE (such as: paceline data stage ~/photos /dev/shm)")
    src, where, *overrides = args
    section = read_source(src, overrides, own_code=own_code).source
    with build_data_progress("bytes") as progress:
        copy = stage_permanently(section, expand_path(where), progress)
    staged = build_staged_section(section, copy)
    if as_json:
        values = {"folder": str(copy), "seconds": round(progress.elapsed_s, 3), "source": staged.model_dump()}
        print(json.dumps(values, indent=2))
        return 0
    rows = [
        ("copy", printable(copy)),
        ("time", seconds(progress.elapsed_s)),
        ("a run uses it", f"with data.stage={where}"),
        ("to remove it", f"paceline data stage --remove {where}"),
    ]
    print_rows(rows, printable(src))
    print(f"or, in a recipe: {recipe_overrides(staged)}")
    return 0


def _remove_copies(args: list[str], *, as_json: bool) -> int:
    if len(args) != 1:
        raise RecipeError("--remove: takes only the folder (such as: paceline data stage --remove /dev/shm)")
    removed = unstage(expand_path(args[0]))
    if as_json:
        print(json.dumps({"removed": [str(folder) for folder in removed]}, indent=2))
        return 0
    print("\n".join(f"removed {printable(folder)}" for folder in removed) or f"no copies in {printable(args[0])}")
    return 0
