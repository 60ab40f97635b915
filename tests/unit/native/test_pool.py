"""The pool of native threads: batches in order, with a time limit, dropped, damaged, forked, closed and leaked."""

import math
import os
import signal
import struct
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest

from paceline.data.native import NativeExtension

if TYPE_CHECKING:
    from paceline.data._native import Pool, Task

LIMIT_S = 60.0  # of any wait here, all of which take milliseconds
NOT_REDUCED = 3  # stage: decode at full size, however much smaller the output is


class Batch(NamedTuple):
    """A batch under way, and what it is made into."""

    task: "Task"
    out: np.ndarray
    status: np.ndarray


def submit(pool: "Pool", records: list[bytes], num_images: int, size: int = 16, **changes: Any) -> Batch:
    """Ask for `num_images` crops, taking the records in turn, all of them in one shard."""
    lengths = np.array([len(record) for record in records], np.uint64)
    offsets = np.cumsum(lengths) - lengths
    turn = np.arange(num_images) % len(records)
    asked: dict[str, Any] = {
        "shards": [b"".join(records)],
        "shard_of": np.zeros(num_images, np.int32),
        "offsets": offsets[turn],
        "lengths": lengths[turn],
        "boxes": np.tile([2.0, 3.0, 30.0, 40.0], (num_images, 1)),
        "flips": turn % 2 == 0,
        "inside": True,
        "size": size,
        "channels": 3,
        "out": np.zeros((num_images, 3, size, size), np.uint8),
        "status": np.full(num_images, -1, np.int32),
        **changes,
    }
    return Batch(pool.submit(**asked), asked["out"], asked["status"])


def alone(core: NativeExtension, record: bytes, flip: bool, size: int = 16) -> np.ndarray:
    out = np.zeros((3, size, size), np.uint8)
    core.decode_crop_into(record, (2.0, 3.0, 30.0, 40.0), True, flip, size, 3, out)
    return out


@pytest.fixture
def pool(core: NativeExtension) -> Iterator["Pool"]:
    made = core.Pool(2)
    yield made
    made.close()


def flat(side: int) -> bytes:
    """Return the record of a gray image of one color: of each block, two codes of a bit."""
    mcus = side // 8
    points_x = -(-mcus // 255)
    points = [struct.pack("<I3h", 2 * (y * mcus + x * 255), 0, 0, 0) for y in range(mcus) for x in range(points_x)]
    bits = bytes(-(-mcus * mcus // 4))
    header = struct.pack(
        "<4s2H4B3s3s2B3I", b"PJ1", side, side, 1, 1, 255, 0, b"\x11", b"", 3, 0, len(points), len(bits), 34
    )
    huffman = 2 * (b"\1" + bytes(15) + b"\0")  # of one code, 0: no difference, no more coefficients
    body = b"".join(points)
    return header + 64 * b"\1\0" + huffman + bytes(-34 % 4) + body + bytes(-len(body) % 4) + bits + bytes(8)


def test_a_batch_is_what_its_images_are_one_by_one(core: NativeExtension, pool: "Pool", records: list[bytes]) -> None:
    task, out, status = submit(pool, records, 24)
    assert task.wait(LIMIT_S) and task.done and task.wait(0.0)
    assert not status.any()
    for n in range(24):
        assert np.array_equal(out[n], alone(core, records[n % 8], flip=n % 2 == 0))
    assert 0 < task.seconds < LIMIT_S
    assert pool.scratch_bytes > 0


def test_batches_are_done_in_the_order_they_were_asked_for(core: NativeExtension, records: list[bytes]) -> None:
    """One thread works on one image at a time, so whenever a batch is done all before it are."""
    pool = core.Pool(1)
    batches = [submit(pool, records, 4) for _ in range(50)]
    for number in (25, 49):
        assert batches[number].task.wait(LIMIT_S)
        assert all(each.task.done for each in batches[:number])
    pool.close()


def test_a_wait_ends_with_its_time_limit(pool: "Pool", records: list[bytes]) -> None:
    """Much more is asked for than can be made in the time it takes to ask whether it is done."""
    batch = submit(pool, records, 4000, size=64)
    for timeout_s in (0.0, 1e-10, 1e-9):
        assert not batch.task.wait(timeout_s) and not batch.task.done
    assert batch.task.wait(math.inf) and not batch.status.any()


@pytest.mark.parametrize("timeout_s", [-1.0, math.nan])
def test_a_time_limit_is_a_time(pool: "Pool", records: list[bytes], timeout_s: float) -> None:
    batch = submit(pool, records, 1)
    with pytest.raises(ValueError, match="is no time"):
        batch.task.wait(timeout_s)
    with pytest.raises(TypeError):
        batch.task.wait("1")  # type: ignore[arg-type]


def test_a_signal_is_answered_while_waiting(pool: "Pool", records: list[bytes]) -> None:
    """As Ctrl-C is: the handler runs before the batch is done, and what it raises ends the wait."""

    def interrupt(*words: object) -> None:
        raise InterruptedError

    before = signal.signal(signal.SIGALRM, interrupt)
    batch = submit(pool, records, 20_000, size=64)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        with pytest.raises(InterruptedError):
            batch.task.wait(LIMIT_S)
        assert (batch.status == -1).any()
    finally:
        signal.signal(signal.SIGALRM, before)


def test_dropping_a_task_leaves_out_what_has_not_begun(
    core: NativeExtension, pool: "Pool", records: list[bytes]
) -> None:
    dropped, out, status = submit(pool, records, 20_000, size=64)
    follower = submit(pool, records, 8)
    del dropped
    made = (status == 0).sum()
    assert made == out.any(axis=(1, 2, 3)).sum() < 20_000
    assert follower.task.wait(LIMIT_S) and not follower.status.any()
    assert (status == 0).sum() == made, "an image of a dropped task was made after it was gone"


def test_images_of_no_length_are_left_alone(pool: "Pool", records: list[bytes]) -> None:
    lengths = np.array([len(records[0]), 0, len(records[0])], np.uint64)
    none = np.array([0, 99, 0], np.int32)
    batch = submit(pool, records, 3, lengths=lengths, offsets=np.zeros(3, np.uint64), shard_of=none)
    assert batch.task.wait(LIMIT_S)
    assert batch.status.tolist() == [0, -1, 0]
    assert not batch.out[1].any() and batch.out[0].any()


def test_an_empty_batch_is_done_at_once(pool: "Pool", records: list[bytes]) -> None:
    assert submit(pool, records, 0).task.done


def test_damaged_records_get_a_status_and_others_are_made(
    core: NativeExtension, pool: "Pool", records: list[bytes]
) -> None:
    damaged = [b"PJ1\0" + bytes(100), records[1], records[2][:50], b"x"]
    batch = submit(pool, damaged, 8)
    assert batch.task.wait(LIMIT_S)
    assert batch.status.tolist() == [1, 0, 1, 1] * 2
    assert np.array_equal(batch.out[1], alone(core, records[1], flip=False))


def test_a_box_outside_the_image_gets_a_status(core: NativeExtension, pool: "Pool", records: list[bytes]) -> None:
    boxes = np.array([[0, 0, 9, 9], [0, 0, math.nan, 9], [1e18, 0, 9, 9], [0, 0, 0, 9]], np.float64)
    batch = submit(pool, records, 4, boxes=boxes)
    assert batch.task.wait(LIMIT_S)
    assert batch.status[0] == 0 and [core.reason(each) for each in batch.status[1:]] == [core.reason(5)] * 3


def test_a_file_that_was_cut_gets_a_status_and_not_a_bus_error(
    core: NativeExtension, pool: "Pool", records: list[bytes], tmp_path: Path
) -> None:
    kernel = tuple(int(part) for part in os.uname().release.split(".")[:2])
    if sys.platform != "linux" or kernel < (5, 14):
        pytest.skip(f"the kernel cannot be asked whether a page can be read before 5.14: {os.uname().release}")
    file = tmp_path / "shard"
    file.write_bytes(b"".join(records) + bytes(1 << 16) + records[0])
    mapped = np.memmap(file, mode="r")
    offset = len(mapped) - len(records[0])
    os.truncate(file, offset - 4096)
    lengths = np.full(2, len(records[0]), np.uint64)
    batch = submit(pool, records, 2, shards=[mapped], offsets=np.array([0, offset], np.uint64), lengths=lengths)
    assert batch.task.wait(LIMIT_S)
    assert batch.status[0] == 0 and "cannot be read" in core.reason(int(batch.status[1]))


BIG = np.uint64(2**64 - 1)
WRONG = [
    ({"offsets": np.array([0, BIG], np.uint64)}, ValueError, "image 1 is at 18446744073709551615"),
    ({"lengths": np.array([1, BIG], np.uint64)}, ValueError, "image 1 is at"),
    ({"offsets": np.full(2, 10**9, np.uint64)}, ValueError, "image 0 is at 1000000000"),
    ({"shard_of": np.array([0, 1], np.int32)}, ValueError, "image 1 .* of shard 1, which has 0"),
    ({"shard_of": np.array([-1, 0], np.int32)}, ValueError, "shard -1"),
    ({"shard_of": np.zeros(3, np.int32)}, ValueError, "has 2 items, not 3"),
    ({"shard_of": np.zeros(2, np.int64)}, TypeError, "shard_of is of items of format 'l', not int32"),
    ({"offsets": np.zeros(2, np.int64)}, TypeError, "not uint64"),
    ({"offsets": np.zeros(2, ">u8")}, TypeError, "not uint64"),
    ({"lengths": np.zeros(4, np.uint64)[::2]}, ValueError, "lengths is not contiguous"),
    ({"boxes": np.zeros((2, 3))}, ValueError, "boxes has 6 items, not 8"),
    ({"boxes": np.zeros((2, 4), np.float32)}, TypeError, "not float64"),
    ({"flips": np.zeros(1, bool)}, ValueError, "flips has 1"),
    ({"out": np.zeros((2, 3, 16, 15), np.uint8)}, ValueError, "out has 1440 items, not 1536"),
    ({"out": bytes(1536)}, ValueError, "out cannot be borrowed to be written"),
    ({"out": None}, TypeError, "out has no memory"),
    ({"status": np.zeros(2, np.int64)}, TypeError, "not int32"),
    ({"status": np.zeros(1, np.int32)}, ValueError, "status has 1"),
    ({"shards": [b"", 3]}, TypeError, "a shard has no memory"),
    ({"shards": 3}, TypeError, "not iterable"),
    ({"size": 0}, ValueError, "size 0"),
    ({"channels": 4}, ValueError, "channels 4"),
    ({"stage": -1}, ValueError, "stage -1"),
]


@pytest.mark.parametrize(("changes", "error", "message"), WRONG)
def test_a_batch_that_cannot_be_made_is_refused(
    pool: "Pool", records: list[bytes], changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        submit(pool, records, 2, **changes)


@pytest.mark.parametrize("threads", [0, -1, 1025])
def test_a_pool_has_1_to_1024_threads(core: NativeExtension, threads: int) -> None:
    with pytest.raises(ValueError, match=f"threads {threads} is not in 1 to 1024"):
        core.Pool(threads)


def test_what_was_asked_for_may_change_afterwards(pool: "Pool", records: list[bytes]) -> None:
    lengths = np.array([len(records[0])] * 500, np.uint64)
    offsets = np.zeros(500, np.uint64)
    batch = submit(pool, records, 500, lengths=lengths, offsets=offsets)
    lengths[:], offsets[:] = 2**40, 2**50
    assert batch.task.wait(LIMIT_S) and not batch.status.any()


def test_memory_is_held_until_the_task_is_done_and_no_longer(pool: "Pool", records: list[bytes]) -> None:
    shard, status = bytearray(records[0]), bytearray(4)
    batch = submit(
        pool, records, 1, shards=[shard], offsets=np.zeros(1, np.uint64), lengths=np.full(1, len(shard), np.uint64),
        status=np.frombuffer(status, np.int32),
    )  # fmt: skip
    assert batch.task.wait(LIMIT_S)
    shard.clear()  # BufferError where somebody still holds it
    busy = bytearray(b"".join(records))
    batch = submit(pool, records, 4000, shards=[busy], size=64)
    with pytest.raises(BufferError):
        busy.clear()
    del batch
    busy.clear()


def test_a_closed_pool_takes_no_more_and_says_so_of_what_it_left_out(
    core: NativeExtension, records: list[bytes]
) -> None:
    pool = core.Pool(2)
    done, left = submit(pool, records, 4), submit(pool, records, 20_000, size=64)
    assert done.task.wait(LIMIT_S)
    pool.close()
    pool.close()
    assert done.task.wait(0.0) and (left.status == -1).any()
    with pytest.raises(ValueError, match="closed before the task was done"):
        left.task.wait(LIMIT_S)
    with pytest.raises(ValueError, match="the pool is closed"):
        submit(pool, records, 1)
    assert pool.scratch_bytes == 0


def test_a_forked_child_cannot_use_its_parent_s_pool_and_may_make_its_own(
    core: NativeExtension, records: list[bytes]
) -> None:
    pool = core.Pool(2)
    batch = submit(pool, records, 4000, size=64)
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        child = os.fork()
    if child == 0:
        signal.alarm(30)  # a child that hangs fails the test and does not outlive it
        refused = is_refused(lambda: submit(pool, records, 1)) and is_refused(lambda: pool.close())
        refused &= is_refused(lambda: batch.task.wait(1.0)) and is_refused(lambda: batch.task.done)
        del batch, pool
        own = core.Pool(1)
        made = submit(own, records, 8).task.wait(LIMIT_S)
        own.close()
        os._exit(0 if refused and made else 1)
    _, code = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(code) == 0
    assert batch.task.wait(LIMIT_S) and not batch.status.any()
    pool.close()


def is_refused(use: Callable[[], object]) -> bool:
    try:
        use()
    except ValueError as error:
        return "another process" in str(error)
    return False


def test_the_memory_of_an_unusually_large_image_is_given_back(core: NativeExtension, records: list[bytes]) -> None:
    pool = core.Pool(1)
    kept = []
    for side in (7168, 8192):  # 49 MiB of samples, which is kept, and 64 and some, which is not
        boxes = np.array([[0.0, 0.0, side, side]])
        out = np.zeros((1, 1, 16, 16), np.uint8)
        batch = submit(pool, [flat(side)], 1, channels=1, boxes=boxes, out=out, stage=NOT_REDUCED)
        assert batch.task.wait(LIMIT_S) and batch.status.tolist() == [0] and (batch.out == 128).all()
        kept.append(pool.scratch_bytes >> 20)
    pool.close()
    assert kept[0] >= 49 and kept[1] == 0


def test_a_program_that_ends_with_images_under_way_ends(tmp_path: Path) -> None:
    """Whatever is still held: a batch that is never let go, and a thread that waits for one."""
    program = tmp_path / "program.py"
    program.write_text(f"""
import sys, threading
sys.path.insert(0, {str(Path(__file__).parent)!r})
from conftest import photograph
from test_pool import submit
from paceline.data.native import load_native
core = load_native()
pool, record = core.Pool(2), core.index_jpeg(photograph(40, 96, 0))
first, second = (submit(pool, [record], 20_000, size=64) for _ in range(2))
kept = [first]
kept.append(kept)  # a cycle
threading.Thread(target=second.task.wait, args=(1e9,), daemon=True).start()
print("here")
""")
    ended = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=LIMIT_S)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "here\n", "")


def test_pools_that_come_and_go_leak_no_thread_and_no_descriptor(core: NativeExtension, records: list[bytes]) -> None:
    def find_threads_and_descriptors() -> tuple[set[str], int]:
        return {each.name for each in Path("/proc/self/task").iterdir()}, len(list(Path("/proc/self/fd").iterdir()))

    before, num_before = find_threads_and_descriptors()
    for number in range(64):
        pool = core.Pool(3)
        batch = submit(pool, records, 8)
        if number % 2:
            assert batch.task.wait(LIMIT_S)
            pool.close()
        del pool, batch
    for _ in range(10_000):  # the kernel takes a thread from its list a moment after it could be joined
        threads, num_descriptors = find_threads_and_descriptors()
        if threads <= before:  # one of an earlier test may have ended
            break
        os.sched_yield()
    assert threads <= before and num_descriptors == num_before


def test_python_goes_on_while_one_of_its_threads_waits(pool: "Pool", records: list[bytes]) -> None:
    """The waiter keeps the GIL until it is inside; were it held there, it would be free when all is done."""
    batch, is_inside = submit(pool, records, 20_000, size=64), threading.Event()

    def wait() -> None:
        is_inside.set()
        batch.task.wait(LIMIT_S)

    waiter = threading.Thread(target=wait)
    waiter.start()
    assert is_inside.wait(LIMIT_S)
    assert (batch.status == -1).any()
    waiter.join(LIMIT_S)
    assert batch.task.done and not batch.status.any()


def test_several_python_threads_use_one_pool(core: NativeExtension, pool: "Pool", records: list[bytes]) -> None:
    wanted = [alone(core, record, flip=n % 2 == 0) for n, record in enumerate(records)]
    right: list[bool] = []

    def use() -> None:
        for _ in range(20):
            batch = submit(pool, records, 8)
            right.append(batch.task.wait(LIMIT_S) and np.array_equal(batch.out, wanted))

    users = [threading.Thread(target=use) for _ in range(4)]
    for user in users:
        user.start()
    for user in users:
        user.join(LIMIT_S)
    assert right == [True] * 80
