"""The Python part of the native loader, with a pool that decodes by Pillow: batches equal those of other loaders,
whichever images the core cannot decode.
"""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from io import BytesIO

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torchvision.transforms.v2 import functional as F

from paceline.core.dataset import DatasetInfo, Sample
from paceline.core.errors import DataError, WatchError
from paceline.core.units import Duration
from paceline.data.augment.build import build_augments
from paceline.data.augment.geometric import BatchFlip
from paceline.data.bad_images import build_bad_image_policy
from paceline.data.batch import Batch
from paceline.data.loaders.batch_maker import BatchMaker
from paceline.data.loaders.native import BATCHES_AHEAD, BatchFinisher, NativeLoader, PageableBuffers
from paceline.data.loaders.native_plan import BatchPlanner, PackImages
from paceline.data.loaders.reader import ImageReader
from paceline.data.order import BatchSchedule, EvalBatchSchedule, EvalShard, TrainBatchSchedule, TrainOrder
from paceline.data.resize import CenterCropResizer, RandomCropResizer, Resizer
from paceline.data.timing import BatchTimer, LoaderStats
from paceline.data.workers import WorkerProgress, track_source
from paceline.recipe.schema.data import Data

CROP = RandomCropResizer((0.08, 1.0), (0.75, 4 / 3))
NUM = 50
BATCH = 10
ORDER = TrainOrder(seed=1, num_images=NUM, batch_size=BATCH)


def png(index: int) -> bytes:
    with BytesIO() as file:
        pixels = np.random.default_rng(index).integers(0, 256, (20 + index % 5, 24, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(file, "png")
        return file.getvalue()


FILES = [png(index) for index in range(NUM)]


@dataclass(frozen=True)
class Shard:
    """All files in a row, in memory."""

    data: bytes

    def __len__(self) -> int:
        return 1

    def memory(self, shard: int) -> memoryview | None:
        return memoryview(self.data)

    def read(self, shard: int, offset: int, length: int) -> bytes:
        raise AssertionError

    def close(self) -> None: ...


class Pack:
    """Fifty images. The core cannot decode `kept`, Python cannot read `bad`; Python calls `before` at each read."""

    info = DatasetInfo("made", "train", NUM, ("a", "b"), 3, None, (0.5,) * 3, (0.25,) * 3)

    def __init__(
        self,
        kept: tuple[int, ...] = (),
        bad: tuple[int, ...] = (),
        before: Callable[[int], object] = lambda index: None,
    ) -> None:
        self.bad, self.before = bad, before
        self.files = Shard(b"".join(FILES))
        self.lengths = np.array([len(file) for file in FILES], dtype=np.uint64)
        self.offsets = np.cumsum(self.lengths) - self.lengths
        self.heights = np.array([20 + index % 5 for index in range(NUM)], dtype=np.uint16)
        self.widths = np.full(NUM, 24, dtype=np.uint16)
        self.kinds = np.array([2 if index in kept else 1 for index in range(NUM)], dtype=np.uint8)
        self.labels = (np.arange(NUM) % 2).astype(np.int32)

    def __len__(self) -> int:
        return NUM

    def read(self, index: int) -> Sample:
        self.before(index)
        if index in self.bad:
            raise DataError(f"made/{index}.jpg: cannot be decoded (remove it)")
        return FILES[index], index % 2

    def name_of(self, index: int) -> str:
        return f"made/{index}.jpg"

    def locate(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.uint64], NDArray[np.uint64]]:
        return np.zeros(len(indices), dtype=np.int32), self.offsets[indices], self.lengths[indices]


@dataclass(frozen=True)
class PillowTask:
    future: "Future[None]"
    seconds: float = 0.25

    @property
    def done(self) -> bool:
        return self.future.done()

    def wait(self, timeout_s: float, /) -> bool:
        wait([self.future], timeout_s)
        if self.future.cancelled():
            raise ValueError("the pool was closed")
        return self.future.done()


class PillowPool:
    """Decode submitted images in a thread, except those of the `damaged` lengths."""

    scratch_bytes = 0

    def __init__(self, damaged: tuple[int, ...] = (), before: Callable[[], object] = lambda: None) -> None:
        self.damaged, self.before = {len(FILES[index]) for index in damaged}, before
        self.threads = ThreadPoolExecutor(1)
        self.submitted = 0

    def submit(self, shards, shard_of, offsets, lengths, boxes, flips, inside, size, channels, out, status, stage=0):
        self.submitted += 1
        given = [np.array(each) for each in (shard_of, offsets, lengths, boxes, flips)]
        return PillowTask(self.threads.submit(self._decode, shards, given, inside, size, out, status))

    def _decode(self, shards, given, inside, size, out, status) -> None:
        self.before()
        for row, (shard, offset, length, box, flip) in enumerate(zip(*given, strict=True)):
            if not length:
                continue
            status[row] = 4 if length in self.damaged else 0
            out[row] = 77  # what a damaged record has come to
            if status[row] == 0:
                file = bytes(shards[shard][int(offset) : int(offset + length)])
                out[row] = cut(Image.open(BytesIO(file)), *box.tolist(), inside, flip, size)

    def close(self) -> None:
        self.threads.shutdown(cancel_futures=True)


def cut(image: Image.Image, top: float, left: float, height: float, width: float, inside, flip, size):
    assert inside
    box = [int(top), int(left), int(height), int(width)]
    tensor = F.pil_to_tensor(F.resized_crop(image, *box, [size, size], antialias=True))
    return (tensor.flip(2) if flip else tensor).numpy()


def native_loader(
    pack: Pack,
    data: Data,
    schedule: BatchSchedule,
    resizer: Resizer,
    make_pool: Callable[[], PillowPool] = PillowPool,
    buffers: PageableBuffers | None = None,
) -> NativeLoader:
    purpose = "train" if resizer is CROP else "eval"
    augments = build_augments(data.augment, (0.5,) * 3) if purpose == "train" else ()
    flip = augments[0] if augments and isinstance(augments[0], BatchFlip) else None
    planner = BatchPlanner(PackImages(pack), schedule, resizer, flip)
    progress = WorkerProgress(3)
    finishers = []
    for worker in range(3):
        timer = BatchTimer(time.perf_counter)
        reader = ImageReader(
            track_source(pack, progress.for_worker(worker)), resizer, build_bad_image_policy(data, purpose), timer
        )
        batches = BatchMaker(schedule, reader, augments[flip is not None :], timer)
        finishers.append(BatchFinisher(batches, pack.labels, planner.num_draws, pin_memory=False))
    return NativeLoader(
        planner,
        finishers,
        make_pool,
        (buffers or PageableBuffers()).allocate,
        timeout=data.worker_timeout,
        progress=progress,
        loader_stats=LoaderStats(time.perf_counter, 2, "native"),
        timer=BatchTimer(time.perf_counter),
    )


def schedule_of(data: Data) -> TrainBatchSchedule:
    augments = build_augments(data.augment, (0.5,) * 3)
    num_draws = CROP.num_draws + sum(augment.num_draws for augment in augments)
    return TrainBatchSchedule(ORDER, lambda step: 16, [False] * num_draws, 0, None, 4)


def alone(pack: Pack, data: Data, first: int = 0, stop: int = 5) -> list[Batch]:
    """Return the batches of a Python loader."""
    timer = BatchTimer(None)
    reader = ImageReader(pack, CROP, build_bad_image_policy(data, "train"), timer)
    batches = BatchMaker(schedule_of(data), reader, build_augments(data.augment, (0.5,) * 3), timer)
    return [batches[number] for number in range(first, stop)]


def same(one: Batch, other: Batch) -> bool:
    return bool(
        torch.equal(one.images, other.images)
        and torch.equal(one.labels, other.labels)
        and np.array_equal(one.indices, other.indices)
        and torch.equal(one.draws, other.draws)
        and one.bad == other.bad
    )


@pytest.fixture
def closing() -> Iterator[list[NativeLoader]]:
    """Loaders to close at the end."""
    loaders: list[NativeLoader] = []
    yield loaders
    for loader in loaders:
        loader.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("loader")]


FLIP = Data(augment=("random_resized_crop", "flip"))  # type: ignore[arg-type]
MORE = Data(augment=("random_resized_crop", "flip", "rotate"))  # type: ignore[arg-type]
OTHER = Data(augment=("random_resized_crop", "rotate", "flip"))  # type: ignore[arg-type]
PLAIN = Data(augment=("random_resized_crop",))  # type: ignore[arg-type]
SKIP = Data(augment=("random_resized_crop", "flip"), on_bad_image="skip")  # type: ignore[arg-type]


@pytest.mark.parametrize("data", [PLAIN, FLIP, MORE, OTHER], ids=["plain", "flip", "flip first", "flip last"])
@pytest.mark.parametrize("kept", [(), (0, 7, 8, 30), tuple(range(NUM))], ids=["records", "some files", "files"])
@pytest.mark.parametrize("damaged", [(), (3, 7, 31)], ids=["whole", "damaged"])
def test_batches_equal_those_of_python_loaders(data: Data, kept, damaged, closing) -> None:
    pack = Pack(kept)
    loader = native_loader(pack, data, schedule_of(data), CROP, lambda: PillowPool(damaged))
    closing.append(loader)
    expected, found = alone(pack, data), list(loader.batches(0, 5))
    assert len(expected) == len(found) == 5
    assert all(same(one, other) for one, other in zip(expected, found, strict=True))
    tail = list(loader.batches(3, 7))
    assert all(same(one, other) for one, other in zip(alone(pack, data, 3, 7), tail, strict=True))


# matrix: 35
def test_replacements_of_bad_samples_equal_those_of_python_loaders(closing) -> None:
    pack = Pack(kept=(8, 20), bad=(7, 8, 31))
    loader = native_loader(pack, SKIP, schedule_of(SKIP), CROP, lambda: PillowPool(damaged=(7, 31)))
    closing.append(loader)
    expected, found = alone(pack, SKIP), list(loader.batches(0, 5))
    assert {bad.index for batch in found for bad in batch.bad} == {7, 8, 31}
    assert all(same(one, other) for one, other in zip(expected, found, strict=True))


# matrix: 35
def test_a_record_that_cannot_be_decoded_ends_the_run_at_its_batch(closing) -> None:
    pack = Pack(bad=(7,))
    loader = native_loader(pack, FLIP, schedule_of(FLIP), CROP, lambda: PillowPool(damaged=(7,)))
    closing.append(loader)
    step = next(step for step in range(5) if 7 in ORDER.indices(step))
    handed = 0
    with pytest.raises(DataError, match=r"^made/7.jpg: cannot be decoded \(remove it\)$"):
        for _ in loader.batches(0, 5):
            handed += 1
    assert handed == step


# matrix: 35
def test_an_evaluation_drops_records_that_cannot_be_decoded(closing) -> None:
    pack = Pack(kept=tuple(range(NUM)), bad=(0, 1, 17, 48))
    loader = native_loader(pack, SKIP, EvalBatchSchedule(EvalShard(NUM, 16), 16), CenterCropResizer(0.875))
    closing.append(loader)
    batches = list(loader.batches(0, 4))
    assert [len(batch) for batch in batches] == [14, 15, 16, 1]
    assert [index for batch in batches for index in batch.indices.tolist()] == [
        index for index in range(NUM) if index not in pack.bad
    ]
    assert all(len(batch.images) == len(batch.labels) == len(batch.draws) == len(batch.indices) for batch in batches)
    assert tuple(bad.index for batch in batches for bad in batch.bad) == pack.bad


def test_an_evaluation_in_inference_mode_reads_files_in_threads_without_it(closing) -> None:
    pack = Pack(kept=(0, 17))
    loader = native_loader(pack, PLAIN, EvalBatchSchedule(EvalShard(NUM, 16), 16), CenterCropResizer(0.875))
    closing.append(loader)
    with torch.inference_mode():
        batches = list(loader.batches(0, 4))
    assert sum(len(batch) for batch in batches) == NUM


def test_batches_stay_valid_while_they_are_referenced(closing) -> None:
    buffers = PageableBuffers()
    loader = native_loader(Pack(), FLIP, schedule_of(FLIP), CROP, buffers=buffers)
    closing.append(loader)
    batches = list(loader.batches(0, 5))
    before = [batch.images.clone() for batch in batches]
    for _ in range(3):
        list(loader.batches(5, 10))
    assert all(torch.equal(batch.images, images) for batch, images in zip(batches, before, strict=True))
    loader.close()
    assert all(torch.equal(batch.images, images) for batch, images in zip(batches, before, strict=True))


def test_memory_is_bounded_by_the_prefetched_batches(closing) -> None:
    buffers = PageableBuffers()
    loader = native_loader(Pack(), FLIP, schedule_of(FLIP), CROP, buffers=buffers)
    closing.append(loader)
    for _ in loader.batches(0, 60):
        assert buffers.num_bytes <= (BATCHES_AHEAD + 2) * BATCH * 3 * 16 * 16


def test_no_more_than_the_prefetched_batches_are_submitted(closing) -> None:
    pools: list[PillowPool] = []

    def make() -> PillowPool:
        pools.append(PillowPool())
        return pools[-1]

    loader = native_loader(Pack(), FLIP, schedule_of(FLIP), CROP, make)
    closing.append(loader)
    assert not pools  # a fork may still come
    for handed, _ in enumerate(loader.batches(0, 20), start=1):
        assert pools[0].submitted == min(20, handed - 1 + BATCHES_AHEAD)
    list(loader.batches(0, 3))
    assert len(pools) == 1  # it lives on
    loader.close()
    list(loader.batches(0, 3))
    assert len(pools) == 2


# matrix: 18
def test_a_pool_that_hangs_is_reported_with_the_first_undecoded_sample(closing) -> None:
    stuck = threading.Event()
    data = FLIP.model_copy(update={"worker_timeout": Duration.parse("0.3s")})
    pool = PillowPool(before=lambda: stuck.wait(60))
    loader = native_loader(Pack(), data, schedule_of(data), CROP, lambda: pool)
    closing.append(loader)
    with pytest.raises(WatchError) as caught:
        next(loader.batches(2, 5))
    stuck.set()
    first = ORDER.indices(2)[0]
    assert str(caught.value) == (
        f"data.worker_timeout: no batch for 0.3s: the native loader hangs in the batch of step 3, at sample {first}, "
        f"made/{first}.jpg (check that image and its disk, or raise data.worker_timeout)"
    )


# matrix: 18
def test_a_file_that_hangs_in_python_is_reported(closing) -> None:
    stuck = threading.Event()
    data = FLIP.model_copy(update={"worker_timeout": Duration.parse("0.3s")})
    pack = Pack(kept=(7, 8), before=lambda index: stuck.wait(60))
    loader = native_loader(pack, data, schedule_of(data), CROP)
    closing.append(loader)
    with pytest.raises(WatchError, match=r"the native loader hangs in the batch of step \d, at sample (7|8), made/"):
        list(loader.batches(0, 5))
    stuck.set()


def test_the_result_includes_the_time_of_the_native_threads(closing) -> None:
    loader = native_loader(Pack(), FLIP, schedule_of(FLIP), CROP)
    closing.append(loader)
    read = [index for batch in loader.batches(0, 4) for index in batch.indices.tolist()]
    stats = loader.stats()
    assert stats is not None
    assert (stats.loader, stats.workers, stats.batches, stats.images) == ("native", 2, 4, 40)
    assert stats.decode_s == 4 * 0.25 and stats.augment_s > 0
    assert stats.bytes_read == sum(len(FILES[index]) for index in read)
    assert stats.bytes_made == 40 * 3 * 16 * 16
    assert 0 <= stats.queue_depth <= BATCHES_AHEAD


def test_the_loader_works_after_an_abandoned_iterator(closing) -> None:
    pack = Pack(kept=(1, 2, 3))
    loader = native_loader(pack, MORE, schedule_of(MORE), CROP)
    closing.append(loader)
    for _ in range(3):
        given_up = loader.batches(0, 20)
        next(given_up)
        given_up.close()  # type: ignore[attr-defined]
    found = list(loader.batches(0, 5))
    assert all(same(one, other) for one, other in zip(alone(pack, MORE), found, strict=True))


def test_the_image_size_may_change_between_steps(closing) -> None:
    schedule = replace(schedule_of(FLIP), size_at_step=lambda step: 8 + 8 * (step % 3))
    loader = native_loader(Pack(), FLIP, schedule, CROP)
    closing.append(loader)
    assert [batch.images.shape[-1] for batch in loader.batches(0, 6)] == [8, 16, 24, 8, 16, 24]
