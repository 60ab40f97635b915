"""Padded, cut and mirrored batches of pixels are what numpy makes of them, with whatever instructions."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from paceline.data.native import NativeExtension

# Narrow images go through registers: 16 to 32 columns; both sides of both ends, and the real ones.
SHAPES = [(1, 1, 1), (3, 8, 8), (2, 9, 15), (3, 5, 16), (1, 28, 28), (3, 20, 31), (3, 32, 32), (2, 7, 33), (3, 12, 80)]


@pytest.fixture(params=["avx2", "scalar"])
def core_with(core: NativeExtension, request: pytest.FixtureRequest) -> Iterator[NativeExtension]:
    best = core.isa()
    if request.param == "avx2" and best != "avx2":
        pytest.skip("this processor has no AVX2")
    core.choose_isa(request.param)
    yield core
    core.choose_isa(best)


def moves(n: int, num_images: int, padding: int) -> tuple[NDArray, NDArray, NDArray, NDArray]:
    draw = np.random.default_rng(n)
    tops, lefts = draw.integers(0, 2 * padding + 1, (2, n)).astype(np.int32)
    return draw.integers(0, num_images, n), tops, lefts, draw.integers(0, 2, n).astype(np.uint8)


def moved(core: NativeExtension, images: NDArray, given: tuple[NDArray, ...], padding: int, reflect: bool) -> NDArray:
    out = np.full((len(given[0]), *images.shape[1:]), 99, np.uint8)
    channels, height, width = images.shape[1:]
    core.move(images, *given, padding, reflect, (channels, height, width), out)
    return out


def expected(images: NDArray, given: tuple[NDArray, ...], padding: int, mode: str) -> NDArray:
    padded = F.pad(torch.from_numpy(images), (padding,) * 4, mode=mode).numpy()
    height, width = images.shape[2:]
    cut = [padded[i, :, t : t + height, le : le + width] for i, t, le in zip(*given[:3], strict=True)]
    return np.stack([each[..., ::-1] if flip else each for each, flip in zip(cut, given[3], strict=True)])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("padding", [0, 1, 4, 50])
def test_zeros_come_in_from_beyond_the_edges(
    core_with: NativeExtension, shape: tuple[int, int, int], padding: int
) -> None:
    images = np.random.default_rng(0).integers(1, 256, (5, *shape), np.uint8)
    given = moves(40, 5, padding)
    assert np.array_equal(moved(core_with, images, given, padding, False), expected(images, given, padding, "constant"))


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if min(shape[1:]) > 4])
def test_reflected_pixels_come_in_as_torch_reflects_them(
    core_with: NativeExtension, shape: tuple[int, int, int]
) -> None:
    images = np.random.default_rng(0).integers(1, 256, (5, *shape), np.uint8)
    for padding in (1, 4, min(shape[1:]) - 1):
        given = moves(40, 5, padding)
        assert np.array_equal(
            moved(core_with, images, given, padding, True), expected(images, given, padding, "reflect")
        )


def test_nothing_is_moved_where_there_is_nothing_to_move(core_with: NativeExtension) -> None:
    images = np.zeros((2, 3, 32, 32), np.uint8)
    assert moved(core_with, images, moves(0, 2, 4), 4, False).shape == (0, 3, 32, 32)
