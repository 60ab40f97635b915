"""Batch loaders for a real GPU: a dataset in device memory, and reuse of page-locked memory."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image

from paceline.contrib.nvjpeg import TorchvisionDecoder
from paceline.core.dataset import ArraySource, DatasetInfo, Sample
from paceline.data.batch import Batch
from paceline.data.loaders.build import Loader, LoaderOptions, build_eval_loader, build_train_loader
from paceline.data.loaders.device import DeviceLoader
from paceline.data.loaders.native import allocate_pinned
from paceline.data.order import EvalShard, TrainOrder
from paceline.data.transfer import DeviceCopy
from paceline.recipe.schema.data import Data

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    # torch warns once that the synchronization debug mode is a prototype
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
]
INFO = DatasetInfo("made", "train", 500, ("a", "b"), 3, (32, 32), (0.5,) * 3, (0.25,) * 3)
ORDER = TrainOrder(seed=1, num_images=500, batch_size=64)
RECIPES = {
    "plain": Data(),
    "moved": Data(augment=("pad_crop", "flip", "mixup")),  # type: ignore[arg-type]
    "on the host": Data(augment=("pad_crop", "rand_augment", "flip")),  # type: ignore[arg-type]
}


def source() -> ArraySource:
    images = np.random.default_rng(0).integers(0, 256, (500, 32, 32, 3), dtype=np.uint8)
    return ArraySource(INFO, images, np.arange(500, dtype=np.int64) % 2)


@pytest.fixture
def synchronising_raises() -> Iterator[Callable[[], None]]:
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


def train(data: Data, loader: str) -> Loader:
    device = torch.device("cuda")
    options = LoaderOptions(0, False, True, time.perf_counter, loader, device)  # type: ignore[arg-type]
    return build_train_loader(data, source(), ORDER, lambda step: 32, options)


def same(one: Batch, other: Batch) -> bool:
    assert other.images.is_cuda and other.labels.is_cuda and other.draws.is_cuda
    return bool(
        torch.equal(one.images, other.images.cpu())
        and torch.equal(one.labels, other.labels.cpu())
        and torch.equal(one.draws, other.draws.cpu())
        and np.array_equal(one.indices, other.indices)
    )


@pytest.mark.parametrize("name", ["plain", "moved"])
def test_a_data_set_on_the_gpu_gives_the_batches_of_the_inline_loader(name: str) -> None:
    resident, inline = train(RECIPES[name], "device"), train(RECIPES[name], "inline")
    assert isinstance(resident, DeviceLoader)
    pairs = list(zip(inline.batches(3, 20), resident.batches(3, 20), strict=True))
    assert len(pairs) == 17 and all(same(one, other) for one, other in pairs)


def test_augmentations_on_the_gpu_equal_those_on_the_host_up_to_rounding() -> None:
    resident, inline = train(RECIPES["on the host"], "device"), train(RECIPES["on the host"], "inline")
    for one, other in zip(inline.batches(0, 8), resident.batches(0, 8), strict=True):
        assert torch.equal(one.draws, other.draws.cpu()) and other.images.is_cuda
        off = (one.images.int() - other.images.cpu().int()).abs()
        assert (off > 1).float().mean() < 0.01  # rotated pixels may fall to either side of a grid line


def test_an_evaluation_on_the_gpu_counts_every_image_once() -> None:
    options = LoaderOptions(0, pin_memory=False, loader="device", device=torch.device("cuda"))
    loader = build_eval_loader(Data(), source(), EvalShard(500, 64), 32, options)
    images = torch.cat([batch.images for batch in loader.batches(0, 8)]).cpu()
    assert torch.equal(images, torch.from_numpy(source().images.transpose(0, 3, 1, 2).copy()))


def test_steps_of_a_data_set_on_the_gpu_do_not_synchronise(synchronising_raises) -> None:
    loader = train(RECIPES["moved"], "device")
    synchronising_raises()
    assert len(list(loader.batches(0, 30))) == 30


def test_page_locked_memory_is_not_reused_before_its_copy_ends() -> None:
    copies = []
    for number in range(30):
        memory = allocate_pinned((64, 3, 128, 128))
        assert memory.is_pinned()
        memory.fill_(number)
        copies.append(memory.to("cuda", non_blocking=True))
        del memory
    assert [int(copy.float().mean().round()) for copy in copies] == list(range(30))


def test_copies_on_a_side_stream_are_complete_while_the_gpu_computes(synchronising_raises) -> None:
    bus, matrix = DeviceCopy(torch.device("cuda")), torch.randn(4096, 4096, device="cuda")
    batches = [torch.full((64, 3, 128, 128), number, dtype=torch.uint8).pin_memory() for number in range(20)]
    matrix = matrix @ matrix
    torch.cuda.synchronize()
    synchronising_raises()
    sums = []
    for batch in batches:
        (copy,) = bus.send((batch,))
        sums.append(copy.sum(dtype=torch.int64))
        del copy  # its memory must not be reused before the sum is done
        matrix = torch.tanh(matrix @ matrix)
    torch.cuda.set_sync_debug_mode("default")
    assert [int(each) for each in sums] == [number * batches[0].numel() for number in range(20)]
    there = torch.ones(3, device="cuda")
    assert bus.send((there,))[0] is there


def test_copies_are_counted_and_timed_on_their_own_stream() -> None:
    bus = DeviceCopy(torch.device("cuda"), timed=True)
    batch = torch.ones(64, 3, 128, 128, dtype=torch.uint8).pin_memory()
    for _ in range(5):
        bus.send((batch, torch.zeros(64, dtype=torch.int64)))
    there = torch.ones(3, device="cuda")
    assert bus.send((there,))[0] is there  # a tensor on the device is not copied
    num_bytes, found = batch.nbytes + 64 * 8, bus.stats(skip=2)
    assert (found.sends, found.bytes, found.copied_bytes) == (5, 5 * num_bytes, 5 * num_bytes)
    assert found.timed_bytes == 3 * num_bytes and found.timed_s > 0


class Jpegs:
    """JPEGs in memory, of smooth colors."""

    info = replace(INFO, image_size=None)

    def __init__(self) -> None:
        random = np.random.default_rng(0)
        self.files = []
        for _ in range(500):
            height, width = random.integers(60, 120, 2)
            ramp = np.linspace(0, 200, height)[:, None, None] + np.linspace(0, 40, width)[None, :, None]
            file = BytesIO()
            Image.fromarray(np.clip(ramp * random.random(3), 0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
            self.files.append(file.getvalue())

    def __len__(self) -> int:
        return 500

    def read(self, index: int) -> Sample:
        return self.files[index], index % 2

    def name_of(self, index: int) -> str:
        return f"made/{index}.jpg"


def batches_of(loader: str) -> list[Batch]:
    """Return eight batches of `loader` with two workers."""
    data, device = Data(augment=("random_resized_crop", "flip")), torch.device("cuda")  # type: ignore[arg-type]
    options = LoaderOptions(2, True, True, loader=loader, device=device)  # type: ignore[arg-type]
    built = build_train_loader(data, Jpegs(), ORDER, lambda step: 48, options)
    try:
        return list(built.batches(0, 8))
    finally:
        built.close()


@pytest.mark.silicon
def test_nvjpeg_gives_the_samples_of_the_host_with_similar_pixels() -> None:
    """Pixels differ by up to six levels of 255: by inverse transform, chroma upsampling, and resampling in float."""
    for host, gpu in zip(batches_of("threads"), batches_of("nvjpeg"), strict=True):
        assert gpu.images.is_cuda and np.array_equal(host.indices, gpu.indices)
        assert torch.equal(host.labels, gpu.labels.cpu()) and torch.equal(host.draws, gpu.draws.cpu())
        off = (host.images.int() - gpu.images.cpu().int()).abs()
        assert off.float().mean() < 1 and (off > 6).float().mean() < 0.001


@pytest.mark.silicon
def test_nvjpeg_does_not_overwrite_memory_of_queued_work() -> None:
    """Its stream does not wait for others, so it must not get memory that they still read, of any size."""
    idle = batches_of("nvjpeg")
    matrix = torch.randn(8192, 8192, device="cuda")
    tensors = [torch.full((3, 100, 100), 7, dtype=torch.uint8, device="cuda") for _ in range(400)]
    torch.cuda.synchronize()
    for _ in range(100):  # some seconds
        matrix = torch.tanh(matrix @ matrix)
    sums = [tensor.sum() for tensor in tensors]
    del tensors  # the allocator reuses it at once on this stream
    busy = batches_of("nvjpeg")
    assert [int(each) for each in sums] == [7 * 3 * 100 * 100] * 400
    for one, other in zip(idle, busy, strict=True):
        assert torch.equal(one.images, other.images) and torch.equal(one.labels, other.labels)


@pytest.mark.silicon
def test_nvjpeg_refuses_a_damaged_file_and_decodes_the_next_one() -> None:
    decoder, files = TorchvisionDecoder(torch.device("cuda"), 3), Jpegs().files
    with pytest.raises(RuntimeError):
        decoder([files[0][:300]])
    assert decoder(files[:3])[0].is_cuda
