"""Read samples by index as images of one size, uint8 or scaled float32: gather from memory, or decode and resize."""

from typing import Final, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as F

from paceline.core.dataset import ArraySource, PixelArray, Source
from paceline.core.errors import DataError
from paceline.core.pixels import FULL_SCALE, PixelType
from paceline.data.augment.geometric import FusedCropFlip
from paceline.data.bad_images import BadImage, BadImagePolicy, get_reason
from paceline.data.batch import batch_dtype
from paceline.data.decode_array import decode_image
from paceline.data.resize import ImageOrTensor, Resizer
from paceline.data.timing import BatchTimer

# Largest split that is converted to channels-first in memory; of a larger one, only each batch is.
MAX_COPIED_BYTES: Final = 4 * 10**9

Indices = NDArray[np.int64]


def scale_pixels(pixels: PixelArray) -> PixelArray:
    """Return uint8 pixels as they are, and wider ones as float32, divided by their full scale."""
    scale = FULL_SCALE[cast(PixelType, pixels.dtype.name)]
    return pixels if pixels.dtype == np.uint8 else pixels.astype(np.float32) / np.float32(scale)


def to_planes(pixels: PixelArray) -> Tensor:
    """Return pixels [..., H, W, C] as a contiguous tensor [..., C, H, W], scaled by `scale_pixels`."""
    # Always a copy: the source's array may be read-only.
    return torch.from_numpy(np.moveaxis(scale_pixels(pixels), -1, -3).copy())


def load_images(source: ArraySource, max_copied_bytes: int = MAX_COPIED_BYTES) -> Tensor | PixelArray:
    """Copy the images to [M, C, H, W], which is gathered faster; return them as they are above the limit."""
    return source.images if source.images.nbytes > max_copied_bytes else to_planes(source.images)


class ReadSamples(NamedTuple):
    """Samples read for N indices: K images [K, C, size, size], uint8 or float32, and their labels int64 [K].

    `is_kept`, bool [N], is false for unreadable samples that were dropped. `bad` lists the distinct unreadable samples,
    in order of occurrence.
    """

    images: Tensor
    labels: Tensor
    is_kept: NDArray[np.bool_]
    bad: tuple[BadImage, ...] = ()


class ArrayReader:
    """Gather raw pixels of one size, a whole batch at once.

    `images` are a tensor [M, C, H, W], or an array [M, H, W, C] if they may be a mapped file. `crop_flip`, which needs
    a tensor, is applied in the same pass.
    """

    def __init__(
        self,
        images: Tensor | PixelArray,
        labels: NDArray[np.int64],
        crop_flip: FusedCropFlip | None,
        timer: BatchTimer,
        interpolation: InterpolationMode = InterpolationMode.BILINEAR,
    ) -> None:
        self._images = images
        self._interpolation = interpolation
        self._labels = torch.from_numpy(labels)
        self._crop_flip = crop_flip
        self._timer = timer
        self.num_draws = crop_flip.num_draws if crop_flip else 0

    def read(self, indices: Indices, draws: NDArray[np.float64], size: int) -> ReadSamples:
        """Return (images [N, C, size, size], int64 [N]); `draws` is float64 [N, num_draws]."""
        return ReadSamples(
            self._gather(indices, draws, size),
            self._labels[torch.from_numpy(indices)],
            np.ones(len(indices), dtype=np.bool_),
        )

    def _gather(self, indices: Indices, draws: NDArray[np.float64], size: int) -> Tensor:
        stored = self._images
        if self._crop_flip and self._crop_flip.supports(size, size) and stored.shape[-2:] == (size, size):
            assert isinstance(stored, Tensor)
            images = self._crop_flip.gather(stored.numpy(), indices, draws)
            self._timer.end_read(images.nbytes)
            return images
        if isinstance(stored, Tensor):
            images = stored.index_select(0, torch.from_numpy(indices))  # on CIFAR-10 several times faster than indexing
        else:
            images = to_planes(stored[indices])
        self._timer.end_read(images.nbytes)
        if images.shape[-2:] != (size, size):
            images = F.resize(images, [size, size], self._interpolation, antialias=True)
            self._timer.end_stage("decode")  # which includes resizing
        if self._crop_flip:  # after resizing, so that padding is in pixels of the model's input
            images = self._crop_flip(images, torch.from_numpy(draws))
            self._timer.end_stage("augment")
        return images


class ImageReader:
    """Decode and resize samples one by one; `bad_image_policy` is for unreadable ones."""

    def __init__(self, source: Source, resizer: Resizer, bad_image_policy: BadImagePolicy, timer: BatchTimer) -> None:
        self._source = source
        self._timer = timer
        self._resizer = resizer
        self._bad_image_policy = bad_image_policy
        self.num_draws = resizer.num_draws

    def read(self, indices: Indices, draws: NDArray[np.float64], size: int) -> ReadSamples:
        """Return (images [K, C, size, size], int64 [K]) and the dropped samples."""
        images, labels, is_kept = [], [], []
        bad: dict[int, BadImage] = {}
        for index, draw in zip(indices.tolist(), draws, strict=True):
            sample = self._read_or_substitute(index, bad)
            is_kept.append(sample is not None)
            if sample is not None:
                image, label = sample
                images.append(self._resizer(image, draw, size))
                self._timer.end_stage("decode")
                labels.append(label)
        form = self._source.info.pixel_format
        empty = torch.empty(0, form.channels, size, size, dtype=batch_dtype(form.pixels))
        return ReadSamples(
            torch.stack(images) if images else empty,
            torch.tensor(labels, dtype=torch.int64),
            np.array(is_kept, dtype=np.bool_),
            tuple(bad.values()),
        )

    def _read_or_substitute(self, index: int, bad: dict[int, BadImage]) -> tuple[ImageOrTensor, int] | None:
        # A replacement comes with its own label, and with the draws of the requested sample.
        current: int | None = index
        while current is not None:
            try:
                content, label = self._source.read(current)
                self._timer.end_read(len(content) if isinstance(content, bytes) else content.nbytes)
                return self._decode(content, current), label
            except DataError as error:
                bad.setdefault(current, BadImage(current, self._source.name_of(current), get_reason(error)))
                current = self._bad_image_policy(current, len(self._source), bad, error)
        return None

    def _decode(self, content: bytes | PixelArray, index: int) -> ImageOrTensor:
        if isinstance(content, bytes):
            decoded = decode_image(content, self._source.info.pixel_format, name=self._source.name_of(index))
            return to_planes(decoded) if isinstance(decoded, np.ndarray) else decoded
        return to_planes(content)


SampleReader = ArrayReader | ImageReader
