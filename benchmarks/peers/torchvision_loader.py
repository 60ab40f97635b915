"""torchvision: ImageFolder and a DataLoader, as tutorials have it, without floats, and with `decode_jpeg`.

python benchmarks/peers/torchvision_loader.py float --data FOLDER --cache FOLDER
"""

from collections.abc import Iterator

import torch
from contender_options import REPEATS, ContenderOptions, main
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.io import ImageReadMode, decode_jpeg, read_file
from torchvision.transforms import v2

_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def as_float(options: ContenderOptions) -> Iterator[int]:
    """Return what the tutorials do: PIL, then floats, normalized by the workers."""
    floats = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(_MEAN, _STD)]
    return _batches(options, v2.Compose([*_sizing(options), *floats]))


def as_uint8(options: ContenderOptions) -> Iterator[int]:
    """Return the same without floats."""
    return _batches(options, v2.Compose([*_sizing(options), v2.PILToTensor()]))


def decoded(options: ContenderOptions) -> Iterator[int]:
    """Return what libjpeg-turbo decodes to tensors, which are then sized."""
    return _batches(options, v2.Compose(_sizing(options)), loader=_decode)


def _decode(path: str) -> torch.Tensor:
    return decode_jpeg(read_file(path), mode=ImageReadMode.RGB)


def _sizing(options: ContenderOptions) -> list[torch.nn.Module]:
    if options.is_train:
        return [v2.RandomResizedCrop(options.size, scale=options.scale, antialias=True), v2.RandomHorizontalFlip()]
    return [v2.Resize(options.short_side, antialias=True), v2.CenterCrop(options.size)]


def _batches(options: ContenderOptions, transform: v2.Compose, **loader: object) -> Iterator[int]:
    files = ImageFolder(str(options.data), transform=transform, **loader)
    files.samples = files.samples * REPEATS
    batches = DataLoader(files, options.batch, shuffle=True, num_workers=options.workers, drop_last=True)
    return (len(images) for images, _ in batches) if not options.prepare else iter(())


if __name__ == "__main__":
    main({"float": as_float, "uint8": as_uint8, "decode_jpeg": decoded})
