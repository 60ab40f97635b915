"""Worker processes stay alive between evaluations, and end with the loader, with an error, or with the program."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
import psutil
import pytest
import torch

from paceline.core.dataset import DatasetInfo, Sample
from paceline.core.errors import DataError, WatchError
from paceline.data.loaders.build import Loader, LoaderOptions, build_eval_loader, build_train_loader
from paceline.data.loaders.process import ProcessLoader
from paceline.data.order import EvalShard, TrainOrder
from paceline.recipe.schema.data import Data

NUM, BATCH, SIZE = 50, 8, 16
NUM_BATCHES = 7


class Pictures:
    """Samples whose pixels tell their index; `act` runs in the worker before each read."""

    info = DatasetInfo("made", "val", NUM, ("a", "b"), 3, None, (0.5,) * 3, (0.25,) * 3)

    def __init__(self, act: Callable[[int], object] = lambda index: None) -> None:
        self.act = act

    def __len__(self) -> int:
        return NUM

    def read(self, index: int) -> Sample:
        self.act(index)
        return np.full((SIZE, SIZE, 3), index, np.uint8), index % 2

    def name_of(self, index: int) -> str:
        return f"made/{index}.jpg"


def evaluation(act: Callable[[int], object] = lambda index: None, *, workers: int = 2, timeout: str = "5min") -> Loader:
    data = Data(worker_timeout=timeout)  # type: ignore[arg-type]
    return build_eval_loader(data, Pictures(act), EvalShard(NUM, BATCH), SIZE, LoaderOptions(workers, False))


def pids(loader: Loader) -> set[int]:
    assert isinstance(loader, ProcessLoader)
    return {position.pid for position in loader.progress.positions()}


def are_alive(processes: set[int]) -> set[bool]:
    return {psutil.pid_exists(pid) for pid in processes}


def assert_all_batches(loader: Loader) -> None:
    inline = evaluation(workers=0)
    for made, expected in zip(loader.batches(0, NUM_BATCHES), inline.batches(0, NUM_BATCHES), strict=True):
        assert torch.equal(made.images, expected.images) and torch.equal(made.labels, expected.labels)


@pytest.fixture
def trap() -> Callable[[Callable[[], object]], Callable[[int], None]]:
    """Return a function that runs once: at sample 30, in the second evaluation."""
    from multiprocessing import Value

    seen = Value("i", 0)

    def make(spring: Callable[[], object]) -> Callable[[int], None]:
        def act(index: int) -> None:
            if index == 30:
                seen.value += 1
                if seen.value == 2:
                    spring()

        return act

    return make


def test_three_evaluations_have_the_same_workers() -> None:
    loader = evaluation()
    seen = []
    for _ in range(3):
        assert_all_batches(loader)
        seen.append(pids(loader))
    assert len(seen[0]) == 2 and seen[0] == seen[1] == seen[2] and are_alive(seen[0]) == {True}
    loader.close()
    assert are_alive(seen[0]) == {False}
    assert_all_batches(loader)  # by new workers
    assert not pids(loader) & seen[0]
    loader.close()


def test_a_consumer_that_counts_batches_keeps_the_workers() -> None:
    """It never asks for a batch after the last, and drops the iterator."""
    loader = evaluation()
    seen = []
    for _ in range(2):
        made = loader.batches(0, NUM_BATCHES)
        assert sum(len(next(made)) for _ in range(NUM_BATCHES)) == NUM
        del made
        seen.append(pids(loader))
    assert seen[0] == seen[1]
    loader.close()


def test_a_part_of_an_evaluation_has_workers_of_its_own_number() -> None:
    loader = evaluation()
    assert_all_batches(loader)
    whole = pids(loader)
    (last,) = loader.batches(NUM_BATCHES - 1, NUM_BATCHES)
    assert last.indices.tolist() == [48, 49] and are_alive(whole) == {False}
    assert_all_batches(loader)
    loader.close()


def test_two_evaluations_at_once_do_not_share_workers() -> None:
    loader = evaluation()
    assert_all_batches(loader)
    one, other = loader.batches(0, NUM_BATCHES), loader.batches(0, NUM_BATCHES)
    for first, second in zip(one, other, strict=True):
        assert torch.equal(first.images, second.images)
    loader.close()


def test_workers_end_with_an_evaluation_that_is_abandoned() -> None:
    loader = evaluation()
    assert_all_batches(loader)
    before, made = pids(loader), loader.batches(0, NUM_BATCHES)
    next(made)
    assert pids(loader) == before
    del made
    assert are_alive(before) == {False}
    assert_all_batches(loader)
    loader.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_idle_workers_that_are_gone_are_replaced(number: signal.Signals) -> None:
    loader = evaluation()
    assert_all_batches(loader)
    before = pids(loader)
    os.kill(min(before), number)
    assert_all_batches(loader)
    assert not pids(loader) & before and are_alive(before) == {False}
    loader.close()


# matrix: 17
def test_a_worker_that_is_killed_in_a_later_evaluation_is_reported_with_its_sample(trap) -> None:
    loader = evaluation(trap(lambda: os.kill(os.getpid(), signal.SIGKILL)))
    assert_all_batches(loader)
    before = pids(loader)
    with pytest.raises(WatchError, match=r"was killed by SIGKILL in .*, at sample 30, made/30.jpg \("):
        list(loader.batches(0, NUM_BATCHES))
    assert are_alive(before) == {False}
    assert_all_batches(loader)
    loader.close()


# matrix: 18
def test_a_worker_that_hangs_in_a_later_evaluation_is_reported_with_its_sample(trap) -> None:
    loader = evaluation(trap(lambda: time.sleep(600)), timeout="2s")
    assert_all_batches(loader)
    before = pids(loader)
    with pytest.raises(WatchError, match=r"no batch for 2s: worker 1 .* hangs in .*, at sample 30, made/30.jpg \("):
        list(loader.batches(0, NUM_BATCHES))
    assert are_alive(before) == {False}


# matrix: 18
def test_a_worker_that_hangs_at_the_end_is_told_from_one_that_has_no_batches_left() -> None:
    """Of seven batches, worker 1 has made its last, number 5, when worker 0 hangs in number 6."""
    loader = evaluation(lambda index: time.sleep(600 if index == 49 else 0), timeout="1s")
    with pytest.raises(WatchError, match=r"no batch for 1s: worker 0 .* hangs in .*, at sample 49, made/49.jpg \("):
        list(loader.batches(0, NUM_BATCHES))


def stop_with_the_lock_of_dataloader() -> None:
    frame = sys._getframe()
    while "done_event" not in frame.f_locals:  # of DataLoader's worker loop
        assert frame.f_back is not None
        frame = frame.f_back
    frame.f_locals["done_event"]._cond.acquire()
    os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.timeout(30)
def test_a_worker_that_hangs_with_a_lock_does_not_hang_the_loader(trap) -> None:
    loader = evaluation(trap(stop_with_the_lock_of_dataloader), timeout="1s")
    assert_all_batches(loader)
    with pytest.raises(WatchError, match=r"^data\.worker_timeout: no batch for 1s: worker "):
        list(loader.batches(0, NUM_BATCHES))
    loader.close()


def test_an_unreadable_image_of_a_later_evaluation_raises_its_own_error(trap) -> None:
    def fail() -> None:
        raise DataError("made/30.jpg: cannot be decoded (remove it)")

    loader = evaluation(trap(fail))
    assert_all_batches(loader)
    before = pids(loader)
    with pytest.raises(DataError, match=r"^made/30.jpg: cannot be decoded"):
        list(loader.batches(0, NUM_BATCHES))
    assert are_alive(before) == {False}


def test_evaluations_leave_the_random_state_alone() -> None:
    """So that a user's own loop, resumed between two evaluations, has the numbers of an uninterrupted one."""
    loader, before = evaluation(), torch.get_rng_state()
    for _ in range(2):
        assert_all_batches(loader)
    loader.close()
    assert torch.equal(torch.get_rng_state(), before)


def test_training_workers_end_with_their_iterator() -> None:
    """The next one may draw its samples otherwise (`data.sampler=hard`)."""
    order = TrainOrder(seed=1, num_images=NUM, batch_size=10)
    loader = build_train_loader(Data(), Pictures(), order, lambda step: SIZE, LoaderOptions(2, False))
    list(loader.batches(0, 5))
    assert are_alive(pids(loader)) == {False}


_FORGETFUL = """
import test_kept_workers as tests
idle, busy = tests.evaluation(), tests.evaluation()
tests.assert_all_batches(idle)
made = busy.batches(0, 7)
next(made)
print(*tests.pids(idle), *tests.pids(busy))
"""


def test_a_program_that_forgets_to_close_loaders_ends_without_leftovers() -> None:
    here = os.path.dirname(__file__)  # noqa: PTH120
    program = [sys.executable, "-c", _FORGETFUL]
    done = subprocess.run(program, cwd=here, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    processes = {int(pid) for pid in done.stdout.split()}
    assert len(processes) == 4 and are_alive(processes) == {False}
