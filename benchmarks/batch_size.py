"""How do the time per step and images/s depend on the batch size? Two models on the CPU, on one and on two ranks.

Whole steps (forward, backward, optimizer) of all batch sizes in turn, one thread per rank, wall clock of rank 0;
medians and spread:

    python benchmarks/batch_size.py --json benchmarks/results/batch-size-cpu.json

Each batch size, which is per rank, is measured in three ways: `alone` on rank 0 while rank 1 waits, `beside` on both
ranks without messages, and `ddp` on both ranks with gloo. From `beside` to `ddp` only communication is added.

A line is fitted to the medians: seconds per step = `fixed_s` + `per_image_s` * batch. It minimizes relative errors;
`errors` has those that remain, by batch size.
"""

import argparse
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from record import provenance, spread, write
from torch import distributed, multiprocessing, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from paceline.models.build import build_model
from paceline.models.validate import choose_memory_format
from paceline.recipe.schema.model import Model
from paceline.recipe.schema.optim import Sgd
from paceline.training.optim.build import build_optimizer

MODELS: Final = (("resnet18_cifar", 0.0625, 16), ("resnet18_cifar", 0.25, 32))  # name, width, pixels
BATCH_SIZES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)
FITTED_FROM: Final = 2  # for one image, PyTorch computes convolutions by another algorithm (`_slow_conv2d`)
PARTS: Final = ("forward", "backward", "optimizer")
RANKS: Final = 2
DROPPED_STEPS: Final = 1  # of each turn: after another batch size, caches are cold
TIMED_STEPS: Final = 2
WARMUP_ROUNDS: Final = 1
TIMEOUT: Final = timedelta(minutes=5)


@dataclass
class Variant:
    """A model on some ranks, and the seconds of its steps by batch size: a row per step, a column per part."""

    name: str
    ranks: int
    model: nn.Module
    optimizer: torch.optim.Optimizer
    seconds: dict[int, list[list[float]]] = field(default_factory=lambda: {size: [] for size in BATCH_SIZES})

    def turn(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        """Take a few steps on this rank and note the last ones."""
        for number in range(DROPPED_STEPS + TIMED_STEPS):
            if self.ranks > 1:
                distributed.barrier()
            seconds = self.step(images, labels)
            if number >= DROPPED_STEPS:
                self.seconds[len(images)].append(seconds)

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> list[float]:
        """Take one training step; return the seconds of its parts."""
        began = time.perf_counter()
        loss = functional.cross_entropy(self.model(images), labels)
        computed = time.perf_counter()
        loss.backward()
        averaged = time.perf_counter()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return [computed - began, averaged - computed, time.perf_counter() - averaged]


def build_variants(section: Model, memory_format: torch.memory_format) -> list[Variant]:
    """Return the three variants of a model, each with weights of its own."""
    variants = []
    for name, ranks in (("alone", 1), ("beside", RANKS), ("ddp", RANKS)):
        torch.manual_seed(0)
        model = build_model(section, num_classes=10, channels=3).to(memory_format=memory_format)
        optimizer = build_optimizer(Sgd(lr=0.001), list(model.named_parameters()), "cpu")
        variants.append(Variant(name, ranks, DistributedDataParallel(model) if name == "ddp" else model, optimizer))
    return variants


def measure(name: str, width: float, pixels: int, rounds: int) -> dict[str, Any]:
    """Return the spreads and fits of a model's variants, as this rank measured them."""
    section = Model(name=name, width=width)
    layout = choose_memory_format(section, torch.device("cpu"), num_classes=10, channels=3)
    variants = build_variants(section, layout)
    rank = distributed.get_rank()
    for current in range(WARMUP_ROUNDS + rounds):
        for batch_size in BATCH_SIZES:
            images = torch.randn(batch_size, 3, pixels, pixels).to(memory_format=layout)
            labels = torch.randint(0, 10, (batch_size,))
            for variant in variants:
                if rank < variant.ranks:
                    variant.turn(images, labels)
                distributed.barrier()
        if current < WARMUP_ROUNDS:
            for variant in variants:
                for seconds in variant.seconds.values():
                    seconds.clear()
    return {
        "model": name,
        "width": width,
        "image_size": pixels,
        "memory_format": str(layout).removeprefix("torch.").removesuffix("_format"),
        "parameters": sum(parameter.numel() for parameter in variants[0].model.parameters()),
        "variants": {each.name: summarize(each.seconds) for each in variants if rank < each.ranks},
    }


def summarize(seconds: Mapping[int, list[list[float]]]) -> dict[str, Any]:
    """Return the spread of the steps of each batch size, and the line through their medians."""
    steps = {size: spread(np.sum(rows, axis=1).tolist()) for size, rows in seconds.items()}
    fitted = [size for size in seconds if size >= FITTED_FROM]
    medians_s = np.array([steps[size]["median_s"] for size in fitted])
    sizes = np.array(fitted)
    fixed_s, per_image_s = fit(sizes, medians_s, medians_s)
    parts = {}
    for column, part in enumerate(PARTS):
        part_s = np.array([np.median(np.array(seconds[size])[:, column]) for size in fitted])
        part_fixed_s, part_per_image_s = fit(sizes, part_s, medians_s)
        parts[part] = {"fixed_s": round(part_fixed_s, 7), "per_image_s": round(part_per_image_s, 9)}
    errors = {size: (fixed_s + per_image_s * size) / steps[size]["median_s"] - 1 for size in steps}
    return {
        "steps": [
            {"batch": size, "images_per_s": round(size / row["median_s"], 1), **row} for size, row in steps.items()
        ],
        "fit": {
            "fixed_s": round(fixed_s, 7),
            "per_image_s": round(per_image_s, 9),
            "knee": round(fixed_s / per_image_s, 2),
            "errors": {size: round(error, 4) for size, error in errors.items()},
            "parts": parts,
        },
    }


def fit(sizes: np.ndarray, seconds: np.ndarray, scale_s: np.ndarray) -> tuple[float, float]:
    """Return a and b of a + b * size by least squares of the errors over `scale_s`."""
    columns = np.stack([np.ones(len(sizes)), sizes], axis=1) / scale_s[:, None]
    (fixed, per_image), *_ = np.linalg.lstsq(columns, seconds / scale_s)
    return float(fixed), float(per_image)


def describe(measured: Mapping[str, Any]) -> str:
    """Return the fits of a model as lines."""
    lines = [f"{measured['model']} x {measured['width']:g}, {measured['image_size']} px, {measured['memory_format']}"]
    for name, variant in measured["variants"].items():
        line = variant["fit"]
        errors = [abs(error) for size, error in line["errors"].items() if size >= FITTED_FROM]
        lines.append(
            f"  {name:7} {1e3 * line['fixed_s']:6.2f} ms + {1e6 * line['per_image_s']:7.1f} us per image; knee at "
            f"{line['knee']:.1f} images; error {100 * np.mean(errors):.0f} %, {100 * max(errors):.0f} % at most"
        )
        rates = "  ".join(f"{row['batch']}: {row['images_per_s']:,.0f}" for row in variant["steps"])
        lines.append(f"          images/s  {rates}")
    return "\n".join(lines)


def run_rank(rank: int, store: str, rounds: int, out: Path | None) -> None:
    """Measure all models as one of the ranks; rank 0 prints and writes the record."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=TIMEOUT)
    models = []
    for model in MODELS:
        measured = measure(*model, rounds)
        models.append(measured)
        if rank == 0:
            print(describe(measured), flush=True)
    if rank == 0 and out:
        numbers = {"unit": "seconds per step", "fitted_from": FITTED_FROM, "models": models}
        write(out, {**numbers, "provenance": provenance()})
    distributed.destroy_process_group()


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(run_rank, (f"{folder}/store", options.rounds, options.json), nprocs=RANKS)


if __name__ == "__main__":
    main()
