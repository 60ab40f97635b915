"""Load image files listed with their labels in a CSV file or a pickled {path: label} dict."""

import csv
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from io import TextIOWrapper
from pathlib import Path

import numpy as np

from paceline.core.dataset import Datasets, Split
from paceline.core.errors import DataError, suggest_similar
from paceline.core.files import open_to_read
from paceline.data.files import expand_path, printable
from paceline.data.sources.image_files import ImageFileSource, build_files_info, find_faults, raise_for_faults
from paceline.data.sources.restricted_pickle import load_restricted_pickle
from paceline.recipe.schema.source import Manifest

# (place in the file for messages, path, label)
_ManifestRow = tuple[str, str, str]
_NUM_PATHS_CHECKED = 100
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,17}")
_ALLOWED_CONTENT = "a manifest may hold only a dict of str to int or str (write it as CSV)"


@dataclass(frozen=True)
class _ImageList:
    file: Path
    root: Path
    paths: Sequence[str]
    labels: Sequence[str]


def load_manifest(section: Manifest, *, skip_bad: bool = False) -> Datasets:
    """Load the files in the lists of `section`; the training labels, sorted as numbers or text, are the classes.

    Without a validation list that split is empty. Raise `DataError` for a malformed list, a repeated path, an unknown
    validation label, and a missing or unreadable file; `skip_bad` keeps such files, unless the first 100 are missing.
    """
    train = _read_manifest(section.train, section.root, skip_bad=skip_bad)
    if section.val == "off":
        val = replace(train, paths=(), labels=())
    else:
        val = _read_manifest(section.val, section.root, skip_bad=skip_bad)
    class_names = _sort_class_names(train.labels)
    numbers = {name: number for number, name in enumerate(class_names)}
    unknown = next((label for label in val.labels if label not in numbers), None)
    if unknown is not None:
        raise DataError(
            f"{printable(val.file)}: label '{printable(unknown)}' is not in the training list {printable(train.file)}"
            f"{suggest_similar(unknown, numbers)}; correct it, or add its training images"
        )
    shared = len(_resolve_paths(train) & _resolve_paths(val))
    notes = (f"{shared:,} of {len(val.paths):,} validation images are training images too",) if shared else ()
    if section.val == "off":
        notes = ("data.source.val names no list",)
    return Datasets(
        _build_manifest_source(train, "train", numbers, section),
        _build_manifest_source(val, "val", numbers, section, notes),
    )


def _read_manifest(text: str, root: str, *, skip_bad: bool) -> _ImageList:
    file = expand_path(text)
    match file.suffix.lower():
        case ".csv":
            rows = _read_csv_rows(file)
        case ".pkl" | ".pickle":
            rows = _read_pickle_rows(file)
        case _:
            raise DataError(f"{printable(file)}: is not a .csv, .pkl or .pickle file; write the list as CSV")
    labels: dict[str, str] = {}
    for position, path, label in rows:
        if not _is_valid_path(path):
            raise DataError(f"{position}: '{printable(path)}' is not a path; correct it or leave the line out")
        if path in labels:
            raise DataError(f"{position}: path '{printable(path)}' is listed twice; leave one of them out")
        labels[path] = label
    if not labels:
        raise DataError(f"{printable(file)}: lists no images; write a line for each under 'path,label'")
    start = (file.parent if root == "auto" else expand_path(root)).absolute()
    listing = _ImageList(file, start, tuple(labels), tuple(labels.values()))
    _check_first_paths(listing, skip_bad=skip_bad)
    if not skip_bad:
        full = {path: os.path.join(start, path) for path in listing.paths}  # noqa: PTH118 - three times as fast
        raise_for_faults(printable(file), dict(find_faults(full)))
    return listing


def _is_valid_path(text: str) -> bool:
    try:
        return b"\0" not in os.fsencode(text) and bool(text)
    except UnicodeEncodeError:  # a lone surrogate, from a pickle
        return False


def _check_first_paths(listing: _ImageList, *, skip_bad: bool) -> None:
    # Reports a wrong root after 100 paths, before millions of files are checked.
    first = [listing.root / path for path in listing.paths[:_NUM_PATHS_CHECKED]]
    missing = [path for path in first if not os.path.lexists(path)]
    if len(missing) > (len(first) - 1 if skip_bad else 0):
        raise DataError(
            f"{printable(listing.file)}: lists {printable(missing[0])}, which does not exist ({len(missing)} of the "
            f"first {len(first)} do not); set data.source.root to the folder that the paths start from"
        )


def _read_csv_rows(file: Path) -> Iterator[_ManifestRow]:
    try:
        with TextIOWrapper(open_to_read(file), encoding="utf-8-sig", newline="") as lines:
            reader = csv.reader(lines, strict=True, skipinitialspace=True)
            header = next(reader, [])
            if not {"path", "label"} <= set(header):
                raise DataError(
                    f"{printable(file)}:1: its header lacks path or label; make its first line 'path,label'"
                )
            path_column, label_column = header.index("path"), header.index("label")
            for cells in filter(None, reader):
                position = f"{printable(file)}:{reader.line_num}"
                if len(cells) <= max(path_column, label_column) or not cells[label_column]:
                    raise DataError(
                        f"{position}: has no label; write 'path,label', with quotes around a comma in either"
                    )
                yield position, cells[path_column], cells[label_column]
    except UnicodeDecodeError as error:
        raise DataError(f"{printable(file)}: is not UTF-8 (byte {error.start}); save it as UTF-8") from error
    except csv.Error as error:
        raise DataError(f"{printable(file)}:{reader.line_num}: {error}; correct the line") from error
    except OSError as error:
        raise DataError(f"{printable(file)}: cannot be read: {error.strerror}; correct its name") from error


def _read_pickle_rows(file: Path) -> Iterator[_ManifestRow]:
    table = load_restricted_pickle(file, hint=_ALLOWED_CONTENT)
    if not isinstance(table, dict):
        raise DataError(f"{printable(file)}: holds a {type(table).__name__}; {_ALLOWED_CONTENT}")
    for path, label in table.items():
        if type(path) is not str:
            raise DataError(f"{printable(file)}: has a key of type {type(path).__name__}; {_ALLOWED_CONTENT}")
        if type(label) not in (int, str) or label == "" or (type(label) is int and abs(label) >= 10**18):
            kind = "an empty text" if label == "" else f"a value of type {type(label).__name__}"
            raise DataError(f"{printable(file)}: labels {printable(path)[:120]} with {kind}; {_ALLOWED_CONTENT}")
    for path in sorted(table):  # independent of the order of insertion
        yield printable(file), path, str(table[path])


def _sort_class_names(labels: Iterable[str]) -> tuple[str, ...]:
    names = set(labels)
    if all(_INTEGER.fullmatch(name) for name in names):
        return tuple(sorted(names, key=int))
    return tuple(sorted(names))


def _resolve_paths(listing: _ImageList) -> set[Path]:
    return {listing.root / path for path in listing.paths}


def _build_manifest_source(
    listing: _ImageList, split: Split, numbers: dict[str, int], section: Manifest, notes: tuple[str, ...] = ()
) -> ImageFileSource:
    class_names = tuple(printable(name) for name in numbers)
    info = build_files_info("manifest", split, len(listing.paths), class_names, section.pixel_format, notes)
    labels = np.array([numbers[label] for label in listing.labels], dtype=np.int32)
    return ImageFileSource.from_paths(info, str(listing.root), [os.fsencode(path) for path in listing.paths], labels)
