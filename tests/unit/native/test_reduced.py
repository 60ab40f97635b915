"""A box much larger than the output is decoded at reduced size: libjpeg's scaled samples, and nearly the same crop."""

import ctypes
import io
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from paceline.data.native import NativeExtension

CSRC = Path(__file__).parents[3] / "csrc"
PARTS = ["cpu", "entropy", "huffman", "idct", "idct_avx2", "planes", "record", "scratch"]
"""Files of the core that decode planes, which the extension does not hand out."""

NOT_REDUCED = 3  # stage: decode at full size
Box = tuple[float, float, float, float]


class Region(ctypes.Structure):
    """`pl_region` of csrc/paceline.h."""

    _fields_ = [(name, ctypes.c_int) for name in ("top", "left", "bottom", "right")] + [
        ("reductions", ctypes.c_int * 3)
    ]


class Plane(ctypes.Structure):
    """`pl_plane` of csrc/paceline.h."""

    _fields_ = [("data", ctypes.c_void_p), ("stride", ctypes.c_ssize_t)] + [
        (name, ctypes.c_int) for name in ("x0", "y0", "width", "height")
    ]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("cc")
    if not compiler:
        pytest.skip("no C compiler: the native core cannot be built here")
    path = tmp_path_factory.mktemp("planes") / "planes.so"
    options = ["-std=c11", "-O1", "-shared", "-fPIC", "-ffp-contract=off"]
    files = [CSRC / f"{name}.c" for name in PARTS]
    subprocess.run([compiler, *options, *files, "-o", path], check=True, timeout=120)
    library = ctypes.CDLL(str(path))
    library.pl_scratch_new.restype = ctypes.c_void_p
    return library


def planes_of(
    library: ctypes.CDLL, record: bytes, region: Region, num_planes: int
) -> list[tuple[int, int, NDArray[np.uint8]]]:
    """Decode planes of a record: the row and column of the first sample, and the samples."""
    opened, planes = ctypes.create_string_buffer(1024), (Plane * 3)()
    assert library.pl_record_open(record, ctypes.c_size_t(len(record)), opened) == 0
    scratch = ctypes.c_void_p(library.pl_scratch_new())
    assert library.pl_decode_planes(opened, region, 0, scratch, planes) == 0
    found = []
    for plane in planes[:num_planes]:
        rows = [ctypes.string_at(plane.data + y * plane.stride, plane.width) for y in range(plane.height)]
        samples = np.frombuffer(b"".join(rows), np.uint8).reshape(plane.height, plane.width)
        found.append((plane.y0, plane.x0, samples))
    library.pl_scratch_free(scratch)
    return found


def picture(height: int, width: int, mode: str = "RGB") -> Image.Image:
    """Return waves of all lengths and noise, with colors that clip."""
    draw = np.random.default_rng([height, width])
    y, x = np.mgrid[0:height, 0:width]
    waves = [128 + 120 * np.sin(x / draw.uniform(1, 30) + y / draw.uniform(1, 30)) for _ in range(3)]
    noisy = np.stack(waves, -1) + draw.normal(0, draw.choice([0, 10, 60]), (height, width, 3))
    return Image.fromarray(np.clip(noisy, 0, 255).astype(np.uint8)).convert(mode)


def jpeg(image: Image.Image, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", **{"quality": 90, **options})
    return file.getvalue()


@pytest.mark.parametrize("reduction", [2, 4, 8])
@pytest.mark.parametrize("isa", [0, 1], ids=["scalar", "best"])
@pytest.mark.parametrize(("mode", "subsampling"), [("L", 0), ("YCbCr", 0), ("L", 1), ("L", 2)])
def test_reduced_samples_are_those_of_libjpeg_s_scaled_decoding(
    core: NativeExtension, library: ctypes.CDLL, reduction: int, isa: int, mode: str, subsampling: int
) -> None:
    """Where chroma is subsampled, luma is compared alone: libjpeg scales chroma less, to enlarge it less."""
    library.pl_isa_choose(min(isa, library.pl_isa_best()))
    for height, width, quality in ((1, 1, 75), (9, 31, 100), (64, 48, 1), (95, 130, 30), (200, 313, 90)):
        scene = picture(height, width, "L" if mode == "L" and subsampling == 0 else "RGB")
        file = jpeg(scene, quality=quality, subsampling=subsampling)
        scaled = Image.open(io.BytesIO(file))
        size = -(-width // reduction), -(-height // reduction)
        scaled.draft(mode, (max(width // reduction, 1), max(height // reduction, 1)))
        if scaled.size != size:  # Pillow reduces the smallest ones less
            assert min(height, width) < 16
            continue
        whole = Region(0, 0, height, width, (reduction, reduction, reduction))
        planes = [samples for _, _, samples in planes_of(library, core.index_jpeg(file), whole, len(scaled.getbands()))]
        np.testing.assert_array_equal(np.stack(planes, -1).squeeze(), np.asarray(scaled).squeeze())


@pytest.mark.parametrize("reductions", [(1, 1, 1), (2, 1, 4), (4, 2, 2), (8, 4, 1)])
@pytest.mark.parametrize("subsampling", [0, 1, 2])
def test_planes_of_a_region_are_those_of_the_image(
    core: NativeExtension, library: ctypes.CDLL, reductions: tuple[int, int, int], subsampling: int
) -> None:
    record = core.index_jpeg(jpeg(picture(217, 330), subsampling=subsampling))
    whole = planes_of(library, record, Region(0, 0, 217, 330, reductions), 3)
    for top, left, bottom, right in ((0, 0, 1, 1), (16, 32, 90, 200), (71, 131, 217, 329), (216, 329, 217, 330)):
        parts = planes_of(library, record, Region(top, left, bottom, right, reductions), 3)
        for (_, _, samples), (y0, x0, part), reduction in zip(whole, parts, reductions, strict=True):
            height, width = part.shape
            assert y0 * reduction <= top and (y0 + height) * reduction * (2 if subsampling == 2 else 1) >= bottom
            assert x0 * reduction <= left and (x0 + width) * reduction * (2 if subsampling else 1) >= right
            np.testing.assert_array_equal(part, samples[y0 : y0 + height, x0 : x0 + width])


def crop(
    core: NativeExtension,
    record: bytes,
    box: Box,
    size: int,
    *,
    inside: bool = True,
    flip: bool = False,
    stage: int = 0,
) -> NDArray[np.uint8]:
    out = np.full((3, size, size), 99, np.uint8)
    core.decode_crop_into(record, box, inside, flip, size, 3, out, stage)
    return out


def apart(core: NativeExtension, record: bytes, box: Box, size: int, **options: Any) -> NDArray[np.int64]:
    """Return how much larger each sample is with reduction than without."""
    reduced = crop(core, record, box, size, **options).astype(np.int64)
    return reduced - crop(core, record, box, size, stage=NOT_REDUCED, **options)


BOXES = [(0, 0, 640, 700), (1, 0, 517, 611), (3.5, 77.25, 600.5, 400), (13, 5, 421, 431), (39, 99, 601, 601)]


@pytest.mark.parametrize("subsampling", [0, 1, 2])
@pytest.mark.parametrize("size", [9, 24, 40, 80])
@pytest.mark.parametrize("inside", [True, False])
def test_a_gradient_is_not_shifted(core: NativeExtension, subsampling: int, size: int, inside: bool) -> None:
    """Half a reduced sample would be 0.36 levels of red at a half of the size, and 1.4 at an eighth."""
    y, x = np.mgrid[0:640, 0:700]
    ramps = np.stack([x * 0.36, y * 0.39, 255 - (x + y) * 0.19], -1)
    for orientation in (1, 6):
        exif = Image.Exif()
        exif[0x0112] = orientation
        file = jpeg(Image.fromarray(ramps.astype(np.uint8)), quality=98, subsampling=subsampling, exif=exif)
        record = core.index_jpeg(file)
        for box in BOXES:
            upright = box if orientation == 1 else (box[1], box[0], box[3], box[2])
            difference = apart(core, record, upright, size, inside=inside, flip=size == 24)
            assert np.abs(difference).max() <= 2  # of three roundings that colors add up
            # At an eighth, libjpeg rounds a mean that ends in a half up, always.
            assert np.abs(difference.mean((1, 2))).max() < (0.5 if size == 9 else 0.2)


def smooth(height: int, width: int) -> Image.Image:
    """Return a scene whose detail falls with its frequency, as photographs' does."""
    draw = np.random.default_rng([height, width])
    total = np.zeros((height, width, 3))
    for period in (2, 4, 8, 16, 32, 64, 128):
        shape = (width // period + 2, height // period + 2)
        noise = Image.fromarray(draw.integers(0, 256, (shape[1], shape[0], 3)).astype(np.uint8))
        total += (np.asarray(noise.resize((width, height), Image.Resampling.BICUBIC)).astype(float) - 128) * period**0.5
    return Image.fromarray(np.clip(128 + total * 50 / total.std(), 0, 255).astype(np.uint8))


@pytest.mark.parametrize("subsampling", [0, 2])
@pytest.mark.parametrize("size", [12, 30, 60, 90, 100])
def test_a_reduced_crop_is_nearly_the_unreduced_one(core: NativeExtension, subsampling: int, size: int) -> None:
    record = core.index_jpeg(jpeg(smooth(640, 700), subsampling=subsampling))
    for box in BOXES:
        difference = np.abs(apart(core, record, box, size))
        # Rounding alone gives 0.1 and 1. Without narrowing the triangle it would be up to 1.2 and 8.
        assert difference.mean() < 0.4 and difference.max() <= 3, (box, difference.mean(), difference.max())


def test_it_is_reduced_from_four_samples_to_one_of_the_output_on(core: NativeExtension) -> None:
    record = core.index_jpeg(jpeg(picture(640, 700), subsampling=0))
    assert not apart(core, record, (0, 0, 399.9, 500), 100).any()
    assert not apart(core, record, (0, 0, 500, 399.9), 100).any()
    assert apart(core, record, (0, 0, 400, 500), 100).any()


def test_subsampled_chroma_is_reduced_half_as_much(core: NativeExtension) -> None:
    """The luma is flat, so what is apart is chroma."""
    stripes = np.full((640, 640, 3), 128, np.uint8)
    stripes[..., 1:] += np.random.default_rng(0).integers(-60, 60, (640, 640, 1)).astype(np.uint8)
    image = Image.fromarray(stripes, mode=None).convert("RGB")
    image = Image.frombytes("YCbCr", image.size, stripes.tobytes())
    full, halved = (core.index_jpeg(jpeg(image, subsampling=subsampling)) for subsampling in (0, 2))
    assert apart(core, full, (0, 0, 640, 640), 100).any()  # by 2
    assert not apart(core, halved, (0, 0, 640, 640), 100).any()  # 3.2 samples to one
    assert apart(core, halved, (0, 0, 640, 640), 80).any()


@pytest.fixture
def best(core: NativeExtension) -> Iterator[str]:
    name = core.isa()
    yield name
    core.choose_isa(name)


@pytest.mark.parametrize("subsampling", [0, 1, 2])
def test_all_instructions_give_the_same_bits(core: NativeExtension, best: str, subsampling: int) -> None:
    record = core.index_jpeg(jpeg(picture(333, 401), subsampling=subsampling, quality=100))
    draw = np.random.default_rng(subsampling)
    for size in (1, 3, 8, 17, 40, 80):
        top, left = draw.uniform(0, 60, 2)
        made = []
        for isa in (best, "scalar"):
            core.choose_isa(isa)
            made.append(crop(core, record, (top, left, 333 - 1.5 * top, 401 - 2 * left), size, inside=size % 2 == 0))
        assert np.array_equal(*made)


def test_a_sample_across_the_edge_of_the_box_counts_by_its_pixels_inside(core: NativeExtension) -> None:
    """Of the last sample, one pixel of eight is inside: it has an eighth of its weight, which would make 35."""
    halves = np.zeros((320, 320), np.uint8)
    halves[:, 161:] = 255
    record = core.index_jpeg(jpeg(Image.fromarray(halves), quality=100))
    made = crop(core, record, (0, 0, 320, 161), 10)
    assert not made[..., :-1].any() and made[..., -1].max() < 10
