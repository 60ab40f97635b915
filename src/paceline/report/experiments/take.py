"""Build the commands that train a recipe with every change that a ladder kept."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from paceline.core.experiments.ladder import LadderResult
from paceline.report.blocks import Block, Paragraph, Section
from paceline.report.experiments.frame import Told, shell
from paceline.report.sections import cells
from paceline.report.words import clean

_ROOT: Final = "data.source.root"
# Arguments of `paceline data pack` for each data set that `lab/prepared.py` makes. The ladder deletes these data, so a
# first command prepares them again outside of its folder.
_MAKING: Final[dict[str, tuple[str, ...]]] = {
    "source.pack": ("packed.pack",),
    "source-256.pack": ("packed.pack", "--resize", "256", "--quality", "90"),
    "source.lmdb": ("packed.lmdb", "--format", "lmdb"),
}


def take(report: Told, result: LadderResult) -> Section:
    """Return the commands that train the kept changes, on as many ranks as these were measured on."""
    if not result.best_patch:
        return Section("take", "Next steps", [cells.missing("No change was kept: keep the recipe.")])
    blocks: list[Block] = []
    for why, arguments in commands(report.path, result):
        blocks += [Paragraph(clean(why)), shell(arguments)]
    return Section("take", "Next steps", blocks)


def commands(folder: Path, result: LadderResult) -> list[tuple[str, list[str]]]:
    """Return pairs of a sentence and a command; the last command trains."""
    patch = result.best_patch
    root = next((value for key, _, value in (word.partition("=") for word in patch) if key == _ROOT), "")
    pack_arguments = _making(folder, root)
    steps: list[tuple[str, list[str]]] = []
    if pack_arguments:
        why = "The ladder has deleted the data that it prepared. To prepare them again:"
        steps.append((why, ["paceline", "data", "pack", str(folder), *pack_arguments]))
        patch = tuple(f"{_ROOT}={pack_arguments[0]}" if word.startswith(f"{_ROOT}=") else word for word in patch)
    best = next((rung.ranks for rung in result.rungs if rung.name == result.best), None)
    why = f"To train the whole recipe with all changes that were kept, up to the rung “{result.best}”:"
    steps.append((why, ["paceline", "train", str(folder), *patch, "--ranks", str(best or result.ranks)]))
    return steps


def _making(folder: Path, root: str) -> Sequence[str]:
    path = Path(root)
    # The folder may have been moved or linked, so compare its name only. Data elsewhere still exist.
    names = (folder.absolute().name, folder.resolve().name)
    is_ours = path.parent.name == "data" and path.parent.parent.name in names
    return _MAKING.get(path.name, ()) if is_ours else ()
