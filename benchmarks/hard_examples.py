"""Does drawing hard examples more often help, on equal classes, on a long tail, and with wrong labels?

    python benchmarks/hard_examples.py --fashion DIR --json benchmarks/results/hard-examples-cpu.json

Digits of scikit-learn and, with `--fashion`, a part of Fashion-MNIST in DIR are written as folders of PNG files: with
equal classes, with a long tail (the smallest class has 1/20 of the images of the largest), and with a fifth of the
training labels wrong. Every sampler trains as many steps. The accuracy is the mean over classes, all equally many in
the validation split of Fashion-MNIST, and gains are within seeds.
"""

import argparse
import gzip
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import accuracy
import numpy as np
import record
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import load_digits

import paceline
from paceline.core.statistics import mean_interval

SAMPLERS: Final = {
    "shuffle": "{name: shuffle}",
    "balanced": "{name: balanced}",
    "hard": "{name: hard, after: 4}",
    "hard, share 1": "{name: hard, after: 4, share: 1}",
}
VERSIONS: Final = ("equal", "long tail", "wrong labels")
IMBALANCE: Final = 20
WRONG_SHARE: Final = 0.2
FASHION_IMAGES: Final = (4000, 2000)
COMMON: Final = (
    *("data.batch_size=64", "data.workers=0", "data.augment=[{name: pad_crop, padding: 2}]", "model.width=0.25"),
    *("data.mean=[0.5]", "data.std=[0.25]", "train.eval_every=100%", "checkpoint.every=off", "parallel.threads=1"),
    *("log.tensorboard=off", "log.report=off", "log.worst=0", "measure.telemetry=off"),
)
Split = tuple[NDArray[np.uint8], NDArray[np.int64]]


def main() -> None:
    """Train every sampler on every version at all seeds, print the table, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fashion", type=Path, metavar="DIR", help="folder of Fashion-MNIST's four files")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=16)
    parser.add_argument("--only", nargs="+", default=[], help="versions whose name holds one of these")
    parser.add_argument("--samplers", nargs="+", default=list(SAMPLERS), choices=list(SAMPLERS))
    parser.add_argument("--json", type=Path, metavar="OUT", help="where to write the result")
    args = parser.parse_args()
    values: dict[str, Any] = {"benchmark": "hard_examples", **record.provenance(), "samplers": SAMPLERS}
    values["command"] = accuracy.without_folders(values["command"])
    for dataset, train, val in read_datasets(args.fashion):
        for version in VERSIONS:
            name = f"{dataset}, {version}"
            if args.only and not any(each in name for each in args.only):
                continue
            with tempfile.TemporaryDirectory() as folder:
                write_split(Path(folder, "train"), change(train, version))
                write_split(Path(folder, "val"), val)
                size = f"data.image_size={val[0].shape[1]}"
                settings = [f"data.source.root={folder}", f"train.epochs={args.epochs}", size]
                values[name] = compare(name, settings, args.samplers, args.seeds)
    if args.json:
        record.write(args.json, values)


def compare(name: str, settings: list[str], samplers: list[str], seeds: list[int]) -> dict[str, Any]:
    """Return the accuracy of each sampler, and its gain over shuffling."""
    scores: dict[str, list[float]] = {}
    for sampler in samplers:
        overrides = [*settings, f"data.sampler={SAMPLERS[sampler]}"]
        scores[sampler] = [train_once([*overrides, f"seed={seed}"]) for seed in seeds]
        print(f"{name:30} {sampler:15} {' '.join(f'{each:.4f}' for each in scores[sampler])}", flush=True)
    outcome = {sampler: accuracy.over_seeds(each) for sampler, each in scores.items()}
    for sampler, each in scores.items():
        if sampler != "shuffle" and "shuffle" in scores and len(seeds) > 1:
            gain = mean_interval(list(map(float.__sub__, each, scores["shuffle"])))
            outcome[sampler]["gain"] = f"{gain.value:.4f} [{gain.low:.4f}, {gain.high:.4f}]"
    return outcome


def train_once(overrides: list[str]) -> float:
    """Return the mean accuracy over classes at the end of a run of the preset `digits`."""
    with tempfile.TemporaryDirectory() as folder:
        settings = ["data.source.name=folder", "data.source.channels=1", *COMMON, *overrides]
        result = paceline.train("digits", *settings, run_dir=Path(folder, "run"))
    assert result.eval is not None and result.eval.mean_class_accuracy is not None
    return result.eval.mean_class_accuracy


def read_datasets(fashion: Path | None) -> Iterator[tuple[str, Split, Split]]:
    """Yield name, training and validation split of each dataset."""
    digits = load_digits()
    images = np.repeat(np.repeat((digits.images * 15.9375).astype(np.uint8), 2, axis=1), 2, axis=2)
    labels, is_val = digits.target.astype(np.int64), np.arange(len(images)) % 5 == 0
    yield "digits", (images[~is_val], labels[~is_val]), (images[is_val], labels[is_val])
    if fashion:
        parts = zip(("train", "t10k"), FASHION_IMAGES, strict=True)
        train, val = (
            (read_idx(fashion, part, 3, 16)[:num], read_idx(fashion, part, 1, 8)[:num]) for part, num in parts
        )
        yield "Fashion-MNIST", (train[0], train[1].astype(np.int64)), (val[0], val[1].astype(np.int64))


def read_idx(folder: Path, part: str, num_axes: int, header: int) -> NDArray[np.uint8]:
    """Return the array of an IDX file."""
    kind = "images" if num_axes == 3 else "labels"
    content = gzip.decompress(Path(folder, f"{part}-{kind}-idx{num_axes}-ubyte.gz").read_bytes())
    values = np.frombuffer(content, dtype=np.uint8, offset=header)
    return values.reshape(-1, 28, 28) if num_axes == 3 else values


def change(split: Split, version: str) -> Split:
    """Return a version of a training split."""
    images, labels = split
    draws = np.random.default_rng(0)
    if version == "wrong labels":
        is_wrong = draws.random(len(labels)) < WRONG_SHARE
        return images, np.where(is_wrong, (labels + draws.integers(1, 10, len(labels))) % 10, labels)
    if version == "long tail":
        largest = np.bincount(labels).min()
        kept = [np.flatnonzero(labels == each)[: round(largest * IMBALANCE ** (-each / 9))] for each in range(10)]
        rows = np.sort(np.concatenate(kept))
        return images[rows], labels[rows]
    return images, labels


def write_split(folder: Path, split: Split) -> None:
    """Write the images of a split as PNG files, one folder per class."""
    for number, (image, label) in enumerate(zip(*split, strict=True)):
        path = folder / str(label) / f"{number:05}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)


if __name__ == "__main__":
    main()
