"""What do paceline's loaders gain in Lightning, in Accelerate and in a loop of timm's, against what these usually have?

    python benchmarks/interop.py --data FOLDER --rounds 3 --json benchmarks/results/interop-cpu.json

FOLDER has `train/` with class folders of JPEGs, in the page cache. Usual is, in Lightning and Accelerate, the code of
tutorials: torchvision's ImageFolder, its transforms, and a DataLoader whose workers stay; in timm, `create_dataset` and
`create_loader`. Ours is `paceline.interop` on a lossless pack of the same files. Both have as many workers, the same
random crop and mirroring, and float32 images, normalized; the loops are each framework's own, and the same for both.

Two networks: `none`, a linear layer on the mean color, so that data are all there is to wait for; and `small`, timm's
`test_resnet`, forwards and backwards on the same cores as the loaders. Each framework and side is a fresh process, and
all take turns, forwards and then backwards. A window begins behind more batches than any loader makes ahead. `ratio`
compares the two sides of a round, `ratio_by_cpu` what they took of the CPUs, workers included: a busy machine disturbs
that least. Ours ends an epoch every few steps, as a set this small does; the usual side's files are repeated, so that
its workers never start anew within a window. Speed is measured, not checked: the exit status is 0.
"""

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import record
from peers.stopwatch import tree_cpu_s

SIZE, BATCH, WARMUP_BATCHES, REPEATS, TIMEOUT_S = 160, 32, 8, 400, 300
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
NETWORKS = ("none", "small")
SIDES = ("usual", "ours")


class Window:
    """Count images from behind the first batches to the end of `seconds`."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._batches, self._images = seconds, 0, 0
        self._began_s = self._cpu_s = 0.0
        self.found: dict[str, float] = {}

    def tick(self, num_images: int) -> bool:
        """Note that a step of `num_images` is done; return whether the window is over."""
        self._batches += 1
        if self._batches == WARMUP_BATCHES:
            self._cpu_s, self._began_s = tree_cpu_s(), time.perf_counter()
        elif self._batches > WARMUP_BATCHES:
            self._images += num_images
            if time.perf_counter() - self._began_s >= self._seconds:
                wall_s, cpu_s = time.perf_counter() - self._began_s, tree_cpu_s() - self._cpu_s
                self.found = {"images_per_s": self._images / wall_s, "cpu_ms": 1000 * cpu_s / self._images}
                return True
        return False


def main() -> None:
    """Measure, print, and write the result; or be one of those that are measured."""
    args = parse_args()
    if args.one:
        warnings.simplefilter("ignore")
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        framework, side = args.one
        print(json.dumps({network: LOOPS[framework](side, network, args).found for network in NETWORKS}), flush=True)
        return
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        args.pack = args.pack or packed(args.data / "train", Path(folder))
        runs = measure(args)
    config = {"rounds": args.rounds, "seconds": args.seconds, "workers": args.workers, "size": SIZE, "batch": BATCH}
    result = {
        "benchmark": "interop",
        **record.provenance(),
        "load_before": round(load_before, 2),
        "config": config,
        "versions": versions(),
        **{framework: {network: summary(sides, network) for network in NETWORKS} for framework, sides in runs.items()},
        "runs": runs,
    }
    print(table(result))
    if args.json:
        record.write(args.json, result)


def parse_args() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with train/ and class folders of JPEGs in it")
    parser.add_argument("--pack", type=Path, help="a lossless pack of train/ (default: made, and removed afterwards)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0, help="a window (default: 5)")
    parser.add_argument("--workers", type=int, default=2, help="processes or threads of each loader (default: 2)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="where to write the result")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args()


def packed(train: Path, folder: Path) -> Path:
    """Return a lossless pack of the class folders in `train`."""
    path = folder / "photos.pack"
    both = ("data.source.name=folder", f"data.source.train_root={train}", f"data.source.val_root={train}")
    run([sys.executable, "-m", "paceline", "data", "pack", "folder", str(path), *both])
    return path


def measure(args: argparse.Namespace) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Return what each side of each framework found, a round after the other."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = {name: {side: [] for side in SIDES} for name in LOOPS}
    arguments = ["--data", str(args.data), "--pack", str(args.pack), "--seconds", str(args.seconds)]
    turns = [(framework, side) for framework in LOOPS for side in SIDES]
    for number in range(args.rounds):
        for framework, side in turns[:: -1 if number % 2 else 1]:
            one = [sys.executable, __file__, *arguments, "--workers", str(args.workers), "--one", framework, side]
            report = json.loads(run(one).splitlines()[-1])
            found[framework][side].append(report)
            rates = ", ".join(f"{name} {each['images_per_s']:,.0f}" for name, each in report.items())
            print(f"round {number + 1}: {framework}, {side}: {rates} images/s", file=sys.stderr, flush=True)
    return found


def run(arguments: list[str]) -> str:
    """Run a program, and return what it says on stdout."""
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode:
        sys.exit(f"{' '.join(arguments)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout


def network_of(name: str) -> Any:
    """Return what is trained: next to nothing, or a small real network."""
    import timm
    from torch import nn

    if name == "none":
        return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 1000))
    return timm.create_model("test_resnet", num_classes=1000)


def our_batches(args: argparse.Namespace) -> Any:
    """Return paceline's loader of the pack."""
    from paceline.interop import loaders

    arguments = ["data.source.name=pack", f"data.source.root={args.pack}", f"data.batch_size={BATCH}"]
    arguments += [f"data.image_size={SIZE}", f"data.workers={args.workers}"]
    return loaders("folder", *arguments, device="cpu").train


def torchvision_batches(args: argparse.Namespace) -> Any:
    """Return what torchvision's tutorials load with."""
    import torch
    from torch.utils.data import DataLoader
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    steps = [v2.RandomResizedCrop(SIZE, antialias=True), v2.RandomHorizontalFlip(), v2.ToImage()]
    steps += [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    files = ImageFolder(str(args.data / "train"), transform=v2.Compose(steps))
    files.samples = files.samples * REPEATS
    options = {"num_workers": args.workers, "drop_last": True, "persistent_workers": True}
    return DataLoader(files, BATCH, shuffle=True, **options)


def timm_batches(args: argparse.Namespace) -> Any:
    """Return what timm's `train.py` loads with: its own crop and mirroring, and no other change."""
    import torch
    from timm.data import create_dataset, create_loader

    dataset = create_dataset("", root=str(args.data), split="train")
    dataset.reader.samples = dataset.reader.samples * REPEATS
    same_crop = {"scale": (0.08, 1.0), "ratio": (3 / 4, 4 / 3), "hflip": 0.5, "color_jitter": None}
    return create_loader(
        dataset,
        input_size=(3, SIZE, SIZE),
        batch_size=BATCH,
        is_training=True,
        num_workers=args.workers,
        interpolation="bilinear",
        device=torch.device("cpu"),
        persistent_workers=True,
        **same_crop,
    )


def endless(loader: Iterable[Any]) -> Iterator[Any]:
    """Yield epoch after epoch."""
    while True:
        yield from loader


def in_lightning(side: str, network: str, args: argparse.Namespace) -> Window:
    """Train with Lightning's Trainer."""
    import lightning as L
    import torch

    window = Window(args.seconds)

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network_of(network)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.trainer.should_stop = window.tick(len(batch[1]))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    loader = torchvision_batches(args) if side == "usual" else our_batches(args)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    L.Trainer(accelerator="cpu", max_epochs=-1, enable_model_summary=False, **quiet).fit(Module(), loader)
    return window


def in_accelerate(side: str, network: str, args: argparse.Namespace) -> Window:
    """Train in a loop of Accelerate's documentation."""
    import torch
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = network_of(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = accelerator.prepare(model, optimizer)
    loader = accelerator.prepare(torchvision_batches(args)) if side == "usual" else our_batches(args)
    return trained(model, optimizer, loader, accelerator.backward, args)


def in_timm(side: str, network: str, args: argparse.Namespace) -> Window:
    """Train as timm's `train_one_epoch` does, with its optimizer."""
    import torch
    from timm.optim import create_optimizer_v2

    model = network_of(network)
    optimizer = create_optimizer_v2(model, opt="sgd", lr=0.01)
    loader = timm_batches(args) if side == "usual" else our_batches(args)
    return trained(model, optimizer, loader, torch.Tensor.backward, args)


def trained(
    model: Any, optimizer: Any, loader: Any, backward: Callable[[Any], None], args: argparse.Namespace
) -> Window:
    """Train until the window is over."""
    import torch

    window = Window(args.seconds)
    for images, labels in endless(loader):
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if window.tick(len(labels)):
            return window
    raise AssertionError("a loader has no batches")


LOOPS = {"lightning": in_lightning, "accelerate": in_accelerate, "timm": in_timm}


def summary(sides: dict[str, list[dict[str, Any]]], network: str) -> dict[str, Any]:
    """Return both sides' images/s, and how many times as fast ours is, by the clock and by CPU time."""
    usual, ours = ([each[network] for each in sides[side]] for side in SIDES)
    pairs = list(zip(usual, ours, strict=True))
    return {
        "usual": spread([each["images_per_s"] for each in usual]),
        "ours": spread([each["images_per_s"] for each in ours]),
        "ratio": spread([b["images_per_s"] / a["images_per_s"] for a, b in pairs]),
        "ratio_by_cpu": spread([a["cpu_ms"] / b["cpu_ms"] for a, b in pairs]),
    }


def spread(values: list[float]) -> dict[str, Any]:
    """Return the median, the lowest and the highest of some values, and how many there are."""
    found = {"median": np.median(values), "low": min(values), "high": max(values)}
    return {**{name: round(float(value), 1 if value >= 100 else 3) for name, value in found.items()}, "n": len(values)}


def versions() -> dict[str, str]:
    """Return the versions of the frameworks."""
    from importlib.metadata import version

    return {name: version(name) for name in ("lightning", "accelerate", "timm", "torch", "torchvision", "Pillow")}


def table(result: dict[str, Any]) -> str:
    """Return the result as a person reads it."""
    lines = [f"load {result['load_before']} before; images/s, median (lowest to highest)"]
    for framework in LOOPS:
        for network, row in result[framework].items():
            rates = "  ".join(
                f"{side} {row[side]['median']:8,.0f} ({row[side]['low']:,.0f} to {row[side]['high']:,.0f})"
                for side in SIDES
            )
            ratio, by_cpu = row["ratio"]["median"], row["ratio_by_cpu"]["median"]
            lines.append(f"{framework:<11}{network:<6} {rates}  x {ratio:.2f} ({by_cpu:.2f} by CPU)")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
