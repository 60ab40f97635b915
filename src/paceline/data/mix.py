"""Mixing each image and its label with its neighbour's: mixup and cutmix, on pairs of the global batch.

Neighbours are the images at positions 2k and 2k + 1. A rank computes an even number of images at once, so the pairs
are the same for any number of ranks and micro-batches. Each pair has one share, from the draws of its first image:
an image keeps that share of itself and takes the rest of the other.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.data.augment.erase import inside
from paceline.recipe.schema import augment as sections
from paceline.recipe.schema.section import Section

_WHICH, _SHARE, _ROW, _COLUMN = range(4)


class Mixing(Protocol):
    """Mix images and labels in pairs, by `num_draws` draws an image."""

    @property
    def num_draws(self) -> int:
        """How many draws an image uses."""
        ...

    def prepare(self, draws: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return float64 [N, num_draws]: uniform draws of even N images, turned into what mixing on a device needs."""
        ...

    def __call__(self, images: Tensor, labels: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
        """Return (float [N, C, H, W], what the loss compares with), by `prepare`d draws on the same device."""
        ...


class Unmixed:
    """Leave images and labels as they are."""

    num_draws = 0

    def prepare(self, draws: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the draws."""
        return draws

    def __call__(self, images: Tensor, labels: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
        """Return (images, labels int64 [N])."""
        return images, labels


class Kept(Protocol):
    """One way of mixing: how much of itself each pixel keeps, and each label."""

    @property
    def alpha(self) -> float:
        """Shares are drawn from Beta(alpha, alpha)."""
        ...

    def __call__(self, draws: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
        """Return float64 ([P, 1, H or 1, W or 1], [P]) in [0, 1] for `prepare`d draws, float64 [P, 4]."""
        ...


@dataclass(frozen=True)
class MixUp:
    """Blend the whole image (Zhang et al. 2018, arXiv 1710.09412)."""

    alpha: float

    def __call__(self, draws: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
        """Return float64 ([P, 1, 1, 1], [P])."""
        return draws[:, _SHARE, None, None, None], draws[:, _SHARE]


@dataclass(frozen=True)
class CutMix:
    """Paste a box (Yun et al. 2019, arXiv 1905.04899): centred on a random pixel, its sides sqrt(1 - share) of the
    image's, cut off at the edges; the label's share is the area that is left, to the pixel.
    """

    alpha: float

    def __call__(self, draws: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
        """Return float64 ([P, 1, H, W], [P])."""
        side = (1 - draws[:, _SHARE]).sqrt()
        top, bottom = _ends((draws[:, _ROW] * height).long(), (side * height).long(), height)
        left, right = _ends((draws[:, _COLUMN] * width).long(), (side * width).long(), width)
        own = ~inside(top, left, bottom, right, height, width)
        area = ((bottom - top) * (right - left)).double()
        return own.double(), 1 - area / (height * width)


def _ends(centre: Tensor, length: Tensor, size: int) -> tuple[Tensor, Tensor]:
    half = length // 2
    return (centre - half).clamp_(min=0), (centre + half).clamp_(max=size)


@dataclass(frozen=True)
class PairMixing:
    """Mix each pair in one of `kinds`, drawn evenly. Draws: which kind, share, row and column of the box's centre."""

    kinds: tuple[Kept, ...]
    num_classes: int
    num_draws: int = 4

    def prepare(self, draws: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return float64 [N, 4] with the share of each pair from its Beta distribution.

        The quantile function of Beta is scipy's, in float64 and so on the host: torch has none. scipy comes with
        scikit-learn.
        """
        from scipy.special import betaincinv  # type: ignore[import-untyped]

        prepared = draws.copy()
        first = prepared[0::2]
        chosen = (first[:, _WHICH] * len(self.kinds)).astype(np.int64)
        alphas = np.array([kind.alpha for kind in self.kinds])[chosen]
        first[:, _SHARE] = betaincinv(alphas, alphas, first[:, _SHARE])
        return prepared

    def __call__(self, images: Tensor, labels: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
        """Return (images of the same dtype [N, C, H, W], float targets [N, num_classes] whose rows sum to 1).

        Targets are float32, or float64 where the images are.
        """
        assert len(images) % 2 == 0, f"{len(images)} images are no pairs: the plan lets only even micro-batches through"
        pixels, shares = self._kept(draws[0::2], *images.shape[-2:])
        classes = torch.arange(self.num_classes, device=labels.device)
        targets = (labels[:, None] == classes).to(torch.promote_types(images.dtype, torch.float32))
        return _mixed(images, pixels), _mixed(targets, shares[:, None])

    def _kept(self, draws: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
        """Return what each pair keeps, float64 ([P, 1, H or 1, W or 1], [P])."""
        pixels, shares = self.kinds[0](draws, height, width)
        chosen = (draws[:, _WHICH] * len(self.kinds)).long()
        for number, kind in enumerate(self.kinds[1:], start=1):
            here = chosen == number
            other_pixels, other_shares = kind(draws, height, width)
            pixels = torch.where(here[:, None, None, None], other_pixels, pixels)
            shares = torch.where(here, other_shares, shares)
        return pixels, shares


def _mixed(values: Tensor, kept: Tensor) -> Tensor:
    """Return `values` [2P, ...] of which each keeps its share, [P, ...], and takes the rest from its neighbour."""
    own = kept.to(values.dtype)
    first, second = values[0::2], values[1::2]
    mixed = torch.empty_like(values)  # in the same memory format
    mixed[0::2] = own * first + (1 - own) * second
    mixed[1::2] = own * second + (1 - own) * first
    return mixed


def build_mixing(chosen: tuple[Section, ...], num_classes: int) -> Mixing:
    """Return what `data.augment` ends in: mixup, cutmix, both, or nothing."""
    kinds: list[Kept] = []
    for section in chosen:
        match section:
            case sections.MixUp(alpha=alpha):
                kinds.append(MixUp(alpha))
            case sections.CutMix(alpha=alpha):
                kinds.append(CutMix(alpha))
    return PairMixing(tuple(kinds), num_classes) if kinds else Unmixed()
