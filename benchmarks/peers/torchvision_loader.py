"""torchvision: ImageFolder and a DataLoader, as tutorials have it, without floats, and with `decode_jpeg`.

python benchmarks/peers/torchvision_loader.py float --data FOLDER --cache FOLDER
"""

from collections.abc import Iterator

import torch
from asked import REPEATS, Asked, main
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.io import ImageReadMode, decode_jpeg, read_file
from torchvision.transforms import v2

_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def as_float(asked: Asked) -> Iterator[int]:
    """Return what the tutorials do: PIL, then floats, normalised by the workers."""
    floats = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(_MEAN, _STD)]
    return _batches(asked, v2.Compose([*_sizing(asked), *floats]))


def as_uint8(asked: Asked) -> Iterator[int]:
    """Return the same without floats."""
    return _batches(asked, v2.Compose([*_sizing(asked), v2.PILToTensor()]))


def decoded(asked: Asked) -> Iterator[int]:
    """Return what libjpeg-turbo decodes to tensors, which are then sized."""
    return _batches(asked, v2.Compose(_sizing(asked)), loader=_decode)


def _decode(path: str) -> torch.Tensor:
    return decode_jpeg(read_file(path), mode=ImageReadMode.RGB)


def _sizing(asked: Asked) -> list[torch.nn.Module]:
    if asked.is_train:
        return [v2.RandomResizedCrop(asked.size, scale=asked.scale, antialias=True), v2.RandomHorizontalFlip()]
    return [v2.Resize(asked.short_side, antialias=True), v2.CenterCrop(asked.size)]


def _batches(asked: Asked, transform: v2.Compose, **loader: object) -> Iterator[int]:
    files = ImageFolder(str(asked.data), transform=transform, **loader)
    files.samples = files.samples * REPEATS
    batches = DataLoader(files, asked.batch, shuffle=True, num_workers=asked.workers, drop_last=True)
    return (len(images) for images, _ in batches) if not asked.prepare else iter(())


if __name__ == "__main__":
    main({"float": as_float, "uint8": as_uint8, "decode_jpeg": decoded})
