"""Prove a pack against the data set that it was made of, sample by sample."""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from paceline.core.dataset import Datasets, Sample, Source, Split
from paceline.core.errors import DataError
from paceline.data.bad import BadImage
from paceline.data.decode import decode
from paceline.data.native import Native, native
from paceline.data.pack.assemble import Names
from paceline.data.pack.format import KIND_RECORD, Made
from paceline.data.pack.ordered import in_order
from paceline.data.pack.reader import PackSource

_IMAGES_A_TASK = 8
_MAX_FAULTS = 100
_MAX_MEAN_DIFFERENCE = 64.0
"""Grey levels: a quarter of the range is no loss of quality but another image."""


@dataclass(frozen=True)
class Fault:
    """Sample `index` of a split is not in the pack what it is in the source, and how."""

    split: Split
    index: int
    name: str
    what: str


@dataclass(frozen=True)
class Checked:
    """A comparison: how many images, how many of them are exactly the source's, and what is wrong with `num_faults`.

    What cannot be read in either counts as exact. `mean_difference` is that of the others to the source at their size,
    in grey levels of 255. `faults` are the first 100. `decoders` are those that were compared: pillow, and native where
    the core is there.
    """

    images: int
    exact: int
    mean_difference: float
    num_faults: int
    faults: tuple[Fault, ...]
    decoders: tuple[str, ...]


def check_pack(source: Datasets, packed: Datasets, progress: Callable[[int, int], None], workers: int) -> Checked:
    """Compare labels, names, order and decoded pixels of all samples, with `workers` threads.

    Pixels must be the same, also as the native core decodes them; of images that were scaled down when they were
    packed, the size must be what was asked for and the pixels be close. Raise `DataError` for a pack of another source.
    """
    total = len(packed.train) + len(packed.val)
    for each, other in ((source.train, packed.train), (source.val, packed.val)):
        _refuse_another(each, other)
    core = native()
    images = exact = num_faults = 0
    differences: list[float] = []
    faults: list[Fault] = []
    progress(0, total)
    with closing(in_order(_tasks(source, packed, core), max(1, workers))) as found:
        for batch in found:
            for one in batch:
                images += 1
                exact += one.difference == 0 and not one.fault
                differences += [one.difference] if one.difference > 0 else []
                num_faults += one.fault is not None
                faults += [one.fault] if one.fault and len(faults) < _MAX_FAULTS else []
            progress(images, total)
    mean = float(np.mean(differences)) if differences else 0.0
    return Checked(images, exact, mean, num_faults, tuple(faults), ("pillow", "native") if core else ("pillow",))


@dataclass(frozen=True)
class _Found:
    """What came of a sample: the mean difference of its pixels, -1 where none were compared, and a fault if any."""

    difference: float
    fault: Fault | None = None


def _refuse_another(source: Source, packed: Source) -> None:
    split = source.info.split
    facts = {"class_names": "names of classes", "channels": "channels", "num_images": "number of images"}
    for what, words in facts.items():
        ours, theirs = getattr(packed.info, what), getattr(source.info, what)
        if ours != theirs:
            told = f"{ours!s:.60} and {theirs!s:.60}"
            raise DataError(f"the pack and its source differ in the {words} of {split}: {told} (pack the source again)")


def _tasks(source: Datasets, packed: Datasets, core: Native | None) -> Iterator[Callable[[], list[_Found]]]:
    for each, other in ((source.train, packed.train), (source.val, packed.val)):
        comparison = _Comparison(each, other, Names.of(each), Names.of(other), core)
        for first in range(0, len(each), _IMAGES_A_TASK):
            yield partial(comparison.of, range(first, min(first + _IMAGES_A_TASK, len(each))))


@dataclass(frozen=True)
class _Comparison:
    """A split of the source beside that of the pack."""

    source: Source
    packed: Source
    names: Names
    packed_names: Names
    core: Native | None

    def of(self, indices: range) -> list[_Found]:
        """Compare some samples."""
        return [self._one(index) for index in indices]

    def _one(self, index: int) -> _Found:
        ours, theirs = _read(self.packed, index), _read(self.source, index)
        if self.names.raw(index) != self.packed_names.raw(index):
            return self._fault(index, f"is called {self.packed_names.of_sample(index)} in the pack")
        if isinstance(ours, str) or isinstance(theirs, str):
            # What could not be read when it was packed cannot be read now; why it cannot may be told in other words.
            if isinstance(ours, str) and isinstance(theirs, str):
                return _Found(0.0)
            return self._fault(index, ours if isinstance(ours, str) else f"can be read, and in the source: {theirs}")
        if ours[1] != theirs[1]:
            return self._fault(index, f"has label {ours[1]} in the pack, and {theirs[1]} in the source")
        if isinstance(ours[0], bytes) and ours[0] == theirs[0]:
            return _Found(0.0)
        return self._pixels(index, ours, theirs)

    def _pixels(self, index: int, ours: Sample, theirs: Sample) -> _Found:
        try:
            wanted, found = self._decoded(theirs), self._decoded(ours)
        except DataError as error:
            return self._fault(index, BadImage.of(index, "", error).reason)
        if self._is_native(index):
            again = self._by_core(index)
            if again.shape != found.shape or not np.array_equal(again, found):
                return self._fault(index, "is decoded to other pixels by the native core")
        made = _made(self.packed)
        if found.shape == wanted.shape and np.array_equal(found, wanted):
            return _Found(0.0)
        if made.resize is None:
            return self._fault(index, "has other pixels in the pack")
        return self._reduced(index, found, wanted, made.resize)

    def _reduced(self, index: int, found: NDArray[np.uint8], wanted: NDArray[np.uint8], resize: int) -> _Found:
        height, width = wanted.shape[:2]
        scale = min(1.0, resize / min(height, width))
        size = (round(height * scale), round(width * scale))
        if max(abs(size[0] - found.shape[0]), abs(size[1] - found.shape[1])) > 1:
            return self._fault(index, f"is {found.shape[1]}x{found.shape[0]} in the pack, not {size[1]}x{size[0]}")
        image = _image(wanted).resize((found.shape[1], found.shape[0]), Image.Resampling.BILINEAR)
        there = np.asarray(image, dtype=np.int16).reshape(found.shape)
        difference = float(np.abs(there - found).mean())
        if difference > _MAX_MEAN_DIFFERENCE:
            return self._fault(index, f"is another image: its pixels differ by {difference:.0f} of 255")
        return _Found(difference)

    def _decoded(self, sample: Sample) -> NDArray[np.uint8]:
        """Return pixels, uint8 [H, W, C]."""
        content, _ = sample
        if not isinstance(content, bytes):
            return content
        channels: Literal[1, 3] = 3 if self.source.info.channels == 3 else 1
        pixels = np.asarray(decode(content, channels=channels, name=""))
        return pixels if pixels.ndim == 3 else pixels[:, :, None]

    def _is_native(self, index: int) -> bool:
        packed = self.packed
        return self.core is not None and isinstance(packed, PackSource) and packed.kinds[index] == KIND_RECORD

    def _by_core(self, index: int) -> NDArray[np.uint8]:
        assert self.core is not None and isinstance(self.packed, PackSource)
        record = self.packed.stored(index)
        height, width, _ = self.core.size_of(record)
        pixels = np.empty((height, width, self.source.info.channels), dtype=np.uint8)
        try:
            self.core.decode_into(record, self.source.info.channels, pixels)
        except ValueError:
            return np.empty((0, 0, 0), dtype=np.uint8)
        return pixels

    def _fault(self, index: int, what: str) -> _Found:
        return _Found(-1.0, Fault(self.packed.info.split, index, self.names.of_sample(index), what))


def _read(source: Source, index: int) -> Sample | str:
    """Return a sample, or why it cannot be read."""
    try:
        return source.read(index)
    except DataError as error:
        return BadImage.of(index, "", error).reason


def _made(packed: Source) -> Made:
    return packed.index.meta.made if isinstance(packed, PackSource) else Made(every=1)


def _image(pixels: NDArray[np.uint8]) -> Image.Image:
    return Image.fromarray(pixels if pixels.shape[2] == 3 else pixels[:, :, 0])
