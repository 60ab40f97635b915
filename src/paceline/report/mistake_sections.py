"""Report section on mistakes: worst images, confused pairs, confusion matrix, classes and calibration."""

from collections.abc import Sequence
from dataclasses import replace
from heapq import nlargest
from typing import Final

from paceline.core.results import CalibrationBin, ClassCount, error_rate_key
from paceline.core.units import count, share
from paceline.report import cells
from paceline.report.charts import MAX_MATRIX_CLASSES
from paceline.report.document import (
    BarChart,
    BarRow,
    BarSegment,
    Block,
    Chart,
    ChartLine,
    ChartRow,
    Gallery,
    HeatMap,
    PageSection,
    Table,
    TableCell,
    Thumbnail,
)
from paceline.report.read_run import RunData, SavedImage
from paceline.report.text import clean_text, finite_or_none

_NUM_OPEN_CLASSES: Final = 20
_NUM_WORST_IMAGES: Final = 12
_MAX_CONFUSED_PAIRS: Final = 20
_MAX_PAIR_IMAGES: Final = 6
_MAX_CLASSES: Final = 1000
_MAX_THUMBNAIL_BYTES: Final = 400_000  # of all thumbnails of a gallery
_MAPS_NOTE: Final = (
    "Beside each image, the parts that speak for the predicted class, then for the true one: the more yellow, the "
    "more. Each map is scaled to its own maximum."
)


def mistakes_section(run: RunData) -> PageSection | None:
    """Return what the evaluated weights get wrong, the worst images first; None if nothing was evaluated."""
    if not run.classes and not run.mistakes:
        return None
    # Both are of the one label of an image.
    blocks = [] if run.is_multi_label else [*_worst_images(run), *_confusion_blocks(run)]
    if run.classes:
        blocks.append(class_table(run.classes, run.confusion))
    return PageSection("classes", "What it gets wrong", [*blocks, *_calibration_blocks(run)])


def class_table(
    counts: Sequence[ClassCount], confusion: Sequence[Sequence[int]] = (), num_open: int = _NUM_OPEN_CLASSES
) -> Table:
    """Return recall and, with a confusion matrix, precision and F1 of each class, the lowest recall first."""
    evaluated = [index for index, each in enumerate(counts) if each.images]
    evaluated.sort(key=lambda index: error_rate_key(counts[index]))
    listed = [*evaluated, *(index for index, each in enumerate(counts) if not each.images)][:_MAX_CLASSES]
    predicted = [sum(column) for column in zip(*confusion, strict=True)]
    counts = [
        each if each.predicted is not None or not predicted else replace(each, predicted=number)
        for each, number in zip(counts, predicted or [None] * len(counts), strict=True)
    ]
    has_predicted, has_scores = (
        any(getattr(each, name) is not None for each in counts) for name in ("predicted", "auroc")
    )
    rows = []
    for index in listed:
        each = counts[index]
        recall = cells.accuracy_cell(each.accuracy, bar=True) if each.images else TableCell("no images")
        row = [cells.text_cell(each.name, 80), cells.count_cell(each.images), cells.count_cell(each.correct), recall]
        if has_predicted:
            row += [cells.accuracy_cell(each.precision), cells.accuracy_cell(each.f1)]
        if has_scores:
            row += [cells.loss_cell(finite_or_none(each.auroc)), cells.loss_cell(finite_or_none(each.ap))]
        rows.append(row)
    titles = ["images", "correct", "recall"]
    titles += [*(["precision", "F1"] if has_predicted else []), *(["AUROC", "AP"] if has_scores else [])]
    more = (
        f"all {len(counts):,} classes"
        if len(listed) == len(counts)
        else f"the worst {len(listed):,} of {len(counts):,}"
    )
    return Table("Classes, the lowest recall first", cells.table_columns(["class"], titles), rows, num_open, more)


def _worst_images(run: RunData) -> list[Block]:
    if not run.mistakes:
        return [cells.missing_paragraph("No misclassified image was saved: there is none, or log.worst is 0.")]
    pictures = [_mistake_thumbnail(mistake) for mistake in run.mistakes[:_NUM_WORST_IMAGES]]
    note = _MAPS_NOTE if any(each.overlays for each in pictures) else ""
    return [Gallery("Worst images: the highest loss", limit_thumbnails(pictures, _MAX_THUMBNAIL_BYTES), note)]


def limit_thumbnails(pictures: Sequence[Thumbnail], max_bytes: int) -> list[Thumbnail]:
    """Return thumbnails without the images that do not fit into `max_bytes` in all; overlays come last."""
    left, limited = max_bytes, []
    for each in pictures:
        is_shown = len(each.address) <= left
        left -= len(each.address) if is_shown else 0
        limited.append(each if is_shown else replace(each, address=""))
    for number, each in enumerate(limited):
        overlays_bytes = sum(len(address) for address, _ in each.overlays)
        is_shown = bool(each.address) and overlays_bytes <= left
        left -= overlays_bytes if is_shown else 0
        limited[number] = each if is_shown else replace(each, overlays=())
    return limited


def _mistake_thumbnail(mistake: SavedImage) -> Thumbnail:
    record = mistake.record
    confidence, loss = finite_or_none(record.get("confidence")), finite_or_none(record.get("loss"))
    details = [
        f"{100 * confidence:.0f} % confident" if confidence is not None else "",
        f"loss {loss:.2f}" if loss is not None else "",
    ]
    name = clean_text(record.get("name", record.get("index", "")), 300)
    title = _read_as(record.get("true", "?"), record.get("predicted", "?"))
    overlays = [
        (address, f"what speaks for {clean_text(record.get(what, what), 40)}") for what, address in mistake.maps.items()
    ]
    return Thumbnail(mistake.thumbnail, title, [*filter(None, details)], name, overlays)


def _read_as(true: object, predicted: object) -> str:
    return f"{clean_text(true, 40)} read as {clean_text(predicted, 40)}"


def _confusion_blocks(run: RunData) -> list[Block]:
    if not run.confusion:
        if not run.classes:
            return []
        return [cells.missing_paragraph("There is no confusion matrix: too many classes, or it was not written.")]
    names = [each.name for each in run.classes]
    pairs = _confused_pairs(run)
    blocks = _pair_images(run, pairs)
    if pairs:
        columns = cells.table_columns(["true", "predicted"], ["images", "share of the true class"])
        rows = [
            [
                cells.text_cell(names[row], 80),
                cells.text_cell(names[column], 80),
                cells.count_cell(number),
                cells.share_cell(number / sum(run.confusion[row]), bar=True),
            ]
            for number, row, column in pairs
        ]
        blocks.append(Table("Most confused pairs", columns, rows, 5, "more", num_names=2))
    if len(names) <= MAX_MATRIX_CLASSES:
        blocks.append(HeatMap("Confusion matrix", names, run.confusion))
    return blocks


def _confused_pairs(run: RunData) -> list[tuple[int, int, int]]:
    """Return (images, true class, predicted class), the most images first."""
    mistakes = (
        # Negative indices: of equal counts, `nlargest` takes the first in class order.
        (number, -row, -column)
        for row, counts in enumerate(run.confusion)
        for column, number in enumerate(counts)
        if number and row != column
    )
    return [(number, -row, -column) for number, row, column in nlargest(_MAX_CONFUSED_PAIRS, mistakes)]


def _pair_images(run: RunData, pairs: Sequence[tuple[int, int, int]]) -> list[Block]:
    # A picture per pair, of the pairs whose images were saved.
    saved: dict[tuple[str, str], str] = {}
    for mistake in run.mistakes:
        if mistake.thumbnail:
            pair = (str(mistake.record.get("true")), str(mistake.record.get("predicted")))
            saved.setdefault(pair, mistake.thumbnail)
    pictures = []
    for number, row, column in pairs:
        true, predicted = run.classes[row].name, run.classes[column].name
        if address := saved.get((true, predicted)):
            of_class = f"{share(number / sum(run.confusion[row]))} of its class"
            pictures.append(Thumbnail(address, _read_as(true, predicted), [count(number, "image"), of_class], ""))
    if not pictures:
        return []
    shown = limit_thumbnails(pictures[:_MAX_PAIR_IMAGES], _MAX_THUMBNAIL_BYTES)
    return [Gallery("Most confused pairs of classes, with an image of each", shown)]


def _calibration_blocks(run: RunData) -> list[Block]:
    """Return a reliability diagram as in Guo et al. 2017 (arXiv 1706.04599), figure 1, and its counts."""
    filled = [each for each in run.calibration if each.images]
    if not filled:
        return []
    total = sum(each.images for each in filled)
    ece = sum(abs(each.correct - each.confidence * each.images) for each in filled) / total
    over = sum(each.confidence * each.images - each.correct for each in filled) / total
    lines = [
        ChartLine("perfect calibration", [(0, 0), (100, 100)], label="perfect", is_dashed=True),
        ChartLine("accuracy", [(100 * each.confidence, 100 * each.accuracy) for each in filled], has_markers=True),
    ]
    kind = "over-confident" if over > 0 else "under-confident"
    note = f"ECE {ece:.4f}, {len(run.calibration)} bins; {kind} by {100 * abs(over):.1f} points on average"
    diagram = Chart("Reliability diagram", "confidence, %", "accuracy, %", lines, high=100.0, note=note)
    largest = max(each.images for each in filled)
    bars = BarChart(
        "Images by confidence",
        [_confidence_row(each, largest) for each in filled],
        legend=[("right", "c-right"), ("wrong", "c-wrong")],
        note="and how many are right",
    )
    return [ChartRow([diagram]), bars]


def _confidence_row(each: CalibrationBin, largest: int) -> BarRow:
    wrong = each.images - each.correct
    parts = [
        BarSegment(name, number / largest, count(number, "image"), f"c-{name}")
        for name, number in (("right", each.correct), ("wrong", wrong))
        if number
    ]
    name = f"{100 * each.low:.0f} to {100 * each.high:.0f} %"
    return BarRow(name, parts, f"{100 * each.accuracy:.0f} % of {each.images:,}")
