"""Protocols of batch-wise augmentation."""

from typing import Protocol

from torch import Tensor


class Change(Protocol):
    """A change to a batch: uint8 images [N, C, H, W], with `num_draws` uniform draws per sample."""

    @property
    def num_draws(self) -> int:
        """Number of draws per sample."""
        ...

    def __call__(self, images: Tensor, draws: Tensor) -> Tensor:
        """Return uint8 [N, C, H, W]; `draws` is float64 [N, num_draws]."""
        ...


class Augment(Protocol):
    """Augment uint8 images [N, C, H, W] with `num_draws` draws per sample, in host memory if `has_host_augments`."""

    @property
    def num_draws(self) -> int:
        """Number of draws per sample."""
        ...

    @property
    def alternating(self) -> bool:
        """Whether the draws belong to the sample and alternate by epoch (see `data.draws`), instead of being fresh."""
        ...

    @property
    def needs_host(self) -> bool:
        """Whether the draws select the operations, for which a GPU would have to be waited for."""
        ...

    def __call__(self, images: Tensor, draws: Tensor) -> Tensor:
        """Return uint8 [N, C, H, W]; `draws` is float64 [N, num_draws] on the images' device, or on the host."""
        ...
