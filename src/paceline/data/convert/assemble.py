"""Turn the samples of an unfinished pack into a pack: write index and headers, then move it into place."""

import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.dataset import ArraySource, JoinedNames, Source
from paceline.core.errors import DataError
from paceline.core.files import move_without_overwriting, open_to_read, open_to_write
from paceline.data.convert.partial_pack import KEY_NAME, PackedShard, PartialPack, find_foreign_file, remove_pack
from paceline.data.files import fsync_file, fsync_path, printable
from paceline.data.pack.format import (
    ALIGNMENT,
    COLUMNS,
    INDEX_NAME,
    MAGIC,
    SHARD_DTYPE,
    FileRole,
    IndexLayout,
    IndexSizes,
    PackHeader,
    PackMeta,
    align_offset,
)
from paceline.data.pack.reader import PackSource
from paceline.data.pack.shards import HEADER_BYTES
from paceline.data.sources.image_files import ImageFileSource

_ROWS_PER_CHUNK = 1 << 18  # so that only the last chunk of a column needs padding
# Index columns that are fields of the rows.
_ROW_FIELDS = {
    "lengths": "length", "crc32s": "crc32", "labels": "label", "heights": "height", "widths": "width", "kinds": "kind",
}  # fmt: skip


def get_sample_names(source: Source) -> JoinedNames:
    """Return the names of a split, paths relative to the root for files; each b"" for an array."""
    match source:
        case ArraySource():
            return JoinedNames(b"", np.zeros(len(source), dtype=np.int64))
        case ImageFileSource(paths=names) | PackSource(names=names):
            return names
    return JoinedNames.from_list(
        [source.name_of(index).encode("utf-8", "surrogateescape") for index in range(len(source))]
    )


def format_sample_name(names: JoinedNames, index: int) -> str:
    """Return the printable name of a sample, `[12]` without names."""
    name = names[index].decode("utf-8", "surrogateescape")
    return printable(name) if name else f"[{index}]"


def assemble_pack(
    partial: PartialPack,
    meta: PackMeta,
    names: tuple[JoinedNames, JoinedNames],
    pack_id: bytes,
    out: Path,
    *,
    overwrite: bool,
) -> int:
    """Turn `partial` into the pack `out`, a file or a folder of shards; return its size in bytes.

    With `overwrite` an existing pack is replaced. Raise `DataError` if another process has created `out` meanwhile.
    """
    # The rows stay until the pack has its name, so an interrupted run repeats these steps.
    shards = partial.shards
    rows = np.concatenate([shard.rows for shard in shards])
    offsets = _compute_offsets(shards)
    if partial.shard_bytes is None:
        shard = shards[0]
        data_path = partial.get_data_path(0)
        header_without_index = PackHeader(FileRole.WHOLE, pack_id, 0, shard.data_bytes, shard.data_crc32)
        with open_to_write(data_path, "r+b") as file:
            num_bytes = _write_index(file, header_without_index, meta, [], rows, offsets, names)
        _move_into_place(data_path, out, overwrite=overwrite)
        remove_pack(partial.folder)
        return num_bytes
    table = []
    for number, shard in enumerate(shards):
        num_bytes = HEADER_BYTES + shard.data_bytes
        header = PackHeader(
            FileRole.SHARD, pack_id, num_bytes, shard.data_bytes, shard.data_crc32, shard=number, num_shards=len(shards)
        )
        with open_to_write(partial.get_data_path(number), "r+b") as file:
            file.write(header.to_bytes())
            file.truncate(num_bytes)
            fsync_file(file)
        table.append((num_bytes, zlib.crc32(header.to_bytes())))
    with open_to_write(partial.folder / INDEX_NAME, "wb") as file:
        header_without_index = PackHeader(FileRole.INDEX, pack_id, 0, 0, 0, num_shards=len(shards))
        num_bytes = _write_index(file, header_without_index, meta, table, rows, offsets, names)
    fsync_path(partial.folder)
    # The unfinished folder is private. The pack's follows the umask as its files do, plus x for everyone who has r.
    file_mode = partial.get_data_path(0).stat().st_mode & 0o777
    partial.folder.chmod(file_mode | (file_mode & 0o444) >> 2)
    _move_into_place(partial.folder, out, overwrite=overwrite)
    for path in (*out.glob("*.rows"), out / KEY_NAME):
        path.unlink()
    return num_bytes + sum(size for size, _ in table)


def _compute_offsets(shards: list[PackedShard]) -> NDArray[np.uint64]:
    # In the concatenated data of all shards.
    starts = np.cumsum([0, *(shard.data_bytes for shard in shards[:-1])], dtype=np.uint64)
    return np.concatenate([start + shard.rows["offset"] for start, shard in zip(starts, shards, strict=True)])


def _write_index(
    file: IO[bytes],
    header: PackHeader,
    meta: PackMeta,
    table: list[tuple[int, int]],
    rows: NDArray[np.void],
    offsets: NDArray[np.uint64],
    names: tuple[JoinedNames, JoinedNames],
) -> int:
    meta_json = meta.to_json()
    num_train = len(names[0])
    sizes = IndexSizes(
        len(meta_json), len(table), (num_train, len(rows) - num_train), (len(names[0].joined), len(names[1].joined))
    )
    layout = IndexLayout.from_sizes(sizes)
    # The first cuts off the index of an interrupted call, the second appends zeros up to the start of the index.
    file.truncate(HEADER_BYTES + header.data_bytes)
    file.truncate(header.index_offset)
    file.seek(header.index_offset)
    crc32 = written = 0
    for chunk in _iter_index_chunks(sizes, meta_json, table, rows, offsets, names):
        file.write(chunk)
        crc32, written = zlib.crc32(chunk, crc32), written + len(chunk)
    assert written == layout.num_bytes, f"the index has {written} bytes, not {layout.num_bytes}"
    num_bytes = header.index_offset + written
    complete = PackHeader(
        header.role,
        header.pack_id,
        num_bytes,
        header.data_bytes,
        header.data_crc32,
        written,
        crc32,
        0,
        header.num_shards,
        meta.version,
    )
    # The header, which makes the file valid, is written once everything else is on disk.
    fsync_file(file)
    file.seek(0)
    file.write(complete.to_bytes())
    fsync_file(file)
    return num_bytes


def _iter_index_chunks(
    sizes: IndexSizes,
    meta_json: bytes,
    table: list[tuple[int, int]],
    rows: NDArray[np.void],
    offsets: NDArray[np.uint64],
    names: tuple[JoinedNames, JoinedNames],
) -> Iterator[bytes]:
    yield sizes.to_bytes()
    yield _pad_to_alignment(meta_json)
    yield _pad_to_alignment(np.array([(*row, 0) for row in table], dtype=SHARD_DTYPE).tobytes())
    first = 0
    for split_names, num_samples in zip(names, sizes.samples, strict=True):
        split = slice(first, first + num_samples)
        columns: dict[str, NDArray[Any]] = {name: rows[field][split] for name, field in _ROW_FIELDS.items()}
        columns |= {"offsets": offsets[split], "name_ends": split_names.ends}
        for name, code in COLUMNS.items():
            for start in range(0, num_samples, _ROWS_PER_CHUNK):
                yield _pad_to_alignment(columns[name][start : start + _ROWS_PER_CHUNK].astype(code).tobytes())
        yield _pad_to_alignment(bytes(split_names.joined))
        first += num_samples


def _pad_to_alignment(content: bytes) -> bytes:
    return content.ljust(align_offset(len(content), ALIGNMENT), b"\0")


def check_replaceable(out: Path) -> None:
    """Raise `DataError` if `out`, or the backup of an interrupted replacement, exists and is not a pack."""
    for path in (out, _backup_path(out)):
        if not os.path.lexists(path):
            continue
        if not _is_pack(path):
            raise DataError(
                f"{printable(path)}: is not a pack, so it is not overwritten (remove it, or write elsewhere)"
            )
        foreign = find_foreign_file(path) if path.is_dir() and not path.is_symlink() else ""
        if foreign:
            raise DataError(
                f"{printable(path / foreign)}: is not part of a pack, so the folder is not overwritten (move it away, "
                f"or write elsewhere)"
            )


def _is_pack(path: Path) -> bool:
    try:
        with open_to_read(path / INDEX_NAME if path.is_dir() else path) as file:
            return file.read(HEADER_BYTES).startswith(MAGIC)
    except OSError:
        return False


def _backup_path(out: Path) -> Path:
    return out.with_name(f".{out.name}.old")


def _move_into_place(complete: Path, out: Path, *, overwrite: bool) -> None:
    # A file replaces a file atomically. Anything else at `out` becomes the backup first: between the two renames a kill
    # leaves no `out`, and the next run continues from the log.
    if overwrite:
        check_replaceable(out)
        remove_pack(_backup_path(out))
        if complete.is_file() and out.is_file():
            complete.replace(out)
            fsync_path(out.parent)
            return
        if os.path.lexists(out):
            move_without_overwriting(out, _backup_path(out))
    try:
        move_without_overwriting(complete, out)
    except FileExistsError:
        raise DataError(
            f"{printable(out)}: was created by another process meanwhile (move it away and pack again: "
            f"packing resumes from here)"
        ) from None
    fsync_path(out.parent)
    if overwrite:
        remove_pack(_backup_path(out))
