"""JPEG files as they lie: the pixels of their records, with and without index entries, from paths, parts and memory."""

import io
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageOps

from paceline.data.native import NOT_INDEXABLE, RESIZED, NativeExtension

if TYPE_CHECKING:
    from paceline.data._native import Pool, Task

LIMIT_S = 60.0  # of any wait here, all of which take milliseconds
UNREADABLE, SIZE = 8, 16
CSRC = Path(__file__).parents[3] / "csrc"
File = bytes | memoryview | None


def picture(height: int, width: int, mode: str = "RGB") -> Image.Image:
    """Return waves and noise."""
    draw = np.random.default_rng([height, width])
    y, x = np.mgrid[0:height, 0:width]
    waves = [128 + 100 * np.sin(x / draw.uniform(2, 30) + y / draw.uniform(2, 30)) for _ in range(3)]
    noisy = np.stack(waves, -1) + draw.normal(0, 12, (height, width, 3))
    return Image.fromarray(np.clip(noisy, 0, 255).astype(np.uint8)).convert(mode)


def jpeg(height: int = 61, width: int = 83, mode: str = "RGB", **options: Any) -> bytes:
    file = io.BytesIO()
    picture(height, width, mode).save(file, "JPEG", **{"quality": 85, **options})
    return file.getvalue()


def turned(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return jpeg(40, 72, exif=exif)


COPIED = {
    "4:4:4": jpeg(subsampling=0),
    "4:2:2": jpeg(subsampling=1),
    "4:2:0": jpeg(subsampling=2),
    "gray": jpeg(mode="L"),
    "optimized": jpeg(optimize=True, quality=97),
    "coarse": jpeg(quality=3),
    "exact": jpeg(quality=100, subsampling=0),
    "tiny": jpeg(1, 1),
    "trailing": jpeg(9, 200) + b"more",
    "comment": jpeg(comment=b"\xff\xd9\xff\xda"),
    **{f"orientation {number}": turned(number) for number in range(1, 9)},
}
CODED_ANEW = {
    "progressive": jpeg(progressive=True),
    "progressive gray": jpeg(mode="L", progressive=True),
    "restarts": jpeg(restart_marker_rows=1),
    "many restarts": jpeg(restart_marker_blocks=3, subsampling=0),
}
ALL = {**COPIED, **CODED_ANEW}


class Batch(NamedTuple):
    """A batch under way, and what it is made into."""

    task: "Task"
    out: NDArray[np.uint8]
    status: NDArray[np.int32]
    sizes: NDArray[np.int32]

    @property
    def indexes(self) -> list[bytes | None]:
        """Wait, and return the new entries."""
        assert self.task.wait(LIMIT_S)
        return self.task.indexes()


def size_of(file: bytes) -> tuple[int, int]:
    """Return the upright (height, width) that Pillow finds."""
    with Image.open(io.BytesIO(file)) as opened:
        width, height = ImageOps.exif_transpose(opened).size
    return height, width


def boxes_of(sizes: NDArray[np.int32]) -> NDArray[np.float64]:
    height, width = sizes.T
    return np.stack([height * 0.15, width * 0.25, height * 0.7, width * 0.6], axis=1)


def submit(
    pool: "Pool", files: Sequence[File], entries: Sequence[bytes | None] = (), sizes: Any = None, /, **changes: Any
) -> Batch:
    """Ask for a crop of each file; `sizes` is needed where it is not memory."""
    n = len(files)
    if sizes is None:
        sizes = [(1, 1) if file is None else size_of(bytes(file)) for file in files]
    sizes = np.array(sizes, np.int32).reshape(n, 2)
    filled = [entry or b"" for entry in entries] or [b""] * n
    lengths = np.array([len(entry) for entry in filled], np.uint64)
    asked: dict[str, Any] = {
        "files": files,
        "offsets": np.zeros(n, np.uint64),
        "lengths": np.zeros(n, np.uint64),
        "index_buffers": [b"unused", b"".join(filled)],
        "index_of": np.ones(n, np.int32),
        "index_offsets": (np.cumsum(lengths) - lengths).astype(np.uint64),
        "index_lengths": lengths,
        "boxes": boxes_of(sizes),
        "flips": np.arange(n) % 2 == 0,
        "inside": True,
        "size": SIZE,
        "channels": 3,
        "sizes": sizes,
        "out": np.zeros((n, 3, SIZE, SIZE), np.uint8),
        "status": np.full(n, -1, np.int32),
        **changes,
    }
    return Batch(pool.submit_jpegs(**asked), asked["out"], asked["status"], asked["sizes"])


def measure(pool: "Pool", files: Sequence[File], **changes: Any) -> tuple[list[list[int]], list[int]]:
    n = len(files)
    sizes, status = np.full((n, 2), 77, np.int32), np.full(n, -1, np.int32)
    asked = {"offsets": np.zeros(n, np.uint64), "lengths": np.zeros(n, np.uint64), **changes}
    task = pool.measure(files=files, sizes=sizes, status=status, **asked)
    assert task.wait(LIMIT_S) and task.indexes() == [None] * n
    return sizes.tolist(), status.tolist()


def crops_of_records(core: NativeExtension, files: Sequence[bytes], sizes: Any = None) -> NDArray[np.uint8]:
    """Return what a pack of the files gives."""
    out = np.zeros((len(files), 3, SIZE, SIZE), np.uint8)
    boxes = boxes_of(np.array([size_of(file) for file in files] if sizes is None else sizes, np.int32))
    for n, file in enumerate(files):
        core.decode_crop_into(core.index_jpeg(file), tuple(boxes[n].tolist()), True, n % 2 == 0, SIZE, 3, out[n])
    return out


@pytest.fixture
def pool(core: NativeExtension) -> Iterator["Pool"]:
    made = core.Pool(2)
    yield made
    made.close()


@pytest.fixture(scope="module")
def entry(core: NativeExtension) -> bytes:
    """The index entry of the 4:2:0 file."""
    pool = core.Pool(1)
    (made,) = submit(pool, [memoryview(COPIED["4:2:0"])]).indexes
    pool.close()
    assert made is not None
    return made


# ---- pixels ----------------------------------------------------------------------------------------------------------


def test_crops_of_files_are_those_of_their_records(core: NativeExtension, pool: "Pool", tmp_path: Path) -> None:
    """From paths, from parts of one file, and from memory; without entries, and with those made before."""
    files, sizes = list(ALL.values()), [size_of(file) for file in ALL.values()]
    wanted = crops_of_records(core, files)
    for number, file in enumerate(files):
        (tmp_path / str(number)).write_bytes(file)
    (tmp_path / "tar").write_bytes(b"".join(b"header" + file for file in files))
    lengths = np.array([len(file) for file in files], np.uint64)
    parts = {"offsets": (np.cumsum(lengths + 6) - lengths).astype(np.uint64), "lengths": lengths}
    entries: list[bytes | None] = []
    for which, changes in (
        ([os.fsencode(tmp_path / str(number)) for number in range(len(files))], {}),
        ([os.fsencode(tmp_path / "tar")] * len(files), parts),
        ([memoryview(file) for file in files], {}),
    ):
        for known in ([], entries):
            batch = submit(pool, which, known, sizes, **changes)
            made = batch.indexes
            assert not batch.status.any()
            np.testing.assert_array_equal(batch.out, wanted)
            if known:
                assert made == [None] * len(files), "a valid entry was not used"
            else:
                assert [each is not None for each in made] == [name in COPIED for name in ALL]
                assert not entries or made == entries
                entries = made


def test_gray_and_the_surroundings_of_the_box_are_as_in_a_record(core: NativeExtension, pool: "Pool") -> None:
    files = list(ALL.values())
    batch = submit(
        pool, [memoryview(file) for file in files], inside=False, channels=1,
        out=np.zeros((len(files), 1, SIZE, SIZE), np.uint8),
    )  # fmt: skip
    assert batch.task.wait(LIMIT_S) and not batch.status.any()
    for n, (file, box) in enumerate(zip(files, boxes_of(batch.sizes).tolist(), strict=True)):
        alone = np.zeros((1, SIZE, SIZE), np.uint8)
        core.decode_crop_into(core.index_jpeg(file), tuple(box), False, n % 2 == 0, SIZE, 1, alone)
        np.testing.assert_array_equal(batch.out[n], alone)


def test_an_entry_is_the_head_of_the_record_after_what_it_says_of_the_file(core: NativeExtension, entry: bytes) -> None:
    file, record = COPIED["4:2:0"], core.index_jpeg(COPIED["4:2:0"])
    _, _, length, scan_at, scan_bytes = struct.unpack_from("<3Q2I", entry)
    assert length == len(file) and entry[32:] == record[: len(entry) - 32]
    scan = file[scan_at : scan_at + scan_bytes].replace(b"\xff\0", b"\xff")
    assert file[scan_at - 14 : scan_at - 12] == b"\xff\xda" and file[scan_at + scan_bytes :] == b"\xff\xd9"
    assert scan[:-1] == record[len(entry) - 32 : -9]


def test_digests_are_those_that_the_specification_of_xxh64_gives(tmp_path: Path) -> None:
    """The vectors of xxHash's own sanity test: bytes 56 to 63 of a product that goes on."""
    if not shutil.which("cc"):
        pytest.skip("no C compiler")
    (tmp_path / "main.c").write_text(
        '#include <stdio.h>\n#include "xxh64.h"\n'
        "int main(void) {\n  static uint8_t bytes[256];\n  uint64_t next = 2654435761u;\n"
        "  for (int i = 0; i < 256; i++, next *= 11400714785074694797u) bytes[i] = (uint8_t)(next >> 56);\n"
        "  size_t sizes[] = {0, 1, 4, 14, 222};\n"
        '  for (int i = 0; i < 5; i++) printf("%016llX\\n", (unsigned long long)pl_xxh64(bytes, sizes[i]));\n'
        '  printf("%016llX\\n", (unsigned long long)pl_xxh64((const uint8_t *)"abc", 3));\n}\n'
    )
    program = tmp_path / "main"
    sources = [tmp_path / "main.c", CSRC / "xxh64.c"]
    subprocess.run(["cc", "-std=c11", "-I", CSRC, *sources, "-o", program], check=True, timeout=LIMIT_S)
    printed = subprocess.run([program], capture_output=True, text=True, check=True, timeout=LIMIT_S).stdout.split()
    assert printed == [
        "EF46DB3751D8E999", "E934A84ADB052768", "9136A0DCA57457EE", "8282DCC4994E35C8", "B641AE8CB691C174",
        "44BC2CF5AD770999",
    ]  # fmt: skip


# ---- entries that are wrong ------------------------------------------------------------------------------------------


def test_a_damaged_entry_is_not_used(core: NativeExtension, pool: "Pool", entry: bytes) -> None:
    """Each byte changed, and the entry cut at each length: the pixels are right, and a new entry is made."""
    file = memoryview(COPIED["4:2:0"])
    damaged = [entry[:at] + bytes([entry[at] ^ (1 << at % 8)]) + entry[at + 1 :] for at in range(len(entry))]
    damaged += [entry[:length] for length in range(1, len(entry))] + [entry + b"\0", entry[:32], bytes(len(entry))]
    batch = submit(pool, [file] * len(damaged), damaged, [size_of(bytes(file))] * len(damaged))
    assert batch.indexes == [entry] * len(damaged) and not batch.status.any()
    wanted = crops_of_records(core, [bytes(file)] * 2)
    for parity in (0, 1):
        assert (batch.out[parity::2] == wanted[parity]).all()


def test_an_entry_of_another_file_is_not_used(core: NativeExtension, pool: "Pool") -> None:
    """Not even of one that differs in a byte that no pixel depends on, or is a byte longer."""
    comment = COPIED["comment"]
    files = [comment, comment.replace(b"\xff\xd9\xff\xda", b"\xff\xd9\xff\xdb"), comment + b"\0", COPIED["4:2:0"]]
    (entry, *_) = submit(pool, [memoryview(file) for file in files]).indexes
    batch = submit(pool, [memoryview(file) for file in files], [entry] * 4)
    new = batch.indexes
    assert new[0] is None and None not in new[1:] and entry not in new
    np.testing.assert_array_equal(batch.out, crops_of_records(core, files))


def test_a_forged_entry_crashes_nothing(core: NativeExtension, pool: "Pool", entry: bytes) -> None:
    """One whose checksum fits needs a compiled XXH64 to make; the fuzzer does. Here: valid entries of other images."""
    files = list(COPIED.values())
    entries = submit(pool, [memoryview(file) for file in files]).indexes
    for shift in range(1, len(files)):
        batch = submit(pool, [memoryview(file) for file in files], entries[shift:] + entries[:shift])
        assert batch.indexes == entries
    np.testing.assert_array_equal(batch.out, crops_of_records(core, files))


# ---- files that are not what they were -------------------------------------------------------------------------------


def test_a_file_of_another_size_is_not_decoded(core: NativeExtension, pool: "Pool", tmp_path: Path) -> None:
    """As one that was replaced since it was measured: the size comes back, and with that it is decoded."""
    path = tmp_path / "a.jpg"
    path.write_bytes(COPIED["4:2:0"])
    sizes, _ = measure(pool, [os.fsencode(path)])
    path.write_bytes(turned(6))
    (entry, *_) = submit(pool, [memoryview(turned(6))]).indexes
    for known in ([], [entry]):
        batch = submit(pool, [os.fsencode(path)], known, sizes)
        assert batch.indexes == [None]
        assert batch.status.tolist() == [RESIZED] and batch.sizes.tolist() == [[72, 40]] and not batch.out.any()
    batch = submit(pool, [os.fsencode(path)], (), batch.sizes)
    assert batch.indexes == [entry]
    np.testing.assert_array_equal(batch.out, crops_of_records(core, [turned(6)]))


def png() -> bytes:
    file = io.BytesIO()
    picture(20, 30).save(file, "PNG")
    return file.getvalue()


def huge(height: int, width: int) -> bytes:
    """Return a small file whose header claims another size."""
    file = COPIED["gray"]
    frame = file.index(b"\xff\xc0") + 5
    return file[:frame] + struct.pack(">HH", height, width) + file[frame + 4 :]


OTHERS = {
    "PNG": png(),
    "CMYK": jpeg(mode="CMYK"),
    "a letter": b"x",
    "its first bytes": COPIED["4:2:0"][:100],
    "65500 x 65500": huge(65500, 65500),
    "zero rows": huge(0, 9),
}
DAMAGED = {
    "cut": COPIED["4:2:0"][:-300],
    "65500 x 1900": huge(65500, 1900),
    "zeros": COPIED["4:2:0"][:-400] + bytes(400),
    "no end": COPIED["4:2:0"][:-2],
}


def test_files_that_only_pillow_reads_get_a_status(pool: "Pool") -> None:
    files = [memoryview(file) for file in (*OTHERS.values(), *DAMAGED.values())]
    sizes, status = measure(pool, files)
    assert status == [NOT_INDEXABLE] * len(OTHERS) + [0] * len(DAMAGED)
    assert sizes[: len(OTHERS)] == [[0, 0]] * len(OTHERS) and sizes[len(OTHERS) + 1] == [65500, 1900]
    batch = submit(pool, files, (), np.maximum(np.array(sizes), 1))
    assert batch.indexes == [None] * len(files)
    assert batch.status.tolist() == [NOT_INDEXABLE] * len(files) and not batch.out.any()


def test_paths_that_lead_to_no_file_get_a_status(core: NativeExtension, pool: "Pool", tmp_path: Path) -> None:
    """A pipe without a writer too, which others wait for."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").touch()
    (tmp_path / "loop").symlink_to("loop")
    names = ["pipe", "empty", "loop", "missing", ".", "long" * 2000, "empty/below"]
    paths: list[File] = [b"", *(os.fsencode(tmp_path / name) for name in names), b"/dev/zero", memoryview(b"")]
    batch = submit(pool, paths, (), [(9, 9)] * len(paths))
    assert batch.indexes == [None] * len(paths) and "cannot be read" in core.reason(UNREADABLE)
    assert batch.status.tolist() == [UNREADABLE] * len(paths)
    assert measure(pool, paths)[1] == [UNREADABLE] * len(paths)


def test_parts_of_a_file_lie_inside_it(pool: "Pool", tmp_path: Path) -> None:
    path, file = tmp_path / "tar", COPIED["gray"]
    path.write_bytes(bytes(512) + file)
    parts = [(512, len(file)), (512, len(file) + 1), (512, 0), (2**64 - 1, 2), (513, 2**64 - 1), (2**63, 2**63)]
    offsets, lengths = (np.array(column, np.uint64) for column in zip(*parts, strict=True))
    _, status = measure(pool, [os.fsencode(path)] * len(parts), offsets=offsets, lengths=lengths)
    assert status == [0] + [UNREADABLE] * (len(parts) - 1)


def test_a_file_of_more_than_a_gibibyte_is_left_to_pillow(pool: "Pool", tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    path.write_bytes(COPIED["4:2:0"])
    os.truncate(path, (1 << 30) + 1)
    batch = submit(pool, [os.fsencode(path)], (), [size_of(COPIED["4:2:0"])])
    assert batch.indexes == [None] and batch.status.tolist() == [NOT_INDEXABLE]
    assert measure(pool, [os.fsencode(path)])[1] == [NOT_INDEXABLE]


def test_a_mapped_file_that_was_cut_gets_a_status_and_not_a_bus_error(
    core: NativeExtension, pool: "Pool", tmp_path: Path
) -> None:
    if tuple(int(part) for part in os.uname().release.split(".")[:2]) < (5, 14):
        pytest.skip(f"the kernel cannot be asked whether a page can be read before 5.14: {os.uname().release}")
    path = tmp_path / "a.jpg"
    path.write_bytes(bytes(8192) + COPIED["4:2:0"])
    mapped = np.memmap(path, mode="r").data[8192:]
    os.truncate(path, 4096)
    batch = submit(pool, [mapped, memoryview(COPIED["4:2:0"])], (), [size_of(COPIED["4:2:0"])] * 2)
    assert batch.task.wait(LIMIT_S) and batch.status.tolist() == [UNREADABLE, 0]
    # The same of an index buffer: it is as if there were no entry.
    batch = submit(
        pool, [memoryview(COPIED["4:2:0"])], index_buffers=[mapped], index_of=np.zeros(1, np.int32),
        index_lengths=np.full(1, 100, np.uint64),
    )  # fmt: skip
    assert batch.indexes[0] is not None and batch.status.tolist() == [0]


# ---- sizes -----------------------------------------------------------------------------------------------------------


def test_sizes_are_those_of_the_upright_image(pool: "Pool", tmp_path: Path) -> None:
    """Also behind thumbnails: of more than is read at first."""
    blocks = b"".join(struct.pack(">2sH", b"\xff\xe2", 65535) + bytes(65533) for _ in range(5))
    files = [*ALL.values(), turned(8)[:2] + blocks + turned(8)[2:]]
    path = tmp_path / "a.jpg"
    path.write_bytes(files[-1])
    sizes, status = measure(pool, [*(memoryview(file) for file in files), os.fsencode(path), None])
    assert sizes == [*(list(size_of(file)) for file in files), [72, 40], [77, 77]]
    assert status == [0] * (len(files) + 1) + [-1]


# ---- the interface ---------------------------------------------------------------------------------------------------


def test_none_leaves_an_image_alone(core: NativeExtension, pool: "Pool", entry: bytes) -> None:
    file = COPIED["4:2:0"]
    batch = submit(pool, [None, memoryview(file), None], [entry, None, None])
    assert batch.indexes == [None, entry, None]
    assert batch.status.tolist() == [-1, 0, -1] and batch.out.any(axis=(1, 2, 3)).tolist() == [False, True, False]
    assert submit(pool, []).indexes == []


def test_a_box_outside_the_image_gets_a_status(core: NativeExtension, pool: "Pool") -> None:
    batch = submit(pool, [memoryview(COPIED["gray"])] * 2, boxes=np.array([[0.0, 0, 9, 9], [0, 0, 999, 9]]))
    assert batch.task.wait(LIMIT_S) and batch.status.tolist() == [0, 5]


def test_entries_are_there_when_the_task_is_done(core: NativeExtension) -> None:
    pool = core.Pool(1)
    file = memoryview(jpeg(700, 900))
    batch = submit(pool, [file] * 300, (), [(700, 900)] * 300)
    with pytest.raises(ValueError, match="not done"):
        batch.task.indexes()
    pool.close()
    with pytest.raises(ValueError, match="closed before the task was done"):
        batch.task.indexes()
    with pytest.raises(ValueError, match="the pool is closed"):
        measure(pool, [file])


def test_tasks_are_dropped_while_files_are_read(core: NativeExtension, tmp_path: Path) -> None:
    """Also of paths that are read ahead: the task that holds them is gone by then."""
    (tmp_path / "a.jpg").write_bytes(COPIED["4:2:0"])
    path = os.fsencode(tmp_path / "a.jpg")
    for threads in (1, 2, 3):
        pool = core.Pool(threads)
        sizes = np.tile(np.array(size_of(COPIED["4:2:0"]), np.int32), (64, 1))
        for _ in range(100):
            batch = submit(pool, [bytes(bytearray(path)) for _ in range(64)], (), sizes.copy())
            follower = submit(pool, [path] * 64, (), sizes.copy())
            del batch
        assert None not in follower.indexes
        del follower
        late = submit(pool, [path] * 64, (), sizes)
        pool.close()
        del late


def test_files_are_held_until_the_task_is_done_and_no_longer(pool: "Pool") -> None:
    file = bytearray(COPIED["4:2:0"])
    batch = submit(pool, [memoryview(file)] * 500, (), [size_of(COPIED["4:2:0"])] * 500)
    with pytest.raises(BufferError):
        file.clear()
    assert batch.task.wait(LIMIT_S)
    file.clear()
    assert all(each is not None for each in batch.task.indexes())


WRONG = [
    ({"files": [b"a\0b"]}, ValueError, "a path has a zero byte"),
    ({"files": ["a.jpg"]}, TypeError, "a file has no memory"),
    ({"files": [3]}, TypeError, "a file has no memory"),
    ({"files": 3}, TypeError, "not iterable"),
    ({"files": [b"a", b"b"]}, ValueError, "offsets has 1 items, not 2"),
    ({"lengths": np.zeros(2, np.uint64)}, ValueError, "lengths has 2 items, not 1"),
    ({"index_of": np.zeros(1, np.int64)}, TypeError, "index_of .* not int32"),
    (
        {"index_lengths": np.full(1, 9, np.uint64)},
        ValueError,
        "index 0 is at 0, 9 bytes, of index buffer 1",
    ),
    ({"index_lengths": np.full(1, 9, np.uint64), "index_of": np.full(1, -1, np.int32)}, ValueError, "index buffer -1"),
    ({"index_buffers": [b"", None]}, TypeError, "an index buffer has no memory"),
    ({"boxes": np.zeros((1, 3))}, ValueError, "boxes has 3 items, not 4"),
    ({"flips": np.zeros(2, bool)}, ValueError, "flips has 2"),
    ({"sizes": np.zeros((1, 2), np.int64)}, TypeError, "sizes .* not int32"),
    ({"sizes": np.zeros(3, np.int32)}, ValueError, "sizes has 3 items, not 2"),
    ({"sizes": bytes(8)}, ValueError, "sizes cannot be borrowed to be written"),
    ({"out": np.zeros(5, np.uint8)}, ValueError, "out has 5 items, not 768"),
    ({"status": np.zeros(2, np.int32)}, ValueError, "status has 2"),
    ({"size": 0}, ValueError, "size 0"),
    ({"stage": 9}, ValueError, "stage 9"),
]


@pytest.mark.parametrize(("changes", "error", "message"), WRONG)
def test_a_batch_that_cannot_be_made_is_refused(
    pool: "Pool", changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        submit(pool, [memoryview(COPIED["gray"])], **changes)


def test_the_memory_of_an_unusually_large_file_is_given_back(core: NativeExtension) -> None:
    pool = core.Pool(1)
    kept = []
    for extra in (20 << 20, 70 << 20):  # behind the image
        file = memoryview(COPIED["gray"] + bytes(extra))
        batch = submit(pool, [file], (), [size_of(COPIED["gray"])])
        assert batch.indexes[0] is not None
        kept.append(pool.scratch_bytes >> 20)
    pool.close()
    assert kept[0] >= 20 and kept[1] == 0
