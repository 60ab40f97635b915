"""Group the files of tars into samples: consecutive files with the same name up to the first dot, as in WebDataset."""

from array import array
from dataclasses import dataclass, field

from paceline.core.errors import DataError
from paceline.core.units import count
from paceline.data.sources.image_names import IMAGE_EXTENSIONS
from paceline.data.sources.open_files import MAX_SAMPLE_BYTES
from paceline.data.sources.places import printable
from paceline.data.sources.tar_labels import LabelReader
from paceline.data.sources.tar_walk import TarMember, TarReader, format_member_name

_IMAGE_EXTENSION_BYTES = frozenset(extension.encode() for extension in IMAGE_EXTENSIONS)
_MAX_LABEL_BYTES = 2**20


# `n01/7.jpg` and `n01/7.cls` are one sample. `n01/7.a.jpg` belongs to it too, but its extension `a.jpg` is no image's:
# `base_plus_ext` and `group_by_keys` in
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

    def check_labels(self, num_classes: int) -> None:
        """Raise `DataError` naming the first sample whose label is not below `num_classes`."""
        if max(self.labels) < num_classes:
            return
        for index, label in enumerate(self.labels):
            if label >= num_classes:
                name = bytes(self.names[self.name_ends[index - 1] if index else 0 : self.name_ends[index]])
                tar = next(path for path, end in zip(self.paths, self.tar_ends, strict=True) if index < end)
                raise DataError(
                    f"{printable(tar)}: {format_member_name(name)} has the label {label}, and there are {num_classes:,} classes, "
                    f"starting at 0 (correct the label, or set data.source.classes to a list of all classes)"
                )

    def build_notes(self) -> list[str]:
        """Return notes on samples that were left out."""
        if not self.num_without_image:
            return []
        return [f"left out {count(self.num_without_image, 'sample')} without an image (.jpg, .png, ...) in the tars"]


def scan_tar_samples(paths: tuple[str, ...], read_label: LabelReader) -> TarSamples:
    """List the samples in the tars at `paths`. Raise `DataError` for a tar or a label that cannot be used."""
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
    """Return (name up to the first dot of its last component, extension in lower case); no extension if there is no
    key.
    """
    folder, slash, base = name.rpartition(b"/")
    stem, _, extension = base.partition(b".")
    return folder + slash + stem, extension.lower() if stem else b""


def _check_image(tar: TarReader, member: TarMember, group: _SampleGroup) -> TarMember:
    if group.image is not None:
        raise tar.build_error(
            f"has two images for one sample, {format_member_name(group.image.name)} and {format_member_name(member.name)}"
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
    """Add a finished group. Raise `DataError` for an image without a label."""
    if group.image is None:
        samples.num_without_image += bool(group.key)
    elif group.label is None:
        wanted = samples.read_label.extension.decode()
        raise tar.build_error(
            f"has no {format_member_name(group.key)}.{wanted} beside {format_member_name(group.image.name)}",
            "set data.source.label to what holds the label, or make it again",
        )
    else:
        samples.add(group.image, group.label)
