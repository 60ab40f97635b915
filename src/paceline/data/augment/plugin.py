"""Augmentation plugins: call a user's own code and validate every batch that it returns."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.core.pixels import PixelFormat
from paceline.data.batch import batch_dtype
from paceline.recipe.plugins import AUGMENT, PluginRef
from paceline.recipe.schema.augment import OwnAugment
from paceline.recipe.schema.base import Section


@dataclass(frozen=True)
class PluginAugment:
    """Call the plugin `inner` with images [N, C, H, W] and float64 draws [N, num_draws], on any device.

    Raise `RecipeError`, naming the entry of the list, if it raises or does not return such images.
    """

    inner: Any
    plugin: PluginRef
    num_draws: int
    alternating: bool = False
    needs_host: bool = False

    def __call__(self, images: Tensor, draws: Tensor) -> Tensor:
        """Return uint8 [N, C, H, W]."""
        with self.plugin.reporting():
            changed = self.inner(images, draws)
        if isinstance(changed, Tensor) and _get_signature(changed) == _get_signature(images):
            return changed
        returned = _format_tensor(changed) if isinstance(changed, Tensor) else type(changed).__name__
        given, fix = _format_tensor(images), "return images of the same size, dtype and device"
        raise self.plugin.error(f"returns {returned} for {given} ({fix})")


def _get_signature(images: Tensor) -> tuple[torch.dtype, torch.Size, torch.device]:
    return images.dtype, images.shape, images.device


def _format_tensor(images: Tensor) -> str:
    return f"{images.dtype} {list(images.shape)} on {images.device}"


def build_plugin_augment(section: OwnAugment, position: int) -> PluginAugment:
    """Build the plugin of entry `position` of `data.augment`. Raise `RecipeError` if it is invalid."""
    plugin = PluginRef(f"data.augment[{position}]", section.name, section.args, AUGMENT)
    inner = plugin.make()
    num_draws = inner.num_draws
    if not isinstance(num_draws, int) or num_draws < 0:
        raise plugin.error(f"has num_draws {num_draws!r} (set it to the number of draws per image: 0, 1, 2, ...)")
    return PluginAugment(inner, plugin, num_draws)


def try_plugin_augments(chosen: Sequence[Section], form: PixelFormat, size: int) -> None:
    """Build each plugin among `chosen`, and apply it to two black images of `size` pixels squared.

    Raise `RecipeError` for an invalid one.
    """
    for position, section in enumerate(chosen):
        if isinstance(section, OwnAugment):
            augment = build_plugin_augment(section, position)
            black = torch.zeros(2, form.channels, size, size, dtype=batch_dtype(form.pixels))
            augment(black, torch.zeros(2, augment.num_draws, dtype=torch.float64))
