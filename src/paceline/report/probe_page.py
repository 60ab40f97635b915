"""Build the page of `paceline probe`."""

from collections.abc import Mapping, Sequence
from typing import Final

from paceline import __version__
from paceline.core.probe_result import DuplicatePair, ProbedImage, ProbeResult, SuspectLabel
from paceline.core.statistics import Interval
from paceline.core.units import accuracy, count, number, seconds, share
from paceline.report import cells
from paceline.report.document import (
    Block,
    Chart,
    ChartLine,
    ChartRow,
    Gallery,
    KeyFigure,
    PageSection,
    Paragraph,
    ReportPage,
    Table,
    TableCell,
    Thumbnail,
)
from paceline.report.experiment_common import shell_command
from paceline.report.mistake_sections import limit_thumbnails
from paceline.report.text import clean_text

Thumbnails = Mapping[tuple[str, int], str]
"""Data URLs by split and index."""
NUM_PICTURES: Final = 12
"""Images in the galleries of suspects and of unusual images, and pairs in that of duplicates."""
_MAX_THUMBNAIL_BYTES: Final = 200_000
_NUM_OPEN: Final = 10
_NUM_PRINTED: Final = 5
_MAX_SUSPECTS: Final = 0.1
"""Share of images above which suspects say more of the model than of the labels."""


def pictured_images(result: ProbeResult) -> list[ProbedImage]:
    """Return the images that the page shows."""
    return [
        *(each.image for each in result.suspects[:NUM_PICTURES]),
        *(image for each in result.duplicates[:NUM_PICTURES] for image in (each.first, each.second)),
        *(each.image for each in result.unusual[:NUM_PICTURES]),
    ]


def build_probe_page(result: ProbeResult, title: str, thumbnails: Thumbnails) -> ReportPage:
    """Return the page, headed `title`; a terminal shows its figures and the first rows of its tables."""
    suspects, duplicates, unusual = _suspect_table(result), _duplicate_table(result), _unusual_table(result)
    sections = [
        PageSection("labels", "Can the labels be learned?", _accuracy_blocks(result)),
        PageSection("suspects", "Which labels are likely wrong?", _suspect_blocks(result, suspects, thumbnails)),
        PageSection("duplicates", "Which images are near duplicates?", _pair_blocks(result, duplicates, thumbnails)),
        PageSection("more", "Would more labels help?", _curve_blocks(result)),
        PageSection("unusual", "Which images are unlike the others?", _unusual_blocks(result, unusual, thumbnails)),
        PageSection("origin", "Provenance", _origin_blocks(result)),
    ]
    problems = result.num_suspects + result.num_leaks
    return ReportPage(
        title=title,
        subtitle=[result.source, count(result.train_images + result.val_images, "image"), result.weights],
        status=_status(result),
        tone="warning" if problems else "good",
        figures=_figures(result),
        sections=sections,
        paceline=__version__,
        about="Probe of a dataset",
        source="the features of a frozen model. Numbers are those of probe.json, rounded here only",
        summary=[
            *(_first_rows(each) for each in (suspects, duplicates, unusual) if each.rows),
            *map(Paragraph, (*_doubts(result), *result.notes)),
        ],
    )


def _status(result: ProbeResult) -> str:
    found = [
        count(result.num_suspects, "label that is likely wrong", "labels that are likely wrong"),
        count(result.num_leaks, "leak between splits", "leaks between splits"),
    ]
    return ", ".join(found)


def _doubts(result: ProbeResult) -> list[str]:
    """Return what to think of many suspects: public datasets have 3 % of wrong labels (Northcutt et al. 2021)."""
    if result.num_suspects <= _MAX_SUSPECTS * (result.train_images + result.val_images):
        return []
    return [
        f"Most of the {result.num_suspects:,} labels are probably right: the linear probe, which names them, errs on "
        f"{share(1 - result.linear.value)} of the images. Look at the first of the list, or probe with a better model."
    ]


def _figures(result: ProbeResult) -> list[KeyFigure]:
    figures = [
        KeyFigure("linear probe", cells.accuracy_cell(result.linear.value), _bounds(result.linear)),
        KeyFigure("nearest neighbors", cells.accuracy_cell(result.knn.value), _bounds(result.knn)),
    ]
    if result.linear_val is not None:
        value = cells.accuracy_cell(result.linear_val.value)
        figures.append(KeyFigure("linear probe, validation", value, _bounds(result.linear_val)))
    rate = share(result.num_suspects / (result.train_images + result.val_images))
    figures += [
        KeyFigure("labels likely wrong", cells.count_cell(result.num_suspects), f"{rate} of images"),
        KeyFigure("near duplicates", cells.count_cell(result.num_duplicates), "pairs within a split"),
        KeyFigure("leaks", cells.count_cell(result.num_leaks), "pairs of a training and a validation image"),
    ]
    if result.doubled is not None:
        figures.append(KeyFigure("with twice the labels", TableCell(accuracy(result.doubled.value)), _forecast(result)))
    return figures


def _bounds(interval: Interval) -> str:
    return f"95 % interval: {cells.format_bounds(interval, lambda each: f'{100 * each:.1f}')}"


def _forecast(result: ProbeResult) -> str:
    assert result.current is not None and result.doubled is not None, "they are extrapolated together"
    return f"{accuracy(result.current.value)} now; {_bounds(result.doubled)}"


def _accuracy_blocks(result: ProbeResult) -> list[Block]:
    rows = [
        [TableCell(name), *(cells.accuracy_cell(each) for each in (cross_validated, validation))]
        for name, cross_validated, validation in (
            ("linear probe", result.linear, result.linear_val),
            ("nearest neighbors", result.knn, result.knn_val),
        )
    ]
    columns = cells.table_columns(["classifier of the features"], ["training images, 5 folds", "validation images"])
    note = (
        "A linear probe is a logistic regression on the features of the frozen model. If it is accurate, training only "
        "the classifier may do; if it is far less accurate than the model, fine-tune all layers."
    )
    if result.stage:
        note += f" The features are the output of {clean_text(result.stage)}: later layers are less accurate."
    return [Paragraph(note), Table("Accuracy", columns, rows)]


def _suspect_table(result: ProbeResult) -> Table:
    columns = cells.table_columns(
        ["image", "split", "label", "suggested", "neighbors agree"], ["probability of label", "of suggested"]
    )
    rows = [
        [
            *_image_cells(each.image),
            cells.text_cell(each.suggested, 60),
            TableCell("yes" if each.knn_agrees else "no"),
            cells.share_cell(each.confidence),
            cells.share_cell(each.suggested_confidence),
        ]
        for each in result.suspects
    ]
    return Table("Labels that are likely wrong, the least likely label first", columns, rows, _NUM_OPEN, "more images")


def _image_cells(image: ProbedImage) -> list[TableCell]:
    return [cells.text_cell(image.name, 80), TableCell(image.split), cells.text_cell(image.label, 60)]


def _suspect_blocks(result: ProbeResult, table: Table, thumbnails: Thumbnails) -> list[Block]:
    if not result.suspects:
        return [cells.missing_paragraph("No label is likely wrong.")]
    note = (
        "The linear probe, which has not been fitted to the image, is confident of another class (confident learning). "
        "Look at them from the top: some are wrong, others only hard."
    )
    return [
        Paragraph(" ".join([note, *_doubts(result)])),
        *_gallery("Suspects", [_suspect_picture(each, thumbnails) for each in result.suspects]),
        table,
    ]


def _suspect_picture(each: SuspectLabel, thumbnails: Thumbnails) -> Thumbnail:
    title = f"{each.image.label}, or {each.suggested}?"
    return _picture(each.image, title, f"label {share(each.confidence)}", thumbnails)


def _picture(image: ProbedImage, title: str, detail: str, thumbnails: Thumbnails) -> Thumbnail:
    return Thumbnail(thumbnails.get((image.split, image.index), ""), title, [image.split, detail], image.name)


def _gallery(title: str, pictures: Sequence[Thumbnail]) -> list[Block]:
    shown = limit_thumbnails([each for each in pictures if each.address], _MAX_THUMBNAIL_BYTES)
    return [Gallery(title, shown)] if shown else []


def _duplicate_table(result: ProbeResult) -> Table:
    columns = cells.table_columns(["image", "split", "label", "duplicate", "its split", "its label"], ["similarity"])
    rows = [
        [*_image_cells(each.first), *_image_cells(each.second), cells.loss_cell(each.similarity)]
        for each in result.duplicates
    ]
    return Table("Near duplicates, leaks between splits first", columns, rows, _NUM_OPEN, "more pairs")


def _pair_blocks(result: ProbeResult, table: Table, thumbnails: Thumbnails) -> list[Block]:
    if not result.duplicates:
        return [cells.missing_paragraph("No near duplicates among the images that were probed.")]
    leaks = count(result.num_leaks, "pair")
    note = (
        f"{leaks} of a training and a validation image: each makes the accuracy on the validation images too high. "
        "The similarity is the correlation of gray thumbnails, over crops of 80 % and more and mirror images."
    )
    pictures = [
        _picture(image, title, f"similarity {each.similarity:.3f}", thumbnails)
        for each in result.duplicates[:NUM_PICTURES]
        for image, title in zip((each.first, each.second), _pair_titles(each), strict=True)
    ]
    return [Paragraph(note), *_gallery("Pairs side by side", pictures), table]


def _pair_titles(pair: DuplicatePair) -> tuple[str, str]:
    is_same = pair.first.label == pair.second.label
    return pair.first.label, pair.second.label if is_same else f"{pair.second.label}: another label"


def _curve_blocks(result: ProbeResult) -> list[Block]:
    points = [(float(each.images), 100 * each.accuracy.value) for each in result.curve]
    bounds = {
        point: (100 * each.accuracy.low, 100 * each.accuracy.high)
        for point, each in zip(points, result.curve, strict=True)
        if each.accuracy.low is not None and each.accuracy.high is not None
    }
    if result.doubled is None:
        why = "There are too few images to extrapolate: a learning curve needs four sizes."
        return [cells.missing_paragraph(why)]
    law = [
        (float(images), 100 * each.value)
        for images, each in ((result.total_train, result.current), (2 * result.total_train, result.doubled))
        if each is not None
    ]
    lines = [
        ChartLine("measured", points, has_markers=True, bounds=bounds),
        ChartLine("extrapolated", [points[-1], *law], has_markers=True, is_dashed=True),
    ]
    chart = Chart("Accuracy of the linear probe", "training images", "accuracy, %", lines, low=None, log_x=True)
    note = (
        "A power law of the error is fitted to the sizes measured (interval: a bootstrap of the images). It holds "
        "for more images like these and for a linear probe; fine-tuning may gain more."
    )
    value = accuracy(result.doubled.value)
    sentence = f"With twice the labels, the linear probe reaches about {value} ({_forecast(result)})."
    return [Paragraph(sentence), ChartRow([chart]), Paragraph(note)]


def _unusual_table(result: ProbeResult) -> Table:
    columns = cells.table_columns(["image", "split", "label"], ["distance"])
    rows = [[*_image_cells(each.image), cells.number_cell(each.distance)] for each in result.unusual]
    return Table("Images unlike the training images, the most unusual first", columns, rows, _NUM_OPEN, "more images")


def _unusual_blocks(result: ProbeResult, table: Table, thumbnails: Thumbnails) -> list[Block]:
    threshold = "" if result.threshold is None else f" 5 % of held-out images are above {number(result.threshold)}."
    usage = f" paceline predict --reject uses {result.reference}." if result.reference else ""
    note = f"The distance is 1 - cosine to the fifth nearest training image.{threshold}{usage}"
    pictures = [
        _picture(each.image, each.image.label, f"distance {number(each.distance)}", thumbnails)
        for each in result.unusual[:NUM_PICTURES]
    ]
    return [Paragraph(note), *_gallery("The most unusual images", pictures), table]


def _origin_blocks(result: ProbeResult) -> list[Block]:
    stage = f", the output of {clean_text(result.stage)}" if result.stage else ""
    facts = [
        f"{result.train_images:,} of {result.total_train:,} training images and {result.val_images:,} of "
        f"{result.total_val:,} validation images; {result.dimensions:,} features of {result.weights}{stage}.",
        f"Features: {'from the cache' if result.is_cached else seconds(result.features_s)}; "
        f"answers: {seconds(result.answers_s)}.",
        *result.notes,
    ]
    return [*map(Paragraph, facts), *([shell_command(result.command)] if result.command else [])]


def _first_rows(table: Table) -> Table:
    return Table(table.title, table.columns, table.rows[:_NUM_PRINTED])
