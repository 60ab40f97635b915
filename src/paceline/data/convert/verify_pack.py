"""Compare a pack with the dataset it was made from, sample by sample."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from paceline.core.dataset import Datasets, JoinedNames, PixelArray, Sample, Source, Split
from paceline.core.errors import DataError
from paceline.data.bad_images import get_reason
from paceline.data.convert.assemble import format_sample_name, get_sample_names
from paceline.data.convert.encode import map_ordered
from paceline.data.decode_array import decode_pixels, to_image
from paceline.data.native import NativeExtension, load_native
from paceline.data.pack.format import KIND_RECORD
from paceline.data.pack.reader import PackSource

_IMAGES_PER_TASK = 8
_MAX_FAULTS = 100
# Of 255 gray levels: a quarter of the range is another image, not a loss of quality.
_MAX_MEAN_DIFFERENCE = 64.0


@dataclass(frozen=True)
class Fault:
    """A sample that differs from the source; `what` is the difference."""

    split: Split
    index: int
    name: str
    what: str


@dataclass(frozen=True)
class PackComparison:
    """Result of a comparison."""

    images: int
    exact: int  # identical, or unreadable in both
    mean_difference: float  # of the other images, in gray levels of 255
    num_faults: int
    faults: tuple[Fault, ...]  # the first 100
    decoders: tuple[str, ...]  # pillow, and native if the core is available


def compare_pack(
    source: Datasets, packed: Datasets, progress: Callable[[int, int], None], workers: int
) -> PackComparison:
    """Compare labels, names, order and decoded pixels of all samples; call `progress` with (done, total).

    Pixels must be identical, and the native core's too. Resized images must have the right size and similar pixels.
    Raise `DataError` if the pack was made from another dataset.
    """
    total = len(packed.train) + len(packed.val)
    for source_split, packed_split in ((source.train, packed.train), (source.val, packed.val)):
        _check_same_dataset(source_split, packed_split)
    core = load_native()
    images = exact = num_faults = 0
    differences: list[float] = []
    faults: list[Fault] = []
    progress(0, total)
    for source_split, packed_split in ((source.train, packed.train), (source.val, packed.val)):
        split = _SplitComparison(
            source_split, packed_split, get_sample_names(source_split), get_sample_names(packed_split), core
        )
        numbers = range(len(source_split))
        with closing(map_ordered(split.compare, numbers, max(1, workers), chunk=_IMAGES_PER_TASK)) as comparisons:
            for batch in comparisons:
                new_faults = [each for each in batch if isinstance(each, Fault)]
                differing = [each for each in batch if not isinstance(each, Fault) and each > 0]
                images, num_faults = images + len(batch), num_faults + len(new_faults)
                exact += len(batch) - len(new_faults) - len(differing)
                differences += differing
                faults += new_faults[: _MAX_FAULTS - len(faults)]
                progress(images, total)
    mean = float(np.mean(differences)) if differences else 0.0
    return PackComparison(images, exact, mean, num_faults, tuple(faults), ("pillow", "native") if core else ("pillow",))


def _check_same_dataset(source: Source, packed: Source) -> None:
    split = source.info.split
    fields = {
        "class_names": "class names",
        "channels": "channels",
        "pixels": "pixels",
        "num_images": "number of images",
        "targets": "targets",
    }
    for field, title in fields.items():
        packed_value, source_value = getattr(packed.info, field), getattr(source.info, field)
        if packed_value != source_value:
            values = f"{packed_value!s:.60} and {source_value!s:.60}"
            raise DataError(
                f"the pack and its source differ in the {title} of {split}: {values} (pack the source again)"
            )


@dataclass(frozen=True)
class _SplitComparison:
    source: Source
    packed: Source
    names: JoinedNames
    packed_names: JoinedNames
    core: NativeExtension | None

    # Return the mean difference of the pixels, in gray levels, or a fault.
    def compare(self, index: int) -> float | Fault:
        packed_sample, source_sample = _read_sample(self.packed, index), _read_sample(self.source, index)
        if self.names[index] != self.packed_names[index]:
            return self._build_fault(index, f"is named {format_sample_name(self.packed_names, index)} in the pack")
        if isinstance(packed_sample, str) or isinstance(source_sample, str):
            # A file that was unreadable when it was packed stays unreadable; the reasons may be worded differently.
            if isinstance(packed_sample, str) and isinstance(source_sample, str):
                return 0.0
            return self._build_fault(
                index,
                packed_sample if isinstance(packed_sample, str) else f"can be read, but in the source: {source_sample}",
            )
        if packed_sample[1] != source_sample[1]:
            return self._build_fault(
                index, f"has label {packed_sample[1]} in the pack, and {source_sample[1]} in the source"
            )
        if isinstance(packed_sample[0], bytes) and packed_sample[0] == source_sample[0]:
            return 0.0
        return self._compare_pixels(index, packed_sample, source_sample)

    def _compare_pixels(self, index: int, packed_sample: Sample, source_sample: Sample) -> float | Fault:
        try:
            expected, actual = self._decode(source_sample), self._decode(packed_sample)
        except DataError as error:
            return self._build_fault(index, get_reason(error))
        packed = self.packed
        if self.core is not None and isinstance(packed, PackSource) and packed.kinds[index] == KIND_RECORD:
            native_pixels = self._decode_native(packed.read_stored(index), self.core)
            if native_pixels.shape != actual.shape or not np.array_equal(native_pixels, actual):
                return self._build_fault(index, "decodes to other pixels with the native core")
        if actual.shape == expected.shape and np.array_equal(actual, expected):
            return 0.0
        resize = packed.index.meta.made.resize if isinstance(packed, PackSource) else None
        if resize is None:
            return self._build_fault(index, "has other pixels in the pack")
        return self._compare_resized(index, actual, expected, resize)

    def _compare_resized(self, index: int, actual: PixelArray, expected: PixelArray, resize: int) -> float | Fault:
        height, width = expected.shape[:2]
        scale = min(1.0, resize / min(height, width))
        size = (round(height * scale), round(width * scale))
        if max(abs(size[0] - actual.shape[0]), abs(size[1] - actual.shape[1])) > 1:
            return self._build_fault(
                index, f"is {actual.shape[1]}x{actual.shape[0]} in the pack, not {size[1]}x{size[0]}"
            )
        image = to_image(expected).resize((actual.shape[1], actual.shape[0]), Image.Resampling.BILINEAR)
        resized = np.asarray(image, dtype=np.int16).reshape(actual.shape)
        difference = float(np.abs(resized - actual).mean())
        if difference > _MAX_MEAN_DIFFERENCE:
            return self._build_fault(index, f"is another image: its pixels differ by {difference:.0f} of 255")
        return difference

    def _decode(self, sample: Sample) -> PixelArray:
        return decode_pixels(sample[0], self.source.info.pixel_format, name="")

    def _decode_native(self, record: bytes, core: NativeExtension) -> NDArray[np.uint8]:
        height, width, _ = core.size_of(record)
        pixels = np.empty((height, width, self.source.info.channels), dtype=np.uint8)
        try:
            core.decode_into(record, self.source.info.channels, pixels)
        except ValueError:  # of a shape that no image has, so the comparison fails
            return np.empty((0, 0, 0), dtype=np.uint8)
        return pixels

    def _build_fault(self, index: int, what: str) -> Fault:
        return Fault(self.packed.info.split, index, format_sample_name(self.names, index), what)


def _read_sample(source: Source, index: int) -> Sample | str:
    # A string is the reason why the sample cannot be read.
    try:
        return source.read(index)
    except DataError as error:
        return get_reason(error)
