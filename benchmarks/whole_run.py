"""How long does a whole training run take, from the command to its end, against the scripts that others train with?

    python benchmarks/whole_run.py --data FOLDER --timm-script timm/train.py \
        --torchvision-script vision/references/classification/train.py --rounds 5 \
        --json benchmarks/results/whole-run-cpu.json

FOLDER has JPEGs at any depth. `--timm-script` is `train.py` of github.com/huggingface/pytorch-image-models, and
`--torchvision-script` that of github.com/pytorch/vision, each in a checkout of its repository: the wheels have neither.
A script that is not named is left out. The third is `peers/lightning_train.py`.

All train the same model, on links to the same files, with the same batch, image size, number of workers, threads and
cores, in float32: random-resized crops and flips, SGD and a cosine schedule, and an evaluation after each epoch.
Everything else is each program's default. The number of training images divides by the batch, as some drop the rest.

Each round runs every program for one epoch and for two, forwards and then backwards; the difference is the second
epoch, and `first` is start-up, one epoch and the end. Every run has a new home folder, so that no index of JPEG files
is left from an earlier one, but for `paceline again`, which keeps it. `cpu_s` are those of the program with all its
processes, which a busy machine disturbs least. Files are in the page cache. Speed is measured, not checked: the exit
status is 0.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import record
from PIL import Image

BENCHMARKS = Path(__file__).parent
SUFFIXES = (".jpg", ".jpeg")
LR = 0.05


@dataclass(frozen=True)
class Program:
    """A program that trains: its name, its command line for a number of epochs and a folder, and its environment."""

    name: str
    command: Callable[[int, Path], list[str]]
    keeps_home: bool = False


def programs(args: argparse.Namespace, data: Path) -> list[Program]:
    """Return the programs that are compared."""
    python = sys.executable

    def paceline(epochs: int, out: Path) -> list[str]:
        return [
            *(python, "-m", "paceline", "train", "folder", "--run-dir", str(out / "run")),
            *(f"data.source.train_root={data / 'train'}", f"data.source.val_root={data / 'val'}"),
            *(f"data.batch_size={args.batch}", f"data.eval_batch_size={args.batch}", f"data.image_size={args.size}"),
            *(f"data.workers={args.workers}", f"parallel.threads={args.threads}", f"parallel.device={args.device}"),
            *(f"model.name=torchvision:{args.model}", f"train.epochs={epochs}", "train.precision=fp32"),
            *(f"optim.lr={LR}", "optim.lr_scaling=none", "optim.base_batch_size=auto", "schedule.warmup=0ep"),
            "train.label_smoothing=0",
        ]

    def timm(epochs: int, out: Path) -> list[str]:
        return [
            *(python, str(args.timm_script), "--data-dir", str(data), "--train-split", "train", "--val-split", "val"),
            *("--model", args.model, "--num-classes", str(args.classes), "--img-size", str(args.size)),
            *("--crop-pct", "0.875", "--color-jitter", "0", "--batch-size", str(args.batch)),
            *("--workers", str(args.workers), "--epochs", str(epochs), "--warmup-epochs", "0", "--lr", str(LR)),
            *("--device", args.device, "--output", str(out)),
            *(() if args.device == "cuda" else ("--no-prefetcher",)),  # its prefetcher needs CUDA
        ]

    def torchvision(epochs: int, out: Path) -> list[str]:
        return [
            *(python, str(args.torchvision_script), "--data-path", str(data), "--output-dir", str(out)),
            *("--model", args.model, "--device", args.device, "--batch-size", str(args.batch)),
            *("--workers", str(args.workers), "--epochs", str(epochs), "--lr", str(LR)),
            *("--lr-scheduler", "cosineannealinglr", "--train-crop-size", str(args.size)),
            *("--val-resize-size", str(round(args.size / 0.875)), "--val-crop-size", str(args.size)),
        ]

    def lightning(epochs: int, out: Path) -> list[str]:
        return [
            *(python, str(BENCHMARKS / "peers" / "lightning_train.py"), "--data", str(data), "--out", str(out)),
            *("--model", args.model, "--device", args.device, "--size", str(args.size), "--batch", str(args.batch)),
            *("--workers", str(args.workers), "--epochs", str(epochs), "--lr", str(LR)),
        ]

    found = [Program("paceline", paceline), Program("paceline again", paceline, keeps_home=True)]
    found += [Program("timm", timm)] if args.timm_script else []
    found += [Program("torchvision", torchvision)] if args.torchvision_script else []
    found += [Program("lightning", lightning)]
    return [program for program in found if not args.only or program.name in args.only]


def main() -> None:
    """Measure, print, and write the result."""
    args = parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        num_train, num_val = arrange(args, folder / "data")
        compared = programs(args, folder / "data")
        if args.check:
            for program in compared:  # writes byte code, reads the files, and shows that the program works
                run(program, 1, args, folder)
        runs: dict[str, list[dict[str, Any]]] = {program.name: [] for program in compared}
        for number in range(args.rounds):
            for program in compared[:: -1 if number % 2 else 1]:
                one, two = (run(program, epochs, args, folder) for epochs in (1, 2))
                runs[program.name].append({"one": one, "two": two})
                seconds = f"{one['wall_s']:.1f} s for an epoch, {two['wall_s']:.1f} s for two"
                print(f"round {number + 1}: {program.name}: {seconds}", file=sys.stderr, flush=True)
    names = ("model", "size", "batch", "classes", "copies", "workers", "threads", "device")
    result = {
        "benchmark": "whole_run",
        **record.provenance(),
        "cores": sorted(os.sched_getaffinity(0)) if args.cores is None else args.cores,
        "config": {**{name: getattr(args, name) for name in names}, "train_images": num_train, "val_images": num_val},
        "versions": {name: version(name) for name in ("torch", "torchvision", "timm", "lightning")},
        "commits": {name: commit_of(script) for name, script in scripts(args).items()},
        "programs": {name: summary(each) for name, each in runs.items()},
        "runs": runs,
    }
    print(table(result))
    if args.json:
        record.write(args.json, result)


def parse_args() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of JPEGs, at any depth")
    parser.add_argument("--timm-script", type=Path, metavar="PATH", help="train.py of a checkout of timm")
    parser.add_argument("--torchvision-script", type=Path, metavar="PATH", help="references/classification/train.py")
    parser.add_argument("--only", action="append", help="a program, such as 'paceline again' (default: all)")
    parser.add_argument("--model", default="resnet18", help="a name that torchvision and timm share")
    parser.add_argument("--size", type=int, default=128, help="height and width of images in pixels")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--classes", type=int, default=10, help="class folders that the files are dealt to")
    parser.add_argument("--copies", type=int, default=1, help="links to each training file")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2, help="threads of the model")
    parser.add_argument("--cores", type=int, nargs="+", help="CPU cores that the programs may use (default: all)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--no-check", dest="check", action="store_false", help="leave out a first round that is not timed"
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="where to write the result")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error("--rounds: at least 1")
    for name, script in scripts(args).items():
        if not script.is_file():
            parser.error(f"--{name}-script: {script} is no file")
    return args


def scripts(args: argparse.Namespace) -> dict[str, Path]:
    """Return the named scripts of others."""
    named = {"timm": args.timm_script, "torchvision": args.torchvision_script}
    return {name: script for name, script in named.items() if script}


def arrange(args: argparse.Namespace, root: Path) -> tuple[int, int]:
    """Link the files into class folders below `root/train` and `root/val`; return the images of both.

    Every fifth file is for validation. Classes are by brightness, so that there is something to learn: paceline looks
    into runs that learn nothing, which takes time.
    """
    files = sorted(path for path in args.data.resolve().rglob("*") if path.suffix.lower() in SUFFIXES)
    darkest_first = sorted(files, key=brightness)
    labels = {path: number * args.classes // len(files) for number, path in enumerate(darkest_first)}
    val = files[::5]
    train = [path for number, path in enumerate(files) if number % 5] * args.copies
    train = train[: len(train) // args.batch * args.batch]
    if min(len(train), len(val)) < args.classes:
        sys.exit(f"--data: {args.data} has {len(files)} JPEGs, too few for {args.classes} classes (lower --classes)")
    for split, paths in (("train", train), ("val", val)):
        for number, path in enumerate(paths):
            link = root / split / f"{labels[path]:04}" / f"{number:07}.jpg"
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path)
    return len(train), len(val)


def brightness(path: Path) -> float:
    """Return the mean of an image's gray values."""
    with Image.open(path) as image:
        image.draft("L", (64, 64))
        return float(np.asarray(image.convert("L")).mean())


def run(program: Program, epochs: int, args: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Return the seconds and CPU seconds of a run of `epochs`."""
    with tempfile.TemporaryDirectory(dir=folder) as out, (folder / "output.txt").open("w+") as output:
        home = folder / "home" if program.keeps_home else Path(out) / "home"
        home.mkdir(exist_ok=True)
        threads = {name: str(args.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        environ = {**os.environ, **threads, "HOME": str(home), "XDG_CACHE_HOME": str(home / ".cache")}
        command = program.command(epochs, Path(out))
        pin = [] if args.cores is None else ["taskset", "--cpu-list", ",".join(map(str, args.cores))]
        began_s = time.perf_counter()
        process = subprocess.Popen(
            [*pin, *command], env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        _, status, usage = os.wait4(process.pid, 0)  # its children too, as long as it waits for them
        wall_s = time.perf_counter() - began_s
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            output.seek(0)
            sys.exit(f"{' '.join(command)} ended with {process.returncode}:\n{output.read()[-3000:]}")
    return {"wall_s": round(wall_s, 3), "cpu_s": round(usage.ru_utime + usage.ru_stime, 3)}


def summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return medians and spreads: of the first epoch with start-up and end, and of the second by difference."""
    found = {}
    for unit in ("wall_s", "cpu_s"):
        first = [each["one"][unit] for each in runs]
        second = [each["two"][unit] - each["one"][unit] for each in runs]
        found[unit] = {"first": spread(first), "second": spread(second)}
    return found


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Return the median, the lowest and the highest of some values, and how many there are."""
    low, median, high = (round(float(value), 3) for value in (min(values), np.median(values), max(values)))
    return {"median": median, "low": low, "high": high, "n": len(values)}


def commit_of(script: Path) -> str:
    """Return the commit of the checkout that has `script`, or "" if it is none."""
    done = subprocess.run(
        ["git", "-C", str(script.parent), "log", "-1", "--format=%H", "--", script.name],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.stdout.strip()


def table(result: dict[str, Any]) -> str:
    """Return the result as a person reads it."""
    config = result["config"]
    lines = [
        f"{config['model']}, {config['train_images']:,} training and {config['val_images']:,} validation images at "
        f"{config['size']} px, batch {config['batch']}, {config['workers']} workers, {config['threads']} threads, "
        f"{len(result['cores'])} cores",
        f"{'':16}{'start-up and first epoch':>28}{'second epoch':>28}{'CPU of both':>14}",
    ]
    for name, row in sorted(result["programs"].items(), key=lambda item: item[1]["wall_s"]["second"]["median"]):
        wall, cpu = row["wall_s"], row["cpu_s"]
        both = cpu["first"]["median"] + cpu["second"]["median"]
        lines.append(f"{name:16}{_text(wall['first']):>28}{_text(wall['second']):>28}{both:>12.1f} s")
    return "\n".join(lines)


def _text(seconds: dict[str, Any]) -> str:
    return f"{seconds['median']:.1f} s ({seconds['low']:.1f} to {seconds['high']:.1f})"


if __name__ == "__main__":
    main()
