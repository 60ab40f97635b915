"""A user's own change to a batch, checked each time: what it returns becomes what the network sees."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.core.errors import PacelineError, RecipeError
from paceline.recipe.own import AUGMENT, Own, told
from paceline.recipe.schema.augment import OwnAugment
from paceline.recipe.schema.section import Section


@dataclass(frozen=True)
class OwnChange:
    """Call `inner` with uint8 images [N, C, H, W] and float64 draws [N, num_draws], on whatever device they are.

    Raise `RecipeError`, naming the entry at `path`, where it raises or returns something else than such images.
    """

    inner: Any
    path: str
    name: str
    num_draws: int
    alternating: bool = False
    needs_host: bool = False

    def __call__(self, images: Tensor, draws: Tensor) -> Tensor:
        """Return uint8 [N, C, H, W]."""
        try:
            changed = self.inner(images, draws)
        except PacelineError:
            raise
        except Exception as error:
            raise RecipeError(f"{self.path}: {self.name} raised {told(error)} (mend it)") from error
        if isinstance(changed, Tensor) and _kind(changed) == (torch.uint8, images.shape, images.device):
            return changed
        given = _told(changed) if isinstance(changed, Tensor) else type(changed).__name__
        raise RecipeError(
            f"{self.path}: {self.name} gives {given} for {_told(images)} (return images of the same size, type and "
            f"device)"
        )


def _kind(images: Tensor) -> tuple[torch.dtype, torch.Size, torch.device]:
    return images.dtype, images.shape, images.device


def _told(images: Tensor) -> str:
    return f"{images.dtype} {list(images.shape)} on {images.device}"


def build_own(section: OwnAugment, position: int) -> OwnChange:
    """Return the change that entry `position` of `data.augment` names. Raise `RecipeError` where it is none."""
    own = Own(f"data.augment[{position}]", section.name, section.args, AUGMENT)
    inner = own.make()
    num_draws = inner.num_draws
    if not isinstance(num_draws, int) or num_draws < 0:
        raise own.lacks(f"has num_draws {num_draws!r} (say how many draws an image uses: 0, 1, 2, ...)")
    return OwnChange(inner, own.path, own.name, num_draws)


def try_changes(chosen: Sequence[Section], channels: int, size: int) -> None:
    """Make each own change among `chosen`, and have it change two black images of `size` pixels squared.

    Raise `RecipeError` for one that cannot be made, or gives something else than images.
    """
    for position, section in enumerate(chosen):
        if isinstance(section, OwnAugment):
            change = build_own(section, position)
            black = torch.zeros(2, channels, size, size, dtype=torch.uint8)
            change(black, torch.zeros(2, change.num_draws, dtype=torch.float64))
