"""How many different images does `paceline check` take for copies, and which copies does it find?

Claim: with the limits of `lab.check.near_duplicates`, at most 10 of 50 million pairs of Fashion-MNIST's test images
count as copies (some of them are), and all photographs that were saved again or resized are found.

    python benchmarks/near_duplicates.py --root DIR --json benchmarks/results/near-duplicates.json

DIR has `fashion-mnist` (the IDX files), `cifar10/train/*/*.jpg` and `imagenet-sample/train/*/*.JPEG`; what is missing
is left out. The digits come with scikit-learn. It takes a minute.
"""

import argparse
import gzip
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import record
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import load_digits

from paceline.lab.check import near_duplicates as checked

COPIES: dict[str, Callable[[Image.Image], Image.Image]] = {
    "quality 40": lambda image: save_again(image, 40),
    "quality 75": lambda image: save_again(image, 75),
    "half the size": lambda image: image.resize((max(8, image.width // 2), max(8, image.height // 2))),
    "80 % of the size, quality 60": lambda image: save_again(
        image.resize((image.width * 4 // 5, image.height * 4 // 5)), 60
    ),
    "15 % brighter": lambda image: image.point(lambda value: min(255, round(1.15 * value))),
}
NUM_COPIED = 200


def main() -> None:
    """Run, print, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path("data"), help="where the datasets are (default: data)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="where to write the result")
    args = parser.parse_args()
    rows = {name: measure(images) for name, images in read_datasets(args.root)}
    for name, row in rows.items():
        print(f"{name}: {row}")
    if args.json:
        limits = {"distance": checked.MAX_DISTANCE, "difference": checked.MAX_DIFFERENCE}
        record.write(args.json, {"benchmark": "near_duplicates", **record.provenance(), "limits": limits, **rows})


def read_datasets(root: Path) -> Iterator[tuple[str, list[Image.Image]]]:
    """Yield the name and the images of each dataset that is there."""
    yield "digits", [Image.fromarray((16 * each.clip(0, 15)).astype(np.uint8)) for each in load_digits().images]
    fashion = root / "fashion-mnist" / "t10k-images-idx3-ubyte.gz"
    if fashion.exists():
        pixels = np.frombuffer(gzip.decompress(fashion.read_bytes())[16:], np.uint8).reshape(-1, 28, 28)
        yield "fashion-mnist", [Image.fromarray(each) for each in pixels]
    for name, pattern, every in (("cifar10", "*/*.jpg", 5), ("imagenet-sample", "*/*", 1)):
        if paths := sorted((root / name / "train").glob(pattern))[::every]:
            yield name, [Image.open(path).convert("RGB") for path in paths]


def measure(images: list[Image.Image]) -> dict[str, Any]:
    """Return the pairs that count as copies, by hash alone and by both tests, and the shares of copies found."""
    small = np.stack([shrink(image) for image in images])
    hashes, is_flat = checked._hash(small)
    near = checked._pairs_of_copies(hashes, small, is_flat)
    by_hash = sum(
        int((checked._count_bits(hashes[at] ^ hashes[at + 1 :]) <= checked.MAX_DISTANCE).sum())
        for at in range(len(hashes))
    )
    copied = np.linspace(0, len(images) - 1, min(NUM_COPIED, len(images))).astype(int)
    found = {name: round(share_found(images, small, copied, make), 3) for name, make in COPIES.items()}
    return {"images": len(images), "pairs_by_hash": by_hash, "pairs": len(near), "flat": int(is_flat.sum())} | found


def share_found(
    images: list[Image.Image],
    small: NDArray[np.uint8],
    copied: NDArray[np.int64],
    make: Callable[[Image.Image], Image.Image],
) -> float:
    """Return the share of the `copied` images that are found as the copy which `make` makes."""
    both = np.concatenate([small[copied], np.stack([shrink(make(images[at])) for at in copied])])
    hashes, is_flat = checked._hash(both)
    pairs = checked._pairs_of_copies(hashes, both, is_flat)
    return float((pairs[:, 1] - pairs[:, 0] == len(copied)).sum() / len(copied))


def shrink(image: Image.Image) -> NDArray[np.uint8]:
    """Return an image in gray, uint8 [32, 32], as the check does."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return checked._shrink(file.getvalue(), checked.PixelFormat(3), "image")


def save_again(image: Image.Image, quality: int) -> Image.Image:
    """Return the image after a JPEG file of this quality."""
    file = io.BytesIO()
    image.convert("RGB").save(file, "JPEG", quality=quality)
    return Image.open(io.BytesIO(file.getvalue()))


if __name__ == "__main__":
    main()
