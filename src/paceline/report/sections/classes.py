"""Report per-class accuracy, confused pairs and the images with the highest loss."""

from heapq import nlargest
from typing import Final

from paceline.core.class_table import ClassCount, badness
from paceline.core.units import accuracy
from paceline.report.blocks import Block, Cell, Column, Gallery, HeatMap, Picture, Section, Table
from paceline.report.heat import MAX_CELLS
from paceline.report.run import Mistake, Run
from paceline.report.sections import cells
from paceline.report.words import clean, finite

_NUM_OPEN: Final = 20
_NUM_PAIRS: Final = 20


def classes(run: Run, *, max_classes: int = 1000, max_picture_bytes: int = 400_000) -> Section:
    """Return the class table, the confusion matrix and the worst mistakes.

    List at most `max_classes` classes, and show thumbnails of at most `max_picture_bytes` bytes in all.
    """
    blocks: list[Block] = []
    if run.classes:
        blocks += [_table(run.classes, max_classes), *_confusion(run)]
    else:
        blocks.append(cells.missing("There are no class results: nothing was evaluated."))
    return Section("classes", "Classes and mistakes", [*blocks, _gallery(run, max_picture_bytes)])


def _table(counts: tuple[ClassCount, ...], max_classes: int) -> Table:
    evaluated = sorted((each for each in counts if each.images), key=badness)
    listed = [*evaluated, *(each for each in counts if not each.images)][:max_classes]
    rows = [
        [cells.text(each.name, 80), cells.count(each.images), cells.count(each.correct),
         cells.of_accuracy(each.accuracy, bar=True) if each.images else Cell("no images")]
        for each in listed
    ]  # fmt: skip
    columns = [Column("class", is_number=False), Column("images"), Column("correct"), Column("accuracy")]
    more = (
        f"all {len(counts):,} classes"
        if len(listed) == len(counts)
        else f"the worst {len(listed):,} of {len(counts):,}"
    )
    return Table("Classes, the worst first", columns, rows, _NUM_OPEN, more)


def _confusion(run: Run) -> list[Block]:
    if not run.confusion:
        return [cells.missing("There is no confusion matrix: too many classes, or it was not written.")]
    names = [each.name for each in run.classes]
    blocks: list[Block] = []
    if len(names) <= MAX_CELLS:
        blocks.append(HeatMap("Confusion matrix: true class by row, predicted by column", names, run.confusion))
    pairs = _pairs(run)
    if pairs:
        columns = [Column("true", is_number=False), Column("predicted", is_number=False), Column("images")]
        blocks.append(Table("Most confused pairs", [*columns, Column("share of the true class")], pairs, 10, "more"))
    return blocks


def _pairs(run: Run) -> list[list[Cell]]:
    mistakes = (
        (count, -row, -column)
        for row, counts in enumerate(run.confusion)
        for column, count in enumerate(counts)
        if count and row != column
    )
    rows = []
    for count, row, column in nlargest(_NUM_PAIRS, mistakes):
        true, predicted = run.classes[-row], run.classes[-column]
        share = count / max(1, sum(run.confusion[-row]))
        rows.append([cells.text(true.name, 80), cells.text(predicted.name, 80), cells.count(count),
                     cells.of_share(share, bar=True)])  # fmt: skip
    return rows


def _gallery(run: Run, max_bytes: int) -> Block:
    if not run.mistakes:
        return cells.missing(
            "No misclassified image was saved: there is none, log.worst is 0, or nothing was evaluated."
        )
    left, pictures = max_bytes, []
    for mistake in run.mistakes:
        is_shown = len(mistake.picture) <= left
        left -= len(mistake.picture) if is_shown else 0
        pictures.append(_picture(mistake, mistake.picture if is_shown else ""))
    return Gallery("Worst mistakes, by loss", pictures)


def _picture(mistake: Mistake, address: str) -> Picture:
    record = mistake.record
    confidence, loss = finite(record.get("confidence")), finite(record.get("loss"))
    details = [f"{accuracy(confidence)} sure" if confidence is not None else "", f"loss {loss:.3f}" if loss else ""]
    name = clean(record.get("name", record.get("index", "")), 300)
    true, predicted = (clean(record.get(key, "?"), 40) for key in ("true", "predicted"))
    return Picture(address, true, predicted, [*filter(None, details)], name)
