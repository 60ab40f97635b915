"""Read a pack as a dataset."""

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.dataset import ArraySource, DatasetInfo, Datasets, JoinedNames, Sample, Source, Split
from paceline.data.bad_images import ImageError
from paceline.data.files import printable
from paceline.data.pack.format import COLUMNS, KIND_PIXELS, KIND_RECORD, SPLITS, SplitMeta
from paceline.data.pack.index import PackIndex, SplitColumns, find_index_file, open_index
from paceline.data.pack.jpeg_record import restore_jpeg
from paceline.data.pack.shards import HEADER_BYTES, LocalShards, Shards, check_mapped_files


def open_pack(root: Path) -> Datasets:
    """Open the two splits of the local pack `root`, a file or a folder of shards. Raise `DataError` as `open_index`."""
    index = open_index(find_index_file(root), printable(root))
    return build_pack_datasets(index, LocalShards.open_checked(index.path.parent, index.files))


def build_pack_datasets(index: PackIndex, shards: Shards) -> Datasets:
    """Build the two splits of an open index whose samples are in `shards`."""
    return Datasets(_build_pack_source(index, shards, "train"), _build_pack_source(index, shards, "val"))


# Opening maps and validates the index; samples are read on access. `read` checks the CRC-32 of a sample (3 GB/s, 2 % of
# decoding a photograph, measured). The native loader reads mapped memory without that check and only bounds its
# accesses; `paceline data verify` checks every sample.
@dataclass(frozen=True, eq=False)
class PackSource:
    """A split of a pack. Threads and forked processes can share it; unpickling opens the files again.

    Of selected samples, `rows`, int64 [N], are their positions in the training samples followed by the validation
    samples, and `selected` are their columns.
    """

    info: DatasetInfo
    index: PackIndex
    files: Shards
    rows: NDArray[np.int64] | None = None
    selected: SplitColumns | None = None

    def __len__(self) -> int:
        return len(self._columns)

    @property
    def labels(self) -> NDArray[np.int32]:
        """Class numbers, int32 [N]."""
        return self._columns.labels

    @property
    def heights(self) -> NDArray[np.uint16]:
        """Heights of the upright images, uint16 [N]; 0 if unknown or above 65,535."""
        return self._columns.heights

    @property
    def widths(self) -> NDArray[np.uint16]:
        """Widths, as `heights`."""
        return self._columns.widths

    @property
    def kinds(self) -> NDArray[np.uint8]:
        """Storage kinds (`format.KIND_*`), uint8 [N]."""
        return self._columns.kinds

    @property
    def digest(self) -> bytes:
        """Digest of the packed split, 32 bytes (`sources.fingerprint`); another one if images were changed."""
        return bytes.fromhex(self._meta.digest)

    def select(self, info: DatasetInfo, indices: NDArray[np.int64]) -> "PackSource":
        """Return the samples `indices`, int64 [K], of this split as a split with `info`."""
        return _select_rows(info, self.index, self.files, self._rows[indices])

    def join(self, info: DatasetInfo, other: "PackSource") -> "PackSource":
        """Return the samples of this split, then those of `other`, of the same pack, as a split with `info`."""
        return _select_rows(info, self.index, self.files, np.concatenate([self._rows, other._rows]))

    def locate(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.uint64], NDArray[np.uint64]]:
        """Return for n samples: shard int32 [n], offset in its file uint64 [n], and length in bytes uint64 [n]."""
        offsets = self._columns.offsets[indices]
        shards = np.searchsorted(self.index.starts, offsets, side="right") - 1
        within = offsets - self.index.starts[shards] + np.uint64(HEADER_BYTES)
        lengths = self._columns.lengths[indices].astype(np.uint64)
        check_mapped_files()  # the columns above may have been zeros beyond the end of a truncated index
        return shards.astype(np.int32), within, lengths

    def read(self, index: int) -> Sample:
        """Return (JPEG restored from a record, unchanged file, or pixels [H, W, C]; label).

        Raise `ImageError` for an empty or damaged sample, and `DataError` naming a shard that cannot be read.
        """
        columns = self._columns
        stored = self.read_stored(index)
        if not stored:
            raise ImageError(self._full_name(index), "is empty (0 bytes)", "remove it from the source and pack again")
        label = int(columns.labels[index])
        match int(columns.kinds[index]):
            case kind if kind == KIND_PIXELS:
                shape = (int(columns.heights[index]), int(columns.widths[index]), self.info.channels)
                return np.frombuffer(stored, dtype=self._dtype).reshape(shape), label
            case kind if kind == KIND_RECORD:
                try:
                    return restore_jpeg(stored), label
                except ValueError as error:
                    raise ImageError(self._full_name(index), str(error), "pack it again") from error
        return stored, label

    def read_stored(self, index: int) -> bytes:
        """Return the stored bytes of a sample. Raise `ImageError` if their checksum does not match."""
        shards, offsets, lengths = self.locate(np.array([index], dtype=np.int64))
        stored = self.files.read(int(shards[0]), int(offsets[0]), int(lengths[0])) if lengths[0] else b""
        if zlib.crc32(stored) != self._columns.crc32s[index]:
            raise ImageError(self._full_name(index), "is damaged: its checksum does not match", "copy the pack again")
        return stored

    @property
    def names(self) -> JoinedNames:
        """The stored names: paths relative to the root of the packed source; each b"" without names."""
        return JoinedNames(self._columns.names, self._columns.name_ends)

    def name_of(self, index: int) -> str:
        """Return the stored name in printable form; without names `digits/train[12]`, or `digits[12]` if selected."""
        name = self.names[index]
        if not name and self.rows is not None:
            return f"{self.info.name}[{self.rows[index]}]"
        if not name:
            return f"{self.info.name}/{self.info.split}[{index}]"
        return printable(name.decode("utf-8", "surrogateescape"))

    def __reduce__(self) -> tuple[Any, ...]:
        if self.rows is not None:
            return _select_rows, (self.info, self.index, self.files, self.rows)  # the index opens its file again
        return _reopen_source, (self.index.path, self.index.display_name, self.files, self.info.split)

    @property
    def _dtype(self) -> np.dtype[np.uint8 | np.uint16 | np.float32]:
        return np.dtype(self.info.pixels).newbyteorder("<")

    @property
    def _columns(self) -> SplitColumns:
        return self.index.splits[self.info.split] if self.selected is None else self.selected

    @property
    def _rows(self) -> NDArray[np.int64]:
        if self.rows is not None:
            return self.rows
        start = 0 if self.info.split == "train" else len(self.index.splits["train"])
        return np.arange(start, start + len(self), dtype=np.int64)

    @property
    def _meta(self) -> SplitMeta:
        return self.index.meta.train if self.info.split == "train" else self.index.meta.val

    def _full_name(self, index: int) -> str:
        return f"{self.index.display_name}: {self.name_of(index)}"


def _reopen_source(path: Path, file_name: str, shards: Shards, split: Split) -> PackSource:
    index = open_index(path, file_name)
    return PackSource(_build_info(index, split), index, shards)


def _select_rows(info: DatasetInfo, index: PackIndex, files: Shards, rows: NDArray[np.int64]) -> PackSource:
    splits = [index.splits[split] for split in SPLITS]
    of_train, of_val = (JoinedNames(each.names, each.name_ends) for each in splits)
    num_train = len(of_train)
    names = JoinedNames.from_list(
        [of_train[row] if row < num_train else of_val[row - num_train] for row in rows.tolist()]
    )
    arrays = {name: np.concatenate([getattr(each, name) for each in splits])[rows] for name in COLUMNS}
    arrays["name_ends"] = names.ends.astype(np.uint64)
    return PackSource(info, index, files, rows, SplitColumns(**arrays, names=memoryview(names.joined)))


def _build_pack_source(index: PackIndex, shards: Shards, split: Split) -> Source:
    # Contiguous pixels of equal size in one shard are mapped as one array: no copy, and no read per sample.
    source = PackSource(_build_info(index, split), index, shards)
    size = source.info.image_size
    columns = index.splits[split]
    if size is None or not len(columns) or columns.names or columns.kinds.any():
        return source
    num_bytes = size[0] * size[1] * source.info.channels * source._dtype.itemsize
    first = int(columns.offsets[0])
    contiguous = np.arange(len(columns), dtype=np.uint64) * np.uint64(num_bytes) + np.uint64(first)
    if (columns.lengths != num_bytes).any() or not np.array_equal(columns.offsets, contiguous):
        return source
    (first_shard, last_shard), offsets, _ = source.locate(np.array([0, len(columns) - 1], dtype=np.int64))
    if first_shard != last_shard:
        return source
    pixels = shards.array(int(first_shard), int(offsets[0]), len(columns) * num_bytes)
    shape = (len(columns), *size, source.info.channels)
    return ArraySource(source.info, pixels.view(source._dtype).reshape(shape), columns.labels.astype(np.int64))


def _build_info(index: PackIndex, split: Split) -> DatasetInfo:
    meta = index.meta.train if split == "train" else index.meta.val
    return DatasetInfo(
        name=meta.name,
        split=split,
        num_images=len(index.splits[split]),
        class_names=index.meta.class_names,
        channels=index.meta.channels,
        image_size=meta.image_size,
        mean=meta.mean,
        std=meta.std,
        notes=meta.notes,
        targets=index.meta.decode_targets(split),
        pixels=index.meta.pixels,
    )
