"""Which operators of a convolutional network does the memory of a CPU limit, and which its arithmetic?

One thread, float32, forward only; all operators in turn, process CPU time (which a busy machine disturbs least),
medians and spread:

    python benchmarks/roofline.py --json benchmarks/results/roofline-cpu.json

Shapes are of ResNet-50. FLOPs and bytes are counted from them: every input is read from memory once, and every output
written once, except for a batch norm, which reads its input twice. The roof of arithmetic is the highest rate of all
operators. Among them are a matrix product by `torch.mm`, whose library may not use all units of a CPU, and the same
product as a 1x1 convolution, which oneDNN computes. The roof of memory is a triad (a += x b) or a copy: caches read
what a copy overwrites, which is traffic that a triad does not have.
"""

import argparse
import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from record import provenance, spread, write
from torch import Tensor, nn
from torch.nn import functional

BATCH: Final = 32
FLOAT_BYTES: Final = 4
MATRIX: Final = 2048
NUM_COPIED: Final = 2**26  # numbers: 256 MiB, several times the largest cache
PARAMETERS: Final = 25_557_032  # of ResNet-50
LAYOUTS: Final = {"channels_last": torch.channels_last, "contiguous": torch.contiguous_format}
MEMORY_ROOFS: Final = ("copy", "triad")
WARMUP: Final = 2


@dataclass
class Operator:
    """An operator, its FLOPs and bytes per call, and the seconds its calls took."""

    name: str
    layout: str
    flops: float
    num_bytes: float
    run: Callable[[], object]
    seconds: list[float] = field(default_factory=list)

    def time_call(self) -> None:
        """Run once and note how long it took."""
        started = time.process_time()
        self.run()
        self.seconds.append(time.process_time() - started)

    def row(self) -> dict[str, Any]:
        """Return what the record holds of the operator."""
        times = spread(self.seconds[WARMUP:])
        return {
            "name": self.name,
            "layout": self.layout,
            "flops": self.flops,
            "bytes": self.num_bytes,
            "flops_per_byte": round(self.flops / self.num_bytes, 4),
            "flops_per_s": round(self.flops / times["median_s"]),
            "best_s": round(min(self.seconds[WARMUP:]), 6),
            **times,
        }


def build_operators() -> list[Operator]:
    """Return the operators to measure, with matrix products, a copy and a triad."""
    left, right, product = (torch.randn(MATRIX, MATRIX) for _ in range(3))
    source, target = (torch.randn(NUM_COPIED) for _ in range(2))
    operators = [
        Operator(
            f"product {MATRIX:,}, torch.mm",
            "",
            2.0 * MATRIX**3,
            3.0 * MATRIX**2 * FLOAT_BYTES,
            partial(torch.mm, left, right, out=product),
        ),
        build_convolution(f"product {MATRIX:,}, oneDNN", MATRIX, MATRIX, 1, (16, 8), "channels_last", batch=16),
        Operator("copy", "", 0.0, 2.0 * NUM_COPIED * FLOAT_BYTES, partial(target.copy_, source)),
        Operator(
            "triad", "", 2.0 * NUM_COPIED, 3.0 * NUM_COPIED * FLOAT_BYTES, partial(target.add_, source, alpha=1e-3)
        ),
    ]
    for layout in LAYOUTS:
        operators += [
            build_convolution("conv 3x3, 64", 64, 64, 3, (56, 56), layout),
            build_convolution("conv 3x3, 256", 256, 256, 3, (14, 14), layout),
            build_convolution("conv 1x1, 64 to 256", 64, 256, 1, (56, 56), layout),
            build_convolution("conv 1x1, 256 to 64", 256, 64, 1, (56, 56), layout),
        ]
    operators += [build_batch_norm(256, 56), build_relu(256, 56), build_sgd(PARAMETERS)]
    return operators + [build_linear(4096, batch) for batch in (4, 32, 256)]


def build_convolution(
    name: str,
    channels: int,
    out_channels: int,
    kernel: int,
    size: tuple[int, int],
    layout: str,
    *,
    batch: int = BATCH,
) -> Operator:
    """Return a convolution with padding on a batch of images of `size`, height and width."""
    images = torch.randn(batch, channels, *size).to(memory_format=LAYOUTS[layout])
    weight = torch.randn(out_channels, channels, kernel, kernel).to(memory_format=LAYOUTS[layout])
    num_outputs = batch * out_channels * size[0] * size[1]
    flops = 2.0 * num_outputs * channels * kernel**2
    moved = float(images.numel() + weight.numel() + num_outputs) * FLOAT_BYTES
    return Operator(name, layout, flops, moved, partial(functional.conv2d, images, weight, padding=kernel // 2))


def build_batch_norm(channels: int, size: int) -> Operator:
    """Return a batch norm that trains: mean and variance, then scale and shift."""
    norm = nn.BatchNorm2d(channels).requires_grad_(requires_grad=False)
    images = torch.randn(BATCH, channels, size, size).to(memory_format=torch.channels_last)
    # Per number: an addition and a multiply-add for the statistics, a subtraction and a multiply-add for the output.
    return Operator(
        "batch norm", "channels_last", 6.0 * images.numel(), 3.0 * images.numel() * FLOAT_BYTES, partial(norm, images)
    )


def build_relu(channels: int, size: int) -> Operator:
    """Return a ReLU that writes a new tensor."""
    images = torch.randn(BATCH, channels, size, size).to(memory_format=torch.channels_last)
    moved = 2.0 * images.numel() * FLOAT_BYTES
    return Operator("ReLU", "channels_last", 1.0 * images.numel(), moved, partial(torch.relu, images))


def build_linear(features: int, batch: int) -> Operator:
    """Return a linear layer of `features` inputs and outputs."""
    inputs, weight = torch.randn(batch, features), torch.randn(features, features)
    moved = float(2 * inputs.numel() + weight.numel()) * FLOAT_BYTES
    return Operator(
        f"linear, batch {batch}", "", 2.0 * batch * features**2, moved, partial(functional.linear, inputs, weight)
    )


def build_sgd(num_parameters: int) -> Operator:
    """Return a step of fused SGD with momentum: reads weight, gradient and momentum, writes weight and momentum."""
    weight: Tensor = nn.Parameter(torch.randn(num_parameters))
    weight.grad = torch.randn(num_parameters)
    optimizer = torch.optim.SGD([weight], 0.01, momentum=0.9, fused=True)
    return Operator(
        "SGD, momentum", "", 4.0 * num_parameters, 5.0 * num_parameters * FLOAT_BYTES, lambda: optimizer.step()
    )


def keep_freed_memory() -> None:
    """Make glibc keep freed memory; otherwise a call also pays for the fresh pages of its result."""
    libc = ctypes.CDLL(None)
    libc.mallopt(-4, 0)  # M_MMAP_MAX
    libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


def main() -> None:
    """Measure all operators, print, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    operators = build_operators()
    with torch.inference_mode():
        for _ in range(WARMUP + options.rounds):
            for operator in operators:
                operator.time_call()
    rows = [operator.row() for operator in operators]
    peak = {
        "flops_per_s": round(max(row["flops"] / row["best_s"] for row in rows)),
        "bytes_per_s": round(max(row["bytes"] / row["best_s"] for row in rows if row["name"] in MEMORY_ROOFS)),
    }
    peak["ridge_flops_per_byte"] = round(peak["flops_per_s"] / peak["bytes_per_s"], 2)
    print(f"roofs: {peak['flops_per_s'] / 1e9:.1f} GFLOP/s, {peak['bytes_per_s'] / 1e9:.1f} GB/s")
    for row in rows:
        roof = min(peak["flops_per_s"], row["flops_per_byte"] * peak["bytes_per_s"])
        row["share_of_roof"] = round(row["flops_per_s"] / roof, 3) if roof else None
        rates = f"{row['flops_per_s'] / 1e9:.1f} GFLOP/s, {row['bytes'] / row['median_s'] / 1e9:.1f} GB/s"
        print(f"{row['name']} {row['layout']}: {row['flops_per_byte']:.2f} FLOP/byte, {rates}, {row['share_of_roof']}")
    if options.json:
        write(options.json, {"peak": peak, "operators": rows, "batch": BATCH, "provenance": provenance()})


if __name__ == "__main__":
    main()
