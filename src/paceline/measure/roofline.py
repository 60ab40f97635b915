"""Peak FLOP/s and memory bandwidth of devices, and the roofline of a step.

The roofline (Williams, Waterman and Patterson 2009, doi 10.1145/1498765.1498785) is taken per kernel: a kernel takes as
long as its FLOPs at peak or its bytes at full bandwidth, whichever is longer, and kernels run one after another. MFU,
model FLOPs utilization, is achieved FLOP/s over peak FLOP/s (Chowdhery et al. 2022, arXiv 2204.02311, appendix B).
"""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, Final

from paceline.measure.gpu import find_gpu
from paceline.measure.timer import now_s

ELEMENT_BYTES: Final = {"fp64": 8, "fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2}
"""Bytes per number in memory, by compute format."""
_COPIED_BYTES: Final = 64 * 2**20  # more than a core's caches hold


@dataclass(frozen=True)
class Peak:
    """FLOP/s and bytes/s that `device` could reach in `precision`, with their `source`; `is_measured` if not a
    datasheet's.
    """

    device: str
    precision: str
    flops_per_s: float
    bytes_per_s: float
    source: str
    is_measured: bool = False

    @property
    def element_bytes(self) -> int:
        """Bytes per number in memory."""
        return ELEMENT_BYTES[self.precision]


def peak_of(device: str, precision: str) -> Peak | None:
    """Return the peak of a GPU by torch's name for it, such as `NVIDIA A100-SXM4-80GB`; None if unknown.

    `precision` is as in a recipe; `amp` is bf16 if the table has a rate for it, else fp16; `torch_default` is tf32,
    else fp32.
    """
    gpu = find_gpu(device)
    if gpu is None:
        return None
    kind = _kind(precision)
    if kind == "amp":
        kind = "bf16" if "bf16" in gpu.tflops else "fp16"
    elif kind == "torch_default":
        kind = "tf32" if "tf32" in gpu.tflops else "fp32"
    if kind not in gpu.tflops:
        return None
    return Peak(device, kind, gpu.tflops[kind] * 1e12, gpu.gb_per_s * 1e9, gpu.source)


def measure_peak(precision: str, *, size: int = 1024, repeats: int = 5, now: Callable[[], float] = now_s) -> Peak:
    """Measure the rates of the CPU threads of this process, as a stand-in for the peak.

    FLOP/s are of the fastest of `repeats` products of two `size` x `size` matrices, bytes/s of the fastest copy of 64
    MiB, which is read and written. Takes well under a second in fp32.
    """
    import torch

    assert repeats > 0, repeats
    # A CPU computes tf32 as fp32, and autocasts to bf16.
    kind = {"tf32": "fp32", "torch_default": "fp32", "amp": "bf16"}.get(_kind(precision), _kind(precision))
    dtype = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[kind]
    left, right, product = (torch.ones(size, size, dtype=dtype) for _ in range(3))
    source, target = (torch.ones(_COPIED_BYTES, dtype=torch.uint8) for _ in range(2))
    product_s = _best_time_s(lambda: torch.mm(left, right, out=product), repeats, now)
    copy_s = _best_time_s(lambda: target.copy_(source), repeats, now)
    threads = torch.get_num_threads()
    return Peak(
        device=f"CPU, {threads} thread{'s' if threads > 1 else ''}",
        precision=kind,
        flops_per_s=2 * size**3 / product_s,
        bytes_per_s=2 * _COPIED_BYTES / copy_s,
        source=f"largest matmul rate seen here, {size:,} x {size:,}, and largest copy rate, best of {repeats}",
        is_measured=True,
    )


def _kind(precision: str) -> str:
    return precision if precision == "torch_default" else precision.partition("_")[0]


def _best_time_s(work: Callable[[], object], repeats: int, now: Callable[[], float]) -> float:
    work()  # the first call maps pages and starts threads
    seconds = []
    for _ in range(repeats):
        began_s = now()
        work()
        seconds.append(now() - began_s)
    return min(seconds)


@dataclass(frozen=True)
class Roofline:
    """How close one device came to its peak in training: achieved `flops_per_s`, and `mfu`, their share of the peak.

    The kernels allow `bound_images_per_s`, of which `share` was reached. Both shares may exceed 1 against a measured
    `peak`.
    """

    images_per_s: float
    flops_per_s: float
    mfu: float
    bound_images_per_s: float
    share: float
    peak: Peak

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return asdict(self)


def roofline(kernels: Iterable[tuple[float, float]], images_per_s: float, peak: Peak) -> Roofline:
    """Return how close a device that trains `images_per_s` (its own, not all ranks') comes to `peak`.

    `kernels` are those of one image, forward and backward: (FLOPs, elements moved) of each.
    """
    # Kernels run one after another, each bound by compute or by memory.
    rows = list(kernels)
    flops = sum(flops for flops, _ in rows)
    image_s = sum(
        max(flops / peak.flops_per_s, elements * peak.element_bytes / peak.bytes_per_s) for flops, elements in rows
    )
    assert image_s > 0, "a network that computes and moves nothing has no roofline"
    achieved = flops * images_per_s
    return Roofline(
        images_per_s=images_per_s,
        flops_per_s=achieved,
        mfu=achieved / peak.flops_per_s,
        bound_images_per_s=1 / image_s,
        share=images_per_s * image_s,
        peak=peak,
    )
