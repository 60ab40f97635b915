"""Does the interval of a cross-validation cover the accuracy that it estimates?

    python benchmarks/cross_validation.py --fashion ~/data/fashion-mnist --photographs ~/data/cifar10 \\
        --repeated ~/data/imagenet-sample --classes animals.csv --json benchmarks/results/cross-validation.json

The training images are dealt into disjoint random subsets of 500. Half of the subsets are cross-validated in five
folds, each run with a seed of its own, as `paceline cv` does it. A model that is trained on four fifths of each other
subset is tested on images that no subset has: the mean of these accuracies is the truth, of models on as many images as
those of the folds have. An interval of 95 % should contain it for 95 % of the subsets.

Of a dataset that is too small for subsets (`--repeated`, class folders), the whole is cross-validated again and again
with other folds. The truth is the mean of all these, the result of a cross-validation that is repeated without end.

Three intervals are compared: the corrected resampled t interval that `paceline cv` reports, Student's interval, which
takes the five scores as independent, and Wilson's of all predictions. The photographs are class folders in `train/` and
`test/` (or `val/`), read at 32x32 pixels. `--classes` is a CSV file of class folders and the class that each belongs
to, without a header.
"""

import argparse
import contextlib
import csv
import io
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import record
from numpy.typing import NDArray
from PIL import Image

import paceline
from paceline.core.dataset import ArraySource, Source
from paceline.core.statistics import Interval, mean_interval, resampled_interval, wilson_interval
from paceline.data.sources.build import build_datasets
from paceline.recipe.schema.source import FashionMnist, Folder

FOLDS = 5
SETTINGS = (
    *("model.width=0.125", "data.batch_size=50", "optim.lr=0.05", "parallel.threads=1", "data.workers=0"),
    *("checkpoint.every=off", "log.tensorboard=off", "log.report=off", "log.worst=0"),
    *("measure.telemetry=off", "measure.clock=off"),
)
DATA: dict[str, tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.uint8], NDArray[np.int64], list[str]]] = {}
"""Training images and labels in a random order, test images and labels, and class names, by dataset."""


def main() -> None:
    """Cross-validate and test on subsets of each dataset, and write how often the intervals contain the truth."""
    args = parse_args()
    found = {}
    for name, read in (("fashion", read_fashion), ("photographs", read_photographs)):
        root = getattr(args, name)
        if root is not None:
            DATA[name] = read(root, 2 * args.subsets * args.images, args.test)
            found[name] = measure(name, args)
    if args.repeated is not None:
        DATA["repeated"] = read_classes(args.repeated, args.classes)
        found["repeated"] = measure_repeated(args)
    record.write(
        args.json,
        {
            **record.provenance(),
            "subsets": args.subsets,
            "images": args.images,
            "folds": FOLDS,
            "epochs": args.epochs,
            "settings": list(SETTINGS),
            **found,
        },
    )


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return coverage and width of each interval over the subsets of a dataset."""
    started_s = time.monotonic()
    whole, part = args.images, args.images * (FOLDS - 1) // FOLDS
    truths, rows = [], []
    for number in range(args.subsets):
        truths.append(accuracy(name, args.epochs, number, 2 * number * whole, part)[0])
        rows.append([
            accuracy(name, args.epochs, FOLDS * number + fold, (2 * number + 1) * whole, whole, fold)
            for fold in range(FOLDS)
        ])  # fmt: skip
        print(f"{name}: subset {number + 1} of {args.subsets}, {time.monotonic() - started_s:.0f} s", flush=True)
    truth = mean_interval(truths)
    intervals = build_intervals(rows, whole)
    print(f"{name}: truth {truth.value:.4f} ({truth.low:.4f} to {truth.high:.4f})")
    return {
        "seconds": round(time.monotonic() - started_s, 1),
        "truth": truth.model_dump(),
        "mean_of_estimates": mean_interval([each.value for each in intervals["student"]]).model_dump(),
        **{kind: summarize(kind, each, truth.value) for kind, each in intervals.items()},
    }


def measure_repeated(args: argparse.Namespace) -> dict[str, Any]:
    """Return coverage and width of the intervals over divisions of one dataset."""
    started_s, number = time.monotonic(), len(DATA["repeated"][0])
    rows = []
    for repeat in range(args.repeats):
        rows.append([
            accuracy("repeated", args.epochs, FOLDS * repeat + fold, 0, number, fold, repeat) for fold in range(FOLDS)
        ])  # fmt: skip
        print(f"repeated: {repeat + 1} of {args.repeats}, {time.monotonic() - started_s:.0f} s", flush=True)
    truth = mean_interval([float(np.mean([each for each, _ in row])) for row in rows])
    print(f"repeated: truth {truth.value:.4f} ({truth.low:.4f} to {truth.high:.4f})")
    return {
        "seconds": round(time.monotonic() - started_s, 1),
        "images": number,
        "truth": truth.model_dump(),
        **{kind: summarize(kind, each, truth.value) for kind, each in build_intervals(rows, number).items()},
    }


def build_intervals(rows: list[list[tuple[float, int]]], number: int) -> dict[str, list[Interval]]:
    """Return the intervals of each kind for the accuracies and hits of the folds of each cross-validation."""
    return {
        "corrected": [resampled_interval([each for each, _ in row], 1 / (FOLDS - 1)) for row in rows],
        "student": [mean_interval([each for each, _ in row]) for row in rows],
        "wilson": [wilson_interval(sum(right for _, right in row), number) for row in rows],
    }


def summarize(kind: str, intervals: Sequence[Interval], truth: float) -> dict[str, Any]:
    """Return the share of the intervals that contain the truth, with Wilson's interval, and their mean width."""
    covers = sum(each.low <= truth <= each.high for each in intervals)
    share = wilson_interval(covers, len(intervals))
    width = float(np.mean([each.high - each.low for each in intervals]))
    print(f"  {kind}: covers {covers} of {len(intervals)}, mean width {width:.4f}")
    return {"coverage": share.model_dump(), "width": round(width, 5)}


def accuracy(
    name: str, epochs: int, seed: int, first: int, number: int, fold: int | None = None, repeat: int = 0
) -> tuple[float, int]:
    """Return the accuracy of a model that is trained on a subset, or on all folds of it but `fold`, and its hits."""
    subset_args = f"data.source.args={{dataset: {name}, first: {first}, number: {number}}}"
    split = (
        () if fold is None else (f"data.split.folds={FOLDS}", f"data.split.fold={fold}", f"data.split.repeat={repeat}")
    )
    words = (*SETTINGS, f"train.epochs={epochs}", f"train.eval_every={epochs}ep", f"seed={seed}", subset_args, *split)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        result = paceline.train("digits", *words, source=subset, run_dir=Path(folder) / "run")
    assert result.eval is not None
    return result.eval.top1, round(result.eval.top1 * result.eval.images)


def subset(split: str, dataset: str, first: int, number: int) -> tuple[NDArray[np.uint8], NDArray[np.int64], list[str]]:
    """Return a subset of the training images of a dataset, or its test images."""
    images, labels, test_images, test_labels, names = DATA[dataset]
    rows = slice(first, first + number)
    return (images[rows], labels[rows], names) if split == "train" else (test_images, test_labels, names)


def read_fashion(root: Path, num_train: int, num_test: int) -> Any:
    """Return the images of Fashion-MNIST in a random order."""
    both = build_datasets(FashionMnist(root=str(root), download=False), may_download=False)
    parts: list[Any] = []
    for source, number in ((both.train, num_train), (both.val, num_test)):
        assert isinstance(source, ArraySource)
        rows = np.random.default_rng(0).permutation(len(source))[:number]
        parts += [np.asarray(source.images[rows]), source.labels[rows]]
    assert len(parts[0]) == num_train, f"{num_train} images are needed (lower --subsets)"
    return (*parts, list(both.train.info.class_names))


def read_photographs(root: Path, num_train: int, num_test: int) -> Any:
    """Return the images of a folder in a random order, at 32x32 pixels."""
    both = build_datasets(Folder(root=str(root)), may_download=False)
    parts: list[Any] = []
    for source, number in ((both.train, num_train), (both.val, num_test)):
        rows = np.random.default_rng(0).permutation(len(source))[:number].tolist()
        assert len(rows) == number, f"{number} images are needed (lower --subsets or --test)"
        parts += read_resized(source, rows)
    return (*parts, list(both.train.info.class_names))


def read_classes(root: Path, classes: Path) -> Any:
    """Return all images of a folder at 32x32 pixels, in the classes of a CSV file; the first ones are also the test."""
    with classes.open() as file:
        class_of_folder = dict(csv.reader(file))
    both = build_datasets(Folder(root=str(root)), may_download=False)
    names = sorted(set(class_of_folder.values()))
    numbers = np.array([names.index(class_of_folder[name]) for name in both.train.info.class_names])
    parts = [read_resized(source, range(len(source))) for source in (both.train, both.val) if len(source)]
    images, labels = (np.concatenate([part[i] for part in parts]) for i in range(2))
    return (images, numbers[labels], images[:10], numbers[labels[:10]], names)


def read_resized(source: Source, rows: Sequence[int]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return images at 32x32 pixels, and their labels."""
    read = [source.read(index) for index in rows]
    opened = (Image.open(io.BytesIO(content)) for content, _ in read if isinstance(content, bytes))
    images = np.stack([np.asarray(image.convert("RGB").resize((32, 32))) for image in opened])
    return images, np.array([label for _, label in read], dtype=np.int64)


def parse_args() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--fashion", type=Path, help="folder of Fashion-MNIST")
    parser.add_argument("--photographs", type=Path, help="folder with train/ and test/ class folders, such as CIFAR-10")
    parser.add_argument("--repeated", type=Path, help="folder with train/ class folders, such as 500 photographs")
    parser.add_argument("--classes", type=Path, help="CSV file of class folders and classes for --repeated")
    parser.add_argument("--repeats", type=int, default=40, help="divisions of --repeated")
    parser.add_argument("--subsets", type=int, default=40, help="subsets to cross-validate, and as many to test on")
    parser.add_argument("--images", type=int, default=500, help="images per subset")
    parser.add_argument("--test", type=int, default=2000, help="test images")
    parser.add_argument("--epochs", type=int, default=8, help="epochs of a run")
    parser.add_argument("--json", type=Path, required=True, help="file to write")
    return parser.parse_args()


if __name__ == "__main__":
    main()
