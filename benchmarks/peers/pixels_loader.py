"""torchvision on pixels in memory, as its CIFAR-10 tutorials have it: pad, crop and flip each sample by itself.

python benchmarks/peers/pixels_loader.py per_sample --data FOLDER --cache FOLDER
"""

from collections.abc import Iterator

import numpy as np
import torch
from contender_options import ContenderOptions, main
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

_NUM_IMAGES = 50_000
_MEAN, _STD = (0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616)


class Pixels(Dataset):
    """Images of CIFAR's shape, given as torchvision's CIFAR10 gives them: a PIL image each, which is then changed."""

    def __init__(self, transform: v2.Compose) -> None:
        self.images = np.random.default_rng(0).integers(0, 256, (_NUM_IMAGES, 32, 32, 3), dtype=np.uint8)
        self.transform = transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.transform(Image.fromarray(self.images[index])), 0


def per_sample(options: ContenderOptions) -> Iterator[int]:
    """Return float batches, endlessly."""
    floats = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(_MEAN, _STD)]
    pixels = Pixels(v2.Compose([v2.RandomCrop(32, padding=4), v2.RandomHorizontalFlip(), *floats]))
    loader = DataLoader(pixels, options.batch, shuffle=True, num_workers=options.workers, drop_last=True)
    return (len(images) for _ in range(100) for images, _ in loader)


if __name__ == "__main__":
    main({"per_sample": per_sample})
