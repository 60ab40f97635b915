"""Peak FLOP/s and memory bandwidth of devices, and the roofline of a step.

The roofline (Williams, Waterman and Patterson 2009, doi 10.1145/1498765.1498785) is taken per kernel: a kernel takes as
long as its FLOPs at peak or its bytes at full bandwidth, whichever is longer, and kernels run one after another. MFU,
model FLOPs utilization, is achieved FLOP/s over peak FLOP/s (Chowdhery et al. 2022, arXiv 2204.02311, appendix B).
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, Final

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


@dataclass(frozen=True)
class _Gpu:
    """A table row: a pattern of torch's device name, GB/s, the vendor's document, and TFLOP/s by precision."""

    pattern: str
    gb_per_s: float
    source: str
    tflops: dict[str, float]


def _tflops(**by_precision: float) -> dict[str, float]:
    return by_precision


_A100: Final = _tflops(fp64=19.5, fp32=19.5, tf32=156, fp16=312, bf16=312)
_HOPPER_SXM: Final = _tflops(fp64=67, fp32=67, tf32=494.5, fp16=989.5, bf16=989.5)  # half of "with sparsity"
_HOPPER_NVL: Final = _tflops(fp64=60, fp32=60, tf32=417.5, fp16=835.5, bf16=835.5)
_P100: Final = "NVIDIA Tesla P100 datasheet"
_V100: Final = "NVIDIA V100 datasheet, January 2020"
_GA102: Final = "NVIDIA Ampere GA102 GPU Architecture whitepaper, appendix A"
_ADA: Final = "NVIDIA Ada GPU Architecture whitepaper, appendix A"

_GPUS: Final = (
    _Gpu(r"P100-SXM2", 732, _P100, _tflops(fp64=5.3, fp32=10.6, fp16=21.2)),
    _Gpu(r"P100-PCIE-16GB", 732, _P100, _tflops(fp64=4.7, fp32=9.3, fp16=18.7)),
    _Gpu(r"V100-SXM2", 900, _V100, _tflops(fp64=7.8, fp32=15.7, fp16=125)),
    _Gpu(r"V100-PCIE", 900, _V100, _tflops(fp64=7, fp32=14, fp16=112)),
    _Gpu(r"V100S-PCIE", 1134, _V100, _tflops(fp64=8.2, fp32=16.4, fp16=130)),
    _Gpu(r"\bT4\b", 320, "NVIDIA T4 product brief PB-09256-001", _tflops(fp32=8.1, fp16=65)),
    _Gpu(r"A100-(SXM4|PCIE)-40GB", 1555, "NVIDIA A100 datasheet, 40 GB", _A100),
    _Gpu(r"A100-SXM4-80GB", 2039, "NVIDIA A100 datasheet, 80 GB", _A100),
    _Gpu(r"A100 80GB PCIe", 1935, "NVIDIA A100 datasheet, 80 GB", _A100),
    _Gpu(r"\bA10$", 600, "NVIDIA A10 datasheet", _tflops(fp32=31.2, tf32=62.5, fp16=125, bf16=125)),
    _Gpu(r"\bA30$", 933, "NVIDIA A30 datasheet", _tflops(fp64=10.3, fp32=10.3, tf32=82, fp16=165, bf16=165)),
    _Gpu(r"\bA40$", 696, "NVIDIA A40 datasheet", _tflops(fp32=37.4, tf32=74.8, fp16=149.7, bf16=149.7)),
    _Gpu(r"RTX A6000$", 768, _GA102, _tflops(fp32=38.7, tf32=77.4, fp16=154.8, bf16=154.8)),
    _Gpu(r"RTX 3090$", 936, _GA102, _tflops(fp32=35.6, tf32=35.6, fp16=71, bf16=71)),
    _Gpu(r"RTX 4090$", 1008, _ADA, _tflops(fp32=82.6, tf32=82.6, fp16=165.2, bf16=165.2)),
    _Gpu(r"\bL4$", 300, "NVIDIA L4 datasheet", _tflops(fp32=30.3, tf32=60, fp16=121, bf16=121)),
    _Gpu(r"\bL40S$", 864, "NVIDIA L40S datasheet", _tflops(fp32=91.6, tf32=183, fp16=362.05, bf16=362.05)),
    _Gpu(r"H100 PCIe", 2000, "NVIDIA H100 datasheet", _tflops(fp64=51, fp32=51, tf32=378, fp16=756.5, bf16=756.5)),
    _Gpu(r"H100 80GB HBM3", 3350, "NVIDIA H100 datasheet", _HOPPER_SXM),
    _Gpu(r"H100 NVL", 3900, "NVIDIA H100 datasheet", _HOPPER_NVL),
    _Gpu(r"\bH200$", 4800, "NVIDIA H200 datasheet", _HOPPER_SXM),
    _Gpu(r"H200 NVL", 4800, "NVIDIA H200 datasheet", _HOPPER_NVL),
    _Gpu(r"\bB200$", 8000, "NVIDIA Blackwell Architecture technical brief", _tflops(tf32=1100, fp16=2250, bf16=2250)),
)


def peak_of(device: str, precision: str) -> Peak | None:
    """Return the peak of a GPU by torch's name for it, such as `NVIDIA A100-SXM4-80GB`; None if unknown.

    `precision` is as in a recipe; `amp` is bf16 if the table has a rate for it, else fp16; `torch_default` is tf32,
    else fp32.
    """
    kind = _kind(precision)
    # A MIG slice has a fraction of the GPU that its name does not state.
    if "MIG" in device:
        return None
    for gpu in _GPUS:
        if re.search(gpu.pattern, device):
            if kind == "amp":
                kind = "bf16" if "bf16" in gpu.tflops else "fp16"
            elif kind == "torch_default":
                kind = "tf32" if "tf32" in gpu.tflops else "fp32"
            if kind not in gpu.tflops:
                return None
            return Peak(device, kind, gpu.tflops[kind] * 1e12, gpu.gb_per_s * 1e9, gpu.source)
    return None


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
