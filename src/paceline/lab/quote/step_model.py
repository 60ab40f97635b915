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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from paceline.measure.gpu import Gpu
from paceline.models.flops import Kernel, Kind, StepKernels
from paceline.recipe.schema.base import Section
from paceline.recipe.yaml import read_yaml_file

KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
PARTS: Final = ("compute", "memory", "side", "nchw", "odd")
"""Names of the constants of a class."""
CONSTANTS: Final = Path(str(resources.files("paceline.lab") / "quote" / "constants.yaml"))
SMOOTHNESS: Final = 4.0
"""p of both smooth maxima."""
_MAX_SIDES: Final = 3
_WITHOUT_TENSOR_CORES: Final = ("depthwise", "depthwise_weights")
_VECTOR_FLOPS: Final = 256.0
"""FLOPs per clock and multiprocessor that the efficiencies of those classes are relative to, on every GPU: the second
set of fp32 units of some does not make them faster."""
_NORMAL_95: Final = 1.645
"""Quantile of 95 % of a normal distribution, for intervals of 90 %."""
SLOW_KINDS: Final = (
    *("grouped", "grouped_weights", "narrow", "narrow_weights"),
    *("depthwise", "depthwise_weights"),
)
"""Classes whose speed depends most on the library's choice of a kernel, so that predictions are less certain."""
_REFERENCE_RATE: Final = 71e12 / 82
"""FLOP/s of a multiprocessor of the RTX 3090, on which the loss at short sides was fitted."""
_ALIGNED: Final[Mapping[str, int]] = {"fp16": 8, "bf16": 8, "tf32": 4}
"""Numbers in 16 bytes, which tensor cores are fed with at once."""
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
    odd: float = Field(gt=0)
    """Time of the FLOPs of a matrix product with a side that is not aligned, as a multiple."""


class ErrorConstants(Section):
    """How far predictions were off for networks of families that the fit did not see."""

    low: float
    """Logarithm of (measured / predicted seconds) that few networks of left-out families are below, without kernels of
    `SLOW_KINDS`: 2 % in training and 6 % in inference, so that intervals hold about 90 % (benchmarks/quote.py)."""
    high: float
    """The same that as few are above."""
    slow_spread: float = Field(ge=0)
    """How much wider the interval is for a step of such kernels alone, as a multiple."""


class FormatConstants(Section):
    """What figures of other GPUs say of a number format that the tables do not have."""

    time: float = Field(gt=0)
    """Time of the kernels, as a multiple of what they take by the peak of the format."""
    sigma: float = Field(ge=0)
    """Standard deviation of its logarithm."""


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
    host_sigma: float = Field(ge=0)
    """Standard deviation of its logarithm over computers."""
    formats: dict[str, FormatConstants]
    """Number formats besides those of 16 bits."""
    errors: dict[Layout, ErrorConstants]
    """Errors of the predictions by layout."""
    gpu_sigma: float = Field(ge=0)
    """Standard deviation of the logarithm of the error that a GPU adds that is not among the fitted ones."""


def read_constants(path: Path = CONSTANTS) -> dict[Mode, Constants]:
    """Return the constants of the package, or of a file, by mode."""
    values = read_yaml_file(path).values
    return {mode: Constants.model_validate(values[mode]) for mode in ("training", "inference")}


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
    odd: Array
    launch: float

    @classmethod
    def build(cls, constants: Constants) -> "StepConstants":
        """Build the arrays."""
        rows = [constants.kinds[kind] for kind in KINDS]

        def column(name: str) -> Array:
            return np.array([getattr(row, name) for row in rows])

        return cls(
            compute=column("compute"),
            memory=column("memory"),
            side=column("side"),
            nchw=column("nchw"),
            odd=column("odd"),
            launch=constants.launch,
        )


@dataclass(frozen=True)
class KernelTimes:
    """Seconds of each row of a table, all its kernels: of its FLOPs, of its bytes, and whole with launches.

    `loss` is the sum over sides of s / (s + side), by which the whole grows with s, and `is_odd` whether a side is not
    aligned.
    """

    compute_s: Array
    memory_s: Array
    work_s: Array
    launch_s: Array
    loss: Array
    is_odd: NDArray[np.bool_]


def time_kernels(
    table: KernelTable, batch: Array | float, gpu: Gpu, precision: str, layout: Layout, constants: StepConstants
) -> KernelTimes:
    """Return the times of kernels for batches of `batch` images, a number or one per row."""
    kind = table.kind
    has_no_tensor_cores = np.isin(KINDS, _WITHOUT_TENSOR_CORES)
    tensor, vector = gpu.flops_per_s(precision), _VECTOR_FLOPS * gpu.multiprocessors * gpu.boost_ghz * 1e9
    peak = np.where(has_no_tensor_cores, vector, tensor)
    # The loss at all sides together grows at most as the FLOP/s of a multiprocessor, so that no faster GPU is slower.
    num_sides = np.maximum(np.isfinite(table.sides).sum(axis=1), 1)
    rate = (tensor / gpu.multiprocessors / _REFERENCE_RATE) ** (1 / num_sides)
    short = (constants.side[kind] * np.where(has_no_tensor_cores[kind], 1.0, rate))[:, None] / table.sides
    contiguous = constants.nchw[kind] if layout == "nchw" else 1.0
    sides = np.where(np.isfinite(table.sides), table.sides, 0)
    is_odd = np.any(sides % _ALIGNED.get(precision, 1) > 0, axis=1)
    times = table.count * contiguous
    odd = np.where(is_odd, constants.odd[kind], 1.0)
    compute_s = odd * times * batch * table.flops * np.prod(1 + short, axis=1) / (constants.compute * peak)[kind]
    memory_s = times * (batch * table.num_bytes + table.batch_bytes) / (constants.memory[kind] * gpu.gb_per_s * 1e9)
    work_s = (compute_s**SMOOTHNESS + memory_s**SMOOTHNESS) ** (1 / SMOOTHNESS)
    launch_s = table.count * constants.launch * gpu.launch_us * 1e-6
    return KernelTimes(compute_s, memory_s, work_s, launch_s, np.sum(short / (1 + short), axis=1), is_odd)


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
    factor = constants.formats[precision].time if precision in constants.formats else 1.0
    return PredictedTime(
        gpu_s=float(np.sum(factor * times.work_s + times.launch_s)),
        host_s=1e-6 * constants.host_us * float(np.sum(table.count)),
        slow_s=factor * float(np.sum(times.work_s[is_slow])),
    )


def find_bounds(
    constants: Constants, layout: Layout, precision: str, time: PredictedTime, *, is_fitted: bool
) -> tuple[float, float]:
    """Return the bounds of the logarithm of measured over predicted seconds.

    They are wider for a step with kernels of `SLOW_KINDS`, on a GPU or in a format without measurements, and for a step
    that waits for the host.
    """
    errors = constants.errors[layout]
    scale = 1 + errors.slow_spread * time.slow_s / time.seconds
    middle, half = scale * (errors.low + errors.high) / 2, scale * (errors.high - errors.low) / 2
    sigmas = [constants.host_sigma * (time.host_s / time.seconds) ** SMOOTHNESS]
    if not is_fitted:
        sigmas.append(constants.gpu_sigma)
    if precision in constants.formats:
        sigmas.append(constants.formats[precision].sigma)
    half = math.hypot(half, *(_NORMAL_95 * sigma for sigma in sigmas))
    return middle - half, middle + half
