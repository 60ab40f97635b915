"""Report per-class accuracy, confused pairs and the images with the highest loss."""

from heapq import nlargest
from typing import Final

from paceline.core.class_table import ClassCount, error_rate_key
from paceline.core.units import accuracy
from paceline.report.blocks import Block, Gallery, HeatMap, PageSection, Table, TableCell, TableColumn, Thumbnail
from paceline.report.heat import MAX_MATRIX_CLASSES
from paceline.report.run import RunData, WorstMistake
from paceline.report.sections import cells
from paceline.report.words import clean_text, finite_or_none

_NUM_OPEN_CLASSES: Final = 20
_MAX_CONFUSED_PAIRS: Final = 20


def classes_section(run: RunData, *, max_classes: int = 1000, max_thumbnail_bytes: int = 400_000) -> PageSection:
    """Return the class table, the confusion matrix and the worst mistakes.

    List at most `max_classes` classes, and show thumbnails of at most `max_thumbnail_bytes` bytes in all.
    """
    blocks: list[Block] = []
    if run.classes:
        blocks += [_class_table(run.classes, max_classes), *_confusion_blocks(run)]
    else:
        blocks.append(cells.missing_paragraph("There are no class results: nothing was evaluated."))
    return PageSection("classes", "Classes and mistakes", [*blocks, _mistake_gallery(run, max_thumbnail_bytes)])


def _class_table(counts: tuple[ClassCount, ...], max_classes: int) -> Table:
    evaluated = sorted((each for each in counts if each.images), key=error_rate_key)
    listed = [*evaluated, *(each for each in counts if not each.images)][:max_classes]
    rows = [
        [cells.text_cell(each.name, 80), cells.count_cell(each.images), cells.count_cell(each.correct),
         cells.accuracy_cell(each.accuracy, bar=True) if each.images else TableCell("no images")]
        for each in listed
    ]  # fmt: skip
    columns = [
        TableColumn("class", is_number=False),
        TableColumn("images"),
        TableColumn("correct"),
        TableColumn("accuracy"),
    ]
    more = (
        f"all {len(counts):,} classes"
        if len(listed) == len(counts)
        else f"the worst {len(listed):,} of {len(counts):,}"
    )
    return Table("Classes, the worst first", columns, rows, _NUM_OPEN_CLASSES, more)


def _confusion_blocks(run: RunData) -> list[Block]:
    if not run.confusion:
        return [cells.missing_paragraph("There is no confusion matrix: too many classes, or it was not written.")]
    names = [each.name for each in run.classes]
    blocks: list[Block] = []
    if len(names) <= MAX_MATRIX_CLASSES:
        blocks.append(HeatMap("Confusion matrix: true class by row, predicted by column", names, run.confusion))
    pairs = _confused_pairs(run)
    if pairs:
        columns = [
            TableColumn("true", is_number=False),
            TableColumn("predicted", is_number=False),
            TableColumn("images"),
        ]
        blocks.append(
            Table("Most confused pairs", [*columns, TableColumn("share of the true class")], pairs, 10, "more")
        )
    return blocks


def _confused_pairs(run: RunData) -> list[list[TableCell]]:
    mistakes = (
        (count, -row, -column)
        for row, counts in enumerate(run.confusion)
        for column, count in enumerate(counts)
        if count and row != column
    )
    rows = []
    for count, row, column in nlargest(_MAX_CONFUSED_PAIRS, mistakes):
        true, predicted = run.classes[-row], run.classes[-column]
        share = count / max(1, sum(run.confusion[-row]))
        rows.append([cells.text_cell(true.name, 80), cells.text_cell(predicted.name, 80), cells.count_cell(count),
                     cells.share_cell(share, bar=True)])  # fmt: skip
    return rows


def _mistake_gallery(run: RunData, max_bytes: int) -> Block:
    if not run.mistakes:
        return cells.missing_paragraph(
            "No misclassified image was saved: there is none, log.worst is 0, or nothing was evaluated."
        )
    left, pictures = max_bytes, []
    for mistake in run.mistakes:
        is_shown = len(mistake.thumbnail) <= left
        left -= len(mistake.thumbnail) if is_shown else 0
        pictures.append(_mistake_thumbnail(mistake, mistake.thumbnail if is_shown else ""))
    return Gallery("Worst mistakes, by loss", pictures)


def _mistake_thumbnail(mistake: WorstMistake, address: str) -> Thumbnail:
    record = mistake.record
    confidence, loss = finite_or_none(record.get("confidence")), finite_or_none(record.get("loss"))
    details = [f"{accuracy(confidence)} sure" if confidence is not None else "", f"loss {loss:.3f}" if loss else ""]
    name = clean_text(record.get("name", record.get("index", "")), 300)
    true, predicted = (clean_text(record.get(key, "?"), 40) for key in ("true", "predicted"))
    return Thumbnail(address, true, predicted, [*filter(None, details)], name)
