"""Unreadable images: the error that names one, and the policies of `data.on_bad_image`. Torch-free."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

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


def get_reason(error: DataError) -> str:
    """Return why a sample cannot be read: the reason of an `ImageError`, or the whole message of another error."""
    return error.reason if isinstance(error, ImageError) else str(error)


@dataclass(frozen=True)
class BadImage:
    """An unreadable sample: its index in the split, its path or name, and the reason."""

    index: int
    name: str
    reason: str


@dataclass(frozen=True)
class BadImagePolicy:
    """Choose the sample to read in place of an unreadable one: `fail` ends the run, `drop` leaves it out.

    `substitute` reads the next one, up to `limit` bad images per batch.
    """

    action: Literal["fail", "substitute", "drop"]
    limit: int = 0

    # The replacement depends on the data alone: it is the same for any number of ranks and workers, and after a resume.
    def __call__(self, index: int, num_images: int, bad: Mapping[int, BadImage], error: DataError) -> int | None:
        """Return the index of a replacement, or None to drop the sample. Raise `DataError` to end the run.

        `bad` holds the unreadable samples of the batch so far, this one included.
        """
        if self.action == "fail":
            raise error
        if self.action == "drop":
            return None
        if len(bad) > self.limit or len(bad) == num_images:
            unreadable = (
                f"all {num_images:,} images" if len(bad) == num_images else f"{count(len(bad), 'image')} of a batch"
            )
            raise DataError(
                f"data.on_bad_image: skip, but {unreadable} cannot be read, the last one {bad[index].name} "
                f"({bad[index].reason}; list them with `paceline data verify`; data.max_bad_images is {self.limit:,})"
            )
        return (index + 1) % num_images


def build_bad_image_policy(data: Data, purpose: Literal["train", "eval"]) -> BadImagePolicy:
    """Build the policy of `data.on_bad_image`."""
    if data.on_bad_image == "fail":
        return BadImagePolicy("fail")
    # Training needs full batches; in an evaluation a substitute would count twice.
    return BadImagePolicy("substitute", data.max_bad_images) if purpose == "train" else BadImagePolicy("drop")
