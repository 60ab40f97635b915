"""`patch_pillow`: transforms of torchvision and timm get the crops they draw, and everything else Pillow's pixels."""

import copy
import io
import pickle
import struct

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from paceline.interop import patch_pillow

SIDE = 64


@pytest.fixture
def patched(monkeypatch):
    monkeypatch.setattr(JpegImageFile, "convert", JpegImageFile.convert)  # the original is back at the end
    patch_pillow()


def photograph(seed: int = 0, size: tuple[int, int] = (200, 150), mode: str = "RGB") -> Image.Image:
    """Return an image of smooth colors with noise."""
    generator = np.random.default_rng(seed)
    small = Image.fromarray(generator.integers(0, 256, (6, 8, 3), dtype=np.uint8)).resize(
        size, Image.Resampling.BICUBIC
    )
    noisy = np.asarray(small) + generator.normal(0, 4, (size[1], size[0], 3))
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).convert(mode)


def as_jpeg(image: Image.Image, **options) -> bytes:
    image.save(buffer := io.BytesIO(), "JPEG", quality=90, **options)
    return buffer.getvalue()


def read(content: bytes) -> Image.Image:
    with io.BytesIO(content) as file:
        return Image.open(file).convert("RGB")


def by_pillow(content: bytes) -> Image.Image:
    """Return what Pillow makes of a file, patched or not."""
    image = Image.open(io.BytesIO(content))
    image.load()
    return image.convert("RGB")


def decode(content: bytes) -> np.ndarray:
    return np.asarray(by_pillow(content))


def orientation(type_: int, value: int) -> bytes:
    """Return an EXIF block with an orientation."""
    return b"Exif\0\0MM\0*" + struct.pack(">IHHHIHHI", 8, 1, 0x0112, type_, 1, value, 0, 0)


def in_place(change):
    def changed(image):
        change(image)
        return image

    return changed


def crop_of_a_changed_image(image):
    crop = image.crop((10, 20, 100, 90))
    image.paste(0, (0, 0, 200, 150))
    return crop


def timm_transform():
    timm = pytest.importorskip("timm.data.transforms")
    return timm.RandomResizedCropAndInterpolation(SIDE, interpolation="bilinear")


@pytest.mark.parametrize(
    "create",
    [
        lambda: transforms.RandomResizedCrop(SIDE),
        lambda: v2.RandomResizedCrop(SIDE),
        timm_transform,
        lambda: transforms.Resize((SIDE, SIDE)),
    ],
    ids=["torchvision", "torchvision v2", "timm", "whole images"],
)
def test_resized_crops_are_the_drawn_ones_almost_to_the_bit(create, monkeypatch):
    import random

    transform = create()
    contents = [as_jpeg(photograph(seed)) for seed in range(8)]

    def crops() -> tuple[list, tuple]:
        torch.manual_seed(0)
        random.seed(0)
        return [np.asarray(transform(read(each))).astype(int) for each in contents], (random.random(), torch.rand(1))

    expected, drawn = crops()
    monkeypatch.setattr(JpegImageFile, "convert", JpegImageFile.convert)
    patch_pillow()
    monkeypatch.setattr(JpegImageFile, "load", None)  # nothing is decoded by Pillow
    reports: list[int] = []
    patch_pillow(on_first_crop=lambda: reports.append(1))
    found, drawn_too = crops()
    assert (drawn, reports) == (drawn_too, [1])
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape == (SIDE, SIDE, 3)
        assert abs(ours - theirs).mean() < 0.6


@pytest.mark.parametrize(
    "operation",
    [
        lambda image: image,
        lambda image: image.crop((10, 20, 100, 90)),
        lambda image: image.crop((-5, 20, 100, 90)).resize((SIDE, SIDE), Image.Resampling.BILINEAR),
        lambda image: image.crop((10, 20, 100, 90)).resize((SIDE, SIDE), Image.Resampling.BICUBIC),
        lambda image: image.crop((10, 20, 100, 90)).resize((SIDE, 32), Image.Resampling.BILINEAR),
        lambda image: image.crop((10, 20, 100, 90)).resize((SIDE, SIDE)),
        lambda image: image.crop((0, 0, SIDE, SIDE)).resize((SIDE, SIDE), Image.Resampling.BILINEAR),
        lambda image: image.resize((SIDE, 32), Image.Resampling.BILINEAR),
        lambda image: image.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
        lambda image: image.crop((10, 20, 100, 90)).convert("L"),
        lambda image: image.copy(),
        lambda image: pickle.loads(pickle.dumps(image)),
        lambda image: pickle.loads(pickle.dumps(image.crop((10, 20, 100, 90)))),
        lambda image: image.convert("RGB").crop((10, 20, 100, 90)).crop((5, 5, 50, 60)),
        lambda image: copy.deepcopy(image.crop((10, 20, 100, 90))),
        in_place(lambda image: image.thumbnail((64, 64))),
        in_place(lambda image: image.thumbnail((64, 64), Image.Resampling.BILINEAR, reducing_gap=None)),
        in_place(lambda image: image.draft("L", (50, 50))),
        in_place(lambda image: image.paste(0, (10, 20, 100, 90))),
        crop_of_a_changed_image,
        transforms.Compose([transforms.Resize(80), transforms.CenterCrop(SIDE)]),
    ],
)
def test_other_operations_have_pillows_pixels(patched, operation):
    content = as_jpeg(photograph(), icc_profile=b"of a printer")
    image = read(content)
    assert (image.size, image.mode, image.format) == ((200, 150), "RGB", None)
    found, expected = operation(image), operation(by_pillow(content))
    assert found == expected  # with the type and `info`
    assert found.info["icc_profile"] == b"of a printer"


def test_an_image_is_like_one_of_pillow(patched):
    content = as_jpeg(photograph())
    with Image.open(io.BytesIO(content)) as original:
        image = original.convert("RGB")
        assert np.array_equal(np.asarray(original), decode(content))
    crop = image.crop((10, 20, 100, 90))
    image.close()
    with pytest.raises(ValueError, match="closed"):
        image.getpixel((0, 0))
    assert np.array_equal(np.asarray(crop), decode(content)[20:90, 10:100])
    assert read(content) == read(content) != read(content).crop((1, 1, 9, 9))
    with read(content) as again:
        pass
    assert again.getpixel((3, 4)) == tuple(decode(content)[4, 3])


def test_the_file_that_pillow_opened_is_closed(patched, tmp_path):
    (tmp_path / "image.jpg").write_bytes(as_jpeg(photograph()))
    original = Image.open(tmp_path / "image.jpg")
    file = original.fp
    original.convert("RGB")
    assert file.closed and original.getpixel((0, 0))


def test_crops_of_one_image_are_independent_of_its_index(patched):
    content = as_jpeg(photograph())
    crop = transforms.functional.resized_crop
    image = read(content)
    assert crop(image, 0, 20, 100, 90, [SIDE, SIDE]).info == by_pillow(content).info
    several = [np.asarray(crop(image, top, 20, 100, 90, [SIDE, SIDE])) for top in (0, 10, 20)]
    alone = [np.asarray(crop(read(content), top, 20, 100, 90, [SIDE, SIDE])) for top in (0, 10, 20)]
    assert all(map(np.array_equal, several, alone))


@pytest.mark.parametrize(
    "content",
    [
        as_jpeg(photograph(mode="L")),
        as_jpeg(photograph(mode="CMYK")),
        as_jpeg(photograph(), exif=orientation(type_=3, value=6)),
        as_jpeg(photograph(), exif=orientation(type_=0, value=3)),
        as_jpeg(photograph(), exif=b"Exif\0\0\x01\x12junk", dpi=(72, 72)),
    ],
    ids=["gray", "cmyk", "turned", "turned by a damaged tag", "damaged tags"],
)
def test_other_jpegs_are_decoded_by_pillow(patched, content):
    crop = transforms.functional.resized_crop
    expected = crop(Image.fromarray(decode(content)), 10, 20, 100, 90, [SIDE, SIDE])
    assert np.array_equal(np.asarray(crop(read(content), 10, 20, 100, 90, [SIDE, SIDE])), np.asarray(expected))


def test_an_image_that_is_drafted_or_decoded_already_stays_with_pillow(patched):
    content = as_jpeg(photograph(size=(640, 480)))
    drafted = Image.open(io.BytesIO(content))
    drafted.draft("RGB", (160, 120))
    assert drafted.convert("RGB").size == (160, 120)
    decoded = Image.open(io.BytesIO(content))
    decoded.load()
    assert np.array_equal(np.asarray(decoded.convert("RGB")), decode(content))


def test_a_truncated_file_raises_pillows_error_where_pillow_does(patched, monkeypatch):
    content = as_jpeg(photograph())[:2000]
    with pytest.raises(OSError, match="truncated"):
        read(content)
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    assert np.array_equal(np.asarray(read(content)), decode(content))


def test_a_damaged_file_is_left_to_pillow(patched):
    content = bytearray(as_jpeg(photograph()))
    content[len(content) // 2 : len(content) // 2 + 40] = b"\xff\xd0" * 20
    crop = transforms.functional.resized_crop
    expected = crop(Image.fromarray(decode(bytes(content))), 10, 20, 100, 90, [SIDE, SIDE])
    assert np.array_equal(np.asarray(crop(read(bytes(content)), 10, 20, 100, 90, [SIDE, SIDE])), np.asarray(expected))


def test_worker_processes_decode_alike(patched, tmp_path):
    for seed in range(8):
        (tmp_path / str(seed % 2)).mkdir(exist_ok=True)
        (tmp_path / str(seed % 2) / f"{seed}.jpg").write_bytes(as_jpeg(photograph(seed)))
    crop = transforms.Lambda(lambda image: transforms.functional.resized_crop(image, 10, 20, 100, 90, [SIDE, SIDE]))
    dataset = ImageFolder(str(tmp_path), transforms.Compose([crop, transforms.PILToTensor()]))
    here = torch.stack([image for image, _ in dataset])
    workers = DataLoader(dataset, 2, num_workers=2, multiprocessing_context="fork")
    assert torch.equal(torch.cat([images for images, _ in workers]), here)
