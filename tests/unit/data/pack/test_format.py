"""Headers, the layout of the index, and its metadata."""

import json
import struct
import zlib

import pytest

from paceline.core.errors import DataError
from paceline.data.pack.format import (
    ALIGNMENT,
    COLUMNS,
    FileRole,
    IndexLayout,
    IndexSizes,
    PackHeader,
    PackMeta,
    ProcessingMeta,
    SplitMeta,
    align_offset,
)
from paceline.data.pack.shards import HEADER_BYTES

WHOLE = PackHeader(FileRole.WHOLE, bytes(range(16)), 1024, 100, 7, index_bytes=1024 - 256, index_crc32=9)


def test_a_header_is_read_as_it_was_written():
    assert len(WHOLE.to_bytes()) == HEADER_BYTES
    assert PackHeader.from_bytes(WHOLE.to_bytes(), "x") == WHOLE


def test_each_field_of_a_header_is_at_its_documented_offset():
    data = WHOLE.to_bytes()
    assert data[:8] == b"plpack\r\n"
    assert struct.unpack_from("<HH", data, 8) == (1, FileRole.WHOLE)
    assert struct.unpack_from("<I", data, 12) == (zlib.crc32(data[:12] + bytes(4) + data[16:]),)
    assert data[16:32] == WHOLE.pack_id
    assert struct.unpack_from("<QQQ", data, 32) == (1024, 100, 768)
    assert struct.unpack_from("<IIII", data, 56) == (9, 7, 0, 1)
    assert not any(data[72:])


def test_a_header_with_any_bit_flipped_is_refused():
    data = WHOLE.to_bytes()
    for bit in range(8 * HEADER_BYTES):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DataError, match=r"^x: "):
            PackHeader.from_bytes(bytes(flipped), "x")


def test_a_later_version_is_named_even_if_the_checksum_is_wrong():
    data = bytearray(WHOLE.to_bytes())
    data[8] = 3
    with pytest.raises(DataError, match="version 3, and this program reads versions 1 and 2"):
        PackHeader.from_bytes(bytes(data), "x")


LONGER_THAN_FILES = {"data_bytes": 1 << 63, "num_bytes": align_offset(128 + (1 << 63)) + WHOLE.index_bytes}


@pytest.mark.parametrize("change", [{"num_bytes": 1025}, {"num_shards": 0}, {"shard": 1}, LONGER_THAN_FILES])
def test_an_inconsistent_header_is_refused(change):
    with pytest.raises(DataError, match="is inconsistent"):
        PackHeader.from_bytes(PackHeader(**{**vars(WHOLE), **change}).to_bytes(), "x")


def test_columns_are_consecutive_and_aligned_to_64_bytes():
    layout = IndexLayout.from_sizes(IndexSizes(meta_bytes=1000, num_shards=5, samples=(77, 13), names_bytes=(999, 1)))
    at = align_offset(64 + 1000)
    assert (layout.meta, layout.shards) == (64, at)
    at = align_offset(at + 5 * 16)
    for columns, names, samples, names_bytes in zip(layout.columns, layout.names, (77, 13), (999, 1), strict=True):
        assert list(columns) == list(COLUMNS)
        for column in columns.values():
            assert column.offset == at and at % ALIGNMENT == 0
            at = align_offset(at + samples * column.dtype.itemsize)
        assert names == at
        at = align_offset(at + names_bytes)
    assert layout.num_bytes == at


def test_the_index_has_33_bytes_per_sample_and_its_name():
    many = (
        IndexLayout.from_sizes(IndexSizes(0, 0, (1 << 20, 0), (0, 0))).num_bytes
        - IndexLayout.from_sizes(IndexSizes(0, 0, (0, 0), (0, 0))).num_bytes
    )
    assert many == 33 << 20


def meta(**change):
    split = SplitMeta(name="x", mean=(0.5,), std=(0.25,), digest="0" * 64)
    return PackMeta(class_names=("a",), channels=1, made=ProcessingMeta(every=8), train=split, val=split).model_copy(
        update=change
    )


def test_metadata_survive_a_round_trip():
    metadata = meta(class_names=("a", "ö\n\u2028"), made=ProcessingMeta(resize=256, quality=90, every=4))
    assert PackMeta.from_json(metadata.to_json(), "x") == metadata


INVALID_METADATA = {
    "no JSON": b"{", "nothing": b"", "no object": b"[]", "not UTF-8": b'{"class_names": ["\xff"]}',
    "deep": b"[" * 100_000, "unknown": json.dumps({**json.loads(meta().to_json()), "more": 1}).encode(),
    "infinity": meta().to_json().replace(b"0.25", b"Infinity"), "no std": meta().to_json().replace(b"0.25", b"0"),
    "channels": meta().to_json().replace(b'"channels":1', b'"channels":3'),
    "digest": meta().to_json().replace(b'"digest":"0', b'"digest":"g'),
    "no classes": meta().to_json().replace(b'["a"]', b"[]"),
    "a huge number": meta().to_json().replace(b"0.25", b"9" * 9999),
    "size": meta().to_json().replace(b'"image_size":null', b'"image_size":[0,99999999999999999999]'),
}  # fmt: skip


@pytest.mark.parametrize("metadata", INVALID_METADATA.values(), ids=INVALID_METADATA.keys())
def test_invalid_metadata_are_refused_in_one_line(metadata):
    with pytest.raises(DataError, match=r"^x: the metadata in its index is damaged \(.*\)$"):
        PackMeta.from_json(metadata, "x")
