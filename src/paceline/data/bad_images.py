"""Unreadable images: the error that names one, and the policies of `data.on_bad_image`. Torch-free."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from paceline.core.errors import DataError
from paceline.core.units import count
from paceline.recipe.schema.data import Data


class ImageError(DataError):
    """An image that cannot be read: its name, the reason, and the fix."""

    def __init__(self, name: str, reason: str, fix: str) -> None:
        super().__init__(name, reason, fix)  # pickle calls the constructor with `args` when the error leaves a worker
        self.reason = reason

    def __str__(self) -> str:
        return "{}: {}; {}".format(*self.args)


@dataclass(frozen=True)
class BadImage:
    """An unreadable sample: its index in the split, its path or name, and the reason."""

    index: int
    name: str
    reason: str

    @classmethod
    def from_error(cls, index: int, name: str, error: DataError) -> "BadImage":
        """Build from the `error` of reading sample `index`."""
        return cls(index, name, error.reason if isinstance(error, ImageError) else str(error))


class BadImagePolicy(Protocol):
    """Choose the sample to read in place of an unreadable one."""

    def __call__(self, index: int, num_images: int, bad: Mapping[int, BadImage], error: DataError) -> int | None:
        """Return the index of a replacement, or None to drop the sample; raise to end the run.

        `bad` holds the unreadable samples of the batch so far, this one included.
        """
        ...


class FailOnBadImage:
    """End the run at the first bad image."""

    def __call__(self, index: int, num_images: int, bad: Mapping[int, BadImage], error: DataError) -> int | None:
        """Raise `error`."""
        raise error


@dataclass(frozen=True)
class SubstituteNext:
    """Replace a bad image with the next sample; raise `DataError` above `limit` bad images per batch."""

    limit: int

    # The replacement depends on the data alone: it is the same for any number of ranks and workers, and after a resume.
    def __call__(self, index: int, num_images: int, bad: Mapping[int, BadImage], error: DataError) -> int | None:
        """Return the next index of the split, wrapping around."""
        if len(bad) > self.limit or len(bad) == num_images:
            unreadable = (
                f"all {num_images:,} images" if len(bad) == num_images else f"{count(len(bad), 'image')} of a batch"
            )
            raise DataError(
                f"data.on_bad_image: skip, but {unreadable} cannot be read, the last one {bad[index].name} "
                f"({bad[index].reason}; list them with `paceline data verify`; data.max_bad_images is {self.limit:,})"
            )
        return (index + 1) % num_images


class SkipBadImage:
    """Drop bad images from the batch."""

    def __call__(self, index: int, num_images: int, bad: Mapping[int, BadImage], error: DataError) -> int | None:
        """Return None."""
        return None


def build_bad_image_policy(data: Data, purpose: Literal["train", "eval"]) -> BadImagePolicy:
    """Build the policy of `data.on_bad_image`."""
    # Training needs full batches; in an evaluation a substitute would count twice.
    match data.on_bad_image, purpose:
        case "fail", _:
            return FailOnBadImage()
        case _, "train":
            return SubstituteNext(data.max_bad_images)
    return SkipBadImage()
