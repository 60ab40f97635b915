"""What does a step of each optimizer cost, in each of its implementations, on the parameters of ResNet-50?

Steps of all of them in turn, medians and spread, and each one's time as a multiple of fused SGD's:

    python benchmarks/optimizers.py --threads 1 --steps 10 --json benchmarks/results/optimizers-cpu.json

On a GPU, `--device cuda`. The iteration inside Muon is also measured alone: in batches of equal shapes or matrix by
matrix, in bfloat16 or float32.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from record import provenance, spread, write
from torch import nn

from paceline.models.build import build_model
from paceline.recipe.schema.model import Model
from paceline.recipe.schema.optim import (
    Adam,
    AdamW,
    Lamb,
    Lars,
    Muon,
    NovoGrad,
    OptimSection,
    RmsProp,
    ScheduleFree,
    Sgd,
)
from paceline.training.optim.build import build_optimizer
from paceline.training.optim.muon import orthogonalize

NETWORK = "torchvision:resnet50"
IMPLEMENTATIONS = ("fused", "foreach", "loop")
OURS = (RmsProp(), NovoGrad(), Lars(), Lamb(), ScheduleFree(), Muon(), Muon(rescale=True))
WARMUP = 2


@dataclass
class Variant:
    """What is measured, and the seconds that each time took."""

    name: str
    run: Callable[[], object]
    finish: Callable[[], None]
    seconds: list[float] = field(default_factory=list)

    def step(self) -> None:
        """Run once and note how long it took, on a GPU until it is done there."""
        self.finish()
        started = time.perf_counter()
        self.run()
        self.finish()
        self.seconds.append(time.perf_counter() - started)


def sections() -> list[tuple[str, OptimSection]]:
    """Return what is measured, by name."""
    torchs = [
        (f"{section.name} {each}", section.model_copy(update={"implementation": each}))
        for section in (Sgd(), Adam(), AdamW())
        for each in IMPLEMENTATIONS
    ]
    ours = [(f"{each.name} rescaled" if isinstance(each, Muon) and each.rescale else each.name, each) for each in OURS]
    return torchs + ours


def parameters(device: str) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters of the network, channels last as in training, with made-up gradients."""
    torch.manual_seed(0)
    model = build_model(Model(name=NETWORK), num_classes=1000, channels=3)
    model.to(device, memory_format=torch.channels_last)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter) * 1e-3
    return list(model.named_parameters())


def optimizers(device: str) -> list[Variant]:
    """Return every optimizer, each with parameters of its own."""
    return [
        Variant(name, build_optimizer(section, parameters(device), device).step, waiting(device))
        for name, section in sections()
    ]


def iterations(device: str) -> list[Variant]:
    """Return the orthogonalization of all filters, in the ways it could be done."""
    matrices = [parameter.detach().flatten(1) for _, parameter in parameters(device) if parameter.ndim == 4]
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        whole = partial(orthogonalize, matrices, steps=5, dtype=dtype)
        parts = [partial(orthogonalize, [matrix], steps=5, dtype=dtype) for matrix in matrices]
        name = str(dtype).removeprefix("torch.")
        found.append(Variant(f"{name} in batches", whole, waiting(device)))
        found.append(Variant(f"{name} one by one", partial(run_all, parts), waiting(device)))
    return found


def run_all(parts: list[Callable[[], object]]) -> None:
    """Run one after the other."""
    for part in parts:
        part()


def waiting(device: str) -> Callable[[], None]:
    """Return what waits until the device has nothing left to do."""
    return torch.cuda.synchronize if device == "cuda" else lambda: None


def measure(variants: list[Variant], steps: int, reference: str) -> list[dict]:
    """Run `variants` in turn; return the spread of each, and its median as a multiple of that of `reference`."""
    for _ in range(WARMUP + steps):
        for variant in variants:
            variant.step()
    rows = [{"name": each.name, **spread(each.seconds[WARMUP:])} for each in variants]
    unit = next(row["median_s"] for row in rows if row["name"] == reference)
    for row in rows:
        row["times_reference"] = round(row["median_s"] / unit, 2)
        interval = f"({1e3 * row['p10_s']:.2f} to {1e3 * row['p90_s']:.2f})"
        times = f"{row['times_reference']:.2f}x {reference}"
        print(f"{row['name']:22} {1e3 * row['median_s']:9.2f} ms {interval}  {times}", flush=True)
    return rows


def main() -> None:
    """Measure, print, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    device = options.device
    result = {
        "unit": "seconds a step",
        "model": NETWORK,
        "threads": torch.get_num_threads(),
        "optimizers": measure(optimizers(device), options.steps, "sgd fused"),
        "iterations": measure(iterations(device), options.steps, "bfloat16 in batches"),
    }
    if options.json:
        write(options.json, {**result, "provenance": provenance()})


if __name__ == "__main__":
    main()
