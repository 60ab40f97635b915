"""What every random change to a batch looks like. What mixes images with each other is in `data.mix`."""

from typing import Protocol

from torch import Tensor


class Change(Protocol):
    """What is done to a batch, or several things at once: uint8 images [N, C, H, W], `num_draws` draws a sample."""

    @property
    def num_draws(self) -> int:
        """How many draws a sample uses."""
        ...

    def __call__(self, images: Tensor, draws: Tensor) -> Tensor:
        """Return uint8 [N, C, H, W]; `draws` is float64 [N, num_draws]."""
        ...


class Augment(Protocol):
    """Change uint8 images [N, C, H, W] by `num_draws` uniform draws a sample, on any device unless it `needs_host`."""

    @property
    def num_draws(self) -> int:
        """How many draws a sample uses."""
        ...

    @property
    def alternating(self) -> bool:
        """Whether the draws belong to the sample and alternate by epoch (`data.draws`), instead of being fresh."""
        ...

    @property
    def needs_host(self) -> bool:
        """Whether the draws decide what is run, for which a GPU would have to be waited for."""
        ...

    def __call__(self, images: Tensor, draws: Tensor) -> Tensor:
        """Return uint8 [N, C, H, W]; `draws` is float64 [N, num_draws] on the device of the images."""
        ...
