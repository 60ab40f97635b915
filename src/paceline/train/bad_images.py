"""The images of a run that could not be read: known to all ranks, listed by one, and not too many."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from paceline.core.dataset import Datasets, Source, Split
from paceline.core.errors import DataError
from paceline.core.units import count
from paceline.data.bad import BadImage
from paceline.data.verify import trouble

_SPLITS: tuple[Split, ...] = ("train", "val")


@dataclass
class BadImages:
    """Different bad images of both splits, in `known`, by twice their index, and one more in the validation split.

    `known` is kept in the state of the run. `union` makes one sorted sequence of what the ranks have, and `listed` is
    told of each image once. More than `limit` end the run.
    """

    datasets: Datasets
    limit: int
    union: Callable[[Sequence[int]], Sequence[int]]
    listed: Callable[[dict[str, str | int]], None]
    known: list[int]
    _new: dict[int, str] = field(default_factory=dict)

    def note(self, split: Split, bad: Iterable[BadImage]) -> int:
        """Keep what this rank has met; return how many of these no rank had told of."""
        met = {2 * image.index + _SPLITS.index(split): image.reason for image in bad}
        new = {number: reason for number, reason in met.items() if number not in self.known}
        self._new |= new
        return len(new)

    def of(self, split: Split) -> "OfSplit":
        """Return the same for the images of one split."""
        return OfSplit(self, split)

    def settle(self) -> None:
        """Tell all ranks what each has met. Every rank must call it. Raise `DataError` when there are too many."""
        for number in self.union(sorted(self._new)):
            if number not in self.known:
                self.known.append(number)
                row = {"split": _SPLITS[number % 2], "index": number // 2, "path": self._name(number)}
                self.listed({**row, "reason": self._new.get(number) or self._found_here(number)})
        self._new.clear()
        if len(self.known) > self.limit:
            raise DataError(
                f"data.max_bad_images: {count(len(self.known), 'image')} cannot be read, more than {self.limit:,}, "
                f"such as {self._name(self.known[-1])} (paceline data verify lists them all; remove them, or raise it)"
            )

    def _found_here(self, number: int) -> str:
        """Return why an image that another rank has met is bad, as this rank finds it."""
        return trouble(self._source(number), number // 2) or "another rank could not read it"

    def _source(self, number: int) -> Source:
        return self.datasets.val if number % 2 else self.datasets.train

    def _name(self, number: int) -> str:
        return self._source(number).name_of(number // 2)


@dataclass(frozen=True)
class OfSplit:
    """The bad images of one split."""

    all: BadImages
    split: Split

    def note(self, bad: Iterable[BadImage]) -> int:
        """Keep what this rank has met; return how many of these no rank had told of."""
        return self.all.note(self.split, bad)

    def settle(self) -> None:
        """Tell all ranks, each of which must call it."""
        self.all.settle()
