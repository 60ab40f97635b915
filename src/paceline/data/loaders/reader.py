"""Read samples by index as uint8 images of one size: gather from memory, or decode and resize."""

from typing import Final, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as F

from paceline.core.dataset import ArraySource, Source
from paceline.core.errors import DataError
from paceline.data.augment.geometric import FusedCropFlip
from paceline.data.bad_images import BadImage, BadImagePolicy
from paceline.data.decode import decode
from paceline.data.resize import ImageOrTensor, Resizer
from paceline.data.timing import BatchTimer

# Largest split that is converted to channels-first in memory; of a larger one, only each batch is.
MAX_COPIED_BYTES: Final = 4 * 10**9

Indices = NDArray[np.int64]


def load_images(source: ArraySource, max_copied_bytes: int = MAX_COPIED_BYTES) -> Tensor | NDArray[np.uint8]:
    """Copy the images to uint8 [M, C, H, W], which is gathered faster; return them as they are above the limit."""
    if source.images.nbytes > max_copied_bytes:
        return source.images
    return torch.from_numpy(np.ascontiguousarray(source.images.transpose(0, 3, 1, 2)))


class ReadSamples(NamedTuple):
    """Samples read for N indices: K uint8 images [K, C, size, size] and their labels int64 [K].

    `is_kept`, bool [N], is false for unreadable samples that were dropped. `bad` lists the distinct unreadable samples,
    in order of occurrence.
    """

    images: Tensor
    labels: Tensor
    is_kept: NDArray[np.bool_]
    bad: tuple[BadImage, ...] = ()


class ArrayReader:
    """Gather raw pixels of one size, a whole batch at once.

    `images` are uint8 [M, C, H, W], or [M, H, W, C] if they may be a mapped file. `crop_flip`, which needs a
    tensor, is applied in the same pass.
    """

    def __init__(
        self,
        images: Tensor | NDArray[np.uint8],
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
        """Return (uint8 [N, C, size, size], int64 [N]); `draws` is float64 [N, num_draws]."""
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
            images = torch.from_numpy(stored[indices]).permute(0, 3, 1, 2).contiguous()
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
        """Return (uint8 [K, C, size, size], int64 [K]) and the dropped samples."""
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
        empty = torch.empty(0, self._channels, size, size, dtype=torch.uint8)
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
                bad.setdefault(current, BadImage.from_error(current, self._source.name_of(current), error))
                current = self._bad_image_policy(current, len(self._source), bad, error)
        return None

    def _decode(self, content: bytes | NDArray[np.uint8], index: int) -> ImageOrTensor:
        if isinstance(content, bytes):
            return decode(content, channels=self._channels, name=self._source.name_of(index))
        return torch.from_numpy(content.transpose(2, 0, 1).copy())  # a copy: the source's array may be read-only

    @property
    def _channels(self) -> Literal[1, 3]:
        return 3 if self._source.info.channels == 3 else 1


SampleReader = ArrayReader | ImageReader
