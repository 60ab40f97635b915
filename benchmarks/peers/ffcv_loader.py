"""FFCV: its own file format, read by threads that run compiled code. Each way of writing the file is a contender.

python benchmarks/peers/ffcv_loader.py jpeg --data FOLDER --cache FOLDER --prepare
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
from contender_options import REPEATS, ContenderOptions, main
from ffcv.fields import IntField, RGBImageField
from ffcv.fields.decoders import CenterCropRGBImageDecoder, IntDecoder, RandomResizedCropRGBImageDecoder
from ffcv.loader import Loader, OrderOption
from ffcv.transforms import RandomHorizontalFlip, ToTensor, ToTorchImage
from ffcv.writer import DatasetWriter
from torchvision.datasets import ImageFolder

_QUALITY = 90


def written(options: ContenderOptions, mode: str, longest: int | None) -> Iterator[int]:
    """Return uint8 batches of a file written in `mode`, no side longer than `longest` pixels."""
    files = ImageFolder(str(options.data))
    path = options.cache / f"{options.data.parent.name}-{options.name}.beton"
    if not path.exists():
        _write(files, path, mode, longest)
    if options.prepare:
        return iter(())
    size = (options.size, options.size)
    decoder = (
        RandomResizedCropRGBImageDecoder(size, scale=options.scale)
        if options.is_train
        else CenterCropRGBImageDecoder(size, ratio=options.size / options.short_side)
    )
    changes = [RandomHorizontalFlip()] if options.is_train else []
    loader = Loader(
        str(path),
        batch_size=options.batch,
        num_workers=options.workers,
        order=OrderOption.RANDOM,
        os_cache=True,
        indices=np.tile(np.arange(len(files)), REPEATS),
        drop_last=True,
        pipelines={"image": [decoder, *changes, ToTensor(), ToTorchImage()], "label": [IntDecoder(), ToTensor()]},
    )
    return (len(images) for images, _ in loader)


def _write(files: ImageFolder, path: Path, mode: str, longest: int | None) -> None:
    image = RGBImageField(write_mode=mode, max_resolution=longest, jpeg_quality=_QUALITY)
    part = path.with_suffix(".part")
    DatasetWriter(str(part), {"image": image, "label": IntField()}, num_workers=1).from_indexed_dataset(files)
    part.rename(path)


if __name__ == "__main__":
    main(
        {
            "jpeg": partial(written, mode="jpg", longest=None),
            "jpeg500": partial(written, mode="jpg", longest=500),
            "raw": partial(written, mode="raw", longest=None),
            "raw500": partial(written, mode="raw", longest=500),
        }
    )
