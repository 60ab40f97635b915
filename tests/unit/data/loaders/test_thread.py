"""Threads make the batches of the inline loader, in order, with bounded prefetching and a timeout."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from paceline.core.dataset import ArraySource, DatasetInfo, Sample, Source
from paceline.core.errors import DataError, WatchError
from paceline.data.batch import Batch
from paceline.data.loaders.build import Loader, LoaderOptions, build_eval_loader, build_train_loader
from paceline.data.loaders.thread import BATCHES_PER_THREAD
from paceline.data.order import EvalShard, TrainOrder
from paceline.recipe.schema.data import Data

INFO = DatasetInfo("made", "train", 50, ("a", "b"), 3, (16, 16), (0.5,) * 3, (0.25,) * 3)
ORDER = TrainOrder(seed=1, num_images=50, batch_size=10)
AUGMENT = Data(augment=("pad_crop", "flip", "rotate"))  # type: ignore[arg-type]
CROP = Data(augment=("random_resized_crop", "flip"))  # type: ignore[arg-type]
MIX = Data(augment=("flip", "mixup", "cutmix"))  # type: ignore[arg-type]


class Pictures:
    """A source of single images; `before` is called with the index before each is read."""

    info = replace(INFO, image_size=None)

    def __init__(self, before: Callable[[int], object] = lambda index: None) -> None:
        self.before = before
        self.images = np.random.default_rng(0).integers(0, 256, (50, 16, 16, 3), dtype=np.uint8)

    def __len__(self) -> int:
        return 50

    def read(self, index: int) -> Sample:
        self.before(index)
        return self.images[index], index % 2

    def name_of(self, index: int) -> str:
        return f"made/{index}.png"


def arrays() -> ArraySource:
    return ArraySource(INFO, Pictures().images, np.arange(50, dtype=np.int64) % 2)


def loader_of(source: Source, data: Data = CROP, *, loader: str = "threads", workers: int = 2) -> Loader:
    options = LoaderOptions(workers, pin_memory=False, clock=time.perf_counter, loader=loader)  # type: ignore[arg-type]
    return build_train_loader(data, source, ORDER, lambda step: 16, options)


@pytest.fixture
def closing() -> Iterator[list[Loader]]:
    """Loaders to close at the end."""
    loaders: list[Loader] = []
    yield loaders
    for loader in loaders:
        loader.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("loader")]


def same(one: Batch, other: Batch) -> bool:
    return bool(
        torch.equal(one.images, other.images)
        and torch.equal(one.labels, other.labels)
        and np.array_equal(one.indices, other.indices)
        and torch.equal(one.draws, other.draws)
        and one.bad == other.bad
    )


@pytest.mark.parametrize("data", [AUGMENT, CROP, MIX], ids=["changed", "cropped", "mixed"])
@pytest.mark.parametrize("source", [arrays(), Pictures()], ids=["arrays", "pictures"])
@pytest.mark.parametrize("workers", [1, 3])
def test_threads_make_the_batches_of_the_inline_loader(data: Data, source: Source, workers: int, closing) -> None:
    inline, ahead = loader_of(source, data, loader="inline"), loader_of(source, data, workers=workers)
    closing.append(ahead)
    expected = list(inline.batches(3, 12))
    found = list(ahead.batches(3, 12))
    assert len(expected) == len(found) == 9
    assert all(same(one, other) for one, other in zip(expected, found, strict=True))


def test_threads_serve_the_next_iterator_and_end_on_close(closing) -> None:
    seen: set[int] = set()
    loader = loader_of(Pictures(lambda index: seen.add(threading.get_native_id())))
    closing.append(loader)
    first = loader.batches(0, 5)
    next(first)
    first.close()  # type: ignore[attr-defined]
    once = [thread.ident for thread in threading.enumerate() if thread.name.startswith("loader")]
    assert len(list(loader.batches(0, 10))) == 10
    assert once == [thread.ident for thread in threading.enumerate() if thread.name.startswith("loader")]
    assert 1 <= len(seen) <= len(once) == 2
    loader.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("loader")]
    assert len(list(loader.batches(0, 2))) == 2  # others start


def test_prefetching_is_bounded_per_thread(closing) -> None:
    read: list[int] = []
    loader = loader_of(Pictures(read.append))
    closing.append(loader)
    ahead = loader.batches(0, 50)
    for handed in range(1, 6):
        next(ahead)
        time.sleep(0.05)  # for threads to go too far
        assert len(read) <= 10 * (handed - 1 + 2 * BATCHES_PER_THREAD)
    ahead.close()  # type: ignore[attr-defined]


def test_an_unreadable_sample_raises_at_its_batch(closing) -> None:
    bad = int(ORDER.indices(2)[4])

    def fails(index: int) -> None:
        if index == bad:
            raise DataError(f"made/{index}.png: cannot be read (mend it)")

    loader = loader_of(Pictures(fails))
    closing.append(loader)
    handed = []
    with pytest.raises(DataError, match=rf"^made/{bad}.png: cannot be read"):
        handed.extend(batch for batch in _each(loader.batches(0, 5)))
    stats = loader.stats()
    assert stats is not None and stats.batches == 2


def _each(batches: Iterator[Batch]) -> Iterator[Batch]:
    yield from batches


def test_bad_samples_are_dropped_from_an_evaluation(closing) -> None:
    def fails(index: int) -> None:
        if index % 7 == 0:
            raise DataError("made: cannot be read (mend it)")

    options = LoaderOptions(2, pin_memory=False, loader="threads")
    data, shard = Data(on_bad_image="skip"), EvalShard(50, 16)
    loader = build_eval_loader(data, Pictures(fails), shard, 16, options)
    inline = build_eval_loader(data, Pictures(fails), shard, 16, replace(options, loader="inline", workers=0))
    closing.append(loader)
    expected, found = list(inline.batches(0, 4)), list(loader.batches(0, 4))
    assert sum(map(len, found)) == 42
    assert all(same(one, other) for one, other in zip(expected, found, strict=True))


# matrix: 18
def test_a_thread_that_hangs_is_reported_with_its_sample(closing) -> None:
    stuck = threading.Event()

    def hangs(index: int) -> None:
        if index == 7:
            stuck.wait(60)

    data = Data(worker_timeout="0.3s")  # type: ignore[arg-type]
    loader = loader_of(Pictures(hangs), data)
    closing.append(loader)
    step = next(step for step in range(5) if 7 in ORDER.indices(step))
    with pytest.raises(WatchError) as caught:
        list(loader.batches(0, 5))
    stuck.set()
    message = str(caught.value)
    assert message.startswith("data.worker_timeout: no batch for 0.3s: thread ")
    assert f" hangs in the batch of step {step + 1}, at sample 7, made/7.png (" in message


def test_the_result_has_the_workers_and_their_time(closing) -> None:
    loader = loader_of(Pictures(lambda index: time.sleep(0.001)))
    closing.append(loader)
    started_s = time.perf_counter()
    list(loader.batches(0, 10))
    elapsed_s = time.perf_counter() - started_s
    stats = loader.stats()
    assert stats is not None
    assert (stats.loader, stats.workers, stats.batches, stats.images) == ("threads", 2, 10, 100)
    assert stats.bytes_read == stats.bytes_made == 100 * 3 * 16 * 16
    assert stats.read_s >= 0.1 and stats.read_s + stats.decode_s + stats.augment_s + stats.collate_s <= 2 * elapsed_s
    assert stats.busy is not None and 0 < stats.busy <= 1 and stats.queue_depth <= 2 * BATCHES_PER_THREAD
