"""The time of a step on a GPU from the kernels of the network, and constants fitted to published measurements.

A kernel takes as long as its FLOPs or its bytes, whichever is longer (a smooth maximum), and an empty kernel:

    t = ((FLOPs fill / (e peak))^p + (bytes / (m bandwidth))^p)^(1/p) + launch

The efficiencies e and m belong to the class of the kernel. A matrix product, or a convolution as one, wastes a part of
its tiles if its sides are short: fill = product of (1 + s / side). The loss s is time of a multiprocessor, so that it
grows with the FLOP/s of one, or with their root if there are two sides. Kernels run one after another. A step takes as
long as they do, or as the host does that launches them, whichever is longer (a smooth maximum).
"""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from paceline.lab.quote.gpu import Gpu
from paceline.models.flops import Kernel, Kind, StepKernels
from paceline.recipe.schema.base import Section
from paceline.recipe.yaml import read_yaml_file

KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
CONSTANTS: Final = Path(str(resources.files("paceline.lab") / "quote" / "constants.yaml"))
SMOOTHNESS: Final = 4.0
"""p of both smooth maxima."""
_MAX_SIDES: Final = 3
_ON_VECTOR_UNITS: Final = ("depthwise", "depthwise_weights")
"""Classes of kernels that use no tensor cores."""
_NORMAL_95: Final = 1.645
"""Quantile of 95 % of a normal distribution, for intervals of 90 %."""
SLOW_KINDS: Final = ("grouped", "grouped_weights", "depthwise", "depthwise_weights")
"""Classes whose speed depends most on the library's choice of a kernel, so that predictions are less certain."""
_REFERENCE_RATE: Final = 71e12 / 82
"""FLOP/s of a multiprocessor of the RTX 3090, on which the loss at short sides was fitted."""
Layout = Literal["nchw", "nhwc"]
Mode = Literal["training", "inference"]
Array = NDArray[np.float64]


class KindConstants(Section):
    """Constants of a class of kernels."""

    compute: float = Field(gt=0)
    """Share of the peak FLOP/s that a large kernel reaches."""
    memory: float = Field(gt=0)
    """Share of the bandwidth that a large kernel reaches, by the bytes that it would move at least."""
    side: float = Field(ge=0)
    """Length of a side of a matrix product at which half of a tile is wasted."""
    nchw: float = Field(gt=0)
    """Time in NCHW, as a multiple of that in NHWC."""


class ErrorConstants(Section):
    """How far predictions were off for networks of families that the fit did not see."""

    low: float
    """Logarithm of (measured / predicted seconds) that 5 % of the networks of left-out families are below, without
    kernels of `SLOW_KINDS`."""
    high: float
    """The same that 5 % are above."""
    slow_spread: float = Field(ge=0)
    """How much wider the interval is for a step of such kernels alone, as a multiple."""


class Constants(Section):
    """Constants of `training` or `inference`, and how far their predictions were off where they were not fitted."""

    source: str
    """Measurements that they were fitted to."""
    kinds: dict[Kind, KindConstants]
    """Constants by class of kernels."""
    launch: float = Field(gt=0)
    """Time of a kernel besides its work, as a multiple of that of an empty one."""
    host_us: float = Field(ge=0)
    """Time of the host to launch a kernel, in microseconds, with what Python and autograd do for it."""
    errors: dict[Layout, ErrorConstants]
    """Errors of the predictions by layout."""
    gpu_sigma: float = Field(ge=0)
    """Standard deviation of the logarithm of the error that a GPU adds that is not among the fitted ones."""


def read_constants(path: Path = CONSTANTS) -> dict[Mode, Constants]:
    """Return the constants of the package, or of a file, by mode."""
    values = read_yaml_file(path).values
    return {mode: Constants.model_validate(values[mode]) for mode in ("training", "inference")}


def find_bounds(constants: Constants, layout: Layout, slow_share: float, *, is_fitted: bool) -> tuple[float, float]:
    """Return the bounds of the logarithm of measured over predicted seconds.

    They are wider for a step of which `slow_share` is kernels of `SLOW_KINDS`, and on a GPU without measurements.
    """
    errors = constants.errors[layout]
    scale = 1 + errors.slow_spread * slow_share
    middle, half = scale * (errors.low + errors.high) / 2, scale * (errors.high - errors.low) / 2
    if not is_fitted:
        half = math.hypot(half, _NORMAL_95 * constants.gpu_sigma)
    return middle - half, middle + half


@dataclass(frozen=True)
class KernelTable:
    """Kernels as arrays: class as an index of `KINDS`, FLOPs and bytes per image, bytes per batch, and sides.

    `sides` has three columns; a missing one is infinite. `count` is how often the kernel runs.
    """

    kind: NDArray[np.int64]
    flops: Array
    num_bytes: Array
    batch_bytes: Array
    sides: Array
    count: Array

    @classmethod
    def build(cls, kernels: Iterable[Kernel]) -> "KernelTable":
        """Build the table of kernels; equal ones share a row."""
        return cls.from_rows([[*kernel, number] for kernel, number in Counter(kernels).items()])

    @classmethod
    def from_rows(cls, rows: Iterable[Iterable[Any]]) -> "KernelTable":
        """Build the table from the fields of each kernel and its count, as `to_rows` returns them."""
        kinds, flops, num_bytes, batch_bytes, sides, counts = zip(*rows, strict=True)
        padded = [[*each, *[np.inf] * (_MAX_SIDES - len(each))] for each in sides]
        # Bytes that grow faster than the batch leave less than nothing for a batch of none.
        numbers = (
            np.maximum(np.array(each, dtype=np.float64), 0) for each in (flops, num_bytes, batch_bytes, padded, counts)
        )
        return cls(np.array([KINDS.index(kind) for kind in kinds]), *numbers)


@dataclass(frozen=True)
class StepConstants:
    """Constants as arrays over `KINDS`, and the launch as a number."""

    compute: Array
    memory: Array
    side: Array
    nchw: Array
    launch: float

    @classmethod
    def build(cls, constants: Constants) -> "StepConstants":
        """Build the arrays."""
        rows = [constants.kinds[kind] for kind in KINDS]

        def column(name: str) -> Array:
            return np.array([getattr(row, name) for row in rows])

        return cls(column("compute"), column("memory"), column("side"), column("nchw"), constants.launch)


@dataclass(frozen=True)
class KernelTimes:
    """Seconds of each row of a table, all its kernels: of its FLOPs, of its bytes, and whole with launches.

    `loss` is the sum over sides of s / (s + side), by which the whole grows with s.
    """

    compute_s: Array
    memory_s: Array
    work_s: Array
    launch_s: Array
    loss: Array


def time_kernels(
    table: KernelTable, batch: Array | float, gpu: Gpu, precision: str, layout: Layout, constants: StepConstants
) -> KernelTimes:
    """Return the times of kernels for batches of `batch` images, a number or one per row."""
    kind = table.kind
    tensor, vector = gpu.flops_per_s(precision), gpu.flops_per_s("fp32")
    peak = np.array([vector if name in _ON_VECTOR_UNITS else tensor for name in KINDS])
    # The loss at all sides together grows at most as the FLOP/s of a multiprocessor, so that no faster GPU is slower.
    num_sides = np.maximum(np.isfinite(table.sides).sum(axis=1), 1)
    rate = (tensor / gpu.multiprocessors / _REFERENCE_RATE) ** (1 / num_sides)
    short = (constants.side[kind] * rate)[:, None] / table.sides
    contiguous = constants.nchw[kind] if layout == "nchw" else 1.0
    times = table.count * contiguous
    compute_s = times * batch * table.flops * np.prod(1 + short, axis=1) / (constants.compute * peak)[kind]
    memory_s = times * (batch * table.num_bytes + table.batch_bytes) / (constants.memory[kind] * gpu.gb_per_s * 1e9)
    work_s = (compute_s**SMOOTHNESS + memory_s**SMOOTHNESS) ** (1 / SMOOTHNESS)
    launch_s = table.count * constants.launch * gpu.launch_us * 1e-6
    return KernelTimes(compute_s, memory_s, work_s, launch_s, np.sum(short / (1 + short), axis=1))


def build_step_table(step: StepKernels, update: Iterable[Kernel] = ()) -> KernelTable:
    """Build the table of all kernels of a step, with those of an `update` of the weights."""
    return KernelTable.build([*step.forward, *step.backward, *update])


@dataclass(frozen=True)
class PredictedTime:
    """Predicted seconds of the GPU and of the host, and how many of the GPU's are kernels of `SLOW_KINDS`."""

    gpu_s: float
    host_s: float
    slow_s: float

    @property
    def seconds(self) -> float:
        """Seconds of a step: of the GPU or the host, which launches its kernels, whichever takes longer."""
        return float((self.gpu_s**SMOOTHNESS + self.host_s**SMOOTHNESS) ** (1 / SMOOTHNESS))

    def combine(self, other: "PredictedTime", number: int = 1) -> "PredictedTime":
        """Return the time of `number` times this and then of `other`."""
        return PredictedTime(
            number * self.gpu_s + other.gpu_s,
            number * self.host_s + other.host_s,
            number * self.slow_s + other.slow_s,
        )


def predict_time(
    table: KernelTable, batch: int, gpu: Gpu, precision: str, layout: Layout, constants: Constants
) -> PredictedTime:
    """Return the time of all kernels of a table for `batch` images."""
    times = time_kernels(table, batch, gpu, precision, layout, StepConstants.build(constants))
    is_slow = np.isin(table.kind, [KINDS.index(kind) for kind in SLOW_KINDS])
    return PredictedTime(
        gpu_s=float(np.sum(times.work_s + times.launch_s)),
        host_s=1e-6 * constants.host_us * float(np.sum(table.count)),
        slow_s=float(np.sum(times.work_s[is_slow])),
    )
