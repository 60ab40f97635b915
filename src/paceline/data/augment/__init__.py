"""Random changes to a batch of images of one size. What a sample becomes depends on its own draws alone."""

from paceline.data.augment.build import build_augments, needs_host, split_augments
from paceline.data.augment.geometry import Flip
from paceline.data.augment.move import Move, fuse
from paceline.data.augment.protocol import Augment, Change

__all__ = ["Augment", "Change", "Flip", "Move", "build_augments", "fuse", "needs_host", "split_augments"]
