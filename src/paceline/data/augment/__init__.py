"""Random changes to a batch of images of one size. What a sample becomes depends on its own draws alone."""

from paceline.data.augment.build import build_augments, needs_host, split_augments
from paceline.data.augment.protocol import Augment

__all__ = ["Augment", "build_augments", "needs_host", "split_augments"]
