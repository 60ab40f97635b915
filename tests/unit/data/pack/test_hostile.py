"""Any file is read as a pack or refused in one line, without a crash, a hang or much memory."""

import random
import struct
import zlib
from dataclasses import replace

import numpy as np
import pytest

from paceline.core.errors import DataError
from paceline.data.pack.format import IndexLayout, IndexSizes, PackHeader, align_offset
from paceline.data.pack.jpeg_record import restore_jpeg
from paceline.data.pack.reader import open_pack
from paceline.data.pack.shards import HEADER_BYTES

NUM_MUTATED = 10_000


def with_valid_checksums(content):
    """Return `content` with the right lengths and checksums, as in a forged pack."""
    header = bytearray(content[:HEADER_BYTES].ljust(HEADER_BYTES, b"\0"))
    (data_bytes,) = struct.unpack_from("<Q", header, 40)
    start = align_offset(HEADER_BYTES + data_bytes)
    if start > len(content):
        return content
    index = content[start:]
    struct.pack_into("<Q", header, 32, len(content))
    struct.pack_into("<QI", header, 48, len(index), zlib.crc32(index))
    struct.pack_into("<I", header, 12, 0)
    struct.pack_into("<I", header, 12, zlib.crc32(header))
    return bytes(header) + content[HEADER_BYTES:]


def read_all(path):
    """Read everything in a pack, as a run does."""
    found = open_pack(path)
    for source in (found.train, found.val):
        for index in range(len(source)):
            source.name_of(index)
            try:
                source.read(index)
            except DataError as error:
                assert len(str(error).splitlines()) == 1
        assert 0 <= int(source.labels.min()) <= int(source.labels.max()) < source.info.num_classes


def mutated(content, rng):
    changed = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 4))):
        place = rng.randrange(len(changed))
        match rng.randrange(7):
            case 0:
                changed[place] ^= 1 << rng.randrange(8)
            case 1:
                changed[place] = rng.randrange(256)
            case 2:
                width = rng.choice((2, 4, 8))
                changed[place : place + width] = rng.choice((b"\xff", b"\0", b"\x7f")) * width
            case 3:
                del changed[place : place + rng.randrange(1, 200)]
            case 4:
                changed[place:place] = changed[place : place + rng.randrange(1, 200)]
            case 5:
                other, length = rng.randrange(len(changed)), rng.choice((1, 8, 64))
                changed[place : place + length] = changed[other : other + length]
            case _:
                del changed[place:]
        if not changed:
            break
    return bytes(changed)


@pytest.fixture
def originals(core, photos, pixels, packed, tmp_path):
    """Return the bytes of a pack of photographs and of one of pixels."""
    packed(photos, "photos.pack")
    packed(pixels, "pixels.pack")
    return [(tmp_path / name).read_bytes() for name in ("photos.pack", "pixels.pack")]


def test_ten_thousand_changed_packs_are_read_or_refused_in_one_line(originals, tmp_path):
    rng, path = random.Random(0), tmp_path / "changed"
    accepted = 0
    for number in range(NUM_MUTATED):
        content = mutated(originals[number % 4 // 2], rng)
        path.write_bytes(with_valid_checksums(content) if number % 2 else content)
        try:
            read_all(path)
            accepted += 1
        except DataError as error:
            assert len(str(error).splitlines()) == 1 and str(path) in str(error), error
        path.unlink()  # a mapped file must not change
    assert NUM_MUTATED / 100 < accepted < NUM_MUTATED * 0.9


def test_ten_thousand_changed_records_are_restored_or_refused(make_photo, make_record):
    rng = random.Random(1)
    originals = [make_record(make_photo(1, 24, 17)), make_record(make_photo(2, mode="L"))]
    outcomes = set()
    for number in range(NUM_MUTATED):
        record = mutated(originals[number % 2], rng)
        try:
            assert restore_jpeg(record).startswith(b"\xff\xd8")
            outcomes.add("restored")
        except ValueError as error:
            assert len(str(error).splitlines()) == 1
            outcomes.add("refused")
    assert outcomes == {"restored", "refused"}


@pytest.fixture
def changed(originals, tmp_path):
    """Return a function that changes a value of a training column, corrects the checksums and opens the pack."""

    def opened(column, row, value):
        content = bytearray(originals[0])
        header = PackHeader.from_bytes(bytes(content[:HEADER_BYTES]), "x")
        start = header.index_offset
        layout = IndexLayout.from_sizes(IndexSizes.from_bytes(bytes(content[start : start + 64])))
        place = layout.columns[0][column]
        values = np.frombuffer(content, place.dtype, 7, start + place.offset)
        values[row] = value
        path = tmp_path / "changed"
        path.write_bytes(with_valid_checksums(bytes(content)))
        return open_pack(path)

    return opened


HOSTILE = {
    "a label below 0": ("labels", 3, -1), "a label beyond the classes": ("labels", 3, 2),
    "a kind of the future": ("kinds", 0, 3), "a name that ends before it begins": ("name_ends", 2, 0),
    "a name beyond the names": ("name_ends", 5, 1 << 62), "names that do not fill theirs": ("name_ends", 6, 1 << 5),
    "an offset beyond the data": ("offsets", 6, 1 << 40), "an offset that wraps": ("offsets", 6, (1 << 64) - 8),
    "an offset into the sample before": ("offsets", 3, 8), "a length beyond the data": ("lengths", 6, (1 << 32) - 1),
    "a length into the next sample": ("lengths", 2, 1 << 20), "pixels of no size": ("kinds", 3, 0),
    "a record of no size": ("heights", 0, 0),
}  # fmt: skip


@pytest.mark.parametrize(("column", "row", "value"), HOSTILE.values(), ids=HOSTILE.keys())
def test_a_forged_index_is_refused(changed, column, row, value):
    with pytest.raises(DataError, match=r"changed: its index is inconsistent: .* \(pack it again, or .*\)$"):
        changed(column, row, value)


def test_a_valid_index_is_accepted(changed):
    assert len(changed("labels", 3, 1).train) == 7


@pytest.mark.parametrize("field", range(6))
@pytest.mark.parametrize("value", [(1 << 64) - 1, 1 << 63, 1 << 40, 1 << 20])
def test_huge_counts_allocate_nothing(originals, tmp_path, field, value):
    content = bytearray(originals[0])
    start = PackHeader.from_bytes(bytes(content[:HEADER_BYTES]), "x").index_offset
    struct.pack_into("<Q", content, start + 8 * field, value)
    (tmp_path / "changed").write_bytes(with_valid_checksums(bytes(content)))
    with pytest.raises(DataError, match="its sizes do not add up"):
        open_pack(tmp_path / "changed")


@pytest.mark.parametrize("sizes", [(0, 1 << 62), (1 << 62, 1 << 62), (128, (1 << 64) - 1), (0, 0)])
def test_shards_of_impossible_sizes_are_refused(core, photos, packed, tmp_path, monkeypatch, sizes):
    monkeypatch.setattr("paceline.data.convert.pack_writer._MIN_SHARD_BYTES", 1000)
    packed(photos, shard_bytes=5000)
    path = tmp_path / "made.pack" / "index.pack"
    content = bytearray(path.read_bytes())
    start = PackHeader.from_bytes(bytes(content[:HEADER_BYTES]), "x").index_offset
    table = start + IndexLayout.from_sizes(IndexSizes.from_bytes(bytes(content[start : start + 64]))).shards
    for number, size in enumerate(sizes):
        struct.pack_into("<Q", content, table + 16 * number, size)
    path.unlink()
    path.write_bytes(with_valid_checksums(bytes(content)))
    with pytest.raises(DataError, match="its list of shards is invalid"):
        open_pack(tmp_path / "made.pack")


@pytest.mark.parametrize(("name", "printed"), [(b"cat/\xff.jpg", r"cat/\udcff.jpg"), (b"cat/\n.jpg", r"cat/\n.jpg")])
def test_unprintable_names_are_escaped_and_stored_unchanged(core, photos, packed, name, printed):
    paths = photos.train.paths
    train = replace(photos.train, paths=replace(paths, joined=paths.joined.replace(b"cat/a.jpg", name)))
    found = packed(replace(photos, train=train), skip_bad=True)
    assert found.train.names[0] == name
    assert found.train.name_of(0) == printed


def test_a_sample_in_two_shards_is_refused(core, photos, packed, tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.data.convert.pack_writer._MIN_SHARD_BYTES", 1000)
    packed(photos, shard_bytes=5000)
    path = tmp_path / "made.pack" / "index.pack"
    content = bytearray(path.read_bytes())
    start = PackHeader.from_bytes(bytes(content[:HEADER_BYTES]), "x").index_offset
    table = start + IndexLayout.from_sizes(IndexSizes.from_bytes(bytes(content[start : start + 64]))).shards
    for number, change in ((0, -8), (1, 8)):
        (size,) = struct.unpack_from("<Q", content, table + 16 * number)
        struct.pack_into("<Q", content, table + 16 * number, size + change)
    path.unlink()
    path.write_bytes(with_valid_checksums(bytes(content)))
    with pytest.raises(DataError, match="its index is inconsistent: a sample of train lies in two shards"):
        open_pack(tmp_path / "made.pack")
