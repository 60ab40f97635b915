"""A crop of a record is what a triangle filter makes of its pixels, in every direction, size and instruction set."""

import io
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torchvision.transforms.v2 import functional as F

from paceline.data.decode import decode
from paceline.data.native import NativeExtension
from paceline.data.resize import RandomCropResizer

SIZES = [1, 7, 8, 9, 15, 16, 17, 33, 100]
ORIENTATION_AT = 9  # byte of a record
NOT_REDUCED = 3  # stage: decode at full size, however much smaller the output is
TURNED: dict[int, Callable[[NDArray], NDArray]] = {
    1: lambda stored: stored,
    2: np.fliplr,
    3: lambda stored: np.rot90(stored, 2),
    4: np.flipud,
    5: lambda stored: stored.T,
    6: lambda stored: np.rot90(stored, -1),
    7: lambda stored: np.rot90(stored, 2).T,
    8: np.rot90,
}
Box = tuple[float, float, float, float]


@pytest.fixture
def scalar_too(core: NativeExtension) -> Iterator[Callable[[Callable[[], NDArray]], list[NDArray]]]:
    """Return a function that calls another with every instruction set there is, the best one first."""
    best = core.isa()

    def with_each(make: Callable[[], NDArray]) -> list[NDArray]:
        made = []
        for isa in (best, "scalar"):
            core.choose_isa(isa)
            made.append(make())
        return made

    yield with_each
    core.choose_isa(best)


def jpeg(height: int, width: int, mode: str = "RGB", **options: Any) -> bytes:
    """Return a JPEG of a smooth scene with edges, whose colors differ less than its brightness, as photographs' do."""
    draw = np.random.default_rng([height, width])
    shape = -(-height // 12) + 1, -(-width // 12) + 1
    coarse = draw.integers(30, 226, (*shape, 1)) + draw.integers(-30, 31, (*shape, 3))
    scene = Image.fromarray(coarse.astype(np.uint8)).resize((width, height), Image.Resampling.BICUBIC)
    file = io.BytesIO()
    scene.convert(mode).save(file, "JPEG", quality=92, **options)
    return file.getvalue()


def crop(
    core: NativeExtension,
    record: bytes,
    box: Box,
    size: int,
    *,
    inside: bool = True,
    flip: bool = False,
    channels: int = 3,
    stage: int = 0,
) -> NDArray:
    out = np.full((channels, size, size), 99, np.uint8)
    core.decode_crop_into(record, box, inside, flip, size, channels, out, stage)
    return out


def upright(core: NativeExtension, record: bytes, channels: int = 1) -> NDArray:
    height, width, _ = core.size_of(record)
    out = np.empty((height, width, channels), np.uint8)
    core.decode_into(record, channels, out)
    return out


def turned(record: bytes, orientation: int) -> bytes:
    return record[:ORIENTATION_AT] + bytes([orientation]) + record[ORIENTATION_AT + 1 :]


def triangle(start: float, length: float, seen: range, extent: int, size: int) -> NDArray:
    """Return float64 [size, extent]: the weights of Pillow's `resize` from [start, start + length), unrounded."""
    scale = length / size
    support = max(1.0, scale)
    centres = start + (np.arange(size) + 0.5) * scale
    weights = np.maximum(0, 1 - np.abs(np.arange(extent) + 0.5 - centres[:, None]) / support)
    weights[:, : seen.start] = weights[:, seen.stop :] = 0
    return weights / weights.sum(1, keepdims=True)


def expected(pixels: NDArray, box: Box, size: int, inside: bool) -> NDArray:
    top, left, height, width = box
    rows, columns = range(pixels.shape[0]), range(pixels.shape[1])
    if inside:
        rows, columns = range(int(top), int(top + height)), range(int(left), int(left + width))
    down = triangle(top, height, rows, pixels.shape[0], size)
    across = triangle(left, width, columns, pixels.shape[1], size)
    return down @ pixels @ across.T


@pytest.mark.parametrize("orientation", TURNED)
@pytest.mark.parametrize("size", SIZES)
def test_a_grey_crop_is_the_filter_s_in_every_orientation(core: NativeExtension, orientation: int, size: int) -> None:
    record = turned(core.index_jpeg(jpeg(61, 83, "L")), orientation)
    pixels = upright(core, record)[..., 0]
    height, width = pixels.shape
    for box, inside in (
        ((0, 0, height, width), True),
        ((5, 11, 40, 31), True),
        ((5, 11, 40, 31), False),
        ((3.25, 0.5, 17.5, 9.75), False),
        ((height - 1, width - 1, 1, 1), True),
    ):
        made = crop(core, record, box, size, inside=inside, channels=1, stage=NOT_REDUCED)[0]
        # Half a level of rounding at the end; 1/128 after the first pass; weights of 14 bits.
        assert np.abs(made - expected(pixels, box, size, inside)).max() < 0.56


@pytest.mark.parametrize("subsampling", ["4:4:4", "4:2:2", "4:2:0"])
@pytest.mark.parametrize("size", SIZES)
def test_all_instructions_give_the_same_bits_and_a_flip_mirrors_them(
    core: NativeExtension, scalar_too: Callable[..., list[NDArray]], subsampling: str, size: int
) -> None:
    record = core.index_jpeg(jpeg(75, 53, subsampling=subsampling))
    for orientation in TURNED:
        stored = turned(record, orientation)
        box, inside = ((4, 3, 47, 41), True) if orientation % 2 else ((2.5, 1.25, 30.25, 44.0), False)
        plain, scalar = scalar_too(
            lambda stored=stored, box=box, inside=inside: crop(core, stored, box, size, inside=inside)
        )
        assert np.array_equal(plain, scalar)
        for flipped in scalar_too(
            lambda stored=stored, box=box, inside=inside: crop(core, stored, box, size, inside=inside, flip=True)
        ):
            assert np.array_equal(flipped, plain[..., ::-1])


def test_a_turned_record_gives_the_turned_crop(core: NativeExtension) -> None:
    record = core.index_jpeg(jpeg(75, 53))
    stored = crop(core, record, (0, 0, 75, 53), 24)
    for orientation, turn in TURNED.items():
        height, width, _ = core.size_of(turned(record, orientation))
        made = crop(core, turned(record, orientation), (0, 0, height, width), 24)
        assert np.array_equal(made, np.stack([turn(channel) for channel in stored])), orientation


def test_a_turned_crop_is_that_of_the_turned_pixels(core: NativeExtension) -> None:
    pixels = Image.open(io.BytesIO(jpeg(80, 48)))
    box = (10, 8, 30, 37)
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    pixels.transpose(Image.Transpose.ROTATE_90).save(file, "JPEG", quality=100, subsampling=0, exif=exif)
    straight = io.BytesIO()
    pixels.save(straight, "JPEG", quality=100, subsampling=0)
    made = crop(core, core.index_jpeg(file.getvalue()), box, 32).astype(int)
    wanted = crop(core, core.index_jpeg(straight.getvalue()), box, 32).astype(int)
    assert np.abs(made - wanted).max() <= 3  # both were rounded to JPEG coefficients, each its own way


@pytest.mark.parametrize("subsampling", ["4:4:4", "4:2:2", "4:2:0"])
def test_colours_are_torchvision_s_within_the_roundings(core: NativeExtension, subsampling: str) -> None:
    data = jpeg(150, 200, subsampling=subsampling)
    image, record = decode(data, channels=3, name="x"), core.index_jpeg(data)
    for size, box in ((64, (10, 20, 120, 130)), (128, (31, 17, 90, 75))):
        wanted = F.pil_to_tensor(F.resized_crop(image, *box, [size, size], antialias=True)).numpy()
        apart = np.abs(crop(core, record, box, size).astype(int) - wanted)
        # Pillow rounds to 8 bits after chroma's enlargement, the colors and each pass: that is what is apart.
        assert apart.mean() < 0.6, apart.mean()


def test_grey_is_repeated_and_one_channel_of_colours_is_their_luma(core: NativeExtension) -> None:
    box = (3, 4, 50, 45)
    grey = core.index_jpeg(jpeg(60, 60, "L"))
    one = crop(core, grey, box, 20, channels=1)
    assert np.array_equal(crop(core, grey, box, 20), np.repeat(one, 3, 0))
    neutral = np.repeat(upright(core, grey), 3, 2)
    file = io.BytesIO()
    Image.fromarray(neutral).save(file, "JPEG", quality=92)
    colours = core.index_jpeg(file.getvalue())
    luma = crop(core, colours, box, 20, channels=1)
    assert np.array_equal(crop(core, colours, box, 20), np.repeat(luma, 3, 0))  # without color, all three are luma


@pytest.mark.parametrize(("shape", "size"), [((1, 4000), 1), ((4000, 3), 2), ((1, 1), 300), ((900, 700), 3)])
def test_extreme_ratios_lose_nothing(
    core: NativeExtension, scalar_too: Callable[..., list[NDArray]], shape: tuple[int, int], size: int
) -> None:
    record = core.index_jpeg(jpeg(*shape, "L"))
    pixels = upright(core, record)[..., 0]
    box = (0, 0, *shape)
    best, scalar = scalar_too(lambda: crop(core, record, box, size, channels=1)[0])
    assert np.array_equal(best, scalar)
    # Thousands of taps share 1 << 14: weights of a few units are rounded by up to one, in turns up and down.
    assert np.abs(best - expected(pixels, box, size, True)).max() < 1.5
    white = io.BytesIO()
    Image.new("L", shape[::-1], 255).save(white, "JPEG")
    assert (crop(core, core.index_jpeg(white.getvalue()), box, size, channels=1) == 255).all()


def test_a_crop_sees_nothing_beyond_its_box_unless_it_may(core: NativeExtension) -> None:
    halves = np.zeros((64, 64), np.uint8)
    halves[:, 32:] = 255  # an edge between blocks: JPEG keeps it exactly
    file = io.BytesIO()
    Image.fromarray(halves).save(file, "JPEG", quality=95)
    record = core.index_jpeg(file.getvalue())
    assert not crop(core, record, (0, 0, 32, 32), 8, inside=True).any()
    beyond = crop(core, record, (0, 0, 32, 32), 8, inside=False)
    assert not beyond[..., :-1].any() and beyond[..., -1].all()


@pytest.mark.parametrize(
    "box",
    [
        (float("nan"), 0, 4, 4),
        (0, 0, float("nan"), 4),
        (0, 0, 4, float("inf")),
        (float("-inf"), 0, 4, 4),
        (1e300, 0, 4, 4),
        (-1, 0, 4, 4),
        (0, 0, 0, 4),
        (0, 0, -4, 4),
        (0, 0, 41, 4),
        (0, 57, 4, 4),
    ],
)
def test_a_box_that_is_not_in_the_image_is_refused(core: NativeExtension, box: Box) -> None:
    record = core.index_jpeg(jpeg(40, 60))
    out = np.full((3, 8, 8), 99, np.uint8)
    with pytest.raises(ValueError, match="outside"):
        core.decode_crop_into(record, box, False, False, 8, 3, out)
    assert (out == 99).all()


def test_a_box_that_rounding_put_a_little_outside_is_taken(core: NativeExtension) -> None:
    record = core.index_jpeg(jpeg(40, 60))
    whole = crop(core, record, (0, 0, 40, 60), 24)
    assert np.array_equal(crop(core, record, (-1e-9, 0, 40 + 2e-9, 60), 24), whole)


@pytest.mark.real_data
def test_photographs_differ_from_torchvision_by_less_than_0_6_levels(
    core: NativeExtension, real_data: Callable
) -> None:
    files = sorted((real_data("imagenet-sample") / "train").rglob("*.JPEG"))[::25]
    assert len(files) >= 20
    sizing, draw, apart = RandomCropResizer((0.08, 1.0), (3 / 4, 4 / 3)), np.random.default_rng(0), []
    for file in files:
        image = decode(file.read_bytes(), channels=3, name=file.name)
        draws = draw.random(sizing.num_draws)
        box = sizing.choose_box(image.height, image.width, draws)
        wanted = sizing(image, draws, 224)
        made = torch.from_numpy(crop(core, core.index_jpeg(file.read_bytes()), box, 224))
        apart.append((made.float() - wanted.float()).abs().mean().item())
    assert np.mean(apart) < 0.6, np.mean(apart)
