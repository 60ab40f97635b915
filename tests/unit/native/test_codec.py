"""A record decodes to the pixels that Pillow gives for the file, bit for bit; what cannot is refused, with why."""

import io
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from paceline.data.bad_images import ImageError
from paceline.data.decode import decode
from paceline.data.native import NativeExtension

SUBSAMPLINGS = {"4:4:4": 0, "4:2:2": 1, "4:2:0": 2}
AssertSame = Callable[..., bytes]

SIZES = [(1, 1), (1, 40), (40, 1), (2, 3), (7, 9), (8, 8), (15, 16), (16, 17), (17, 15), (23, 31), (33, 5), (40, 39)]
SOF0, SOF2, DHT, SOS, DQT, DRI, APP0, APP1, APP14 = 0xC0, 0xC2, 0xC4, 0xDA, 0xDB, 0xDD, 0xE0, 0xE1, 0xEE
HEADER_BYTES, POINT_BYTES, TAIL_BYTES = 32, 10, 8


def picture(height: int, width: int, seed: int, mode: str = "RGB") -> Image.Image:
    """Return waves and noise: all frequencies, and colors that clip."""
    draw = np.random.default_rng([height, width, seed])
    y, x = np.mgrid[0:height, 0:width]
    waves = [128 + 110 * np.sin(x / draw.uniform(1, 9) + y / draw.uniform(1, 9)) for _ in range(3)]
    noisy = np.stack(waves, -1) + draw.normal(0, draw.choice([0, 10, 60]), (height, width, 3))
    return Image.fromarray(np.clip(noisy, 0, 255).astype(np.uint8)).convert(mode)


def jpeg(height: int, width: int, seed: int = 0, mode: str = "RGB", **options: Any) -> bytes:
    file = io.BytesIO()
    options = {"quality": int(np.random.default_rng(seed).choice([1, 20, 50, 75, 90, 100])), **options}
    picture(height, width, seed, mode).save(file, "JPEG", **options)
    return file.getvalue()


def segments(file: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield (marker, start, end) of each segment to the first scan's header; start is of the 0xff."""
    at, marker = 2, 0
    while marker != SOS:
        marker, end = file[at + 1], at + 2 + int.from_bytes(file[at + 2 : at + 4], "big")
        yield marker, at, end
        at = end


def segment(marker: int, content: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(content) + 2) + content


def with_segment(file: bytes, marker: int, content: bytes) -> bytes:
    return file[:2] + segment(marker, content) + file[2:]


def without(file: bytes, marker: int) -> bytes:
    """Leave out all segments of a kind before the first scan."""
    spans = [(start, end) for found, start, end in segments(file) if found == marker]
    assert spans
    for start, end in reversed(spans):
        file = file[:start] + file[end:]
    return file


def changed(file: bytes, marker: int, offset: int, value: int) -> bytes:
    """Set the byte `offset` of the first such segment's content."""
    start = next(start for found, start, _ in segments(file) if found == marker)
    return file[: start + 4 + offset] + bytes([value]) + file[start + 5 + offset :]


def scan_of(file: bytes) -> bytes:
    """Return the bits of a file without restart markers, without stuffing."""
    (end,) = (end for found, _, end in segments(file) if found == SOS)
    assert file.endswith(b"\xff\xd9")
    return file[end:-2].replace(b"\xff\0", b"\xff")


def reshaped(file: bytes, height: int, width: int, factors: int) -> bytes:
    """Give a 4:2:x file another size and other factors of its first component, for which its bits are as good: Pillow
    writes no 4:4:0 and no 4:1:1."""
    start = next(start for found, start, _ in segments(file) if found == SOF0)
    frame = bytearray(file[start : start + 19])
    frame[5:9] = struct.pack(">HH", height, width)
    frame[11] = factors
    return file[:start] + bytes(frame) + file[start + 19 :]


def decoded(core: NativeExtension, record: bytes, channels: int) -> NDArray[np.uint8]:
    height, width, _ = core.size_of(record)
    out = np.full((height, width, channels), 99, np.uint8)
    core.decode_into(record, channels, out)
    return out if channels == 3 else out[..., 0]


@pytest.fixture
def assert_same(core: NativeExtension) -> Iterator[AssertSame]:
    """Return a function that compares a file's record with Pillow, in RGB and gray, with all instruction sets."""
    best = core.isa()

    def compare(file: bytes, every: int = 3) -> bytes:
        record = core.index_jpeg(file, every)
        for channels in (3, 1):
            pillow = np.asarray(decode(file, channels=channels, name="it"))
            for isa in {best, "scalar"}:
                core.choose_isa(isa)
                np.testing.assert_array_equal(decoded(core, record, channels), pillow)
        return record

    yield compare
    core.choose_isa(best)


@pytest.mark.parametrize("subsampling", SUBSAMPLINGS)
@pytest.mark.parametrize("progressive", [False, True], ids=["sequential", "progressive"])
def test_colours_of_all_sizes_are_pillow_s(assert_same: AssertSame, subsampling: str, progressive: bool) -> None:
    for seed, (height, width) in enumerate(SIZES):
        file = jpeg(height, width, seed, subsampling=SUBSAMPLINGS[subsampling], progressive=progressive)
        assert any(found == SOF2 for found, *_ in segments(file)) == progressive
        assert_same(file)


@pytest.mark.parametrize("progressive", [False, True], ids=["sequential", "progressive"])
def test_grey_of_all_sizes_is_pillow_s(assert_same: AssertSame, progressive: bool) -> None:
    for seed, (height, width) in enumerate(SIZES):
        assert_same(jpeg(height, width, seed, "L", progressive=progressive))


RESHAPED = {
    "4:4:0": ("4:2:2", 0x12, (8, 16)),
    "4:1:1": ("4:2:0", 0x41, (32, 8)),
    "4:1:0, upright": ("4:2:0", 0x14, (8, 32)),
}


@pytest.mark.parametrize("name", RESHAPED)
def test_rarer_samplings_are_pillow_s(assert_same: AssertSame, name: str) -> None:
    subsampling, factors, (mcu_width, mcu_height) = RESHAPED[name]
    for seed in range(12):
        file = jpeg(30, 60, seed, subsampling=SUBSAMPLINGS[subsampling], optimize=True)
        across, down = 4, 4 if subsampling == "4:2:2" else 2  # MCUs of 16x8 or 16x16; as many, or fewer, stay
        across, down = (across, down) if mcu_width > 8 else (down, across)
        less_high, less_wide = np.random.default_rng(seed).integers(0, 8, 2)
        assert_same(reshaped(file, down * mcu_height - less_high, across * mcu_width - less_wide, factors))


def test_grey_that_claims_sampling_factors_is_pillow_s(assert_same: AssertSame) -> None:
    assert_same(changed(jpeg(21, 35, mode="L"), SOF0, 7, 0x22))


@pytest.mark.parametrize("optimize", [False, True], ids=["usual tables", "its own tables"])
@pytest.mark.parametrize("progressive", [False, True], ids=["sequential", "progressive"])
def test_files_with_restart_markers_are_pillow_s(assert_same: AssertSame, optimize: bool, progressive: bool) -> None:
    for blocks in (1, 2, 3, 5, 8, 19):
        options: dict[str, Any] = {"subsampling": blocks % 3, "optimize": optimize, "progressive": progressive}
        file = jpeg(37, 83, blocks, restart_marker_blocks=blocks, **options)
        assert any(found == DRI for found, *_ in segments(file)) and b"\xff\xd0" in file
        assert_same(file, every=1 + blocks % 4)


@pytest.mark.parametrize("orientation", range(10))
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_orientation_is_applied_and_wrong_ones_are_not(assert_same: AssertSame, orientation: int, mode: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    record = assert_same(jpeg(35, 50, 3, mode, exif=exif.tobytes()))
    assert record[9] == (orientation if 1 <= orientation <= 8 else 1)


def tiff(order: str, kind: int, value: int, *, num: int = 1, start: int = 8) -> bytes:
    """Return a TIFF block whose directory has the orientation, as a short (kind 3) or a long (kind 4)."""
    mark = b"II" if order == "<" else b"MM"
    number = struct.pack(f"{order}I", value) if kind == 4 else struct.pack(f"{order}HH", value, 0)
    return mark + struct.pack(f"{order}HIH", 42, start, num) + struct.pack(f"{order}HHI", 0x0112, kind, 1) + number


EXIF_BLOCKS = {
    "little-endian": ([b"Exif\0\0" + tiff("<", 3, 6)], 6),
    "big-endian": ([b"Exif\0\0" + tiff(">", 3, 8)], 8),
    "long": ([b"Exif\0\0" + tiff(">", 4, 3)], 3),
    "a long that is too large": ([b"Exif\0\0" + tiff("<", 4, 65536 + 6)], 1),
    "two segments joined": ([b"Exif\0\0" + tiff("<", 3, 5)[:13], b"Exif\0\0" + tiff("<", 3, 5)[13:]], 5),
    "cut short": ([b"Exif\0\0" + tiff("<", 3, 6)[:-5]], 1),
    "a directory far away": ([b"Exif\0\0" + tiff("<", 3, 6, start=2**32 - 1)], 1),
    "no entries": ([b"Exif\0\0" + tiff("<", 3, 6, num=0)], 1),
    "no order of bytes": ([b"Exif\0\0XX" + tiff("<", 3, 6)[2:]], 1),
    "empty": ([b"Exif\0\0"], 1),
    "another application's": ([b"exif\0\0" + tiff("<", 3, 6)], 1),
}


@pytest.mark.parametrize("name", EXIF_BLOCKS)
def test_odd_exif_blocks_turn_a_record_as_they_turn_the_file(assert_same: AssertSame, name: str) -> None:
    blocks, orientation = EXIF_BLOCKS[name]
    file = jpeg(9, 14)
    for block in reversed(blocks):
        file = with_segment(file, APP1, block)
    assert assert_same(file)[9] == orientation


def adobe(transform: int) -> bytes:
    return b"Adobe\0\x64\0\0\0\0" + bytes([transform])


def test_colours_are_told_apart_as_libjpeg_tells_them(assert_same: AssertSame, core: NativeExtension) -> None:
    file = jpeg(20, 20)
    bare = without(file, APP0)
    assert_same(bare)
    assert_same(with_segment(bare, APP14, adobe(1)))
    assert_same(with_segment(file, APP14, adobe(0)))  # JFIF's mark weighs more
    named = bare
    for number, letter in enumerate(b"RGB"):
        named = changed(changed(named, SOF0, 6 + 3 * number, letter), SOS, 1 + 2 * number, letter)
    assert_same(with_segment(named, APP14, adobe(1)))
    for rgb in (with_segment(bare, APP14, adobe(0)), with_segment(bare, APP14, adobe(7)), named):
        with pytest.raises(ValueError, match="RGB"):
            core.index_jpeg(rgb)


def test_a_table_of_16_bits_is_kept(assert_same: AssertSame) -> None:
    file = jpeg(20, 20, subsampling=0)
    start, end = next((start, end) for found, start, end in segments(file) if found == DQT)
    content = file[start + 4 : end]
    assert len(content) == 65
    wide = segment(DQT, bytes([0x10 | content[0]]) + b"".join(bytes([value // 200, value]) for value in content[1:]))
    assert_same(file[:start] + wide + file[end:])


def test_what_follows_the_image_and_what_pads_markers_is_left_out(assert_same: AssertSame) -> None:
    file = jpeg(20, 30)
    record = assert_same(file)
    assert assert_same(file + b"a second image, or anything") == record
    assert assert_same(file[:2] + b"\xff\xff" + file[2:-2] + b"\xff\xff\xff\xd9") == record
    assert assert_same(file[:-2] + segment(0xFE, b"a comment") + b"\xff\xd9") == record


REFUSED: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "nothing": (lambda file: b"", "not a JPEG"),
    "of another kind": (lambda file: b"\x89PNG\r\n\x1a\n", "not a JPEG"),
    "cut in the header": (lambda file: file[:100], "cut off"),
    "cut in the image": (lambda file: file[:-40], "cut off"),
    "without its end": (lambda file: file[:-2], "cut off"),
    "an image too short": (lambda file: file[:-40] + b"\xff\xd9", "cut off"),
    "bytes behind the image": (lambda file: file[:-2] + b"\0\xff\xd9", "bytes behind"),
    "bytes between markers": (lambda file: file[:20] + b"\0" + file[20:], "between its markers"),
    "a restart out of place": (lambda file: file[:2] + b"\xff\xd0" + file[2:], "out of place"),
    "a restart that is not announced": (lambda file: file[:-30] + b"\xff\xd0" + file[-30:], "cut off"),
    "no quantization": (lambda file: without(file, DQT), "table is missing"),
    "no Huffman tables": (lambda file: without(file, DHT), "table is missing"),
    "no frame": (lambda file: without(file, SOF0), "before the frame"),
    "two frames": (lambda file: with_segment(file, SOF0, b"\x08\0\1\0\1\1\1\x11\0"), "two frame"),
    "12 bits": (lambda file: changed(file, SOF0, 0, 12), "8 bits"),
    "no height": (lambda file: changed(changed(file, SOF0, 1, 0), SOF0, 2, 0), "does not say"),
    "larger than any": (lambda file: changed(changed(file, SOF0, 1, 255), SOF0, 3, 255), "too large"),
    "a factor of 3": (lambda file: changed(file, SOF0, 7, 0x31), "sampled"),
    "no factor": (lambda file: changed(file, SOF0, 7, 0x01), "frame header"),
    "a table too full": (lambda file: changed(file, DHT, 1, 2), "Huffman table"),
    "a segment of no length": (lambda file: file[:2] + b"\xff\xe5\0\1" + file[2:], "without length"),
    "arithmetic coding": (lambda file: with_segment(file, 0xCC, b"\0\1"), "arithmetic"),
    "lossless": (lambda file: with_segment(file, 0xC3, b""), "lossless"),
    "hierarchical": (lambda file: with_segment(file, 0xDE, b""), "hierarchical"),
    "another scan": (lambda file: file[:-2] + file[next(s for m, s, _ in segments(file) if m == SOS) :], "scan"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_is_not_whole_is_refused_with_the_reason(core: NativeExtension, name: str) -> None:
    damage, reason = REFUSED[name]
    with pytest.raises(ValueError, match=reason):
        core.index_jpeg(damage(jpeg(30, 40, 1, quality=80)))


def test_a_progressive_file_cut_anywhere_is_refused(core: NativeExtension) -> None:
    file = jpeg(30, 40, 1, quality=80, progressive=True)
    for end in range(2, len(file) - 2, 5):
        for rest in (b"", b"\xff\xd9"):
            with pytest.raises(ValueError, match=r"cut off|damaged|not complete|not a JPEG"):
                core.index_jpeg(file[:end] + rest)


def test_cmyk_is_refused(core: NativeExtension) -> None:
    with pytest.raises(ValueError, match="CMYK"):
        core.index_jpeg(jpeg(10, 10, mode="CMYK"))


def test_a_progressive_file_that_lacks_a_scan_is_refused(core: NativeExtension) -> None:
    file = jpeg(30, 40, progressive=True)
    last = file.rindex(b"\xff\xda")
    with pytest.raises(ValueError, match="not complete"):
        core.index_jpeg(file[:last] + b"\xff\xd9")


@pytest.mark.parametrize("contrast", [255, 100, 69, 40, 24, 17, 13])
def test_coefficients_up_to_8191_are_taken_and_larger_ones_are_refused(core: NativeExtension, contrast: int) -> None:
    """Columns that alternate: of 64 coefficients the one of the highest frequency across is the largest. Only its
    quantization factor is changed, which for the widest contrast makes values of 10 bits too large, and so on."""
    columns = np.tile((np.arange(24) % 2 * contrast).astype(np.uint8), (16, 1))
    basis = np.cos((2 * np.arange(8) + 1) * 7 * np.pi / 16) / 2
    largest = abs(round(float((columns[0, :8] * basis).sum() * np.sqrt(8))))
    file = io.BytesIO()
    Image.fromarray(columns).save(file, "JPEG", quality=100)
    limit, place = 8191 // largest, 1 + 28  # behind the table's number; 28 in zigzag order is 7 in a row
    assert changed(file.getvalue(), DQT, place, 1) == file.getvalue()
    assert core.index_jpeg(changed(file.getvalue(), DQT, place, limit))
    with pytest.raises(ValueError, match="coefficients no image has"):
        core.index_jpeg(changed(file.getvalue(), DQT, place, limit + 1))


@pytest.mark.parametrize(("level", "limit"), [(255, 8), (0, 7), (100, 36)])
def test_means_up_to_8191_are_taken_and_larger_ones_are_refused(core: NativeExtension, level: int, limit: int) -> None:
    """The first coefficient of a flat block is eight times the distance of its level from 128."""
    assert limit == 8191 // (8 * abs(level - 128))
    file = io.BytesIO()
    Image.new("L", (40, 24), level).save(file, "JPEG", quality=100)
    assert core.index_jpeg(changed(file.getvalue(), DQT, 1, limit))
    with pytest.raises(ValueError, match="coefficients no image has"):
        core.index_jpeg(changed(file.getvalue(), DQT, 1, limit + 1))


def test_a_damaged_file_is_refused_or_is_what_pillow_makes_of_it(core: NativeExtension) -> None:
    draw = np.random.default_rng(5)
    indexed = 0
    for trial in range(400):
        file = bytearray(jpeg(17 + trial % 9, 23, trial % 7, progressive=trial % 3 == 0, subsampling=trial % 3))
        for _ in range(1 + trial % 2):
            file[draw.integers(2, len(file))] ^= 1 << draw.integers(8)
        try:
            record = core.index_jpeg(bytes(file))
        except ValueError:
            continue
        indexed += 1
        np.testing.assert_array_equal(decoded(core, record, 3), np.asarray(decode(bytes(file), channels=3, name="it")))
    assert 20 < indexed < 380


def test_a_record_is_laid_out_as_documented(core: NativeExtension) -> None:
    file = jpeg(35, 50, 2, subsampling=2, quality=75)
    record = core.index_jpeg(file, 2)
    head = struct.unpack_from("<4sHHBBBB3s3sBBIII", record)
    num_points, scan_bytes, tables_bytes = head[-3:]
    assert head[:-3] == (b"PJ1\0", 50, 35, 3, 1, 2, 0, b"\x22\x11\x11", b"\x00\x11\x11", 15, 0)
    assert num_points == 3 * 2  # 4 x 3 MCUs of 16 x 16, a point every 2
    tables_at = HEADER_BYTES + 3 * 128
    points_at = -(-(tables_at + tables_bytes) // 4) * 4
    bits_at = -(-(points_at + num_points * POINT_BYTES) // 4) * 4
    quantisation = np.frombuffer(record, "<u2", 3 * 64, HEADER_BYTES).reshape(3, 64)
    pillow = Image.open(io.BytesIO(file)).quantization  # type: ignore[attr-defined]
    assert [table.tolist() for table in quantisation] == [pillow[0], pillow[1], pillow[1]]
    tables = b"".join(file[start + 5 : end] for found, start, end in segments(file) if found == DHT)
    assert sorted(tables) == sorted(record[tables_at : tables_at + tables_bytes])
    assert record[bits_at : bits_at + scan_bytes] == scan_of(file)
    assert record[bits_at + scan_bytes :] == bytes(TAIL_BYTES)
    points = [struct.unpack_from("<I3h", record, points_at + POINT_BYTES * point) for point in range(num_points)]
    bits = [bit for bit, *_ in points]
    assert points[0] == (0, 0, 0, 0) and bits == sorted(set(bits)) and bits[-1] < 8 * scan_bytes


def test_where_the_seek_points_are_changes_no_pixel(core: NativeExtension) -> None:
    file = jpeg(40, 200, 4)
    pixels = [decoded(core, core.index_jpeg(file, every), 3) for every in (1, 2, 8, 13, 255)]
    assert all(np.array_equal(pixels[0], others) for others in pixels[1:])


def status_of(core: NativeExtension, record: bytes) -> str | None:
    try:
        decoded(core, record, 3)
    except ValueError as error:
        return str(error)
    return None


def test_damage_of_each_part_is_named(core: NativeExtension) -> None:
    record = bytearray(core.index_jpeg(jpeg(64, 64, 1, "L", quality=90), 1))
    tables_at = HEADER_BYTES + 128
    points_at = -(-(tables_at + struct.unpack_from("<I", record, 28)[0]) // 4) * 4
    bits_at = -(-(points_at + 64 * POINT_BYTES) // 4) * 4
    for offset, value, status in (
        (0, 0, 1),  # the magic
        (4, 99, 1),  # a width that takes more points
        (tables_at, 200, 1),  # more values than there are bytes
        (points_at + 3, 255, 3),  # a point far behind the bits
    ):
        damaged = record[:offset] + bytes([value]) + record[offset + 1 :]
        assert status_of(core, bytes(damaged)) == core.reason(status), offset
    crowded = record[:tables_at] + b"\2\0" + bytes([sum(record[tables_at : tables_at + 16]) - 2]) + bytes(13)
    assert status_of(core, bytes(crowded + record[tables_at + 16 :])) == core.reason(2)
    ones = record[:bits_at] + b"\xff" * (len(record) - bits_at - TAIL_BYTES) + bytes(TAIL_BYTES)
    assert status_of(core, bytes(ones)) == core.reason(4)
    huge = struct.pack("<HH", 60000, 60000)
    assert status_of(core, bytes(record[:4] + huge + record[8:])) == core.reason(6)


def test_records_of_few_bytes_cannot_ask_for_much_memory(core: NativeExtension) -> None:
    record = bytearray(core.index_jpeg(jpeg(8, 8, mode="L", quality=1), 255))
    record[4:8] = struct.pack("<HH", 2000, 1)  # 250 blocks in the bits of one: as many points
    assert status_of(core, bytes(record)) == core.reason(1)


def test_damaged_records_decode_alike_with_all_instructions_or_are_refused(core: NativeExtension) -> None:
    best = core.isa()
    draw = np.random.default_rng(6)
    records = [core.index_jpeg(jpeg(33, 47, seed, subsampling=seed % 3), 1 + seed) for seed in range(6)]
    outcomes: dict[str | None, int] = {}
    try:
        for trial in range(600):
            damaged = bytearray(records[trial % len(records)])
            for _ in range(1 + trial % 3):
                damaged[draw.integers(len(damaged))] ^= 1 << draw.integers(8)
            core.choose_isa("scalar")
            status = status_of(core, bytes(damaged))
            core.choose_isa(best)
            assert status_of(core, bytes(damaged)) == status
            outcomes[status] = outcomes.get(status, 0) + 1
            if status is None:
                pixels = decoded(core, bytes(damaged), 1)
                core.choose_isa("scalar")
                np.testing.assert_array_equal(decoded(core, bytes(damaged), 1), pixels)
    finally:
        core.choose_isa(best)
    assert outcomes[None] > 50 and outcomes[core.reason(1)] > 10 and outcomes[core.reason(4)] > 10


@pytest.mark.real_data
def test_every_photograph_of_the_sample_is_pillow_s(real_data: Callable[[str], Path], core: NativeExtension) -> None:
    names = sorted((real_data("imagenet-sample") / "train").glob("*/*.JPEG"))
    assert len(names) == 500
    for name in names:
        file = name.read_bytes()
        pixels = decoded(core, core.index_jpeg(file), 3)
        np.testing.assert_array_equal(pixels, np.asarray(decode(file, channels=3, name=name.name)))


def test_pillow_refuses_what_it_refuses_and_indexing_does_too(core: NativeExtension) -> None:
    file = changed(jpeg(20, 20, mode="L"), SOF0, 7, 0x50)
    with pytest.raises(ImageError):
        decode(file, channels=1, name="it")
    with pytest.raises(ValueError, match="frame header"):
        core.index_jpeg(file)
