"""Each loader gives the same batches of wide pixels and of many channels, those of a plain computation with torch."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional
from torchvision.transforms.v2 import functional as F

from paceline.core.dataset import ArraySource, DatasetInfo, Datasets
from paceline.core.errors import RecipeError
from paceline.core.pixels import PixelFormat
from paceline.data.augment.build import build_augments, build_device_transforms
from paceline.data.loaders.build import LoaderOptions, build_eval_loader, build_train_loader
from paceline.data.loaders.choose import choose_loader
from paceline.data.loaders.device import DeviceLoader, load_split_to_device
from paceline.data.order import EvalBatchSchedule, EvalShard, TrainOrder
from paceline.data.sources.build import build_datasets
from paceline.data.sources.statistics import MAX_IMAGES, measure_statistics, with_measured
from paceline.data.timing import BatchTimer, LoaderStats
from paceline.data.transfer import DeviceTransfer
from paceline.recipe.schema.data import Data
from paceline.recipe.schema.source import Folder

FORMS = [PixelFormat(5, "uint8"), PixelFormat(5, "uint16"), PixelFormat(3, "uint16"), PixelFormat(16, "float32")]
FULL = {"uint8": 1, "uint16": 65535, "float32": 1}
NUM, SIZE = 20, 12


def pixels_of(form: PixelFormat, num: int = NUM, side: int = 17) -> np.ndarray:
    values = np.random.default_rng(form.channels).random((num, side, side, form.channels))
    if form.pixels == "float32":
        return (3000 * values - 1000).astype(np.float32)
    return (values * np.iinfo(form.pixels).max).astype(form.pixels)


def folder_of(form: PixelFormat, root: Path) -> Datasets:
    for number, image in enumerate(pixels_of(form)):
        path = root / "train" / "ab"[number % 2] / f"{number:02}.npy"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, image)
    section = Folder(train_root=str(root / "train"), val_root=str(root / "train"), **form._asdict())
    return with_measured(build_datasets(section, may_download=False), skip_bad=False)


def arrays_of(form: PixelFormat, statistics: DatasetInfo) -> ArraySource:
    """Return the images in the order of `folder_of`."""
    order = [*range(0, NUM, 2), *range(1, NUM, 2)]
    facts = {"mean": statistics.mean, "std": statistics.std, "pixels": form.pixels}
    info = DatasetInfo("made", "train", NUM, ("a", "b"), form.channels, (17, 17), **facts)
    return ArraySource(info, pixels_of(form)[order], np.arange(NUM) // (NUM // 2))


@pytest.mark.parametrize("form", FORMS)
def test_every_loader_evaluates_the_pixels_that_torch_resizes(form, tmp_path):
    files = folder_of(form, tmp_path).val
    arrays = arrays_of(form, files.info)
    data, shard = Data(eval_resize="stretch"), EvalShard(NUM, 8, split_size=NUM)
    chosen = np.concatenate([EvalBatchSchedule(shard, SIZE).indices(number) for number in range(shard.num_batches)])
    planes = torch.from_numpy(arrays.images[chosen].transpose(0, 3, 1, 2).copy())
    scaled = planes if form.pixels == "uint8" else planes.float() / FULL[form.pixels]
    expected = F.resize(scaled, [SIZE, SIZE], antialias=True)
    for source, loader in ((files, "processes"), (files, "threads"), (files, "inline"), (arrays, "inline")):
        options = LoaderOptions(2 if loader != "inline" else 0, pin_memory=False, loader=loader)
        built = build_eval_loader(data, source, shard, SIZE, options)
        images = torch.cat([batch.images for batch in built.batches(0, shard.num_batches)])
        built.close()
        assert images.dtype == (torch.uint8 if form.pixels == "uint8" else torch.float32)
        assert torch.equal(images, expected), (loader, source)
    resident = load_split_to_device(arrays, torch.device("cpu"))
    timer, stats = BatchTimer(None), LoaderStats(None, 0, "device")
    built = DeviceLoader(resident, EvalBatchSchedule(shard, SIZE), (), stats, timer)
    assert torch.equal(torch.cat([batch.images for batch in built.batches(0, shard.num_batches)]), expected)


@pytest.mark.parametrize("form", FORMS)
def test_every_loader_and_the_device_augment_alike(form, tmp_path):
    files = folder_of(form, tmp_path).train
    arrays = arrays_of(form, files.info)
    affine = {"name": "affine", "shear_degrees": 10, "interpolation": "nearest"}
    names = ("pad_crop", "flip", "rotate", affine, "random_erasing", "cutout", "mixup", "cutmix")
    data = Data(batch_size=8, augment=names, eval_resize="stretch")
    order = TrainOrder(3, NUM, 8)
    transfer = DeviceTransfer(
        torch.device("cpu"), torch.float32, files.info.mean, files.info.std, torch.contiguous_format, pixels=form.pixels
    )
    batches = {}
    for name, source, loader, on_device in (
        ("processes", files, "processes", False),
        ("threads", files, "threads", False),
        ("pixels", arrays, "inline", False),
        ("device", arrays, "inline", True),
    ):
        workers = 2 if loader != "inline" else 0
        options = LoaderOptions(workers, pin_memory=False, loader=loader, on_device=on_device)
        built = build_train_loader(data, source, order, lambda step: SIZE, options)
        finish = build_device_transforms(data, transfer, 2, on_device=on_device)
        batches[name] = [finish(transfer(batch)) for batch in built.batches(0, 4)]
        built.close()
    for name, made in batches.items():
        for (images, targets), (expected, expected_targets) in zip(made, batches["pixels"], strict=True):
            assert torch.equal(images, expected), name
            assert torch.equal(targets, expected_targets), name


@pytest.mark.parametrize("form", FORMS)
def test_normalization_is_that_of_numpy_and_leaves_the_batch_alone(form):
    pixels = pixels_of(form, 4)
    scale = 255 if form.pixels == "uint8" else FULL[form.pixels]
    mean, std = (tuple(np.random.default_rng(seed).random(form.channels) + 0.1) for seed in (1, 2))
    transfer = DeviceTransfer(
        torch.device("cpu"), torch.float32, mean, std, torch.contiguous_format, pixels=form.pixels
    )
    batch = torch.from_numpy(pixels.transpose(0, 3, 1, 2).copy())
    batch = batch if form.pixels == "uint8" else batch.float() / FULL[form.pixels]
    before = batch.clone()
    expected = (pixels / scale - np.array(mean)) / np.array(std)
    np.testing.assert_allclose(transfer.normalize(batch).permute(0, 2, 3, 1), expected, rtol=2e-6, atol=2e-6)
    assert torch.equal(batch, before)


def test_floats_are_warped_as_grid_sample_does_and_erased_with_the_mean():
    images = torch.rand(4, 5, 9, 9)
    (rotate,) = build_augments(Data(augment=({"name": "rotate", "degrees": 30},)).augment, (0.1,) * 5, "float32")
    turned = rotate(images, torch.rand(4, 3, dtype=torch.float64))
    assert turned.dtype == torch.float32 and not torch.equal(turned, turned.round())
    identity = rotate(images, torch.full((4, 3), 0.5, dtype=torch.float64))
    grid = functional.affine_grid(torch.eye(2, 3).expand(4, 2, 3), [4, 5, 9, 9], align_corners=False)
    torch.testing.assert_close(identity, functional.grid_sample(images, grid, align_corners=False))
    mean = (-3.5, 0.25, 7.0, 1e4, 0.0)
    (cutout,) = build_augments(Data(augment=({"name": "cutout", "size": 4},)).augment, mean, "float32")
    erased = cutout(images, torch.full((4, 2), 0.5, dtype=torch.float64))
    assert torch.equal(erased[0, :, 4, 4], torch.tensor(mean))


@pytest.mark.parametrize("form", FORMS)
def test_statistics_are_those_of_numpy(form, tmp_path):
    info = folder_of(form, tmp_path).train.info
    scaled = pixels_of(form).astype(np.float64) / (255 if form.pixels == "uint8" else FULL[form.pixels])
    assert info.mean == pytest.approx(scaled.mean((0, 1, 2)), rel=1e-5)
    assert info.std == pytest.approx(scaled.std((0, 1, 2)), rel=1e-5)


def test_statistics_read_a_limited_number_of_images_and_a_constant_channel_has_std_one():
    images = np.zeros((2 * MAX_IMAGES + 1, 2, 2, 5), np.uint16)
    images[::2, ..., 1] = 1000  # those that are measured are evenly spaced: the first, the last and every second
    info = DatasetInfo("made", "train", len(images), ("a", "b"), 5, (2, 2), (), (), pixels="uint16")
    read = []

    class Counted(ArraySource):
        def read(self, index):
            read.append(index)
            return super().read(index)

    statistics = measure_statistics(Counted(info, images, np.zeros(len(images), np.int64)), skip_bad=False)
    assert len(read) == len(set(read)) == MAX_IMAGES and (read[0], read[-1]) == (0, 2 * MAX_IMAGES)
    assert statistics.std[0] == 1.0 and statistics.mean[0] == 0.0


@pytest.mark.parametrize("loader", ["native", "nvjpeg"])
def test_loaders_of_8_bit_photographs_are_refused(loader, tmp_path):
    source = folder_of(PixelFormat(5, "uint16"), tmp_path).train
    with pytest.raises(RecipeError, match=rf"^data\.loader: {loader} .*\(.*set data\.loader=auto"):
        choose_loader(Data(loader=loader), source, device="cuda", cores=4, free_bytes=1e12)
    chosen = choose_loader(Data(), source, device="cuda", cores=4, free_bytes=1e12)
    assert chosen.loader == "processes"
