"""Images of the first step: the pixels that the model sees, and a batch that stays as it was."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from paceline.core.dataset import ArraySource, DatasetInfo
from paceline.core.pixels import PixelFormat
from paceline.data.augment.build import DeviceTransforms, build_device_transforms
from paceline.data.batch import Batch
from paceline.data.sources.image_files import ImageFileSource
from paceline.data.transfer import DeviceTransfer
from paceline.recipe.schema.data import Data
from paceline.training.first_inputs import FirstInputs, describe_sizes, to_pixels

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)


def make_info(channels: int, num_images: int) -> DatasetInfo:
    return DatasetInfo("made", "train", num_images, ("cat", "<b>", "d\udcffg"), channels, None, MEAN, STD)


def make_source(num_images: int = 40, side: int = 8, channels: int = 3) -> ArraySource:
    draw = np.random.default_rng(0)
    images = draw.integers(0, 256, (num_images, side, side, channels), dtype=np.uint8)
    return ArraySource(make_info(channels, num_images), images, np.arange(num_images) % 3)


def make_batch(source: ArraySource, size: int, draws: int = 0) -> Batch:
    indices = np.arange(size, dtype=np.int64)[::-1].copy()
    images = torch.from_numpy(source.images[indices]).permute(0, 3, 1, 2).contiguous()
    labels = torch.from_numpy(source.labels[indices])
    numbers = np.random.default_rng(1).random((size, draws))
    return Batch(images, labels, indices, torch.from_numpy(numbers))


def make_recorder(folder: Path, source, transforms=None, dtype=torch.float32, **changes) -> FirstInputs:
    channels = source.info.channels
    mean, std = MEAN[:channels], STD[:channels]
    transfer = DeviceTransfer(torch.device("cpu"), dtype, mean, std, torch.channels_last)
    transforms = transforms or DeviceTransforms((), transfer.normalize, None)
    warnings: list[str] = []
    fields = {"augment_on": None, "micro_batches": 1, "number": 16, "warn": warnings.append, **changes}
    return FirstInputs(folder, source, transfer, transforms, mean, std, **fields)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("channels", [1, 3])
def test_pixels_are_those_that_were_normalized(dtype, channels):
    source = make_source(channels=channels)
    images = torch.from_numpy(source.images).permute(0, 3, 1, 2)
    transfer = DeviceTransfer(torch.device("cpu"), dtype, MEAN[:channels], STD[:channels], torch.contiguous_format)
    pixels = np.stack(to_pixels(transfer.normalize(images), MEAN[:channels], STD[:channels], PixelFormat(channels)))
    expected = source.images if channels == 3 else source.images[..., 0]
    # 16-bit types keep 8 or 11 bits of a number up to 3
    limit = {torch.bfloat16: 1, torch.float16: 1}.get(dtype, 0)
    assert np.abs(pixels.astype(int) - expected).max() <= limit


@pytest.mark.parametrize("micro_batches", [1, 5])
def test_the_first_images_are_written_with_their_classes(tmp_path, micro_batches):
    source = make_source()
    batch = make_batch(source, 20)
    before = batch.images.clone()
    make_recorder(tmp_path / "inputs", source, micro_batches=micro_batches)(batch)
    recorded = json.loads((tmp_path / "inputs" / "inputs.json").read_text())
    assert [row["index"] for row in recorded["images"]] == batch.indices[:16].tolist()
    assert recorded["images"][0] == {
        "index": 19, "name": "made/train[19]", "classes": [["<b>", 1.0]], "file": "00.png"
    }  # fmt: skip
    assert recorded["images"][2]["classes"] == [["d\\udcffg", 1.0]]
    for row in recorded["images"]:
        assert np.array_equal(np.asarray(Image.open(tmp_path / "inputs" / row["file"])), source.images[row["index"]])
    assert torch.equal(batch.images, before) and recorded["mixed"] is False and recorded["augment_on"] is None


def test_images_are_those_after_augmentation_and_mixing_on_the_device(tmp_path):
    source = make_source()
    data = Data.model_validate({"augment": [{"name": "flip", "p": 1.0}, {"name": "mixup", "alpha": 1.0}]})
    transfer = DeviceTransfer(torch.device("cpu"), torch.float32, MEAN, STD, torch.channels_last)
    transforms = build_device_transforms(data, transfer, 3, on_device=True)
    num_draws = sum(each.num_draws for each in transforms.augments) + transforms.mix.num_draws
    batch = make_batch(source, 20, num_draws)
    state = torch.get_rng_state()
    make_recorder(tmp_path / "inputs", source, transforms)(batch)
    recorded = json.loads((tmp_path / "inputs" / "inputs.json").read_text())
    images, targets = transforms(transfer(batch))
    expected = to_pixels(images, MEAN, STD, PixelFormat(3))
    for position, row in enumerate(recorded["images"]):
        assert np.array_equal(np.asarray(Image.open(tmp_path / "inputs" / row["file"])), expected[position])
        shares = [share for _, share in row["classes"]]
        assert shares == sorted(shares, reverse=True) and sum(shares) == pytest.approx(1, abs=0.02)
        assert shares[0] == pytest.approx(float(targets[position].max()), abs=1e-4)
    assert recorded["mixed"] is True and torch.equal(state, torch.get_rng_state())


def test_log_worst_0_keeps_no_image(tmp_path):
    source = make_source()
    make_recorder(tmp_path / "inputs", source, number=0)(make_batch(source, 20))
    recorded = json.loads((tmp_path / "inputs" / "inputs.json").read_text())
    assert recorded["images"] == [] and [each.name for each in (tmp_path / "inputs").iterdir()] == ["inputs.json"]
    assert recorded["image_sizes"]["median"] == [8, 8]


def test_a_disk_that_refuses_the_images_is_a_warning(tmp_path):
    warnings: list[str] = []
    (tmp_path / "file").write_text("")
    source = make_source()
    make_recorder(tmp_path / "file" / "inputs", source, warn=warnings.append)(make_batch(source, 4))
    assert len(warnings) == 1 and "was not written: NotADirectoryError" in warnings[0]


def test_sizes_of_files_are_those_of_the_batch(tmp_path):
    shapes = [(30, 20), (10, 50), (10, 40)]
    for number, (height, width) in enumerate(shapes):
        Image.new("RGB", (width, height)).save(tmp_path / f"{number}.png")
    (tmp_path / "3.png").write_bytes(b"broken")
    names = [f"{number}.png".encode() for number in range(4)]
    source = ImageFileSource.from_paths(make_info(3, 4), str(tmp_path), names, np.zeros(4, dtype=np.int32))
    sizes = describe_sizes(source, [0, 1, 3])["image_sizes"]
    assert (sizes["images"], sizes["is_sample"], sizes["min"], sizes["max"]) == (2, True, [10, 20], [30, 50])
    side = sizes["shorter_side"]
    assert sum(side["counts"]) == 2 and side["edges"][0] == 10 and side["edges"][-1] == 21
    assert describe_sizes(source, [3]) == {}
