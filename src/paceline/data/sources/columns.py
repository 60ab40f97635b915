"""Read one value per training image: a column of the dataset itself, or of a CSV file beside it. Torch-free."""

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from paceline.core.dataset import ArraySource, Source
from paceline.core.errors import DataError
from paceline.core.units import count
from paceline.data.files import expand_path, printable
from paceline.data.pack.reader import PackSource
from paceline.data.sources.huggingface import read_text_column, suggest_column
from paceline.data.sources.image_files import ImageFileSource
from paceline.data.sources.manifest import manifest_root, open_csv
from paceline.data.sources.subset import SourceSubset
from paceline.recipe.schema.source import HuggingFace, Manifest, SourceSection

_NAME_COLUMNS: Final = ("path", "image")
# Lines of a CSV file: (place for messages, cells).
_Lines = list[tuple[str, list[str]]]


def read_column(
    section: SourceSection, source: Source, column: str, file: str = "", field: str = "column"
) -> list[str]:
    """Return the N values of `column`, as text, of the training images `source` of `section`.

    The column is that of the CSV `file`; without one, of the manifest's lists or of the Hugging Face dataset.
    A file with a column `path` or `image` names each image, as the source lists it or in full, and lines of other
    images are ignored. Without, it has one line per image, in order. Raise `DataError` naming the recipe's `field` if
    there is no such column, or the file and line if an image has no value.
    """
    if isinstance(source, SourceSubset):  # a fold of a cross-validation
        values = read_split_columns(section, source.sources, column, file, field)
        return [values[index] for index in source.indices.tolist()]
    if file:
        return _match_values(expand_path(file), column, source, field)
    match section, source:
        case Manifest(), ImageFileSource():
            return _match_lists(section, column, source, field)
        case HuggingFace(), _:
            return read_text_column(section, column, field)
    raise DataError(f"{field}: '{printable(column)}' is not in {section.name}, which has no columns (name a CSV file)")


def read_numbers(
    section: SourceSection, source: Source, column: str, file: str = "", field: str = "column"
) -> NDArray[np.float64]:
    """Return the finite numbers in `column`, float64 [N]. Raise `DataError` as `read_column`, and for another value."""
    values = read_column(section, source, column, file, field)
    numbers = np.fromiter(map(_parse_number, values), dtype=np.float64, count=len(values))
    wrong = np.flatnonzero(~np.isfinite(numbers))
    if len(wrong):
        text, name = printable(values[wrong[0]])[:80], source.name_of(int(wrong[0]))
        raise DataError(f"{field}: '{text}' of {name} in '{printable(column)}' is not a finite number (correct it)")
    return numbers


def _parse_number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _match_values(file: Path, column: str, source: Source, field: str) -> list[str]:
    """Return the values of the images of `source` in the CSV `file`."""
    lines, place, name_place = _read_lines(file, column, field)
    if name_place is not None:
        values = _index_values(lines, name_place, place)
        found = [
            next((values[name] for name in _names_of(source, index) if name in values), None)
            for index in range(len(source))
        ]
        return _raise_for_missing(found, file, source)
    positions = _positions_of(source)
    if positions is not None and positions.max(initial=0) < len(lines):
        return [lines[position][1][place] for position in positions.tolist()]
    if len(lines) != len(source):
        raise DataError(
            f"{printable(file)}: has {count(len(lines), 'line')} for {count(len(source), 'training image')}; write one "
            f"per image in order, or add a column path"
        )
    return [cells[place] for _, cells in lines]


def _match_lists(section: Manifest, column: str, source: ImageFileSource, field: str) -> list[str]:
    """Return the values of images of the training list, or of both lists, as `split.pool=all` joins them."""
    paths = [os.path.normpath(source.get_path(index)) for index in range(len(source))]
    values: dict[str, str] = {}
    for text in (section.train, section.val):
        if text == "off" or (values and values.keys() >= set(paths)):
            continue
        file = expand_path(text)
        lines, place, name_place = _read_lines(file, column, field)
        assert name_place is not None, "a list has paths"
        root = manifest_root(section, file)
        for path, value in _index_values(lines, name_place, place).items():
            values.setdefault(os.path.normpath(root / path), value)
    return _raise_for_missing([values.get(path) for path in paths], expand_path(section.train), source)


def _read_lines(file: Path, column: str, field: str) -> tuple[_Lines, int, int | None]:
    """Return the lines of a CSV file, and the places of `column` and of the names of images, None without these."""
    shown = printable(file)
    if file.suffix.lower() in (".pkl", ".pickle"):
        raise DataError(f"{field}: {shown} is a pickle, which has no column '{printable(column)}' (name a CSV file)")
    with open_csv(file) as reader:
        header: list[str] = next(reader, [])
        lines = [(f"{shown}:{reader.line_num}", cells) for cells in filter(None, reader)]
    if column not in header:
        raise DataError(f"{field}: {shown} has no column '{printable(column)}'{suggest_column(column, header)}")
    place = header.index(column)
    short = next((at for at, cells in lines if len(cells) <= place), "")
    if short:
        raise DataError(f"{short}: has no value in column '{printable(column)}'; write one")
    return lines, place, next((header.index(name) for name in _NAME_COLUMNS if name in header), None)


def _raise_for_missing(values: list[str | None], file: Path, source: Source) -> list[str]:
    """Return `values`, one per image of `source`. Raise `DataError` if one is None."""
    if None in values:
        first = printable(next(_names_of(source, values.index(None))))
        missing = f"{values.count(None):,} of {count(len(source), 'training image')}, the first {first}"
        raise DataError(f"{printable(file)}: has no line for {missing}; add one for each")
    return [value for value in values if value is not None]


def read_split_columns(
    section: SourceSection, sources: Sequence[Source], column: str, file: str, field: str
) -> list[str]:
    """Return the values of the training images `sources[0]` of `section`, then of its validation images, if any.

    Raise `DataError` as `read_column`, and if the section does not name its validation images.
    """
    values = read_column(section, sources[0], column, file, field)
    for source in sources[1:]:
        values += read_column(_validation_section(section), source, column, file, field)
    return values


def _validation_section(section: SourceSection) -> SourceSection:
    if isinstance(section, HuggingFace) and section.val == "auto":
        raise DataError("data.source.val: auto does not name the split whose column is read (set data.source.val=NAME)")
    return section.model_copy(update={"train": section.val}) if isinstance(section, HuggingFace | Manifest) else section


def _positions_of(source: Source) -> NDArray[np.int64] | None:
    """Return the positions of selected images among all, int64 [N]."""
    match source:
        case ArraySource(positions=positions) | PackSource(rows=positions):
            return positions
    return None


def _index_values(lines: _Lines, name_place: int, place: int) -> dict[str, str]:
    """Return the value of each named image."""
    values: dict[str, str] = {}
    for at, cells in lines:
        name = cells[name_place] if name_place < len(cells) else ""
        if values.setdefault(name, cells[place]) != cells[place]:
            raise DataError(f"{at}: '{printable(name)}' is listed twice, with two values; leave one of them out")
    return values


def _names_of(source: Source, index: int) -> Iterator[str]:
    """Yield the names that a file may give an image."""
    if isinstance(source, ImageFileSource):
        yield source.get_listed_path(index)
        yield str(source.get_path(index))
    yield source.name_of(index)
