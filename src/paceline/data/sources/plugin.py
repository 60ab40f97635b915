"""Load samples from a user's own code and validate them."""

import operator
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from paceline.core.dataset import ArraySource, DatasetInfo, Datasets, PixelArray, Sample, Source, Split, TargetTable
from paceline.core.errors import PacelineError, RecipeError
from paceline.core.pixels import FULL_SCALE, MAX_CHANNELS, PixelFormat, PixelType
from paceline.data.bad_images import ImageError
from paceline.data.sources.image_files import build_files_info
from paceline.recipe.plugins import SOURCE, PluginRef, describe_error
from paceline.recipe.schema.source import OwnSource

_FIELD_PATH: Final = "data.source"
_SUPPORTED_SPLITS: Final = (
    "(images, labels, class_names), an object with classes, __len__ and read, or a paceline Source"
)
_RGB: Final = PixelFormat(3)
_PIXEL_TYPES: Final = "uint8, uint16 or float32"
_LIMIT: Final = f"C up to {MAX_CHANNELS}"
# Pixels per call of `np.bincount`, which needs 8 bytes for each.
_BLOCK_PIXELS: Final = 1 << 20
# With `skip_bad`, the first samples of which one should be readable.
_MAX_SAMPLES_PROBED: Final = 16


def load_plugin_source(section: OwnSource, *, skip_bad: bool = False) -> Datasets:
    """Build both splits with the code that `section` names. Raise `RecipeError` for an invalid split.

    A split may be

    - `(images, labels, class_names)`: pixels [N, H, W] or [N, H, W, C], integers [N], strings;
    - an object with `classes`, `__len__()` and `read(index) -> (encoded bytes, or pixels [H, W] or [H, W, C]; label)`,
      for images of any size that are read on access; with an attribute `targets`, the label is not used;
    - a `paceline.core.dataset.Source`, which is used unchanged.

    Pixels are uint8, uint16 or float32, with C of 1 to 16. For several labels per image or soft labels, `labels` or
    `targets` are N targets: each a set, list or tuple of class names or numbers, or an array of a share from 0 to 1 for
    each class.
    """
    plugin = PluginRef(_FIELD_PATH, section.name, section.args, SOURCE)
    train = _build_split(plugin, section, "train", skip_bad=skip_bad)
    val = _build_split(plugin, section, "val", skip_bad=skip_bad, default=train.info.pixel_format)
    if train.info.class_names != val.info.class_names:
        raise plugin.error("names other classes for val than for train (return the same, in the same order)")
    if train.info.pixel_format != val.info.pixel_format:
        raise plugin.error(
            f"has images of {train.info.pixel_format} in train and of {val.info.pixel_format} in val (make them agree)"
        )
    return Datasets(train, val)


def load_plugin_validation(section: OwnSource, *, skip_bad: bool = False) -> Source:
    """Build only the validation split. Raise `RecipeError` as `load_plugin_source`."""
    return _build_split(PluginRef(_FIELD_PATH, section.name, section.args, SOURCE), section, "val", skip_bad=skip_bad)


def _build_split(
    plugin: PluginRef, section: OwnSource, split: Split, *, skip_bad: bool, default: PixelFormat = _RGB
) -> Source:
    returned = plugin.make(split=split)
    match returned:
        case tuple((images, labels, class_names)):
            _check_channels_unset(section)
            return _build_array_source(plugin, split, images, labels, class_names)
    if isinstance(_call_plugin(plugin, split, lambda: getattr(returned, "info", None)), DatasetInfo):
        _check_channels_unset(section)
        _require_attributes(plugin, split, returned, ("__len__", "read", "name_of"))
        return cast(Source, returned)
    return _build_plugin_samples(plugin, section, split, returned, skip_bad=skip_bad, default=default)


def _call_plugin(plugin: PluginRef, split: Split, function: Callable[[], Any]) -> Any:
    # An attribute or `len` of a user's object may run code of the user's that raises anything.
    try:
        return function()
    except PacelineError:
        raise
    except Exception as error:
        raise plugin.error(f"raised {describe_error(error)} for {split} (fix it)") from error


def _require_attributes(plugin: PluginRef, split: Split, returned: Any, names: Sequence[str]) -> None:
    for name in names:
        if not _call_plugin(plugin, split, partial(hasattr, returned, name)):
            raise plugin.error(
                f"gives {split} as {type(returned).__name__}, which has no {name} (return {_SUPPORTED_SPLITS})"
            )


def _check_channels_unset(section: OwnSource) -> None:
    if section.channels != "auto":
        raise RecipeError(
            f"data.source.channels: {section.channels} has no effect on {section.name}, which defines its "
            f"channels itself (leave it at auto)"
        )


def _build_array_source(plugin: PluginRef, split: Split, images: Any, labels: Any, class_names: Any) -> ArraySource:
    images = _to_array(plugin, split, "images", images)
    images = images[..., None] if images.ndim == 3 else images
    if images.dtype.name not in FULL_SCALE or images.ndim != 4 or not 1 <= images.shape[3] <= MAX_CHANNELS:
        actual = f"{images.dtype} {list(images.shape)}"
        raise plugin.error(
            f"gives {split} images as {actual} (give {_PIXEL_TYPES} [N, H, W] or [N, H, W, C], {_LIMIT})"
        )
    if images.dtype == np.float32 and not np.isfinite(images).all():
        raise plugin.error(f"gives {split} images with NaN or infinite pixels (replace them)")
    names, targets = _check_class_names(plugin, class_names), None
    if _are_targets(labels):
        targets, labels = _build_targets(plugin, split, labels, names)
    labels = _to_array(plugin, split, "labels", labels)
    if not np.issubdtype(labels.dtype, np.integer) or labels.shape != images.shape[:1]:
        actual = f"{labels.dtype} {list(labels.shape)}"
        raise plugin.error(f"gives {split} labels as {actual} for {len(images)} images (give one whole number each)")
    wrong = [] if targets else labels[(labels < 0) | (labels >= len(names))][:1].tolist()
    if wrong:
        raise plugin.error(f"gives {split} label {wrong[0]}, and {len(names)} classes (give 0 to {len(names) - 1})")
    mean, std = _compute_mean_and_std(images) if images.dtype == np.uint8 else ((), ())
    height, width, channels = images.shape[1:]
    pixels, size = cast(PixelType, images.dtype.name), (height, width)
    info = DatasetInfo(plugin.name, split, len(labels), names, channels, size, mean, std, (), targets, pixels)
    return ArraySource(info, np.ascontiguousarray(images), labels.astype(np.int64))


def _to_array(plugin: PluginRef, split: Split, what: str, values: Any) -> NDArray[Any]:
    try:
        return np.asarray(values)
    except Exception as error:  # numpy raises TypeError for a GPU tensor
        reason = " ".join(str(error).split())[:100]
        fix = "give one array, or for several sizes an object with read"
        raise plugin.error(f"gives {split} {what} that numpy cannot convert to an array: {reason} ({fix})") from None


def _are_targets(labels: Any) -> bool:
    """Return whether `labels` give each image several labels or shares of classes."""
    if getattr(labels, "ndim", 1) > 1:
        return True
    first = next(iter(labels), None) if isinstance(labels, Sequence) else None
    return isinstance(first, set | frozenset | list | tuple) or getattr(first, "ndim", 0) > 0


def _build_targets(
    plugin: PluginRef, split: Split, given: Any, names: tuple[str, ...]
) -> tuple[TargetTable, NDArray[np.int64]]:
    numbers = {name: number for number, name in enumerate(names)}

    def to_target(index: int, labels: Any) -> NDArray[np.float32]:
        if isinstance(labels, set | frozenset | list | tuple):
            target = np.zeros(len(names), dtype=np.float32)
            chosen: list[Any] = [numbers.get(each, each) if isinstance(each, str) else each for each in labels]
            are_classes = all(type(each) is int or isinstance(each, np.integer) for each in chosen)
            # A number that repeats is of a list such as [0, 1, 1], which means an array.
            if are_classes and len(set(chosen)) == len(chosen) and all(0 <= each < len(names) for each in chosen):
                target[chosen] = 1
                return target
        else:
            shares = _to_array(plugin, split, "labels", labels).astype(np.float32)
            if shares.shape == (len(names),) and ((shares >= 0) & (shares <= 1)).all():
                return shares
        fix = (
            f"give a list of class names or numbers below {len(names)}, each once, or an array of {len(names)} shares "
            "from 0 to 1"
        )
        raise plugin.error(f"gives {split} image {index} the labels {labels!r:.100} ({fix})")

    return TargetTable.from_targets((to_target(index, each) for index, each in enumerate(given)), len(names))


def _compute_mean_and_std(images: NDArray[np.uint8]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    # Per channel, of pixels scaled to [0, 1].
    values, block = np.arange(256) / 255, max(1, _BLOCK_PIXELS // max(1, images.shape[1] * images.shape[2]))
    means, stds = [], []
    for channel in range(images.shape[3]):
        # From a histogram, in blocks, so that no float copy of the images is needed.
        counts = np.zeros(256, np.int64)
        for first in range(0, len(images), block):
            counts += np.bincount(images[first : first + block, ..., channel].ravel(), minlength=256)
        shares = counts / max(1, counts.sum())
        mean = float(shares @ values)
        std = float(np.sqrt(shares @ (values - mean) ** 2))
        means.append(round(mean, 4))
        stds.append(round(std, 4) or 1.0)  # a constant channel stays 0 after normalization
    return tuple(means), tuple(stds)


def _check_class_names(plugin: PluginRef, class_names: object) -> tuple[str, ...]:
    if isinstance(class_names, str) or not isinstance(class_names, Sequence | np.ndarray) or len(class_names) < 2:
        raise plugin.error(f"gives {class_names!r} as class names (give a list of two or more)")
    names = tuple(str(name) for name in class_names)
    if len(set(names)) < len(names):
        repeated = next(name for name in names if names.count(name) > 1)
        raise plugin.error(f"names class {repeated!r} twice (give each class a unique name)")
    return names


def _build_plugin_samples(
    plugin: PluginRef, section: OwnSource, split: Split, returned: Any, *, skip_bad: bool, default: PixelFormat
) -> "PluginSamples":
    _require_attributes(plugin, split, returned, ("classes", "__len__", "read"))
    names = _check_class_names(plugin, _call_plugin(plugin, split, lambda: returned.classes))
    num_images = _call_plugin(plugin, split, lambda: len(returned))
    if num_images == 0 and split == "train":
        raise plugin.error("has no training images (return some for split 'train')")
    # The first sample is read before the run starts: it has errors of the plugin, and the channels of pixels.
    given = _call_plugin(plugin, split, lambda: getattr(returned, "targets", None))
    targets, labels = (None, None) if given is None else _build_targets(plugin, split, given, names)
    if labels is not None and len(labels) != num_images:
        raise plugin.error(f"gives {split} {len(labels)} targets for {num_images} images (give one for each)")
    info = replace(build_files_info(plugin.name, split, num_images, names, default), targets=targets)
    probe = PluginSamples(info, returned, plugin.make(split=split), labels)
    content = probe.probe_first(skip_bad=skip_bad)
    detected = build_files_info(plugin.name, split, num_images, names, _detect_format(section, content, default))
    samples = replace(probe, info=replace(detected, targets=targets))
    if content is not None:
        samples.check_format(0, content)
    return samples


def _detect_format(section: OwnSource, content: bytes | PixelArray | None, default: PixelFormat) -> PixelFormat:
    form = _RGB if isinstance(content, bytes) else default if content is None else _get_format(content)
    return form if section.channels == "auto" else form._replace(channels=section.channels)


def _get_format(pixels: PixelArray) -> PixelFormat:
    return PixelFormat(pixels.shape[2], cast(PixelType, pixels.dtype.name))


@dataclass(frozen=True)
class PluginSamples:
    """A split whose samples a user's code reads one at a time: encoded files, or pixels of any size."""

    info: DatasetInfo
    plugin: Any  # reads in the process `pid`
    fork_copy: Any  # reads in forked workers
    labels: NDArray[np.int64] | None = None  # rows of `info.targets` [N]
    pid: int = field(default_factory=os.getpid)

    def __len__(self) -> int:
        return self.info.num_images

    def name_of(self, index: int) -> str:
        """Return `name/split[index]`."""
        return f"{self.info.name}/{self.info.split}[{index}]"

    def read(self, index: int) -> Sample:
        """Return (encoded bytes, or pixels [H, W, C]; label). Raise `ImageError` if the sample is not valid."""
        content, label = self._read_validated(index)
        return self.check_format(index, content), label

    def check_format(self, index: int, content: bytes | PixelArray) -> bytes | PixelArray:
        """Return `content`. Raise `ImageError` if its channels or their type differ from the split's."""
        if isinstance(content, np.ndarray) and _get_format(content) != self.info.pixel_format:
            reason = f"has {_get_format(content)}, and the split {self.info.pixel_format}"
            raise self._build_error(index, reason, "make them agree")
        return content

    def probe_first(self, *, skip_bad: bool) -> bytes | PixelArray | None:
        """Return the content of the first sample, or with `skip_bad` of the first readable one of a few, or None."""
        for index in range(min(_MAX_SAMPLES_PROBED, len(self))):
            try:
                return self._read_validated(index)[0]
            except ImageError:
                if not skip_bad:
                    raise
        return None

    def _read_validated(self, index: int) -> Sample:
        # `fork_copy` has opened no file before the fork; otherwise all workers would share one file position.
        reader = self.plugin if os.getpid() == self.pid else self.fork_copy
        try:
            content, returned_label = reader.read(index)
            pixels = content if isinstance(content, bytes) else np.asarray(content)
        except PacelineError:
            raise
        except Exception as error:
            raise self._build_error(index, f"read raised {describe_error(error)}", "fix it") from error
        label = self._validate_label(index, returned_label)
        return (pixels if isinstance(pixels, bytes) else self._validate_pixels(index, pixels)), label

    def _validate_label(self, index: int, returned: Any) -> int:
        if self.labels is not None:
            return int(self.labels[index])
        last = len(self.info.class_names) - 1
        try:
            label = operator.index(returned)
        except Exception:  # tensors raise errors of their own
            label = -1
        if not 0 <= label <= last:
            raise self._build_error(
                index,
                f"has label {returned!r:.50}",
                f"give a whole number, 0 to {last}, a place in classes; for several labels set the attribute targets",
            )
        return label

    def _validate_pixels(self, index: int, pixels: NDArray[Any]) -> PixelArray:
        pixels = pixels[..., None] if pixels.ndim == 2 else pixels
        if (
            pixels.dtype.name not in FULL_SCALE
            or pixels.ndim != 3
            or not 1 <= pixels.shape[2] <= MAX_CHANNELS
            or not pixels.size
        ):
            actual = f"{pixels.dtype} {list(pixels.shape)}"
            fix = f"give bytes, or {_PIXEL_TYPES} [H, W] or [H, W, C], {_LIMIT}"
            raise self._build_error(index, f"read gives {actual}", fix)
        if pixels.dtype == np.float32 and not np.isfinite(pixels).all():
            raise self._build_error(index, "read gives NaN or infinite pixels", "replace them")
        return pixels

    def _build_error(self, index: int, reason: str, fix: str) -> ImageError:
        return ImageError(self.name_of(index), reason, fix)
