"""What to take from a ladder: the commands that train the whole recipe with all that was kept.

Data that the ladder has made for itself are gone when it has ended, so that a command makes them anew, outside of it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from paceline.core.experiments.ladder import LadderResult
from paceline.report.blocks import Block, Paragraph, Section
from paceline.report.experiments.frame import Told, shell
from paceline.report.sections import cells
from paceline.report.words import clean

_ROOT: Final = "data.source.root"
_MAKING: Final[dict[str, tuple[str, ...]]] = {
    "source.pack": ("packed.pack",),
    "source-256.pack": ("packed.pack", "--resize", "256", "--quality", "90"),
    "source.lmdb": ("packed.lmdb", "--format", "lmdb"),
}
"""The words of `paceline data pack` that make what a ladder has made under a name, as `lab/prepared.py` does."""


def take(told: Told, result: LadderResult) -> Section:
    """Return how to train with what was kept, on as many ranks as that was measured on."""
    if not result.best_patch:
        return Section("take", "What to take", [cells.missing("No change was kept: the recipe stays as it is.")])
    blocks: list[Block] = []
    for why, words in commands(told.path, result):
        blocks += [Paragraph(clean(why)), shell(words)]
    return Section("take", "What to take", blocks)


def commands(folder: Path, result: LadderResult) -> list[tuple[str, list[str]]]:
    """Return sentences, and the words of the command that each of them leads to: the last one trains."""
    patch = result.best_patch
    root = next((value for key, _, value in (word.partition("=") for word in patch) if key == _ROOT), "")
    making = _making(folder, root)
    found: list[tuple[str, list[str]]] = []
    if making:
        why = "The data that the ladder made are gone. To make them once more, from the recipe's own:"
        found.append((why, ["paceline", "data", "pack", str(folder), *making]))
        patch = tuple(f"{_ROOT}={making[0]}" if word.startswith(f"{_ROOT}=") else word for word in patch)
    best = next((rung.ranks for rung in result.rungs if rung.name == result.best), None)
    why = f"To train the whole recipe with all that was kept, up to the rung “{result.best}”:"
    found.append((why, ["paceline", "train", str(folder), *patch, "--ranks", str(best or result.ranks)]))
    return found


def _making(folder: Path, root: str) -> Sequence[str]:
    """Return how to make what lay at `root` in the folder of an experiment, wherever that has been moved to since.

    There are no words for what lies elsewhere, which is there still.
    """
    place = Path(root)
    names = (folder.absolute().name, folder.resolve().name)
    is_ours = place.parent.name == "data" and place.parent.parent.name in names
    return _MAKING.get(place.name, ()) if is_ours else ()
