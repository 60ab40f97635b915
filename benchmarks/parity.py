"""Does a recipe become as accurate from a pack as from the folder of JPEGs that the pack was made of?

    python benchmarks/parity.py --cifar10 DIR --photographs DIR --json benchmarks/results/parity-cpu.json

Two small tasks, each trained by `paceline train` in a fresh process with the same arguments except for the source and
the loader, once per seed, in turns: CIFAR-10 (500 images per class, evaluated on 100), and photographs in which the
model tells animals from other things (400, evaluated on 100). Crops are random, so the native loader decodes only
parts of images.

From the folder and from the pack, `processes` decode the same JPEGs: their weights must be equal to the last bit, and
the exit status is 1 where they are not. Pixels of `native` differ by rounding, which training makes another run of, as
another seed would: compare its accuracy with the standard errors beside it; no test does. Weights
start equal and images come in the same order, so differences are within seeds; `paired_standard_error` is of those,
`standard_error` of two means that have nothing in common.

CIFAR-10 is `train/` and `test/` with class folders of JPEGs. Photographs are JPEGs below folders that are called by
ImageNet's class numbers, 500 or more of them.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import accuracy
import numpy as np
import record

FOLDER: Final = "folder, processes"
PACK: Final = "pack, processes"
NATIVE: Final = "pack, native"
ARGUMENTS: Final = (
    "cifar10-94",
    "--ranks",
    "1",
    "data.eval_views=1",
    "data.workers=1",
    "model.width=0.25",
    "train.precision=bf16",
    "parallel.threads=1",
    "checkpoint.every=off",
    "data.augment=[{name: random_resized_crop, scale: [0.35, 1.0]}, flip]",
)
"""What all runs have in common."""
FIRST_THING: Final = "n0266"
"""Numbers of ImageNet's 1,000 classes are WordNet's (3.0): animals are n01440764 to n02655020, and things begin at
n02666196. https://image-net.org/challenges/LSVRC/2012/browse-synsets.php"""


@dataclass(frozen=True)
class Task:
    """A dataset, how `make(root, out)` makes its folder, and what is trained on it beyond `WORDS`."""

    name: str
    make: Callable[[Path, Path], None]
    arguments: tuple[str, ...]


def main() -> int:
    """Train all, print, and write the result; return 1 where runs that must be one run differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cifar10", type=Path, metavar="DIR", help="CIFAR-10 as class folders of JPEGs")
    parser.add_argument("--photographs", type=Path, metavar="DIR", help="a part of ImageNet")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--equal-seeds", type=int, default=1, metavar="N", help="first seeds to show equal weights at")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="overrides for every run")
    parser.add_argument("--json", type=Path, metavar="OUT", help="where to write the result")
    args = parser.parse_args()
    roots = {name: root for name in ("cifar10", "photographs") if (root := getattr(args, name)) is not None}
    if not roots:
        parser.error("there is nothing to train on (set --cifar10, --photographs or both)")
    facts = record.provenance()
    for root in roots.values():
        facts["command"] = facts["command"].replace(str(root), "DIR")
    facts["command"] = accuracy.without_folders(facts["command"])
    tasks = {name: on_task(TASKS[name], root, args) for name, root in roots.items()}
    if args.json:
        record.write(args.json, {"benchmark": "parity", **facts, "words": [*ARGUMENTS, *args.set], **tasks})
    return int(not all(found["weights_equal"] for found in tasks.values()))


def on_task(task: Task, root: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Make the folder and the pack, train on both, and return what came out."""
    with tempfile.TemporaryDirectory(prefix="paceline-parity-") as made:
        folder = Path(made, task.name)
        task.make(root, folder)
        packed = json.loads(paceline("data", "pack", str(folder), f"{folder}.pack", "--json"))
        runs: dict[str, dict[int, dict[str, Any]]] = {FOLDER: {}, PACK: {}, NATIVE: {}}
        for contender, seed in turns(args.seeds, args.equal_seeds):
            arguments = [*ARGUMENTS, *task.arguments, *args.set, *source_arguments(contender, folder), f"seed={seed}"]
            runs[contender][seed] = run = accuracy.trained(arguments)
            print(f"{task.name}, {contender}, seed {seed}: {accuracy.summary(run)}", flush=True)
    facts = {"words": list(task.arguments), "images": packed["images"], "kept": packed["kept"], **summary(runs)}
    print(f"{task.name}: {json.dumps(facts['difference'])}, weights equal: {facts['weights_equal']}", flush=True)
    return facts


def turns(seeds: Sequence[int], equal_seeds: int) -> Iterable[tuple[str, int]]:
    """Yield who trains with which seed: round by round, forwards and then backwards."""
    for number, seed in enumerate(seeds):
        contenders = (FOLDER, PACK, NATIVE) if number < equal_seeds else (FOLDER, NATIVE)
        for contender in contenders if number % 2 == 0 else contenders[::-1]:
            yield contender, seed


def source_arguments(contender: str, folder: Path) -> list[str]:
    """Return what tells a contender from the others: where images are, and who makes batches of them."""
    source, _, loader = contender.partition(", ")
    root = folder if source == "folder" else f"{folder}.pack"
    return [f"data.source.name={source}", f"data.source.root={root}", f"data.loader={loader}"]


def summary(runs: dict[str, dict[int, dict[str, Any]]]) -> dict[str, Any]:
    """Return each contender's outcomes, seed by seed, and how far `native` is from the folder.

    `runs` are contender -> seed -> what `accuracy.trained` returns. `weights_equal` is of the folder and the pack under
    `processes`, at the seeds that both have been trained with: false where there is none.
    """
    found: dict[str, dict[str, Any]] = {}
    for contender, of_seeds in runs.items():
        measured = [run["judged"] for run in of_seeds.values()]
        found[contender] = {
            "loader": sorted({run["result"]["loader"]["loader"] for run in of_seeds.values()}),
            "top1": [each["top1"] for each in measured],
            "loss": [each["loss"] for each in measured],
            "weights_sha256": [run["result"]["weights_sha256"] for run in of_seeds.values()],
        }
        if measured:
            found[contender]["top1_over_seeds"] = accuracy.over_seeds(found[contender]["top1"])
            found[contender]["loss_over_seeds"] = accuracy.over_seeds(found[contender]["loss"])
    folder, native = found[FOLDER], found[NATIVE]
    both = [seed for seed in runs[PACK] if seed in runs[FOLDER]]
    equal = [weights(runs[PACK][seed]) == weights(runs[FOLDER][seed]) for seed in both]
    return {
        "difference": {name: difference(folder[name], native[name]) for name in ("top1", "loss")},
        "weights_equal": bool(equal) and all(equal),
        "contenders": found,
    }


def weights(run: dict[str, Any]) -> str:
    """Return the hash of what was trained."""
    digest: str = run["result"]["weights_sha256"]
    return digest


def difference(theirs: Sequence[float], ours: Sequence[float]) -> dict[str, Any]:
    """Return the mean of `ours` less that of `theirs`, seed by seed the same, with its standard errors.

    `standard_error` is that of two independent means, sqrt(sd1^2 / n + sd2^2 / n) (Welch 1947, Biometrika 34, 28-35),
    `paired_standard_error` that of the differences' mean; None with one seed.
    """
    between = np.subtract(ours, theirs)
    found: dict[str, Any] = {"mean": float(np.mean(between)), "n": len(between)}
    if len(between) < 2:
        return {**found, "standard_error": None, "paired_standard_error": None}
    variances = [float(np.var(each, ddof=1)) for each in (theirs, ours)]
    return {
        **found,
        "standard_error": math.sqrt(sum(variances) / len(between)),
        "paired_standard_error": float(np.std(between, ddof=1)) / math.sqrt(len(between)),
    }


def link_cifar10(root: Path, out: Path, num_train: int = 500, num_val: int = 100) -> None:
    """Make `train/` and `val/` below `out`, of links to the first images of each class."""
    for split, theirs, num_images in (("train", "train", num_train), ("val", "test", num_val)):
        for folder in sorted((root / theirs).iterdir()):
            files = sorted(folder.iterdir())[:num_images]
            if len(files) < num_images:
                raise SystemExit(f"error: {folder}: has {len(files)} images (give a folder with {num_images} or more)")
            link(files, out / split / folder.name)


def link_photographs(root: Path, out: Path, num_images: int = 500) -> None:
    """Make `train/` and `val/` below `out`, of links to photographs of animals and of other things.

    Photographs are taken evenly from all that there are below `root`, and every fifth is for validation, so that both
    splits have the same shares of ImageNet's classes.
    """
    every = sorted(path for path in root.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))
    if len(every) < num_images:
        raise SystemExit(f"error: {root}: has {len(every)} photographs (give a folder with {num_images} or more)")
    chosen = [every[number * len(every) // num_images] for number in range(num_images)]
    for number, path in enumerate(chosen):
        split = "val" if number % 5 == 4 else "train"
        link([path], out / split / ("animal" if path.parent.name < FIRST_THING else "other"))


def link(files: Iterable[Path], folder: Path) -> None:
    """Put links to `files` into `folder`, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        (folder / file.name).symlink_to(file.resolve())


def paceline(*arguments: str) -> str:
    """Run paceline, and return what it printed."""
    return subprocess.run(
        [sys.executable, "-m", "paceline", *arguments], stdout=subprocess.PIPE, text=True, check=True
    ).stdout


TASKS: Final = {
    "cifar10": Task(
        "cifar10",
        link_cifar10,
        ("data.image_size=32", "data.batch_size=250", "optim.lr=0.08", "optim.sgd_lr=20", "train.epochs=4"),
    ),
    "photographs": Task(
        "photographs",
        link_photographs,
        ("data.image_size=64", "data.batch_size=50", "optim.lr=0.04", "optim.sgd_lr=5", "train.epochs=12"),
    ),
}


if __name__ == "__main__":
    sys.exit(main())
