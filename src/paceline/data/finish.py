"""Apply batch-wise augmentation, normalization and mixing on the device."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from paceline.data.augment.build import build_augments, split_augments
from paceline.data.augment.protocol import Augment
from paceline.data.mix import Mixer, build_mixer
from paceline.data.placement import DeviceBatch, DeviceTransfer
from paceline.recipe.schema.data import Data


@dataclass(frozen=True)
class DeviceTransforms:
    """Augment, normalize and mix a batch on the device, in this order."""

    augments: tuple[Augment, ...]
    normalize: Callable[[Tensor], Tensor]
    mix: Mixer

    def __call__(self, placed: DeviceBatch) -> tuple[Tensor, Tensor]:
        """Return (float images [N, C, H, W], labels int64 [N] or targets float [N, num_classes])."""
        num_draws = sum(augment.num_draws for augment in self.augments) + self.mix.num_draws
        assert num_draws == placed.draws.shape[1], "the loader was built for another `on_device`"
        images, used = placed.images, 0
        for augment in self.augments:
            images = augment(images, placed.draws[:, used : used + augment.num_draws])
            used += augment.num_draws
        return self.mix(self.normalize(images), placed.labels, placed.draws[:, used:])


def build_device_transforms(
    data: Data, transfer: DeviceTransfer, num_classes: int, *, on_device: bool
) -> DeviceTransforms:
    """Build the device half of the augmentation, for a loader built with the same `data` and `on_device`."""
    _, deferred = split_augments(build_augments(data.augment, transfer.mean), on_device=on_device)
    return DeviceTransforms(deferred, transfer.normalize, build_mixer(data.augment, num_classes))
