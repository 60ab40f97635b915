"""Build the commands that train a recipe with every change that a ladder kept."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from paceline.core.experiments.ladder import LadderResult
from paceline.report.blocks import Block, PageSection, Paragraph
from paceline.report.experiments.frame import ExperimentReport, shell_command
from paceline.report.sections import cells
from paceline.report.words import clean_text

_ROOT_FIELD: Final = "data.source.root"
# Arguments of `paceline data pack` for each data set that `lab/prepared.py` makes. The ladder deletes these data, so a
# first command prepares them again outside of its folder.
_PACK_ARGUMENTS: Final[dict[str, tuple[str, ...]]] = {
    "source.pack": ("packed.pack",),
    "source-256.pack": ("packed.pack", "--resize", "256", "--quality", "90"),
    "source.lmdb": ("packed.lmdb", "--format", "lmdb"),
}


def next_steps_section(report: ExperimentReport, result: LadderResult) -> PageSection:
    """Return the commands that train the kept changes, on as many ranks as these were measured on."""
    if not result.best_patch:
        return PageSection("take", "Next steps", [cells.missing_paragraph("No change was kept: keep the recipe.")])
    blocks: list[Block] = []
    for why, arguments in build_next_commands(report.path, result):
        blocks += [Paragraph(clean_text(why)), shell_command(arguments)]
    return PageSection("take", "Next steps", blocks)


def build_next_commands(folder: Path, result: LadderResult) -> list[tuple[str, list[str]]]:
    """Return pairs of a sentence and a command; the last command trains."""
    patch = result.best_patch
    root = next((value for key, _, value in (word.partition("=") for word in patch) if key == _ROOT_FIELD), "")
    pack_arguments = _find_pack_arguments(folder, root)
    steps: list[tuple[str, list[str]]] = []
    if pack_arguments:
        why = "The ladder has deleted the data that it prepared. To prepare them again:"
        steps.append((why, ["paceline", "data", "pack", str(folder), *pack_arguments]))
        patch = tuple(
            f"{_ROOT_FIELD}={pack_arguments[0]}" if word.startswith(f"{_ROOT_FIELD}=") else word for word in patch
        )
    best = next((rung.ranks for rung in result.rungs if rung.name == result.best), None)
    why = f"To train the whole recipe with all changes that were kept, up to the rung “{result.best}”:"
    steps.append((why, ["paceline", "train", str(folder), *patch, "--ranks", str(best or result.ranks)]))
    return steps


def _find_pack_arguments(folder: Path, root: str) -> Sequence[str]:
    path = Path(root)
    # The folder may have been moved or linked, so compare its name only. Data elsewhere still exist.
    names = (folder.absolute().name, folder.resolve().name)
    is_ours = path.parent.name == "data" and path.parent.parent.name in names
    return _PACK_ARGUMENTS.get(path.name, ()) if is_ours else ()
