"""Images that cannot be read: how they are told of, and what takes their place. Torch-free."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from paceline.core.errors import DataError
from paceline.core.units import count
from paceline.recipe.schema.data import Data


class ImageError(DataError):
    """One image that cannot be read: its name, the reason, and what to do about it."""

    def __init__(self, name: str, reason: str, fix: str) -> None:
        super().__init__(name, reason, fix)  # the arguments of the constructor, so that it can leave a worker
        self.reason = reason

    def __str__(self) -> str:
        return "{}: {}; {}".format(*self.args)


@dataclass(frozen=True)
class BadImage:
    """Sample `index` of a split, what a user would call it, and why it cannot be read."""

    index: int
    name: str
    reason: str

    @classmethod
    def of(cls, index: int, name: str, error: DataError) -> "BadImage":
        """Return what `error`, met when sample `index` was read, says."""
        return cls(index, name, error.reason if isinstance(error, ImageError) else str(error))


class Instead(Protocol):
    """Say which sample to read instead of one that cannot be read."""

    def __call__(self, index: int, num_images: int, bad: Mapping[int, BadImage], error: DataError) -> int | None:
        """Return a sample, or None for no other; `bad` are all of the batch so far. Raise to end the run."""
        ...


class Fail:
    """End the run at the first bad image."""

    def __call__(self, index: int, num_images: int, bad: Mapping[int, BadImage], error: DataError) -> int | None:
        """Raise `error`."""
        raise error


@dataclass(frozen=True)
class Next:
    """Take the next sample of the split: a function of the data alone, not of ranks, workers or where a run starts.

    More than `limit` bad images in one batch are a `DataError`.
    """

    limit: int

    def __call__(self, index: int, num_images: int, bad: Mapping[int, BadImage], error: DataError) -> int | None:
        """Return the next sample, after the last one the first."""
        if len(bad) > self.limit or len(bad) == num_images:
            number = (
                f"all {num_images:,} images" if len(bad) == num_images else f"{count(len(bad), 'image')} of a batch"
            )
            raise DataError(
                f"data.on_bad_image: skip, but {number} cannot be read, the last one {bad[index].name} "
                f"({bad[index].reason}; paceline data verify lists them all, data.max_bad_images is {self.limit:,})"
            )
        return (index + 1) % num_images


class LeaveOut:
    """Read nothing instead."""

    def __call__(self, index: int, num_images: int, bad: Mapping[int, BadImage], error: DataError) -> int | None:
        """Return None."""
        return None


def build_instead(data: Data, purpose: Literal["train", "eval"]) -> Instead:
    """Return what `data.on_bad_image` asks for when images are read to train on or to evaluate."""
    match data.on_bad_image, purpose:
        case "fail", _:
            return Fail()
        case _, "train":
            return Next(data.max_bad_images)
    return LeaveOut()
