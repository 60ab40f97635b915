"""Train on data that your own code reads: synthetic images of any size, with stripes of three kinds.

    python examples/own_source.py
    PYTHONPATH=examples paceline train synthetic data.source.name=own_source:Stripes data.image_size=16

paceline calls the class with "train" and with "val"; the object must have `classes`, `len()` and `read(index)`. Here,
`read` returns pixels. It may instead return the bytes of an image file from any storage.
"""

import numpy as np
from numpy.typing import NDArray

import paceline


class Stripes:
    """Grayscale images of 12 to 30 pixels per side, with horizontal, vertical or diagonal stripes."""

    classes = ("across", "down", "diagonal")

    def __init__(self, split: str, num_images: int = 320, noise: float = 60.0) -> None:
        self.num_images = num_images if split == "train" else num_images // 4
        self.noise = noise
        self.first = 0 if split == "train" else num_images

    def __len__(self) -> int:
        return self.num_images

    def read(self, index: int) -> tuple[NDArray[np.uint8], int]:
        """Return (uint8 [H, W], label), the same for the same index, so that runs are reproducible."""
        draws = np.random.default_rng(self.first + index)
        label = index % len(self.classes)
        height, width = draws.integers(12, 31, size=2)
        rows, columns = np.mgrid[:height, :width]
        along = (rows, columns, rows + columns)[label]
        pixels = 128 + 80 * np.sin(along + draws.uniform(0, 6)) + self.noise * draws.standard_normal(along.shape)
        return pixels.clip(0, 255).astype(np.uint8), label


def main() -> None:
    """Train a small model on the images."""
    recipe = {
        "extends": "digits",
        "data": {"image_size": 16, "batch_size": 32, "augment": ["flip"], "eval_crop": 1.0, "workers": 0},
        "model": {"width": 0.125},
        "schedule": {"name": "constant"},
        "train": {"epochs": 2},
    }
    result = paceline.train(recipe, "data.source.args.noise=40", source=Stripes)
    print(f"top1 {result.eval.top1:.1%} of {result.eval.images} pictures it was not trained on")


if __name__ == "__main__":
    main()
