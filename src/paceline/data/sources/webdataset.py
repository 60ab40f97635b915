"""Load images and labels from WebDataset tars with random access to every sample."""

import json
import os
import re
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from glob import escape, glob
from itertools import product

import numpy as np
from numpy.typing import NDArray

from paceline.core.dataset import DatasetInfo, Datasets, JoinedNames, Sample, Split
from paceline.core.errors import DataError
from paceline.core.files import open_to_read
from paceline.core.pixels import PixelFormat
from paceline.core.units import count
from paceline.data.bad_images import ImageError
from paceline.data.files import IMAGE_EXTENSIONS, MAX_SAMPLE_BYTES, RandomAccessFiles, expand_path, printable
from paceline.data.sources.image_files import LocatedFiles, build_files_info
from paceline.data.sources.tar import TarMember, TarReader, format_member_name
from paceline.recipe.schema.source import WebDataset

MAX_CLASSES = 1_000_000
_NUMBER_RANGE = re.compile(r"\{([0-9]+)\.\.([0-9]+)\}")
_MAX_TARS = 1_000_000
_MAX_CLASS_LIST_BYTES = 2**26
_MAX_LABEL_BYTES = 2**20
_IMAGE_EXTENSION_BYTES = frozenset(extension.encode() for extension in IMAGE_EXTENSIONS)


def expand_tar_paths(text: str, setting: str) -> tuple[str, ...]:
    """Expand `{000..127}` and `*` in `text` to absolute paths, in order of the numbers and names.

    Numbers are padded like the first; `*` does not match a slash. Raise `DataError`, naming `setting`, for a path that
    does not exist or is repeated.
    """
    paths: list[str] = []
    for path in _expand_ranges(str(expand_path(text).absolute()), setting):
        pattern = "*".join(map(escape, path.split("*")))
        matches = sorted(glob(pattern), key=os.fsencode) if "*" in path else [path]  # noqa: PTH207 - takes absolute patterns
        if not matches or not os.path.lexists(matches[0]):
            raise DataError(f"{setting}: {printable(path)} does not exist (correct it, or download the tars first)")
        paths += matches
    if len(set(paths)) < len(paths):
        repeated = next(path for path in paths if paths.count(path) > 1)
        raise DataError(f"{setting}: matches {printable(repeated)} twice (correct it)")
    return tuple(paths)


def _expand_ranges(text: str, setting: str) -> list[str]:
    parts = _NUMBER_RANGE.split(text)  # text, first, last, text, first, last, text
    ranges = []
    num_paths = 1
    for first, last in zip(parts[1::3], parts[2::3], strict=True):
        if len(last) > 9 or int(first) > int(last):
            raise DataError(f"{setting}: {{{first}..{last}}} is not an increasing range of numbers (correct it)")
        numbers = range(int(first), int(last) + 1)
        num_paths *= len(numbers)
        if num_paths > _MAX_TARS:
            raise DataError(f"{setting}: {printable(text)} expands to more than {_MAX_TARS:,} tars (correct it)")
        ranges.append([str(number).zfill(len(first)) for number in numbers])
    return ["".join(_interleave(parts[::3], numbers)) for numbers in product(*ranges)]


def _interleave(texts: list[str], numbers: tuple[str, ...]) -> list[str]:
    return [text for pair in zip(texts, (*numbers, ""), strict=True) for text in pair]


@dataclass(frozen=True)
class LabelReader:
    """Parse the label in the content of a tar member."""

    extension: bytes  # of the members with labels
    json_field: str | None  # None: the whole text is the label
    class_numbers: Mapping[str, int]  # by class name; empty without a class list

    def __call__(self, content: bytes) -> int:
        """Return the class number. Raise `ValueError` with the reason if there is none."""
        value = self._parse_value(content)
        if isinstance(value, str) and value in self.class_numbers:
            return self.class_numbers[value]
        text = value.strip() if isinstance(value, str) else value
        if isinstance(text, str) and text.isascii() and text.isdigit() and len(text) < 10:
            text = int(text)
        if not isinstance(text, int) or isinstance(text, bool) or not 0 <= text < MAX_CLASSES:
            raise ValueError(f"is labeled {printable(repr(value))[:80]}, which is not a class number")
        return text

    def _parse_value(self, content: bytes) -> object:
        try:
            if self.json_field is None:
                return content.decode("ascii")
            return json.loads(content)[self.json_field]
        except (KeyError, TypeError, IndexError):
            raise ValueError(f"has no field '{printable(self.json_field or '')}' in its JSON") from None
        except (ValueError, RecursionError):
            raise ValueError(f"has a .{self.extension.decode()} that cannot be read as such") from None


def build_label_reader(section: WebDataset, class_names: tuple[str, ...]) -> LabelReader:
    """Build the reader for `section.label`. Raise `DataError` if it is neither `cls` nor `json:FIELD`."""
    numbers = {name: number for number, name in enumerate(class_names)}
    kind, _, json_field = section.label.partition(":")
    if kind == "cls" and section.label == "cls":
        return LabelReader(b"cls", None, numbers)
    if kind == "json" and json_field:
        return LabelReader(b"json", json_field, numbers)
    raise DataError(f"data.source.label: '{printable(section.label)}' is neither cls nor json:FIELD (set it to one)")


def read_class_list(section: WebDataset) -> tuple[str, ...]:
    """Read the class names in the file `section.classes`, () for `auto`. Raise `DataError` naming the file."""
    if section.classes == "auto":
        return ()
    path = expand_path(section.classes)
    prefix = f"data.source.classes: {printable(path)}"
    try:
        with open_to_read(path) as file:
            content = file.read(_MAX_CLASS_LIST_BYTES + 1)
        if len(content) > _MAX_CLASS_LIST_BYTES:
            raise DataError(f"{prefix} has more than {_MAX_CLASS_LIST_BYTES:,} bytes (correct the path)")
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise DataError(f"{prefix} cannot be read: {error.strerror} (correct the path)") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{prefix} is not UTF-8 (byte {error.start}); save it as UTF-8") from error
    names = tuple(printable(line.rstrip("\r")) for line in text.removesuffix("\n").split("\n"))
    if len(names) > MAX_CLASSES:
        raise DataError(f"{prefix} names more than {MAX_CLASSES:,} classes (correct the path)")
    seen: dict[str, int] = {}
    for number, name in enumerate(names, start=1):
        first = seen.setdefault(name, number)
        if not name.strip() or first != number:
            problem = f"names '{name}' again, after line {first}" if name.strip() else "has no name"
            raise DataError(f"{prefix}: line {number} {problem} (give each class one line)")
    return names


# `n01/7.jpg` and `n01/7.cls` are one sample. `n01/7.a.jpg` belongs to it too, but its extension `a.jpg` is not that of
# an image: `base_plus_ext` and `group_by_keys` in
# https://github.com/webdataset/webdataset/blob/main/src/webdataset/tariterators.py
@dataclass
class TarSamples:
    """Columns of the samples found so far; see `WebDatasetSource`."""

    paths: tuple[str, ...]
    read_label: LabelReader
    sizes: list[int] = field(default_factory=list)
    tar_ends: "array[int]" = field(default_factory=lambda: array("q"))
    starts: "array[int]" = field(default_factory=lambda: array("Q"))
    lengths: "array[int]" = field(default_factory=lambda: array("I"))
    labels: "array[int]" = field(default_factory=lambda: array("i"))
    names: bytearray = field(default_factory=bytearray)
    name_ends: "array[int]" = field(default_factory=lambda: array("q"))
    num_without_image: int = 0

    def add(self, image: TarMember, label: int) -> None:
        """Append a sample."""
        self.starts.append(image.start)
        self.lengths.append(image.length)
        self.labels.append(label)
        self.names += image.name
        self.name_ends.append(len(self.names))

    @property
    def joined_names(self) -> JoinedNames:
        """The names of the images."""
        return JoinedNames(bytes(self.names), np.asarray(self.name_ends, dtype=np.int64))

    def check_labels(self, num_classes: int) -> None:
        """Raise `DataError` naming the first sample whose label is not below `num_classes`."""
        if max(self.labels) < num_classes:
            return
        for index, label in enumerate(self.labels):
            if label >= num_classes:
                tar = next(path for path, end in zip(self.paths, self.tar_ends, strict=True) if index < end)
                raise DataError(
                    f"{printable(tar)}: {format_member_name(self.joined_names[index])} has the label {label}, "
                    f"and there are {num_classes:,} classes, starting at 0 "
                    f"(correct the label, or set data.source.classes to a list of all classes)"
                )

    def build_notes(self) -> list[str]:
        """Return a note on samples that were left out, if any."""
        if not self.num_without_image:
            return []
        return [f"left out {count(self.num_without_image, 'sample')} without an image (.jpg, .png, ...) in the tars"]


def scan_tar_samples(paths: tuple[str, ...], read_label: LabelReader) -> TarSamples:
    """List the samples in the tars `paths`. Raise `DataError` for a tar or a label that cannot be used."""
    samples = TarSamples(paths, read_label)
    for path in paths:
        tar = TarReader(path)
        _scan_tar(tar, samples)
        samples.sizes.append(tar.num_bytes)
        samples.tar_ends.append(len(samples.labels))
    if not samples.labels:
        raise DataError(
            f"{printable(paths[0])}: has no samples to use; expected KEY.jpg (or .png, ...) beside "
            f"KEY.{read_label.extension.decode()} (set data.source.label to what holds the label)"
        )
    return samples


@dataclass
class _SampleGroup:
    key: bytes
    image: TarMember | None = None
    label: int | None = None


def _scan_tar(tar: TarReader, samples: TarSamples) -> None:
    group = _SampleGroup(b"")
    for member in tar.members():
        key, extension = _split_member_name(member.name)
        if not extension:
            continue
        if key != group.key:
            _add_group(tar, group, samples)
            group = _SampleGroup(key)
        if extension in _IMAGE_EXTENSION_BYTES:
            group.image = _check_image(tar, member, group)
        elif extension == samples.read_label.extension:
            group.label = _read_group_label(tar, member, group, samples.read_label)
    _add_group(tar, group, samples)


def _split_member_name(name: bytes) -> tuple[bytes, bytes]:
    # (name up to the first dot of its last component, rest in lower case); a hidden file has no extension.
    folder, slash, base = name.rpartition(b"/")
    stem, _, extension = base.partition(b".")
    return folder + slash + stem, extension.lower() if stem else b""


def _check_image(tar: TarReader, member: TarMember, group: _SampleGroup) -> TarMember:
    if group.image is not None:
        raise tar.build_error(
            f"has two images for one sample, {format_member_name(group.image.name)} "
            f"and {format_member_name(member.name)}"
        )
    if member.length > MAX_SAMPLE_BYTES:
        raise tar.build_error(
            f"has {member.length:,} bytes in {format_member_name(member.name)}, which is too much for an image"
        )
    return member


def _read_group_label(tar: TarReader, member: TarMember, group: _SampleGroup, read_label: LabelReader) -> int:
    if group.label is not None:
        raise tar.build_error(f"has two labels for one sample, the second in {format_member_name(member.name)}")
    if member.length > _MAX_LABEL_BYTES:
        raise tar.build_error(
            f"has {member.length:,} bytes in {format_member_name(member.name)}, which is too much for a label"
        )
    try:
        return read_label(tar.read(member.start, member.length))
    except DataError:
        raise
    except ValueError as error:
        raise tar.build_error(f"{format_member_name(member.name)} {error}") from error


def _add_group(tar: TarReader, group: _SampleGroup, samples: TarSamples) -> None:
    if group.image is None:
        samples.num_without_image += bool(group.key)
    elif group.label is None:
        extension = samples.read_label.extension.decode()
        raise tar.build_error(
            f"has no {format_member_name(group.key)}.{extension} beside {format_member_name(group.image.name)}",
            "set data.source.label to what holds the label, or make it again",
        )
    else:
        samples.add(group.image, group.label)


# Opening reads the headers of all tars once, 10 us per sample (measured, local files). Memory holds 24 bytes and the
# name per sample.
@dataclass(frozen=True, eq=False)
class WebDatasetSource:
    """The N images of a split in T tars."""

    info: DatasetInfo
    files: RandomAccessFiles
    tar_ends: NDArray[np.int64]  # [T]: tar t has the samples from `tar_ends[t - 1]` up to `tar_ends[t]`
    starts: NDArray[np.uint64]  # [N]: byte offset of each image in its tar
    lengths: NDArray[np.uint32]  # [N]
    labels: NDArray[np.int32]  # [N]
    names: JoinedNames  # of members

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> Sample:
        """Return (encoded image bytes, label). Raise `ImageError` if the image is empty or cannot be read."""
        length = int(self.lengths[index])
        try:
            data = self.files.read(self._find_tar(index), int(self.starts[index]), length)
        except OSError as error:
            raise ImageError(self.name_of(index), f"cannot be read: {error.strerror}", "restore its tar") from error
        if not data:
            raise ImageError(self.name_of(index), "is empty (0 bytes)", "make its tar again")
        return data, int(self.labels[index])

    @property
    def file_root(self) -> str:
        """The folder that all tars are in."""
        return os.path.commonpath([os.path.dirname(path) for path in self.files.paths])  # noqa: PTH120 - as text

    def locate_files(self, indices: NDArray[np.int64]) -> LocatedFiles:
        """Return the parts of tars that hold images, int64 [N]; None for an empty one."""
        tars = [os.fsencode(self.files.paths[tar]) for tar in self._find_tars(indices).tolist()]
        names = [b"/".join((tar, self.names[index])) for tar, index in zip(tars, indices.tolist(), strict=True)]
        lengths = self.lengths[indices].astype(np.uint64)
        return LocatedFiles([*tars], self.starts[indices], lengths, names).without(lengths == 0)

    def name_of(self, index: int) -> str:
        """Return the path of the tar followed by the member's name."""
        return printable(f"{self.files.paths[self._find_tar(index)]}/{os.fsdecode(self.names[index])}")

    def _find_tar(self, index: int) -> int:
        return int(self._find_tars(np.array([index]))[0])

    def _find_tars(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.searchsorted(self.tar_ends, indices, side="right")


def load_webdataset(section: WebDataset) -> Datasets:
    """List the samples of the tars that `section` names; no image is read.

    Raise `DataError` for tars that are missing, truncated or damaged, and for a missing or unknown label.
    """
    class_list = read_class_list(section)
    read_label = build_label_reader(section, class_list)
    train = scan_tar_samples(expand_tar_paths(section.train, "data.source.train"), read_label)
    val = scan_tar_samples(expand_tar_paths(section.val, "data.source.val"), read_label)
    class_names = class_list or tuple(str(label) for label in range(max(train.labels) + 1))
    for samples in (train, val):
        samples.check_labels(len(class_names))
    shared = len(set(train.paths) & set(val.paths))
    notes = [f"{count(shared, 'tar')} of validation are training tars too"] if shared else []
    return Datasets(
        _build_webdataset_source(
            train, "train", class_names, section, [*train.build_notes(), *_note_unseen_classes(train, class_names)]
        ),
        _build_webdataset_source(val, "val", class_names, section, [*val.build_notes(), *notes]),
    )


def _note_unseen_classes(train: TarSamples, class_names: tuple[str, ...]) -> list[str]:
    missing = np.flatnonzero(np.bincount(np.asarray(train.labels), minlength=len(class_names)) == 0)
    if not len(missing):
        return []
    return [
        f"{len(missing):,} of {len(class_names):,} classes have no training image, such as {class_names[missing[0]]}"
    ]


def _build_webdataset_source(
    samples: TarSamples, split: Split, class_names: tuple[str, ...], section: WebDataset, notes: list[str]
) -> WebDatasetSource:
    return WebDatasetSource(
        info=build_files_info(
            "webdataset", split, len(samples.labels), class_names, PixelFormat(section.channels), tuple(notes)
        ),
        files=RandomAccessFiles(samples.paths, tuple(samples.sizes)),
        tar_ends=np.asarray(samples.tar_ends, dtype=np.int64),
        starts=np.asarray(samples.starts, dtype=np.uint64),
        lengths=np.asarray(samples.lengths, dtype=np.uint32),
        labels=np.asarray(samples.labels, dtype=np.int32),
        names=samples.joined_names,
    )
