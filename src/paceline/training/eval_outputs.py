"""Write the outputs of an evaluation: tables, and thumbnails of the worst misclassified images."""

import contextlib
import csv
import io
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from PIL import Image

from paceline.core.csv_cells import to_cell
from paceline.core.dataset import Source
from paceline.core.errors import DataError, PacelineError, RecipeError
from paceline.core.files import write_new
from paceline.core.results import EvalReport, ImagePrediction, MisclassifiedImage, printable_class_name
from paceline.core.run_dir import RunDir, write_atomic
from paceline.data.decode_array import decode_pixels, to_image
from paceline.training.explain import ExplainMistakes, Overlays
from paceline.training.thumbnails import encode_thumbnail, replaced_folder, to_visible

WORST_JSON: Final = "worst.json"
EVAL_JSON: Final = "eval.json"
PREDICTION_COLUMNS: Final = ("image", "true", "predicted", "probability")


def save_worst_images(
    folder: Path,
    mistakes: Sequence[MisclassifiedImage],
    source: Source,
    size: int = 96,
    overlays: Mapping[int, Overlays] | None = None,
) -> None:
    """Write a thumbnail per readable image of `mistakes`, and `worst.json`, into `folder`, replacing an older one.

    Images up to 64 pixels are saved unchanged as PNG, others as JPEG of up to `size` pixels, below 16 KB each.
    `worst.json` lists {index, name, true, predicted, confidence, loss, file} in the order of `mistakes`, and `maps`,
    the files of its `overlays` by what they explain, for an index that has any. Without mistakes the folder is removed.
    Raise `OSError` if the disk cannot be written.
    """
    if not mistakes:
        return shutil.rmtree(folder, ignore_errors=True)
    with replaced_folder(folder) as new:
        rows = [row for mistake in mistakes if (row := _save_thumbnail(new, mistake, source, size))]
        for row in rows:
            if drawn := (overlays or {}).get(row["index"]):
                row["maps"] = {what: _save_image(new, f"{row['index']}.{what}", drawn[what], size) for what in drawn}
        write_new(new / WORST_JSON, json.dumps(rows, indent=2) + "\n")
    return None


def _save_thumbnail(folder: Path, mistake: MisclassifiedImage, source: Source, size: int) -> dict[str, Any] | None:
    """Write a thumbnail and return its row, or None for an unreadable image."""
    try:
        picture = read_image(source, mistake.index)
    except DataError:
        return None
    names = source.info.class_names
    return {
        "index": mistake.index,
        "name": printable_class_name(source.name_of(mistake.index)),
        "true": printable_class_name(names[mistake.label]),
        "predicted": printable_class_name(names[mistake.predicted]),
        "confidence": mistake.confidence,
        "loss": mistake.loss,
        "file": _save_image(folder, str(mistake.index), picture, size),
    }


def _save_image(folder: Path, stem: str, picture: Image.Image, size: int) -> str:
    """Write a thumbnail, and return its file name."""
    data, suffix = encode_thumbnail(picture, size)
    write_new(folder / f"{stem}.{suffix}", data)
    return f"{stem}.{suffix}"


def read_image(source: Source, index: int) -> Image.Image:
    """Return the image in mode L or RGB. Raise `DataError` if it cannot be read."""
    content, _ = source.read(index)
    form = source.info.pixel_format
    pixels = decode_pixels(content, form, name=source.name_of(index))
    # From pixels alone: metadata of the file, such as a color profile, could have any size.
    return to_image(pixels if form.is_photo else to_visible(pixels))


@contextlib.contextmanager
def output_dir(path: Path, option: str = "--out") -> Iterator[RunDir]:
    """Create the folder `path` of `option`, and remove it if the block fails. Raise `RecipeError` if it exists."""
    try:
        path.mkdir(parents=True)
    except FileExistsError:
        raise RecipeError(f"{option}: {path} exists already (name another, or remove it)") from None
    except OSError as error:
        raise RecipeError(f"{option}: {path} cannot be created: {error.strerror} (name another)") from None
    try:
        yield RunDir(path)
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        raise


def write_eval_outputs(
    folder: RunDir, values: Mapping[str, Any], report: EvalReport, source: Source, overlays: Mapping[int, Overlays]
) -> None:
    """Write `eval.json` with `values`, the tables of `RunDir.write_classes`, and the worst images with `overlays`.

    Raise `PacelineError` if the folder cannot be written.
    """
    try:
        if report.classes is not None:
            folder.write_classes(report.classes)
        save_worst_images(folder.worst, report.worst, source, overlays=overlays)
    except OSError as error:
        raise PacelineError(f"--out: {folder.path} cannot be written: {error.strerror} (name another)") from None
    folder.write_json(EVAL_JSON, values)


def write_predictions(path: Path, predictions: Sequence[ImagePrediction], source: Source) -> None:
    """Write a CSV file with a row {image, true, predicted, probability} per image of `source` that was evaluated.

    Raise `PacelineError` if it cannot be written.
    """
    names = [to_cell(printable_class_name(name)) for name in source.info.class_names]
    table = io.StringIO(newline="")
    rows = csv.writer(table, lineterminator="\n")
    rows.writerow(PREDICTION_COLUMNS)
    for each in predictions:
        image = to_cell(printable_class_name(source.name_of(each.index)))
        rows.writerow([image, names[each.label], names[each.predicted], f"{each.probability:.6g}"])
    try:
        write_atomic(path, table.getvalue())
    except OSError as error:
        raise PacelineError(f"{path}: cannot be written: {error.strerror} (name another)") from None


def discard(report: EvalReport, source: Source, explain: ExplainMistakes) -> None:
    """Discard the report."""
