"""Erasing: the box of each image follows its own draws, and other pixels are unchanged."""

import numpy as np
import pytest
import torch
from torchvision.transforms import v2

from paceline.data.augment.erasing import BatchCutout, BatchRandomErasing, to_color

COLOUR = (1, 2, 3)


def white(num: int, height: int, width: int) -> torch.Tensor:
    return torch.full((num, 3, height, width), 255, dtype=torch.uint8)


def uniform(num: int, num_draws: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(2).random((num, num_draws)))


@pytest.mark.parametrize("size", [1, 4, 5, 60])
def test_cutout_blanks_the_square_around_the_drawn_pixel_as_its_paper_does(size: int) -> None:
    images, draws = white(40, 12, 20), uniform(40, 2)
    blanked = BatchCutout(size, COLOUR)(images, draws)
    for image, (row, column) in zip(blanked, draws.tolist(), strict=True):
        expected = white(1, 12, 20)[0]
        top, left = int(row * 12) - size // 2, int(column * 20) - size // 2
        for y in range(max(0, top), min(12, top + size)):
            for x in range(max(0, left), min(20, left + size)):
                expected[:, y, x] = torch.tensor(COLOUR, dtype=torch.uint8)
        assert torch.equal(image, expected)


def test_random_erasing_blanks_the_first_rectangle_that_fits() -> None:
    erasing = BatchRandomErasing(0.6, (0.1, 1.5), (0.3, 3.3), COLOUR)
    images, draws = white(200, 24, 30), uniform(200, erasing.num_draws)
    blanked = erasing(images, draws)
    attempts = []
    for image, draw in zip(blanked, draws.tolist(), strict=True):
        expected, tried = _erased(draw)
        attempts.append(tried)
        assert torch.equal(image, expected)
    assert {0, 1, 2, 3} <= set(attempts), "no try, one, and several"


def _erased(draw: list[float]) -> tuple[torch.Tensor, int]:
    """Return a white image erased by torchvision's rule, and the number of attempts."""
    image = white(1, 24, 30)[0]
    if draw[0] >= 0.6:
        return image, 0
    for attempt in range(10):
        area = 24 * 30 * (0.1 + draw[1 + 2 * attempt] * 1.4)
        ratio = float(np.exp(np.log(0.3) + draw[2 + 2 * attempt] * (np.log(3.3) - np.log(0.3))))
        height, width = round((area / ratio) ** 0.5), round((area * ratio) ** 0.5)
        if 1 <= height < 24 and 1 <= width < 30:
            top, left = int(draw[-2] * (24 - height + 1)), int(draw[-1] * (30 - width + 1))
            image[:, top : top + height, left : left + width] = torch.tensor(COLOUR, dtype=torch.uint8)[:, None, None]
            return image, attempt + 1
    return image, 10


def test_random_erasing_blanks_as_often_and_as_much_as_torchvisions() -> None:
    """5 standard errors of 2,000 images for each of the two, whose shares of blanked pixels vary by 0.1."""
    erasing = BatchRandomErasing(0.5, (0.02, 1 / 3), (0.3, 10 / 3), COLOUR)
    ours = (erasing(white(2000, 32, 32), uniform(2000, erasing.num_draws)) != 255).float().mean((1, 2, 3))
    torch.manual_seed(0)
    theirs = v2.RandomErasing(0.5, (0.02, 1 / 3), (0.3, 10 / 3))
    shares = torch.stack([(theirs(white(1, 32, 32)[0]) != 255).float().mean() for _ in range(2000)])
    assert abs(ours.mean() - shares.mean()) < 5 * 0.13 * (2 / 2000) ** 0.5
    assert abs((ours > 0).float().mean() - 0.5) < 5 * 0.5 / 2000**0.5


def test_the_blank_is_the_nearest_colour_to_the_mean() -> None:
    assert to_color((0.4914, 0.0, 1.0), "uint8") == (125, 0, 255)
