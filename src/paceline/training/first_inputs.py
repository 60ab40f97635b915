"""Record what the model is fed: images of the first step as the model sees them, and sizes of the dataset's images."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from paceline.core.dataset import ArraySource, Source
from paceline.core.errors import DataError
from paceline.core.files import write_new
from paceline.core.pixels import PixelFormat
from paceline.core.results import printable_class_name
from paceline.data.augment.build import DeviceTransforms
from paceline.data.batch import Batch
from paceline.data.decode_array import read_header
from paceline.data.pack.reader import PackSource
from paceline.data.sources.image_files import ImageFileSource
from paceline.data.transfer import DeviceBatch, DeviceTransfer
from paceline.training.thumbnails import encode_thumbnail, replaced_folder, to_visible

INPUTS_JSON: Final = "inputs.json"
MAX_IMAGES: Final = 16
_MAX_HEADERS: Final = 64  # of image files that the first batch has just read, so their headers are in memory
_MAX_SIZE_BINS: Final = 12
_MIN_SHARE: Final = 0.005  # of a class in the label of a mixed image


@dataclass(frozen=True)
class FirstInputs:
    """Write the first `number` images of a batch into `folder`, as the model sees them.

    `transforms` are those of the device, `mean` and `std` the normalization that they apply. Failures are passed to
    `warn`.
    """

    folder: Path
    source: Source
    transfer: DeviceTransfer
    transforms: DeviceTransforms
    mean: tuple[float, ...]
    std: tuple[float, ...]
    augment_on: str | None
    micro_batches: int
    number: int
    warn: Callable[[str], None]

    def __call__(self, batch: Batch) -> None:
        """Record `batch`, the first of the run. The batch and all generators are left as they are."""
        try:
            self._write(batch)
        except Exception as error:  # a disk that is full, or a user's own data source
            self.warn(f"{self.folder}: was not written: {type(error).__name__}: {error} (train with log.worst=0)")

    def _write(self, batch: Batch) -> None:
        sizes = describe_sizes(self.source, batch.indices[:_MAX_HEADERS].tolist())
        values = {"step": 0, "augment_on": self.augment_on, "mixed": self.transforms.mix is not None, **sizes}
        with replaced_folder(self.folder) as folder:
            rows = self._write_images(folder, batch) if self.number else []
            write_new(folder / INPUTS_JSON, json.dumps({**values, "images": rows}, indent=2) + "\n")

    def _write_images(self, folder: Path, batch: Batch) -> list[dict[str, Any]]:
        names = self.source.info.class_names
        rows: list[dict[str, Any]] = []
        for micro_batch in batch.split(self.micro_batches):  # as a step does: images are mixed within a micro-batch
            images, targets = self._transform(micro_batch)
            left = self.number - len(rows)
            for index, image, target in zip(
                micro_batch.indices[:left].tolist(),
                to_pixels(images[:left], self.mean, self.std, self.source.info.pixel_format),
                targets,
                strict=False,
            ):
                data, suffix = encode_thumbnail(Image.fromarray(image))
                file = f"{len(rows):02}.{suffix}"
                write_new(folder / file, data)
                classes = [[printable_class_name(names[label]), share] for label, share in _shares(target)]
                name = printable_class_name(self.source.name_of(index))
                rows.append({"index": index, "name": name, "classes": classes, "file": file})
            if len(rows) == self.number:
                break
        return rows

    def _transform(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return what `batch` becomes on the device: normalized images, and labels or targets on the host."""
        with torch.no_grad():
            placed = self.transfer(batch)
            # A copy: an augmentation may change the images of a batch in place.
            images, targets = self.transforms(DeviceBatch(placed.images.clone(), placed.labels, placed.draws))
        return images, targets.cpu()


def to_pixels(
    images: Tensor, mean: tuple[float, ...], std: tuple[float, ...], form: PixelFormat
) -> list[NDArray[np.uint8]]:
    """Return normalized images [N, C, H, W] of any floating type as uint8 [H, W] or [H, W, 3].

    Those that are not 8-bit gray or RGB are what `to_visible` makes of them.
    """
    shape = (1, len(mean), 1, 1)
    mean_255, std_255 = (torch.tensor(each, dtype=torch.float32).mul(255).view(shape) for each in (mean, std))
    floats = images.detach().cpu().float().mul(std_255).add(mean_255).permute(0, 2, 3, 1)
    if form.is_photo:
        arrays = [*floats.round().clamp(0, 255).to(torch.uint8).contiguous().numpy()]
    else:
        arrays = [to_visible(each) for each in floats.numpy()]
    return [each if each.shape[2] == 3 else each[..., 0] for each in arrays]


def _shares(target: Tensor) -> list[tuple[int, float]]:
    """Return (class, share) of a label [] or of a mixed target [num_classes], the largest share first."""
    if not target.is_floating_point():
        return [(int(target), 1.0)]
    shares = [(label, round(share, 4)) for label, share in enumerate(target.tolist()) if share >= _MIN_SHARE]
    return sorted(shares, key=lambda each: -each[1])


def describe_sizes(source: Source, indices: list[int]) -> dict[str, Any]:
    """Return `image_sizes`: all of an array or a pack, of files the headers of `indices`; {} if they are unknown."""
    match source:
        case ArraySource():
            height, width = source.images.shape[1:3]
            return _summarize_sizes(np.array([[height, width]], dtype=np.int64), len(source), is_sample=False)
        case PackSource():
            sizes = np.stack([source.heights, source.widths], axis=1).astype(np.int64)
            known = sizes[sizes.min(axis=1) > 0]
            return _summarize_sizes(known, len(known), is_sample=len(known) < len(source))
        case ImageFileSource():
            headers = [each for index in indices if (each := _read_size(source, index))]
            sizes = np.array(headers, dtype=np.int64).reshape(-1, 2)
            return _summarize_sizes(sizes, len(sizes), is_sample=len(sizes) < len(source))
    return {}


def _read_size(source: ImageFileSource, index: int) -> tuple[int, int] | None:
    try:
        header = read_header(source.read_bytes(index), source.info.pixel_format, name="")
    except DataError:  # listed as a bad image when it is decoded
        return None
    return header.height, header.width


def _summarize_sizes(sizes: NDArray[np.int64], num_images: int, *, is_sample: bool) -> dict[str, Any]:
    """Describe (height, width), int64 [N, 2], by percentiles and a histogram of the shorter side."""
    if not len(sizes):
        return {}
    low, median, high = np.percentile(sizes, (0, 50, 100), axis=0, method="nearest").tolist()
    shorter = sizes.min(axis=1)
    first, last = int(shorter.min()), int(shorter.max()) + 1
    edges = np.unique(np.linspace(first, last, min(_MAX_SIZE_BINS, last - first) + 1).round().astype(np.int64))
    counts = np.histogram(shorter, edges)[0] * (num_images // len(sizes))
    return {
        "image_sizes": {
            "images": num_images,
            "is_sample": is_sample,
            "min": low,
            "median": median,
            "max": high,
            "shorter_side": {"edges": edges.tolist(), "counts": counts.tolist()},
        }
    }
