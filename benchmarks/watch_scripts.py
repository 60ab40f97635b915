"""Does `paceline watch` hold on scripts that others wrote: bits, attributed time, and overhead?

    python benchmarks/watch_scripts.py --data FOLDER --timm-script timm/train.py \
        --torchvision-script vision/references/classification/train.py --imagenet-script imagenet/main.py \
        --accelerate-script cv_example.py --rounds 5 --json benchmarks/results/watch-scripts-cpu.json

FOLDER has JPEGs at any depth. The scripts are `train.py` of github.com/huggingface/pytorch-image-models,
`references/classification/train.py` of github.com/pytorch/vision, `imagenet/main.py` of github.com/pytorch/examples and
`examples/cv_example.py` of github.com/huggingface/accelerate, unchanged; one that is not named is left out. Scripts in
`peers/` run the Trainers of Transformers and Lightning. All train on a CPU, on one rank and on two.

A round runs a script without observation and with, in alternating order, from the same seed. `watch_shim/` is loaded
into both: it seeds, notes when optimizer steps end, and takes digests of all losses and of the last weights. It also
lets scripts that expect a GPU per rank use gloo and CPUs, and gives Accelerate's example a small model without
weights to download. PyTorch's ImageNet script does not use DDP on CPUs, so its two ranks train apart.

`attributed` is the share of the measured steps of rank 0 in stages other than `other`. `overhead` compares the same
steps with and without observation, by the clock, and `cpu_overhead` by the CPU time of the process, its threads but not
its loader workers, which other programs disturb less. The exit status is 1 if bits differ or less than 98 % of the time
is attributed. Overhead is measured, not checked.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from itertools import compress, pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final

import record
from PIL import Image

from paceline.core.watch_result import WatchResult, read_watch_result

BENCHMARKS: Final = Path(__file__).parent
SHIM: Final = BENCHMARKS / "watch_shim"
WARMUP: Final = 10
"""Steps of each run that are not measured, as `paceline watch` leaves them out."""
LEAST_ATTRIBUTED: Final = 0.98
LIMIT_S: Final = 900
FLAT_COPIES: Final = 2
SUFFIXES: Final = (".jpg", ".jpeg")


@dataclass(frozen=True)
class Size:
    """How much a script trains: pixels, images of a batch, epochs and loader workers per rank."""

    pixels: int
    batch: int
    epochs: int
    workers: int


@dataclass(frozen=True)
class Script:
    """A training script: its arguments after `python`, for the data, an output folder and a size."""

    name: str
    arguments: Callable[[Path, Path, Size], list[str]]
    environ: Mapping[str, str] = field(default_factory=dict)
    several: Sequence[str] = ()
    """Arguments for two ranks."""


def scripts(paths: Mapping[str, Path | None]) -> list[Script]:
    """Return the scripts whose files are named, and those of `peers/`; the plain one if it is named."""

    def timm(data: Path, out: Path, size: Size) -> list[str]:
        return [
            *(str(paths["timm"]), "--data-dir", str(data), "--train-split", "train", "--val-split", "val"),
            *("--model", "resnet18", "--num-classes", "10", "--img-size", str(size.pixels), "--device", "cpu"),
            *("--batch-size", str(size.batch), "--workers", str(size.workers), "--epochs", str(size.epochs)),
            *("--warmup-epochs", "0", "--sched-on-updates", "--lr", "0.05", "--output", str(out)),
        ]

    def torchvision(data: Path, out: Path, size: Size) -> list[str]:
        return [
            *(str(paths["torchvision"]), "--data-path", str(data), "--output-dir", str(out), "--device", "cpu"),
            *("--model", "resnet18", "--batch-size", str(size.batch), "--workers", str(size.workers)),
            *("--epochs", str(size.epochs), "--lr", "0.05", "--train-crop-size", str(size.pixels)),
            *("--val-resize-size", str(size.pixels), "--val-crop-size", str(size.pixels)),
        ]

    def imagenet(data: Path, out: Path, size: Size) -> list[str]:
        return [
            *(str(paths["imagenet"]), str(data), "--arch", "mobilenet_v3_small", "--no-accel", "--seed", "0"),
            *("--batch-size", str(size.batch), "--workers", str(size.workers), "--epochs", str(size.epochs)),
            *("--lr", "0.05"),
        ]

    def accelerate(data: Path, out: Path, size: Size) -> list[str]:
        return [str(paths["accelerate"]), "--data_dir", str(data / "flat"), "--cpu"]

    def peer(name: str, *more: str) -> Callable[[Path, Path, Size], list[str]]:
        def arguments(data: Path, out: Path, size: Size) -> list[str]:
            return [
                *(str(BENCHMARKS / "peers" / name), "--data", str(data), "--out", str(out)),
                *("--size", str(size.pixels), "--batch", str(size.batch), "--workers", str(size.workers)),
                *("--epochs", str(size.epochs), *more),
            ]

        return arguments

    found = [
        Script("timm", timm),
        Script("torchvision", torchvision),
        Script("imagenet", imagenet, several=("--dist-url", "env://", "--dist-backend", "gloo")),
        Script("accelerate", accelerate, environ={"SHIM_MODEL": "test_resnet"}),
    ]
    return [
        *(each for each in found if paths.get(each.name)),
        Script("transformers", peer("transformers_train.py")),
        Script("lightning", peer("lightning_train.py", "--model", "resnet18"), several=("--devices", "2")),
        *([Script("plain", peer("plain_train.py"))] if "plain" in paths else []),
    ]


def command(script: Script, data: Path, out: Path, size: Size, ranks: int) -> list[str]:
    """Return the command that runs a script on some ranks."""
    arguments = [*script.arguments(data, out, size), *(script.several if ranks > 1 else ())]
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    return [sys.executable, *(torchrun if ranks > 1 else ()), *arguments]


def watched(words: Sequence[str], folder: Path, *options: str) -> list[str]:
    """Return the command that watches another."""
    return [sys.executable, "-m", "paceline", "watch", "--run-dir", str(folder), *options, "--", *words]


def run(words: Sequence[str], folder: Path, environ: Mapping[str, str]) -> str:
    """Run a command in an empty folder and return its output. Raise `SystemExit` if it fails."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [str(SHIM), os.environ.get("PYTHONPATH", ""), environ.get("PYTHONPATH", "")]
    fixed = {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONHASHSEED": "0",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HOME": str(folder),
    }
    done = subprocess.run(
        words,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environ, **fixed},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
    )
    if done.returncode:
        raise SystemExit(f"error: {' '.join(words)} ended with {done.returncode}:\n{done.stdout[-3000:]}")
    return done.stdout


def arrange(photographs: Path, root: Path, pixels: int, copies: int, classes: int = 10) -> None:
    """Write smaller copies of photographs to class folders in `train` and `val`, and two links to each to `flat`.

    Each training photograph is there `copies` times.
    """
    files = sorted(path for path in photographs.resolve().rglob("*") if path.suffix.lower() in SUFFIXES)
    if len(files) < 10 * classes:
        raise SystemExit(f"error: --data: {photographs} has {len(files)} JPEGs (name a folder with {10 * classes})")
    root = root.resolve()  # for links
    (root / "flat").mkdir(parents=True)
    for number, path in enumerate(files):
        split, label = "train" if number % 5 else "val", f"class{number % classes}"
        place = root / split / label / f"{label}_{number}.jpg"
        place.parent.mkdir(parents=True, exist_ok=True)
        with Image.open(path) as image:
            image.draft("RGB", (pixels, pixels))
            small = image.convert("RGB")
            small.thumbnail((2 * pixels, 2 * pixels))
            small.save(place, quality=90)
        names = [f"{label}_{number + copy * len(files)}.jpg" for copy in range(max(copies, FLAT_COPIES))]
        for name in names[:FLAT_COPIES]:
            (root / "flat" / name).symlink_to(place)
        for name in names[1:copies] if split == "train" else ():
            (place.parent / name).symlink_to(place)


def compare(script: Script, ranks: int, data: Path, folder: Path, rounds: int, size: Size) -> dict[str, Any]:
    """Run a script without and with observation `rounds` times each, and return what came of it."""
    overheads, cpu_overheads, plain_s, results, are_equal = [], [], [], [], True
    for number in range(rounds):
        runs: dict[str, list[dict[str, Any]]] = {}
        for kind in ("plain", "watched")[:: -1 if number % 2 else 1]:
            place = folder / f"{script.name}-{ranks}-{number}-{kind}"
            environ = {"SHIM_OUT": str(place), "SHIM_CPU": "1", **script.environ}
            words = command(script, data, place / "out", size, ranks)
            watch = place / "watch"
            run(words if kind == "plain" else watched(words, watch), place, environ)
            runs[kind] = [json.loads(Path(f"{place}-{rank}.json").read_text()) for rank in range(ranks)]
            if kind == "watched":
                results.append(read_watch_result(watch))
        sides = [[(each["losses"], each["weights"]) for each in runs[kind]] for kind in ("plain", "watched")]
        are_equal = are_equal and sides[0] == sides[1]
        step_s, overhead, cpu_overhead = overheads_of(*(runs[kind][0] for kind in ("plain", "watched")))
        plain_s.append(step_s)
        overheads.append(overhead)
        cpu_overheads.append(cpu_overhead)
    shares = [result.attributed for result in results]
    print(
        f"{script.name:12} {ranks} ranks: {1e3 * median(plain_s):6.1f} ms, attributed {100 * min(shares):.2f} %, "
        f"bits {'equal' if are_equal else 'DIFFER'}, overhead {100 * median(overheads):+.2f} %, "
        f"of CPU time {100 * median(cpu_overheads):+.2f} %, {results[0].verdict['bottleneck']}",
        flush=True,
    )
    return {
        "script": script.name,
        "ranks": ranks,
        "size": vars(size),
        "bits_are_equal": are_equal,
        "attributed": [round(each, 5) for each in shares],
        "overhead": [round(each, 5) for each in overheads],
        "cpu_overhead": [round(each, 5) for each in cpu_overheads],
        "plain_step_s": [round(each, 5) for each in plain_s],
        "samples_per_s": [each.samples_per_s for each in results],
        "bottlenecks": [each.verdict["bottleneck"] for each in results],
        "stages": stage_shares(results[0]),
    }


def stage_shares(result: WatchResult) -> dict[str, float]:
    """Return the share of each stage of a step."""
    return {name: round(stage.share, 5) for name, stage in result.stages.items()}


def overheads_of(plain: Mapping[str, Any], observed: Mapping[str, Any]) -> tuple[float, float, float]:
    """Return the seconds of a step without observation, and the shares by which clock and CPU time grow with it.

    The same steps are compared. Those with an evaluation or a checkpoint, of more than three medians, are left out on
    both sides.
    """
    sides = [[_differences(side[name])[WARMUP:] for side in (plain, observed)] for name in ("times_s", "cpu_s")]
    pairs = list(zip(*sides[0], strict=True))
    limits = [3 * median(side) for side in sides[0]]
    is_kept = [all(each <= limit for each, limit in zip(pair, limits, strict=True)) for pair in pairs]
    (plain_s, observed_s), (plain_cpu_s, observed_cpu_s) = (
        [sum(compress(side, is_kept)) for side in both] for both in sides
    )
    return plain_s / sum(is_kept), observed_s / plain_s - 1, observed_cpu_s / plain_cpu_s - 1


def _differences(times_s: Sequence[float]) -> list[float]:
    return [after - before for before, after in pairwise(times_s)]


SIZES: Final = {
    "timm": Size(pixels=64, batch=16, epochs=2, workers=1),
    "torchvision": Size(pixels=64, batch=16, epochs=2, workers=1),
    "imagenet": Size(pixels=224, batch=8, epochs=2, workers=1),
    "accelerate": Size(pixels=224, batch=64, epochs=3, workers=4),
    "transformers": Size(pixels=64, batch=16, epochs=2, workers=1),
    "lightning": Size(pixels=64, batch=16, epochs=2, workers=1),
}


def add_script_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that name photographs and scripts."""
    parser.add_argument("--data", type=Path, required=True, help="folder of JPEGs, at any depth")
    for name in ("timm", "torchvision", "imagenet", "accelerate"):
        parser.add_argument(f"--{name}-script", type=Path, metavar="PATH")


def named_scripts(args: argparse.Namespace) -> dict[str, Path | None]:
    """Return the files of the scripts that the command line names."""
    names = ("timm", "torchvision", "imagenet", "accelerate")
    found = {name: getattr(args, f"{name}_script") for name in names}
    return {name: path.resolve() if path else None for name, path in found.items()}


def main() -> int:
    """Run, print and write; return 1 where bits differ or time is not attributed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_script_options(parser)
    parser.add_argument("--only", action="append", help="a script, such as timm (default: all)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--copies", type=int, default=3, help="links to each training photograph (3)")
    parser.add_argument("--epochs", type=int, help="of scripts that take a number (2)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="where to write the result")
    args = parser.parse_args()
    chosen = [each for each in scripts(named_scripts(args)) if not args.only or each.name in args.only]
    with tempfile.TemporaryDirectory(prefix="watch-scripts-") as temporary:
        folder = Path(temporary)
        arrange(args.data, folder / "data", 128, args.copies)
        epochs = {"epochs": args.epochs} if args.epochs else {}
        rows = [
            compare(each, ranks, folder / "data", folder, args.rounds, replace(SIZES[each.name], **epochs))
            for each in chosen
            for ranks in args.ranks
        ]
    if args.json:
        packages = ("torch", "torchvision", "transformers", "lightning", "accelerate", "timm")
        versions = {name: version(name) for name in packages}
        record.write(
            args.json, {"benchmark": "watch_scripts", **record.provenance(), "versions": versions, "rows": rows}
        )
    return int(not all(each["bits_are_equal"] and min(each["attributed"]) >= LEAST_ATTRIBUTED for each in rows))


if __name__ == "__main__":
    sys.exit(main())
