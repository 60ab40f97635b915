"""How much does the channels-last layout gain on a CPU, in float32 and under bfloat16 autocast?

Steps of each variant in turn, one thread, process CPU time (which a busy machine disturbs least), medians and spread:

    python benchmarks/memory_format.py --json benchmarks/results/memory-format-cpu.json
"""

import argparse
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from record import provenance, spread, write
from torch import nn
from torch.nn import functional

from paceline.models.build import build_model
from paceline.recipe.schema.model import Model

NETWORKS = (
    ("resnet18_cifar", 1.0, 3, 32, 16),
    ("resnet18_cifar", 0.25, 3, 32, 32),
    ("wideresnet_course", 0.25, 1, 28, 16),
    ("torchvision:resnet18", 1.0, 3, 224, 4),
    ("resnet50_nersc", 1.0, 3, 32, 4),
)
VARIANTS = (("contiguous", "fp32"), ("channels_last", "fp32"), ("contiguous", "bf16"), ("channels_last", "bf16"))
WARMUP = 2


@dataclass
class Variant:
    """A network in one layout and precision, and the seconds its steps took."""

    memory_format: str
    precision: str
    model: nn.Module
    images: torch.Tensor
    labels: torch.Tensor
    seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01, momentum=0.9)

    def step(self) -> None:
        """Take one training step and note the CPU time it took."""
        started = time.process_time()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.precision == "bf16"):
            loss = functional.cross_entropy(self.model(self.images), self.labels)
        loss.backward()
        self.optimizer.step()
        self.seconds.append(time.process_time() - started)


def build(network: tuple[str, float, int, int, int], memory_format: str, precision: str) -> Variant:
    """Return a network with fresh weights and made-up images, both in the layout asked for."""
    name, width, channels, size, batch = network
    layout = torch.channels_last if memory_format == "channels_last" else torch.contiguous_format
    torch.manual_seed(0)
    model = build_model(Model(name=name, width=width), num_classes=10, channels=channels).to(memory_format=layout)
    images = torch.randn(batch, channels, size, size).to(memory_format=layout)
    return Variant(memory_format, precision, model, images, torch.randint(0, 10, (batch,)))


def measure(network: tuple[str, float, int, int, int], steps: int) -> dict:
    """Return the spread of each variant's step, and its gain over contiguous float32."""
    variants = [build(network, *variant) for variant in VARIANTS]
    for _ in range(WARMUP + steps):
        for variant in variants:
            variant.step()
    rows = [
        {"memory_format": each.memory_format, "precision": each.precision, **spread(each.seconds[WARMUP:])}
        for each in variants
    ]
    for row in rows:
        row["gain"] = round(rows[0]["median_s"] / row["median_s"], 3)
    return {"model": network[0], "width": network[1], "image_size": network[3], "batch": network[4], "variants": rows}


def main() -> None:
    """Measure all networks, print, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    for network in NETWORKS:
        results.append(measure(network, options.steps))
        gains = "  ".join(f"{v['memory_format']} {v['precision']} {v['gain']:.2f}x" for v in results[-1]["variants"])
        print(f"{network[0]} at width {network[1]:g}: {gains}", flush=True)
    if options.json:
        write(options.json, {"unit": "CPU seconds a step", "networks": results, "provenance": provenance()})


if __name__ == "__main__":
    main()
