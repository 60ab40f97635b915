"""Does `paceline watch` hold on scripts that others wrote: bits, attributed time, and overhead?

    python benchmarks/watch_scripts.py --data FOLDER --timm-script timm/train.py \
        --torchvision-script vision/references/classification/train.py --imagenet-script imagenet/main.py \
        --accelerate-script cv_example.py --json benchmarks/results/watch-scripts-cpu.json

FOLDER has JPEGs at any depth. The scripts are `train.py` of github.com/huggingface/pytorch-image-models,
`references/classification/train.py` of github.com/pytorch/vision, `imagenet/main.py` of github.com/pytorch/examples and
`examples/cv_example.py` of github.com/huggingface/accelerate, unchanged; one that is not named is left out. Scripts in
`peers/` run the Trainers of Transformers and Lightning. All train on a CPU, on one rank and on two.

Three runs of a script start from the same seed: one without observation, one with, and one of more and shorter steps
(`--epochs`, two images per step where the script takes a number) whose observation is switched on for one step of each
two, the first or the second at random. Two processes that run the same program differ by more than 1 %, and so does a
machine from one second to the next; neighboring steps of one process do not. What observation costs per step depends on
the calls of a step, not on the pixels, so that the shorter steps show it more clearly. `watch_shim/` is loaded into all
three: it seeds, switches, notes when optimizer steps end, and takes digests of all losses and of the last weights. It
also lets scripts that expect a GPU per rank use gloo and CPUs, and gives Accelerate's example a small model without
weights to download. PyTorch's ImageNet script does not use DDP on CPUs, so its two ranks train apart. Two ranks load
their own images, where the script lets them: two cores have no room for workers beside them.

`attributed` is the share of the measured steps of rank 0 in stages other than `other`. `overhead_ms` is by how much
longer an observed step of rank 0 takes than the one beside it, by the clock, and `cpu_overhead_ms` by the CPU time of
the process, its threads but not its loader workers: the mean over all pairs with its 95 % interval, and the median.
`overhead` and `cpu_overhead` are their shares of a step of the script without observation. `pass_on` is the share that
replaced functions take when they only pass a call on, which switched-off steps have too. `watcher_cpu` is the CPU time
of `paceline watch` itself, which reads what the script writes, as a share of one core. The exit status is 1 if bits
differ or less than 98 % of the time is attributed. Overhead is measured, not checked.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from itertools import compress, pairwise, product
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final

import record
from PIL import Image

from paceline.core.statistics import mean_interval
from paceline.core.watch_result import WatchResult, read_watch_result

BENCHMARKS: Final = Path(__file__).parent
SHIM: Final = BENCHMARKS / "watch_shim"
WARMUP: Final = 10
"""Steps of each run that are not measured, as `paceline watch` leaves them out."""
LEAST_ATTRIBUTED: Final = 0.98
LIMIT_S: Final = 1800
POLL_S: Final = 0.2
SHORT_PIXELS: Final = 32
SHORT_BATCH: Final = 2
FLAT_COPIES: Final = 2
SUFFIXES: Final = (".jpg", ".jpeg")
PACKAGES: Final = ("torch", "torchvision", "transformers", "lightning", "accelerate", "timm")


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
    needs_workers: bool = False
    """Whether it ends with an error without loader workers, or has fixed their number."""
    fixed: Sequence[str] = ()
    """Sizes that it has fixed."""
    short: Mapping[str, str] = field(default_factory=dict)
    """Variables of `watch_shim` for shorter steps."""


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
        Script("timm", timm, needs_workers=True),
        Script("torchvision", torchvision),
        Script("imagenet", imagenet, several=("--dist-url", "env://", "--dist-backend", "gloo"), fixed=("pixels",)),
        Script(
            "accelerate",
            accelerate,
            environ={"SHIM_MODEL": "test_resnet"},
            needs_workers=True,
            fixed=("epochs",),
            short={"SHIM_SIZE": f"{SHORT_PIXELS}:{SHORT_BATCH}"},
        ),
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


@dataclass(frozen=True)
class Ran:
    """A command that ended: what it printed, and the CPU time of its own process as a share of one core."""

    output: str
    cpu: float


def run(words: Sequence[str], folder: Path, environ: Mapping[str, str]) -> Ran:
    """Run a command in an empty folder. Raise `SystemExit` if it fails."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [str(SHIM), os.environ.get("PYTHONPATH", ""), environ.get("PYTHONPATH", "")]
    fixed = {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONHASHSEED": "0",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HOME": str(folder),
    }
    environ = {**os.environ, "OMP_NUM_THREADS": "1", **environ, **fixed}
    started_s, cpu_s, printed = time.monotonic(), 0.0, folder / "printed.txt"
    with printed.open("w") as out:
        process = subprocess.Popen(
            words, cwd=folder, env=environ, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT
        )
    try:
        while process.poll() is None and time.monotonic() - started_s < LIMIT_S:
            cpu_s = _read_cpu_s(process.pid) or cpu_s
            time.sleep(POLL_S)
    finally:
        process.kill()  # a command that has ended is left as it is
    output = printed.read_text(errors="replace")
    if process.wait():
        raise SystemExit(f"error: {' '.join(words)} ended with {process.returncode}:\n{output[-3000:]}")
    return Ran(output, cpu_s / (time.monotonic() - started_s))


def _read_cpu_s(pid: int) -> float:
    """Return the seconds of CPU time of a process, without its children; 0 of one that has ended."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def arrange(
    photographs: Path, root: Path, pixels: int, copies: int, classes: int = 10, flat: int = FLAT_COPIES
) -> None:
    """Write smaller copies of photographs to class folders in `train` and `val`, and `flat` links to each to `flat`.

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
        names = [f"{label}_{number + copy * len(files)}.jpg" for copy in range(max(copies, flat))]
        for name in names[:flat]:
            (root / "flat" / name).symlink_to(place)
        for name in names[1:copies] if split == "train" else ():
            (place.parent / name).symlink_to(place)


def compare(script: Script, ranks: int, data: Path, folder: Path, epochs: int) -> dict[str, Any]:
    """Run a script without and with observation, and with observation that is switched; return what came of it."""
    size = SIZES[script.name]
    if ranks > 1 and not script.needs_workers:
        size = replace(size, workers=0)
    shorter = Size(SHORT_PIXELS, SHORT_BATCH, epochs * ranks, size.workers)
    shorter = replace(shorter, **{name: getattr(size, name) for name in script.fixed})
    shims = {"plain": {}, "watched": {}, "switched": {"SHIM_SWITCH": "1", **script.short}}
    ran, found = {}, {}
    for kind, shim in shims.items():
        place = folder / f"{script.name}-{ranks}-{kind}"
        words = command(script, data, place / "out", shorter if kind == "switched" else size, ranks)
        environ = {"SHIM_OUT": str(place), "SHIM_CPU": "1", **script.environ, **shim}
        ran[kind] = run(words if kind == "plain" else watched(words, place / "watch"), place, environ)
        found[kind] = [json.loads(Path(f"{place}-{rank}.json").read_text()) for rank in range(ranks)]
    result = read_watch_result(folder / f"{script.name}-{ranks}-watched" / "watch")
    are_equal = all(
        before[name] == after[name]
        for before, after in zip(found["plain"], found["watched"], strict=True)
        for name in ("losses", "weights")
    )
    switched = found["switched"][0]["switched"]
    pairs = pair_steps(switched)
    step_s = median(after - before for before, after in pairwise(found["plain"][0]["times_s"][WARMUP:]))
    row = {
        "script": script.name,
        "ranks": ranks,
        "size": vars(size),
        "size_switched": vars(shorter),
        "bits_are_equal": are_equal,
        "attributed": round(result.attributed, 5),
        "step_ms": round(1e3 * step_s, 3),
        "switched_step_ms": round(1e3 * fmean(before for before, _ in pairs["times_s"]), 3),
        "overhead_ms": overhead_of(pairs["times_s"], 1e-3),
        "cpu_overhead_ms": overhead_of(pairs["cpu_s"], 1e-3),
        "overhead": overhead_of(pairs["times_s"], step_s),
        "cpu_overhead": overhead_of(pairs["cpu_s"], step_s),
        "pass_on": round(switched["pass_on_s"] / step_s, 6),
        "watcher_cpu": round(ran["watched"].cpu, 5),
        "samples_per_s": result.samples_per_s,
        "bottleneck": result.verdict["bottleneck"],
        "stages": stage_shares(result),
    }
    print(
        f"{script.name:12} {ranks} ranks: attributed {result.attributed:.2%}, "
        f"bits {'equal' if are_equal else 'DIFFER'}, {row['bottleneck']}; overhead in steps of "
        f"{row['switched_step_ms']:.1f} ms: {row['overhead_ms']['mean']:+.3f} ms; of a step of {1e3 * step_s:.1f} ms: "
        f"{_shown(row['overhead'])}, CPU time {_shown(row['cpu_overhead'])}, passing on {row['pass_on']:.3%}; "
        f"watcher {ran['watched'].cpu:.2%} of a core",
        flush=True,
    )
    return row


def _shown(overhead: Mapping[str, float]) -> str:
    return "{mean:+.2%} ({low:+.2%} to {high:+.2%}, median {median:+.2%}, n = {n})".format(**overhead)


def stage_shares(result: WatchResult) -> dict[str, float]:
    """Return the share of each stage of a step."""
    return {name: round(stage.share, 5) for name, stage in result.stages.items()}


def pair_steps(switched: Mapping[str, Any]) -> dict[str, list[tuple[float, float]]]:
    """Return the seconds of neighboring steps, not observed and observed, by clock and of CPU time.

    Pairs with an evaluation or a checkpoint, of more than three medians, are left out, and those of the warm-up.
    """
    pairs = {}
    for name in ("times_s", "cpu_s"):
        steps_s = [0.0, *(after - before for before, after in pairwise(switched[name]))]
        pairs[name] = [
            (second, first) if first_is_on else (first, second)
            for first, second, first_is_on in zip(steps_s[::2], steps_s[1::2], switched["is_on"][::2], strict=False)
        ][WARMUP // 2 :]
    limits = [3 * median(side) for side in zip(*pairs["times_s"], strict=True)]
    is_kept = [all(each <= limit for each, limit in zip(pair, limits, strict=True)) for pair in pairs["times_s"]]
    return {name: list(compress(values, is_kept)) for name, values in pairs.items()}


def overhead_of(pairs: Sequence[tuple[float, float]], unit_s: float) -> dict[str, float]:
    """Return by how many units the second of each pair is larger: their mean, its interval, and the median."""
    units = [(after - before) / unit_s for before, after in pairs]
    interval = mean_interval(units)
    values = {"mean": interval.value, "low": interval.low, "high": interval.high, "median": median(units)}
    return {**{name: round(value, 5) for name, value in values.items()}, "n": len(pairs)}


SIZES: Final = {
    "timm": Size(pixels=64, batch=16, epochs=1, workers=1),
    "torchvision": Size(pixels=64, batch=16, epochs=1, workers=1),
    "imagenet": Size(pixels=224, batch=8, epochs=1, workers=1),
    "accelerate": Size(pixels=224, batch=64, epochs=3, workers=4),
    "transformers": Size(pixels=64, batch=16, epochs=1, workers=1),
    "lightning": Size(pixels=64, batch=16, epochs=1, workers=1),
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
    parser.add_argument("--copies", type=int, default=3, help="links to each training photograph (3)")
    parser.add_argument("--epochs", type=int, default=3, help="of switched runs, times the ranks (3)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="where to write the result")
    args = parser.parse_args()
    versions = {name: version(name) for name in PACKAGES}
    chosen = [each for each in scripts(named_scripts(args)) if not args.only or each.name in args.only]
    with tempfile.TemporaryDirectory(prefix="watch-scripts-") as temporary:
        folder = Path(temporary)
        arrange(args.data, folder / "data", 128, args.copies, flat=2 * args.copies)
        rows: list[dict[str, Any]] = []
        for script, ranks in product(chosen, args.ranks):
            rows.append(compare(script, ranks, folder / "data", folder, args.epochs))
            if args.json:  # after each row: all take an hour
                values = {"benchmark": "watch_scripts", **record.provenance(), "versions": versions, "rows": rows}
                record.write(args.json, values)
    return int(not all(each["bits_are_equal"] and each["attributed"] >= LEAST_ATTRIBUTED for each in rows))


if __name__ == "__main__":
    sys.exit(main())
