"""Report section on what the model was fed: augmented images, classes, image sizes and splits."""

from collections.abc import Sequence
from typing import Any, Final

from paceline.core.results import is_imbalanced
from paceline.core.units import count
from paceline.report import cells
from paceline.report.document import (
    BarChart,
    BarRow,
    BarSegment,
    Block,
    Gallery,
    KeyValueList,
    PageSection,
    TableCell,
    Thumbnail,
)
from paceline.report.mistake_sections import limit_thumbnails
from paceline.report.read_run import RunData, SavedImage
from paceline.report.text import clean_text, finite_or_none

_MAX_CLASS_ROWS: Final = 30
_NUM_EXTREME_CLASSES: Final = 8
_MAX_BINS: Final = 50
_MAX_IMAGES: Final = 16
_MAX_CLASSES_SHOWN: Final = 3  # of an image
_MAX_THUMBNAIL_BYTES: Final = 300_000
_COLOUR: Final = "c-right"


def input_section(run: RunData) -> PageSection | None:
    """Return images of the first step, class and size histograms, and splits; None if nothing was recorded."""
    blocks = [*_image_gallery(run), *_split_facts(run), *_class_histogram(run), *_size_histogram(run)]
    return PageSection("inputs", "Training inputs", blocks) if blocks else None


def _image_gallery(run: RunData) -> list[Block]:
    images = run.input_images[:_MAX_IMAGES]
    if not images:
        return []
    where = {"host": "after augmentation by the loader", "device": "after augmentation on the device"}
    notes = ["As the model sees them", where.get(str(run.inputs.get("augment_on")), "without augmentation")]
    if run.inputs.get("mixed") is True:
        notes.append("with MixUp or CutMix")
    notes.append("mapped back to 8 bits per channel")
    title = f"{count(len(images), 'training image')} of the first step"
    pictures = limit_thumbnails([_input_thumbnail(each) for each in images], _MAX_THUMBNAIL_BYTES)
    return [Gallery(title, pictures, note=f"{', '.join(notes)}.")]


def _input_thumbnail(image: SavedImage) -> Thumbnail:
    recorded = image.record.get("classes")
    classes: list[tuple[str, float]] = []
    for each in recorded[:_MAX_CLASSES_SHOWN] if isinstance(recorded, list) else []:
        if isinstance(each, list) and len(each) == 2 and (share := finite_or_none(each[1])) is not None:
            classes.append((clean_text(each[0], 40), share))
    is_mixed = any(share != 1 for _, share in classes)
    title = " + ".join(f"{100 * share:.0f} % {name}" if is_mixed else name for name, share in classes)
    if isinstance(recorded, list) and len(recorded) > _MAX_CLASSES_SHOWN:
        title += " + ..."
    title = title or ("no label" if recorded == [] else "?")
    return Thumbnail(image.thumbnail, title, (), clean_text(image.record.get("name", ""), 300))


def _split_facts(run: RunData) -> list[Block]:
    def planned(key: str) -> float | None:
        return finite_or_none(run.plan.get(key))

    rows: list[tuple[str, TableCell]] = []
    for key, label in (("train_images", "training images"), ("val_images", "validation images")):
        if (number := planned(key)) is not None:
            rows.append((label, cells.count_cell(number)))
    if counts := _class_counts(run):
        smallest, largest = min(each for _, each in counts), max(each for _, each in counts)
        balance = f"{smallest:,} to {largest:,} training images each" if smallest < largest else f"{largest:,} each"
        uneven = "; imbalanced" if is_imbalanced(each for _, each in counts) else ""
        rows.append(("classes", TableCell(f"{len(counts):,}, {balance}{uneven}", len(counts))))
    if sizes := _size_text(run):
        rows.append(("image sizes", TableCell(sizes)))
    if (side := planned("image_size")) is not None:
        channels = planned("channels")
        channel = f", {count(int(channels), 'channel')}" if channels else ""
        rows.append(("input of the model", TableCell(f"{side:,.0f} x {side:,.0f} pixels{channel}", side)))
    if dropped := planned("dropped_images"):
        rows.append(("left out per epoch", TableCell(f"{dropped:,.0f}, which do not fill a batch", dropped)))
    if run.bad_images.total:
        skipped = f"{run.bad_images.total:,}, which could not be read"
        rows.append(("skipped", TableCell(skipped, run.bad_images.total)))
    return [KeyValueList(rows)] if rows else []


def _class_counts(run: RunData) -> list[tuple[str, int]]:
    names, counts = run.dataset.get("class_names"), run.dataset.get("class_counts")
    if not (isinstance(names, list) and isinstance(counts, list) and len(names) == len(counts)):
        return []
    if not all(isinstance(each, int) and not isinstance(each, bool) and 0 <= each < 2**53 for each in counts):
        return []
    return [(clean_text(name, 60), number) for name, number in zip(names, counts, strict=True)]


def _class_histogram(run: RunData) -> list[Block]:
    counts = _class_counts(run)
    if len({number for _, number in counts}) < 2:  # none, or a number that the facts name
        return []
    title, shown = "Training images per class", counts
    if len(counts) > _MAX_CLASS_ROWS:
        ordered = sorted(counts, key=lambda each: -each[1])
        shown = [*ordered[:_NUM_EXTREME_CLASSES], *ordered[-_NUM_EXTREME_CLASSES:]]
        title += f": the {_NUM_EXTREME_CLASSES} largest and the {_NUM_EXTREME_CLASSES} smallest of {len(counts):,}"
    return [_histogram(title, shown)]


def _size_text(run: RunData) -> str:
    sizes = run.inputs.get("image_sizes")
    if not isinstance(sizes, dict):
        return ""
    low, median, high = (_height_and_width(sizes.get(key)) for key in ("min", "median", "max"))
    if low is None or median is None or high is None:
        return ""
    if low == high:
        return f"{low[1]:,} x {low[0]:,} pixels"
    known = finite_or_none(sizes.get("images"))
    sample = f", of {known:,.0f} images" if sizes.get("is_sample") is True and known else ""
    return (
        f"width {low[1]:,} to {high[1]:,} pixels (median {median[1]:,}), "
        f"height {low[0]:,} to {high[0]:,} (median {median[0]:,}){sample}"
    )


def _height_and_width(value: Any) -> tuple[int, int] | None:
    if isinstance(value, list) and len(value) == 2 and all(isinstance(each, int) and each > 0 for each in value):
        return value[0], value[1]
    return None


def _size_histogram(run: RunData) -> list[Block]:
    sizes = run.inputs.get("image_sizes")
    recorded = sizes.get("shorter_side") if isinstance(sizes, dict) else None
    if not isinstance(recorded, dict):
        return []
    edges = [finite_or_none(each) for each in _as_list(recorded.get("edges"))]
    counts = [finite_or_none(each) for each in _as_list(recorded.get("counts"))]
    if len(counts) < 2 or len(edges) != len(counts) + 1 or len(counts) > _MAX_BINS:
        return []
    rows = []
    for low, high, number in zip(edges, edges[1:], counts, strict=False):
        if low is None or high is None or number is None or number < 0:
            return []
        last = high - 1
        rows.append((f"{low:,.0f} to {last:,.0f}" if last > low else f"{low:,.0f}", int(number)))
    return [_histogram("Images by shorter side, pixels", rows)] if any(number for _, number in rows) else []


def _as_list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _histogram(title: str, counts: Sequence[tuple[str, int]]) -> BarChart:
    largest = max(number for _, number in counts)
    rows = [
        BarRow(name, [BarSegment("images", number / largest, count(number, "image"), _COLOUR)], f"{number:,}")
        for name, number in counts
    ]
    return BarChart(title, rows)
