"""Photographs decoded on a device: the samples, labels and draws of the host's loaders, and nearly their pixels.

Where there is no GPU the device is the CPU, whose decoder in torchvision stands in for nvJPEG; all else is the same.
"""

from collections.abc import Sequence
from dataclasses import replace
from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torch import Tensor

from paceline.contrib import nvjpeg
from paceline.contrib.nvjpeg import JpegHeader, apply_orientation, build_jpeg_decoder, parse_jpeg_header
from paceline.core.dataset import DatasetInfo, Sample
from paceline.core.errors import DataError, RecipeError
from paceline.data.bad_images import ImageError
from paceline.data.batch import Batch
from paceline.data.loaders.build import Loader, LoaderOptions, build_eval_loader, build_train_loader
from paceline.data.order import EvalShard, TrainOrder
from paceline.recipe.schema.data import Data

CPU = torch.device("cpu")
NUM = 24
INFO = DatasetInfo("made", "train", NUM, ("a", "b"), 3, None, (0.5,) * 3, (0.25,) * 3)
ORDER = TrainOrder(seed=1, num_images=NUM, batch_size=8)
CROPS = Data(augment=("random_resized_crop", "flip", "mixup"))  # type: ignore[arg-type]
HOST = Data(augment=("random_resized_crop", "pad_crop", "rand_augment", "flip"))  # type: ignore[arg-type]
ORIENTATION = 0x0112


def photograph(number: int, kind: str = "JPEG", mode: str = "RGB", orientation: int = 1) -> bytes:
    """Return a file of smooth colors with some noise, 40 to 70 pixels a side."""
    random = np.random.default_rng(number)
    height, width = random.integers(40, 70, 2)
    ramps = np.linspace(0, 200, height)[:, None, None] + np.linspace(0, 40, width)[None, :, None]
    pixels = np.clip(ramps * random.random(3) + random.integers(0, 16, (height, width, 3)), 0, 255).astype(np.uint8)
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    file = BytesIO()
    Image.fromarray(pixels).convert(mode).save(file, kind, exif=exif)
    return file.getvalue()


class Photographs:
    """Files in memory: upright and rotated JPEGs, gray and CMYK ones, and PNGs."""

    def __init__(self, broken: Sequence[int] = ()) -> None:
        self.info = INFO
        self.files = [photograph(number, orientation=number % 8 + 1) for number in range(NUM - 4)]
        self.files += [photograph(90, mode="L"), photograph(91, mode="CMYK"), photograph(92, "PNG"), photograph(93)]
        for number in broken:
            self.files[number] = self.files[number][:200]

    def __len__(self) -> int:
        return NUM

    def read(self, index: int) -> Sample:
        return self.files[index], index % 2

    def name_of(self, index: int) -> str:
        return f"made/{index}.jpg"


def loader(data: Data, source: Photographs, name: str, *, on_device: bool = False) -> Loader:
    options = LoaderOptions(2, False, on_device, loader=name, device=CPU)  # type: ignore[arg-type]
    return build_train_loader(data, source, ORDER, lambda step: 32, options)


def batches(made: Loader) -> list[Batch]:
    try:
        return list(made.batches(0, 6))
    finally:
        made.close()


def assert_nearly(found: Tensor, expected: Tensor, *, most: int, mean: float) -> None:
    off = (found.int() - expected.int()).abs()
    assert off.max() <= most and off.float().mean() < mean, (off.max(), off.float().mean())


def test_samples_labels_and_draws_equal_the_host_s_and_pixels_nearly() -> None:
    """Four levels of 255: Pillow resamples in fixed point, torchvision's tensors in float, each axis rounded once."""
    for on_device in (False, True):
        pairs = [batches(loader(CROPS, Photographs(), name, on_device=on_device)) for name in ("threads", "nvjpeg")]
        for host, device in zip(*pairs, strict=True):
            assert np.array_equal(host.indices, device.indices) and torch.equal(host.labels, device.labels)
            assert torch.equal(host.draws, device.draws)
            assert_nearly(device.images, host.images, most=4, mean=0.6)


def test_an_augment_that_needs_the_host_gets_draws_on_the_host() -> None:
    for host, device in zip(
        *(batches(loader(HOST, Photographs(), name)) for name in ("threads", "nvjpeg")), strict=True
    ):
        assert np.array_equal(host.indices, device.indices)
        assert (host.images.int() - device.images.int()).abs().float().mean() < 4  # histograms are equalized apart


def test_an_evaluation_reads_every_image_once() -> None:
    options = LoaderOptions(2, pin_memory=False, loader="nvjpeg", device=CPU)
    made = build_eval_loader(Data(), Photographs(), EvalShard(NUM, 7), 32, options)
    seen = [batch.indices for batch in made.batches(0, 4)]
    made.close()
    assert np.array_equal(np.concatenate(seen), np.arange(NUM))


def test_a_file_that_cannot_be_decoded_raises_or_is_replaced_as_on_the_host() -> None:
    source = Photographs(broken=[3])
    with pytest.raises(DataError, match=r"made/3\.jpg"):
        batches(loader(CROPS, source, "nvjpeg"))
    skipping = CROPS.model_copy(update={"on_bad_image": "skip"})
    for host, device in zip(*(batches(loader(skipping, source, name)) for name in ("threads", "nvjpeg")), strict=True):
        assert torch.equal(host.labels, device.labels) and host.bad == device.bad
        assert_nearly(device.images, host.images, most=4, mean=0.6)
    assert any(batch.bad for batch in batches(loader(skipping, source, "nvjpeg")))


@pytest.mark.parametrize("orientation", range(10))
def test_orientations_are_applied_as_by_pillow(orientation: int) -> None:
    data = photograph(5, orientation=orientation)
    header = parse_jpeg_header(data)
    assert header is not None
    (stored,) = build_jpeg_decoder(CPU, 3)([data])
    turned = np.asarray(ImageOps.exif_transpose(Image.open(BytesIO(data)).convert("RGB")))
    found = apply_orientation(stored, nvjpeg.read_orientation(header.exif)).permute(1, 2, 0)
    assert_nearly(found, torch.from_numpy(turned.copy()), most=2, mean=0.1)


def test_a_jpeg_header_is_parsed_and_a_damaged_one_is_none() -> None:
    data = photograph(5, orientation=6)
    header = parse_jpeg_header(data)
    with Image.open(BytesIO(data)) as image:
        assert header == JpegHeader(image.height, image.width, 3, image.info["exif"])
    assert [getattr(parse_jpeg_header(photograph(5, mode=mode)), "components", 0) for mode in ("L", "CMYK")] == [1, 4]
    assert parse_jpeg_header(photograph(5, "PNG")) is None
    wholes = [length for length in range(len(data)) if parse_jpeg_header(data[:length]) == header]
    assert wholes and wholes == list(range(wholes[0], len(data)))
    assert all(parse_jpeg_header(data[:length]) is None for length in range(wholes[0]))


def test_a_jpeg_header_tells_rgb_from_ycbcr() -> None:
    """Pillow's `keep_rgb` writes Adobe's segment, whose last byte is 0, and the names of the components."""
    file = BytesIO()
    Image.new("RGB", (16, 16)).save(file, "JPEG", keep_rgb=True)
    stored = file.getvalue()
    segment = stored.index(b"Adobe")
    without = [
        stored,
        stored.replace(b"Adobe", b"Other"),  # the names alone
        stored.replace(b"R\x11", b"\x01\x11", 1),  # the segment alone
        stored[: segment + 11] + b"\x01" + stored[segment + 12 :].replace(b"R\x11", b"\x01\x11", 1),
        photograph(5),
        photograph(5, mode="L"),
    ]
    headers = [parse_jpeg_header(each) for each in without]
    assert [header is not None and header.is_rgb for header in headers] == [True, True, True, False, False, False]


def test_rgb_jpegs_are_decoded_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded_on_host: list[bytes] = []
    decode = nvjpeg.decode

    def watched(data: bytes, **options: object) -> object:
        decoded_on_host.append(data)
        return decode(data, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(nvjpeg, "decode", watched)
    source = Photographs()
    file = BytesIO()
    Image.open(BytesIO(source.files[2])).save(file, "JPEG", keep_rgb=True)
    source.files[2] = file.getvalue()
    made = loader(CROPS, source, "nvjpeg")
    batches(made)
    assert source.files[2] in decoded_on_host and source.files[0] not in decoded_on_host


def test_a_full_device_raises_instead_of_using_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    made = loader(CROPS, Photographs(), "nvjpeg")

    def fails(self: object, files: Sequence[bytes]) -> list[Tensor]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(nvjpeg.TorchvisionDecoder, "__call__", fails)
    with pytest.raises(torch.OutOfMemoryError):
        batches(made)


def test_a_torchvision_without_a_decoder_raises_a_one_line_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: object, files: Sequence[bytes]) -> list[Tensor]:
        raise RuntimeError("decode_jpegs_cuda: torchvision not compiled with nvJPEG support")

    monkeypatch.setattr(nvjpeg.TorchvisionDecoder, "__call__", fails)
    with pytest.raises(
        RecipeError, match=r"data\.loader: nvjpeg: .*not compiled with nvJPEG.*\(set data\.loader=auto\)"
    ):
        build_jpeg_decoder(CPU, 3)


def test_gray_data_sets_are_decoded_to_one_channel() -> None:
    source = Photographs()
    source.info = replace(INFO, channels=1)
    for host, device in zip(*(batches(loader(Data(), source, name)) for name in ("threads", "nvjpeg")), strict=True):
        assert device.images.shape[1] == 1
        assert_nearly(device.images, host.images, most=4, mean=0.6)


def test_read_errors_equal_the_host_s() -> None:
    class Gone(Photographs):
        def read(self, index: int) -> Sample:
            raise ImageError(self.name_of(index), "is gone", "put it back")

    with pytest.raises(DataError, match="is gone"):
        batches(loader(CROPS, Gone(), "nvjpeg"))
