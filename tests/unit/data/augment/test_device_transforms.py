"""Device transforms: the same pixels on host and device, for any number of ranks and micro-batches."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.core.dataset import ArraySource, DatasetInfo
from paceline.data.augment.build import build_device_transforms
from paceline.data.loaders.build import LoaderOptions, build_train_loader
from paceline.data.order import TrainOrder
from paceline.data.transfer import DeviceTransfer
from paceline.recipe.schema.data import Data

INFO = DatasetInfo("made", "train", 50, tuple("abc"), 3, (16, 16), (0.4, 0.5, 0.6), (0.2, 0.25, 0.3))
CHANGES = (
    "pad_crop",
    {"name": "flip", "mode": "alternating"},
    "rotate",
    "rand_augment",
    "trivial_augment",
    "color_jitter",
    "random_erasing",
    "cutout",
)
ALL = Data(augment=(*CHANGES, "mixup", "cutmix"))  # type: ignore[arg-type]
UNMIXED = Data(augment=CHANGES)  # type: ignore[arg-type]
CROPPED = Data(augment=("random_resized_crop", *CHANGES, "cutmix"))  # type: ignore[arg-type]


def source() -> ArraySource:
    images = np.random.default_rng(0).integers(0, 256, (50, 16, 16, 3), dtype=np.uint8)
    return ArraySource(INFO, images, np.arange(50, dtype=np.int64) % 3)


def finished(
    data: Data, *, on_device: bool = False, rank: int = 0, world: int = 1, accumulate: int = 1, workers: int = 0
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the model inputs of 6 steps in two epochs, with micro-batches concatenated."""
    order = TrainOrder(seed=1, num_images=50, batch_size=16, rank=rank, world_size=world)
    options = LoaderOptions(workers, pin_memory=False, on_device=on_device)
    place = DeviceTransfer(torch.device("cpu"), torch.float32, INFO.mean, INFO.std, torch.channels_last)
    finish = build_device_transforms(data, place, INFO.num_classes, on_device=on_device)
    for batch in build_train_loader(data, source(), order, lambda step: 16, options).batches(0, 6):
        micro = [finish(place(part)) for part in batch.split(accumulate)]
        yield torch.cat([images for images, _ in micro]), torch.cat([targets for _, targets in micro])


def equal(one: Iterator[tuple[Tensor, Tensor]], other: Iterator[tuple[Tensor, Tensor]]) -> bool:
    pairs = list(zip(one, other, strict=True))
    assert len(pairs) == 6
    return all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in pairs)


@pytest.mark.parametrize("data", [ALL, UNMIXED, CROPPED], ids=["all", "unmixed", "cropped"])
def test_host_and_device_make_the_same_pixels_and_targets(data: Data) -> None:
    assert equal(finished(data), finished(data, on_device=True))


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_and_micro_batches_together_make_the_batch_of_one_rank(
    on_device: bool, accumulate: int, world: int
) -> None:
    parts = [finished(ALL, on_device=on_device, rank=rank, world=world, accumulate=accumulate) for rank in range(world)]
    together = (
        (torch.cat([part[0] for part in step]), torch.cat([part[1] for part in step]))
        for step in zip(*parts, strict=True)
    )
    assert equal(together, finished(ALL))


def test_workers_send_the_draws_to_the_device() -> None:
    assert equal(finished(ALL, on_device=True, workers=2), finished(ALL))


def test_images_are_normalised_and_labels_kept_without_mixing() -> None:
    images, labels = next(finished(Data()))
    indices = TrainOrder(seed=1, num_images=50, batch_size=16).indices(0)
    pixels = torch.from_numpy(source().images[indices].transpose(0, 3, 1, 2)).float()
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (INFO.mean, INFO.std))
    # Two orders of operations in float32, on numbers up to 3.
    torch.testing.assert_close(images, (pixels / 255 - mean) / std, atol=1e-5, rtol=0)
    assert labels.dtype == torch.int64 and labels.tolist() == (indices % 3).tolist()


def test_erased_pixels_are_nearly_zero_after_normalization() -> None:
    """The mean color is rounded to 8 bits: half a value of 255, over a standard deviation of at least 0.2."""
    images, _ = next(finished(Data(augment=({"name": "cutout", "size": 99},))))  # type: ignore[arg-type]
    assert images.abs().max() <= 0.5 / 255 / 0.2 + 1e-5


def test_a_loader_built_for_another_device_fails_an_assertion() -> None:
    order = TrainOrder(seed=1, num_images=50, batch_size=16)
    loader = build_train_loader(UNMIXED, source(), order, lambda step: 16, LoaderOptions(0, pin_memory=False))
    place = DeviceTransfer(torch.device("cpu"), torch.float32, INFO.mean, INFO.std, torch.channels_last)
    finish = build_device_transforms(UNMIXED, place, INFO.num_classes, on_device=True)
    with pytest.raises(AssertionError, match="built for another `on_device`"):
        finish(place(next(iter(loader.batches(0, 1)))))


@pytest.mark.parametrize("data", [ALL, UNMIXED], ids=["all", "unmixed"])
def test_images_have_the_memory_format_of_the_model(data: Data) -> None:
    images, _ = next(finished(data, on_device=True))
    assert images.is_contiguous(memory_format=torch.channels_last)
