"""Load image files listed with their labels in a CSV file or a pickled {path: label} dict.

An image has one label, several with `separator`, or a share of each class with `class_columns`.
"""

import csv
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.dataset import Datasets, Split, TargetTable
from paceline.core.errors import DataError, suggest_similar
from paceline.core.files import open_to_read
from paceline.data.files import expand_path, printable
from paceline.data.sources.image_files import ImageFileSource, build_files_info, find_faults, raise_for_faults
from paceline.data.sources.restricted_pickle import load_restricted_pickle
from paceline.recipe.schema.source import Manifest

# (place in the file for messages, path, cells of the label columns)
_ManifestRow = tuple[str, str, tuple[str, ...]]
# (class, share) of each class of an image
_Shares = tuple[tuple[str, float], ...]
_LABEL_COLUMN = ("label",)
_NUM_PATHS_CHECKED = 100
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,17}")
_ALLOWED_CONTENT = "a manifest may hold only a dict of str to int or str (write it as CSV)"


@dataclass(frozen=True)
class _ImageList:
    file: Path
    root: Path
    paths: Sequence[str]
    labels: Sequence[_Shares]


def load_manifest(section: Manifest, *, skip_bad: bool = False) -> Datasets:
    """Load the files in the lists of `section`; the training labels, sorted as numbers or text, are the classes.

    With `class_columns` the classes are these columns, in order.
    Without a validation list that split is empty. Raise `DataError` for a malformed list, a repeated path, an unknown
    validation label, and a missing or unreadable file; `skip_bad` keeps such files, unless the first 100 are missing.
    """
    columns = _find_class_columns(section)
    train = _read_manifest(section.train, section, columns, skip_bad=skip_bad)
    if section.class_columns != "off":
        class_names = columns
    else:
        class_names = _sort_class_names(name for each in train.labels for name, _ in each)
    numbers = {name: number for number, name in enumerate(class_names)}
    if not numbers:
        raise DataError(f"{printable(train.file)}: has no label in any line; write some in the column 'label'")
    if section.val == "off":
        val = replace(train, paths=(), labels=())
    else:
        val = _read_manifest(section.val, section, columns, known=numbers, skip_bad=skip_bad)
    shared = len(_resolve_paths(train) & _resolve_paths(val))
    notes = (f"{shared:,} of {len(val.paths):,} validation images are training images too",) if shared else ()
    if section.val == "off":
        notes = ("data.source.val names no list",)
    build = partial(_build_manifest_source, class_names=class_names, section=section)
    if section.has_one_label:
        targets, labels = None, np.array([numbers[each[0][0]] for each in (*train.labels, *val.labels)], dtype=np.int64)
    else:
        shares = (_to_target(each, numbers) for each in (*train.labels, *val.labels))
        targets, labels = TargetTable.from_targets(shares, len(numbers))
    of_train, of_val = np.split(labels, [len(train.labels)])
    return Datasets(build(train, "train", of_train, targets=targets), build(val, "val", of_val, notes, targets=targets))


def _to_target(shares: _Shares, numbers: dict[str, int]) -> NDArray[np.float32]:
    target = np.zeros(len(numbers), dtype=np.float32)
    for name, share in shares:
        target[numbers[name]] = share
    return target


def _find_class_columns(section: Manifest) -> tuple[str, ...]:
    """Return the columns that hold labels: those of the training list's header with `class_columns=auto`."""
    if section.class_columns == "off":
        return _LABEL_COLUMN
    if section.class_columns != "auto":
        return section.class_columns
    file = expand_path(section.train)
    if file.suffix.lower() != ".csv":  # `_read_rows` refuses it
        return ()
    with open_csv(file) as reader:
        columns = tuple(name for name in next(reader, []) if name != "path")
    if not columns or not all(columns):
        raise DataError(f"{printable(file)}:1: its header is not path and one column per class; name each column")
    return columns


def _split_labels(separator: str, cells: tuple[str, ...]) -> _Shares:
    names = [name.strip() for name in cells[0].split(separator)] if separator != "off" else [cells[0]]
    return tuple((name, 1.0) for name in dict.fromkeys(filter(None, names)))


def _parse_shares(columns: tuple[str, ...], cells: tuple[str, ...]) -> _Shares:
    shares = []
    for name, cell in zip(columns, cells, strict=True):
        try:
            share = float(cell or 0)
        except ValueError:
            share = -1.0
        if not 0 <= share <= 1:
            raise ValueError(f"'{printable(cell)}' in column '{printable(name)}' is not a number from 0 to 1")
        if share:
            shares.append((name, share))
    return tuple(shares)


def _read_manifest(
    text: str, section: Manifest, columns: tuple[str, ...], *, known: dict[str, int] | None = None, skip_bad: bool
) -> _ImageList:
    """Read the list `text`, whose labels must be `known` if these are given."""
    file = expand_path(text)
    has_columns = section.class_columns != "off"
    # Cached, so that images with the same cells share one tuple.
    parse: Callable[[tuple[str, ...]], _Shares]
    parse = cache(partial(_parse_shares, columns) if has_columns else partial(_split_labels, section.separator))
    labels: dict[str, _Shares] = {}
    for position, path, cells in _read_rows(file, section, columns):
        if not _is_valid_path(path):
            raise DataError(f"{position}: '{printable(path)}' is not a path; correct it or leave the line out")
        if path in labels:
            raise DataError(f"{position}: path '{printable(path)}' is listed twice; leave one of them out")
        try:
            labels[path] = parse(cells)
        except ValueError as error:
            raise DataError(f"{position}: {error}; correct it, or leave the cell blank for 0") from None
        unknown = next((name for name, _ in labels[path] if known is not None and name not in known), None)
        if unknown is not None:
            raise DataError(
                f"{position}: label '{printable(unknown)}' is not in the training list "
                f"{printable(expand_path(section.train))}{suggest_similar(unknown, known or ())}; correct it, or add "
                f"its training images"
            )
    if not labels:
        raise DataError(f"{printable(file)}: lists no images; write a line for each under 'path,{','.join(columns)}'")
    start = manifest_root(section, file)
    listing = _ImageList(file, start, tuple(labels), tuple(labels.values()))
    _check_first_paths(listing, skip_bad=skip_bad)
    if not skip_bad:
        full = {path: os.path.join(start, path) for path in listing.paths}  # noqa: PTH118 - three times as fast
        raise_for_faults(printable(file), dict(find_faults(full)))
    return listing


def manifest_root(section: Manifest, file: Path) -> Path:
    """Return the folder that the relative paths of the list `file` start from."""
    return (file.parent if section.root == "auto" else expand_path(section.root)).absolute()


def _read_rows(file: Path, section: Manifest, columns: tuple[str, ...]) -> Iterator[_ManifestRow]:
    match file.suffix.lower():
        case ".csv":
            return _read_csv_rows(file, section, columns)
        case ".pkl" | ".pickle" if section.class_columns != "off":
            raise DataError(f"{printable(file)}: is a pickle, which has no columns for class_columns; write it as CSV")
        case ".pkl" | ".pickle":
            return _read_pickle_rows(file, may_be_empty=not section.has_one_label)
    raise DataError(f"{printable(file)}: is not a .csv, .pkl or .pickle file; write the list as CSV")


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


def _read_csv_rows(file: Path, section: Manifest, columns: tuple[str, ...]) -> Iterator[_ManifestRow]:
    line = ",".join(("path", *map(printable, columns[:3]), *(("...",) if len(columns) > 3 else ())))
    with open_csv(file) as reader:
        header: list[str] = next(reader, [])
        missing = next((name for name in ("path", *columns) if name not in header), None)
        if missing is not None:
            which = "path or label" if columns == _LABEL_COLUMN else f"the column '{printable(missing)}'"
            raise DataError(f"{printable(file)}:1: its header lacks {which}; make its first line '{line}'")
        if section.class_columns != "off":
            _check_columns(file, section, header, columns)
        path_column, label_columns = header.index("path"), [header.index(name) for name in columns]
        for cells in filter(None, reader):
            position = f"{printable(file)}:{reader.line_num}"
            if len(cells) <= max(path_column, *label_columns) or (
                section.has_one_label and not cells[label_columns[0]]
            ):
                raise DataError(f"{position}: has no label; write '{line}', with quotes around a comma in either")
            if len(cells) > len(header) and not section.has_one_label:  # `1.jpg,cat,dog` would lose the dog
                raise DataError(f"{position}: has more cells than the header; write quotes around a cell with a comma")
            yield position, cells[path_column], tuple(cells[column] for column in label_columns)


def _check_columns(file: Path, section: Manifest, header: list[str], columns: tuple[str, ...]) -> None:
    """Raise `DataError` if a column of `class_columns` is there twice, or with `auto` one is not in the other list."""
    repeated = next((name for name in columns if header.count(name) > 1), None)
    if repeated is not None:
        raise DataError(f"{printable(file)}:1: its header has the column '{printable(repeated)}' twice; keep one")
    unknown = next((name for name in header if name not in ("path", *columns)), None)
    if section.class_columns == "auto" and unknown is not None:
        raise DataError(
            f"{printable(file)}:1: its column '{printable(unknown)}' is not in the training list "
            f"{printable(expand_path(section.train))}; leave it out, or list data.source.class_columns"
        )


@contextmanager
def open_csv(file: Path) -> Iterator[Any]:
    """Open a CSV file as a `csv.reader`. Raise `DataError` if it cannot be read, or is not CSV in UTF-8."""
    reader: Any = None
    try:
        with TextIOWrapper(open_to_read(file), encoding="utf-8-sig", newline="") as lines:
            reader = csv.reader(lines, strict=True, skipinitialspace=True)
            yield reader
    except UnicodeDecodeError as error:
        raise DataError(f"{printable(file)}: is not UTF-8 (byte {error.start}); save it as UTF-8") from error
    except csv.Error as error:
        raise DataError(f"{printable(file)}:{reader.line_num}: {error}; correct the line") from error
    except OSError as error:
        raise DataError(f"{printable(file)}: cannot be read: {error.strerror}; correct its name") from error


def _read_pickle_rows(file: Path, *, may_be_empty: bool) -> Iterator[_ManifestRow]:
    table = load_restricted_pickle(file, hint=_ALLOWED_CONTENT)
    if not isinstance(table, dict):
        raise DataError(f"{printable(file)}: holds a {type(table).__name__}; {_ALLOWED_CONTENT}")
    for path, label in table.items():
        if type(path) is not str:
            raise DataError(f"{printable(file)}: has a key of type {type(path).__name__}; {_ALLOWED_CONTENT}")
        is_blank = label == "" and not may_be_empty
        if type(label) not in (int, str) or is_blank or (type(label) is int and abs(label) >= 10**18):
            kind = "an empty text" if is_blank else f"a value of type {type(label).__name__}"
            raise DataError(f"{printable(file)}: labels {printable(path)[:120]} with {kind}; {_ALLOWED_CONTENT}")
    for path in sorted(table):  # independent of the order of insertion
        yield printable(file), path, (str(table[path]),)


def _sort_class_names(labels: Iterable[str]) -> tuple[str, ...]:
    names = set(labels)
    if all(_INTEGER.fullmatch(name) for name in names):
        return tuple(sorted(names, key=int))
    return tuple(sorted(names))


def _resolve_paths(listing: _ImageList) -> set[Path]:
    return {listing.root / path for path in listing.paths}


def _build_manifest_source(
    listing: _ImageList,
    split: Split,
    labels: NDArray[np.integer],
    notes: tuple[str, ...] = (),
    *,
    class_names: tuple[str, ...],
    section: Manifest,
    targets: TargetTable | None,
) -> ImageFileSource:
    class_names = tuple(printable(name) for name in class_names)
    info = build_files_info("manifest", split, len(listing.paths), class_names, section.pixel_format, notes)
    paths = [os.fsencode(path) for path in listing.paths]
    return ImageFileSource.from_paths(replace(info, targets=targets), str(listing.root), paths, labels.astype(np.int32))
