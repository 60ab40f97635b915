"""The index cache: shared by processes, complete after any kill, bounded, and never an error."""

import multiprocessing
import os
import resource
import signal
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from paceline.data.loaders import jpeg_index
from paceline.data.loaders.jpeg_index import IndexCache, NoIndexCache, build_index_cache
from paceline.recipe.schema.data import Data

LIMIT_S = 60
NAMES = [f"/images/{number}.jpg".encode() for number in range(20)]
INDEXES = [struct.pack("<QQQ", number, number, 1000 + number) + bytes([number]) * 200 for number in range(20)]
SIZES = np.array([[number + 1, 65_535 - number] for number in range(20)])


def cache_in(folder: Path, warned: list[str], max_bytes: int = 10**6, root: str = "/images") -> IndexCache:
    return IndexCache(folder, root, max_bytes, warned.append)


def add(cache: IndexCache, numbers: Sequence[int], seal: bool = True) -> None:
    rows = list(numbers)
    cache.add([NAMES[row] for row in rows], SIZES[rows], [INDEXES[row] for row in rows])
    if seal:
        cache.seal()


def found_in(cache: IndexCache) -> list[int]:
    """Return the numbers of the names that the cache has, and assert that what it has of them is right."""
    cache.refresh()
    found = cache.find(NAMES)
    numbers = np.flatnonzero(found.lengths).tolist()
    for number in numbers:
        start = int(found.offsets[number])
        memory = found.buffers[found.buffer_of[number]][start : start + int(found.lengths[number])]
        assert bytes(memory) == INDEXES[number]
        assert found.sizes[number].tolist() == SIZES[number].tolist()
        assert found.get_file_bytes(number) == 1000 + number
    return numbers


def segments_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.index"))


def in_process(call: Callable[[], object], code: int = 0) -> None:
    process = multiprocessing.get_context("fork").Process(target=call)
    process.start()
    process.join(LIMIT_S)
    assert process.exitcode == code


def test_indexes_are_found_by_name_in_another_cache(tmp_path: Path) -> None:
    warned: list[str] = []
    first, second = cache_in(tmp_path, warned), cache_in(tmp_path, warned)
    assert found_in(first) == []
    add(first, range(5))
    add(first, range(10, 12), seal=False)
    assert found_in(second) == [0, 1, 2, 3, 4]
    first.seal()
    assert found_in(first) == found_in(second) == [0, 1, 2, 3, 4, 10, 11]
    assert found_in(cache_in(tmp_path, warned, root="/other")) == []
    assert warned == []


def test_the_newest_index_of_a_name_counts(tmp_path: Path) -> None:
    cache = cache_in(tmp_path, [])
    cache.add(NAMES[:2], SIZES[5:7], INDEXES[5:7])
    cache.seal()
    add(cache, range(2))
    assert found_in(cache) == [0, 1]


def test_an_index_that_is_needed_again_is_written_unless_it_is_one_of_few(tmp_path: Path, monkeypatch) -> None:
    cache, other = cache_in(tmp_path, []), cache_in(tmp_path, [])
    add(cache, range(5), seal=False)
    assert not cache.find(NAMES[5:]).lengths.any() and not segments_of(tmp_path)
    assert cache.find(NAMES[3:4]).lengths.all() and len(segments_of(tmp_path)) == 1
    assert found_in(other) == [0, 1, 2, 3, 4]
    assert not cache.find(NAMES[7:8]).lengths.any()
    add(cache, [7], seal=False)
    assert cache.find(NAMES[7:8]).lengths.all() and len(segments_of(tmp_path)) == 2
    monkeypatch.setattr(jpeg_index, "_WORTHWHILE", 1.0)
    add(cache, [8], seal=False)
    assert not cache.find(NAMES[8:9]).lengths.any() and len(segments_of(tmp_path)) == 2


def test_what_was_added_is_written_in_segments(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(jpeg_index, "_SEGMENT_BYTES", 3 * len(INDEXES[0]))
    cache = cache_in(tmp_path, [])
    for number in range(7):
        add(cache, [number], seal=False)
    assert len(segments_of(tmp_path)) == 2
    assert found_in(cache_in(tmp_path, [])) == [0, 1, 2, 3, 4, 5]


def test_processes_write_at_once(tmp_path: Path) -> None:
    def write(first: int) -> None:
        cache = cache_in(tmp_path, [])
        for number in range(first, 20, 2):
            add(cache, [number])

    processes = [multiprocessing.get_context("fork").Process(target=write, args=(first,)) for first in (0, 1)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(LIMIT_S)
    assert [process.exitcode for process in processes] == [0, 0]
    assert found_in(cache_in(tmp_path, [])) == list(range(20))


def test_a_process_that_is_killed_while_it_writes_leaves_what_was_written_before(tmp_path: Path, monkeypatch) -> None:
    def write() -> None:
        cache = cache_in(tmp_path, [])
        add(cache, range(5))
        monkeypatch.setattr(Path, "replace", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        add(cache, range(5, 10))

    in_process(write, -signal.SIGKILL)
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert len(list(folder.iterdir())) == 2  # the second one has a temporary name
    cache = cache_in(tmp_path, [])
    assert found_in(cache) == [0, 1, 2, 3, 4]
    add(cache, [12])  # removes it, and waits for no lock
    assert found_in(cache) == [0, 1, 2, 3, 4, 12] and len(list(folder.iterdir())) == 2


def cut_short(content: bytes) -> bytes:
    return content[:-30]


def emptied(content: bytes) -> bytes:
    return b""


def of_a_few_bytes(content: bytes) -> bytes:
    return content[:7]


def with_a_damaged_table(content: bytes) -> bytes:
    return content[:-30] + bytes(30)


def with_a_table_beyond_its_end(content: bytes) -> bytes:
    return content[:8] + struct.pack("<Q", 2**63) + content[16:]


def foreign(content: bytes) -> bytes:
    return b"GIF89a" + content[6:]


@pytest.mark.parametrize(
    "damage", [cut_short, emptied, of_a_few_bytes, with_a_damaged_table, with_a_table_beyond_its_end, foreign]
)
def test_a_segment_that_is_not_whole_is_ignored(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    warned: list[str] = []
    add(cache_in(tmp_path, warned), range(5))
    (path,) = segments_of(tmp_path)
    add(cache_in(tmp_path, warned), range(5, 8))
    path.write_bytes(damage(path.read_bytes()))
    cache = cache_in(tmp_path, warned)
    assert found_in(cache) == [5, 6, 7]
    add(cache, [1])
    assert found_in(cache) == [1, 5, 6, 7] and warned == []


def test_a_segment_that_is_truncated_in_use_reads_as_zeros_and_is_no_error(tmp_path: Path) -> None:
    from paceline.data.native import NATIVE_MISSING_MESSAGE, load_native
    from paceline.data.pack.shards import check_mapped_files

    if load_native() is None:
        pytest.skip(NATIVE_MISSING_MESSAGE)
    cache = cache_in(tmp_path, [])
    cache.add(NAMES[:1], SIZES[:1], [b"\1" * 50_000])
    cache.seal()
    found = cache.find(NAMES[:1])
    os.truncate(segments_of(tmp_path)[0], 5_000)
    memory = bytes(found.buffers[0])
    assert len(memory) > 50_000 and not any(memory[8_192:])
    check_mapped_files()


def test_entries_that_are_no_segment_are_neither_read_nor_removed(tmp_path: Path) -> None:
    warned: list[str] = []
    add(cache_in(tmp_path, warned), range(5))
    (segment,) = segments_of(tmp_path)
    kept = [segment.with_name("notes.index"), segment.with_suffix(".jpg"), tmp_path / "precious", tmp_path / "0.index"]
    for path in kept:
        path.write_bytes(segment.read_bytes() * 100)
    (segment.parent / f"{1:08}-{1:016x}.index").mkdir()
    assert found_in(cache_in(tmp_path, warned)) == [0, 1, 2, 3, 4]
    cache = cache_in(tmp_path, warned, max_bytes=segment.stat().st_size + 10, root="/other")
    add(cache, range(5, 10))
    assert not segment.exists() and all(path.exists() for path in kept)
    assert found_in(cache) == [5, 6, 7, 8, 9] and warned == []


def test_the_least_recently_used_segments_are_removed_and_the_size_is_bounded(tmp_path: Path) -> None:
    warned: list[str] = []
    written = []
    for number in range(4):
        add(cache_in(tmp_path, warned, root=f"/{number}"), [number])
        (path,) = set(segments_of(tmp_path)) - set(written)
        written.append(path)
        os.utime(path, (100 - number, 100 - number))
    num_bytes = written[0].stat().st_size
    found_in(cache_in(tmp_path, warned, root="/3"))  # which is the oldest, and used now
    for number in range(2):  # a dataset's own segments are kept
        add(cache_in(tmp_path, warned, max_bytes=4 * num_bytes, root="/more"), [10 + number])
    assert [path.exists() for path in written] == [True, False, False, True]
    assert sum(path.stat().st_size for path in segments_of(tmp_path)) <= 4 * num_bytes and warned == []


def test_a_cache_that_a_dataset_fills_takes_no_more_of_it_and_says_so_once(tmp_path: Path) -> None:
    warned: list[str] = []
    cache = cache_in(tmp_path, warned, max_bytes=600)
    add(cache, range(2))
    for number in range(2, 5):
        add(cache, [number])
    assert found_in(cache) == [0, 1]
    assert len(warned) == 1 and "raise data.cache_gb" in warned[0] and "\n" not in warned[0]


def test_a_full_disk_ends_the_writing_with_one_line(tmp_path: Path) -> None:
    warned: list[str] = []
    add(cache_in(tmp_path, warned), range(3))

    def write() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
        cache = cache_in(tmp_path, warned)
        for number in range(3, 6):
            add(cache, [number])
        assert found_in(cache) == [0, 1, 2]
        assert len(warned) == 1 and "File too large" in warned[0] and "data.cache=off" in warned[0]

    in_process(write)
    assert found_in(cache_in(tmp_path, warned)) == [0, 1, 2]
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_folder_that_cannot_be_written_is_read(tmp_path: Path) -> None:
    warned: list[str] = []
    add(cache_in(tmp_path, warned), range(3))
    (segment,) = segments_of(tmp_path)

    def use() -> None:
        if os.geteuid() == 0:
            os.setresuid(12345, 12345, 12345)
        cache = cache_in(tmp_path, warned)
        assert found_in(cache) == [0, 1, 2]
        add(cache, [4])
        assert len(warned) == 1 and "Permission denied" in warned[0]
        assert found_in(cache) == [0, 1, 2]

    for folder in (tmp_path, *tmp_path.parents[:-1]):
        folder.chmod(folder.stat().st_mode | 0o055)
    modes = {path: path.stat().st_mode for path in (tmp_path, segment.parent, tmp_path / "room.lock")}
    try:
        for path in modes:
            path.chmod(0o555)
        in_process(use)
    finally:
        for path, mode in modes.items():
            path.chmod(mode)


@pytest.mark.parametrize("blocked", ["cache", "cache/deeper"])
def test_a_file_in_place_of_the_folder_ends_the_writing_with_one_line(blocked: str, tmp_path: Path) -> None:
    warned: list[str] = []
    (tmp_path / "cache").write_bytes(b"")
    cache = cache_in(tmp_path / blocked, warned)
    add(cache, [1])
    add(cache, [2])
    assert found_in(cache) == [] and len(warned) == 1


def test_a_held_lock_ends_the_writing_after_a_while(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(jpeg_index, "_LOCK_ATTEMPTS", 3)
    warned: list[str] = []
    holder, cache = cache_in(tmp_path, warned), cache_in(tmp_path, warned)
    add(holder, [0])
    lock = holder._lock_room()
    add(cache, [1])
    lock.close()
    assert len(warned) == 1 and "room.lock" in warned[0]


def test_the_recipe_names_the_folder_and_turns_it_off(tmp_path: Path, monkeypatch) -> None:
    warned: list[str] = []
    built = build_index_cache(Data(cache=str(tmp_path / "named"), cache_gb=0.5), "/images", warned.append)
    assert isinstance(built, IndexCache)
    add(built, [1])
    assert found_in(cache_in(tmp_path / "named", warned)) == [1]
    off = build_index_cache(Data(cache="off"), "/images", warned.append)
    assert isinstance(off, NoIndexCache)
    off.add(NAMES, SIZES, INDEXES)
    off.seal()
    assert not off.find(NAMES).lengths.any() and warned == []
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    own = build_index_cache(Data(), "/images", warned.append)
    assert isinstance(own, IndexCache)
    add(own, [2])
    assert found_in(cache_in(tmp_path / "home/.cache/paceline/jpeg-index", warned)) == [2] and warned == []


def test_without_a_home_folder_nothing_is_cached(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    warned: list[str] = []
    assert isinstance(build_index_cache(Data(), "/images", warned.append), NoIndexCache)
    assert len(warned) == 1 and "data.cache" in warned[0] and not list(tmp_path.iterdir())
