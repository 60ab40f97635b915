"""Samples from a user's own code: what it returns for each split, brought to the protocol that all sources follow."""

import operator
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, Literal, cast

import numpy as np
from numpy.typing import NDArray

from paceline.core.dataset import ArraySource, DatasetInfo, Datasets, Sample, Source, Split
from paceline.core.errors import PacelineError, RecipeError
from paceline.data.bad import ImageError
from paceline.data.sources.encoded import files_info
from paceline.recipe.own import SOURCE, Own, told
from paceline.recipe.schema.source import OwnSource

_PATH: Final = "data.source"
_KINDS: Final = "(images, labels, class_names), an object with classes, __len__ and read, or a paceline Source"
_BLOCK: Final = 1 << 20
"""Pixels that are counted at once, about: numpy makes 8 bytes of each for it."""
_TRIED: Final = 16
"""Samples that are looked at, where bad ones are skipped, for one that can be read."""


def load_own(section: OwnSource, *, skip_bad: bool = False) -> Datasets:
    """Return both splits, as the code that `section` names makes them. Raise `RecipeError` where it does not.

    With `skip_bad` a first image that cannot be read is left to whoever reads it in the run.

    A split may be

    - `(images, labels, class_names)`: uint8 [N, H, W] or [N, H, W, C] with C of 1 or 3, whole numbers [N], names;
    - an object with `classes`, `__len__()` and `read(index) -> (bytes of an image file, or uint8 [H, W] or [H, W, C],
      label)`: images of any size, read one at a time;
    - a `paceline.core.dataset.Source`, which is taken as it is.
    """
    own = Own(_PATH, section.name, section.args, SOURCE)
    train = _split(own, section, "train", skip_bad=skip_bad)
    val = _split(own, section, "val", skip_bad=skip_bad, channels=1 if train.info.channels == 1 else 3)
    if train.info.class_names != val.info.class_names:
        raise own.lacks("names other classes for val than for train (return the same, in the same order)")
    if train.info.channels != val.info.channels:
        raise own.lacks(
            f"has images of {train.info.channels} channels in train and of {val.info.channels} in val (make them agree)"
        )
    return Datasets(train, val)


def load_own_validation(section: OwnSource, *, skip_bad: bool = False) -> Source:
    """Return the validation split alone. Raise `RecipeError` as `load_own` does."""
    return _split(Own(_PATH, section.name, section.args, SOURCE), section, "val", skip_bad=skip_bad)


def _split(own: Own, section: OwnSource, split: Split, *, skip_bad: bool, channels: Literal[1, 3] = 3) -> Source:
    """Return a split; `channels` are those of one whose images do not tell."""
    made = own.make(split=split)
    match made:
        case tuple((images, labels, class_names)):
            _refuse_channels(section)
            return _pixels(own, split, images, labels, class_names)
    if isinstance(_asked(own, split, lambda: getattr(made, "info", None)), DatasetInfo):
        _refuse_channels(section)
        _require(own, split, made, ("__len__", "read", "name_of"))
        return cast(Source, made)
    return _read_one_by_one(own, section, split, made, skip_bad=skip_bad, channels=channels)


def _asked(own: Own, split: Split, question: Callable[[], Any]) -> Any:
    """Return the answer of a user's code. Raise `RecipeError` for whatever it raises."""
    try:
        return question()
    except PacelineError:
        raise
    except Exception as error:
        raise own.lacks(f"raised {told(error)} for {split} (mend it)") from error


def _require(own: Own, split: Split, made: Any, names: Sequence[str]) -> None:
    """Raise `RecipeError` for the first of `names` that is not to be had of what was made."""
    for name in names:
        if not _asked(own, split, partial(hasattr, made, name)):
            raise own.lacks(f"gives {split} as {type(made).__name__}, which has no {name} (return {_KINDS})")


def _refuse_channels(section: OwnSource) -> None:
    if section.channels != "auto":
        raise RecipeError(
            f"data.source.channels: {section.channels} has no effect on {section.name}, which says it itself (leave it "
            f"at auto)"
        )


def _pixels(own: Own, split: Split, images: Any, labels: Any, class_names: Any) -> ArraySource:
    """Return a split that is pixels of one size, normalised by its own mean and deviation."""
    images, labels = _array(own, split, "images", images), _array(own, split, "labels", labels)
    images = images[..., None] if images.ndim == 3 else images
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] not in (1, 3):
        found = f"{images.dtype} {list(images.shape)}"
        raise own.lacks(f"gives {split} images as {found} (give uint8 [N, H, W], or [N, H, W, C] with C of 1 or 3)")
    if not np.issubdtype(labels.dtype, np.integer) or labels.shape != images.shape[:1]:
        found = f"{labels.dtype} {list(labels.shape)}"
        raise own.lacks(f"gives {split} labels as {found} for {len(images)} images (give one whole number each)")
    names = _class_names(own, class_names)
    wrong = labels[(labels < 0) | (labels >= len(names))][:1].tolist()
    if wrong:
        raise own.lacks(f"gives {split} label {wrong[0]}, and {len(names)} classes (give 0 to {len(names) - 1})")
    mean, std = _mean_and_std(images)
    height, width, channels = images.shape[1:]
    info = DatasetInfo(own.name, split, len(labels), names, channels, (height, width), mean, std)
    return ArraySource(info, np.ascontiguousarray(images), labels.astype(np.int64))


def _array(own: Own, split: Split, what: str, values: Any) -> NDArray[Any]:
    """Return `values` as one array. Raise `RecipeError` where they are none, such as pictures of several sizes."""
    try:
        return np.asarray(values)
    except Exception as error:  # of a GPU's tensor numpy raises a TypeError
        reason = " ".join(str(error).split())[:100]
        fix = "give one array, or for several sizes an object with read"
        raise own.lacks(f"gives {split} {what} of which numpy makes no array: {reason} ({fix})") from None


def _mean_and_std(images: NDArray[np.uint8]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of each channel, of pixels in [0, 1]; from counts, which are taken in
    blocks to take little room.

    A channel that never changes has a deviation of 1, by which it is left at 0.
    """
    values, block = np.arange(256) / 255, max(1, _BLOCK // max(1, images.shape[1] * images.shape[2]))
    means, stds = [], []
    for channel in range(images.shape[3]):
        counts = np.zeros(256, np.int64)
        for first in range(0, len(images), block):
            counts += np.bincount(images[first : first + block, ..., channel].ravel(), minlength=256)
        shares = counts / max(1, counts.sum())
        mean = float(shares @ values)
        std = float(np.sqrt(shares @ (values - mean) ** 2))
        means.append(round(mean, 4))
        stds.append(round(std, 4) or 1.0)
    return tuple(means), tuple(stds)


def _class_names(own: Own, class_names: object) -> tuple[str, ...]:
    if isinstance(class_names, str) or not isinstance(class_names, Sequence | np.ndarray) or len(class_names) < 2:
        raise own.lacks(f"gives {class_names!r} as names of classes (give a list of two or more)")
    names = tuple(str(name) for name in class_names)
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise own.lacks(f"names class {twice!r} twice (give each class a name of its own)")
    return names


def _read_one_by_one(
    own: Own, section: OwnSource, split: Split, made: Any, *, skip_bad: bool, channels: Literal[1, 3]
) -> "OwnSamples":
    """Return a split whose samples are read by `made`, once the first of them is what it should be."""
    _require(own, split, made, ("classes", "__len__", "read"))
    names = _class_names(own, _asked(own, split, lambda: made.classes))
    num_images = _asked(own, split, lambda: len(made))
    if num_images == 0 and split == "train":
        raise own.lacks("has no training images (return some for split 'train')")
    tried = OwnSamples(files_info(own.name, split, num_images, names, channels), made, own.make(split=split))
    content = tried.first(skip_bad=skip_bad)
    samples = replace(tried, info=files_info(own.name, split, num_images, names, _channels(section, content, channels)))
    if content is not None:
        samples.checked(0, content)
    return samples


def _channels(section: OwnSource, content: bytes | NDArray[np.uint8] | None, otherwise: Literal[1, 3]) -> Literal[1, 3]:
    """Return the channels of a split of which a sample is `content`, or `otherwise` where no sample tells."""
    if section.channels != "auto":
        return section.channels
    if isinstance(content, np.ndarray):
        return 1 if content.shape[2] == 1 else 3
    return 3 if content else otherwise


@dataclass(frozen=True)
class OwnSamples:
    """A split whose samples a user's code reads, one at a time: image files as bytes, or pixels of any size.

    In the process `pid` it is `inner` that reads; in a worker, which is forked from that, `untouched`, which has not
    read anything there. Else they would have one open file, and each move the place where the others read.
    """

    info: DatasetInfo
    inner: Any
    untouched: Any
    pid: int = field(default_factory=os.getpid)

    def __len__(self) -> int:
        return self.info.num_images

    def name_of(self, index: int) -> str:
        """Return `name/split[index]`."""
        return f"{self.info.name}/{self.info.split}[{index}]"

    def read(self, index: int) -> Sample:
        """Return (encoded bytes, or uint8 pixels [H, W, C]; label). Raise `ImageError` for what cannot be read."""
        content, label = self._taken(index)
        return self.checked(index, content), label

    def checked(self, index: int, content: bytes | NDArray[np.uint8]) -> bytes | NDArray[np.uint8]:
        """Return `content`. Raise `ImageError` for pixels of other channels than the split's."""
        if isinstance(content, np.ndarray) and content.shape[2] != self.info.channels:
            channels = self.info.channels
            raise self._error(index, f"has {content.shape[2]} channels, and the split {channels}", "make them agree")
        return content

    def first(self, *, skip_bad: bool) -> bytes | NDArray[np.uint8] | None:
        """Return what the first sample is, whatever channels it has.

        With `skip_bad` it is the first that can be read of a few, and None where none of them can.
        """
        for index in range(min(_TRIED, len(self))):
            try:
                return self._taken(index)[0]
            except ImageError:
                if not skip_bad:
                    raise
        return None

    def _taken(self, index: int) -> Sample:
        inner = self.inner if os.getpid() == self.pid else self.untouched
        try:
            content, given = inner.read(index)
            pixels = content if isinstance(content, bytes) else np.asarray(content)
        except PacelineError:
            raise
        except Exception as error:
            raise self._error(index, f"read raised {told(error)}", "mend it") from error
        label = self._label(index, given)
        return (pixels if isinstance(pixels, bytes) else self._pixels(index, pixels)), label

    def _label(self, index: int, given: Any) -> int:
        last = len(self.info.class_names) - 1
        try:
            label = operator.index(given)
        except Exception:  # a tensor has errors of its own
            label = -1
        if not 0 <= label <= last:
            raise self._error(
                index, f"has label {given!r:.50}", f"give a whole number, 0 to {last}, a place in classes"
            )
        return label

    def _pixels(self, index: int, pixels: NDArray[Any]) -> NDArray[np.uint8]:
        pixels = pixels[..., None] if pixels.ndim == 2 else pixels
        if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] not in (1, 3) or not pixels.size:
            found = f"{pixels.dtype} {list(pixels.shape)}"
            raise self._error(index, f"read gives {found}", "give bytes, or uint8 [H, W] or [H, W, C] with C of 1 or 3")
        return pixels

    def _error(self, index: int, reason: str, fix: str) -> ImageError:
        return ImageError(self.name_of(index), reason, fix)
