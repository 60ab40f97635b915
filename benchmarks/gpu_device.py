"""What the device of `gpu.py` is: what its vendor says of it, what it reaches here, and what its clocks are."""

import shutil
import subprocess
from collections.abc import Callable
from typing import Any

import torch

from paceline.measure.roofline import Peak, measure_peak, peak_of


def vendor(device: torch.device) -> Peak | None:
    """Return what the vendor says of the device, where it says something."""
    return peak_of(torch.cuda.get_device_name(), "bf16") if device.type == "cuda" else None


def reached(device: torch.device, *, is_tiny: bool = False) -> Peak:
    """Return what a product of two large matrices in bfloat16 and a copy of 2 GiB reach on the device."""
    if device.type == "cpu":
        return measure_peak("bf16", size=64 if is_tiny else 1024)
    size, num_bytes = (256, 2**20) if is_tiny else (8192, 2**30)
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    source = torch.ones(num_bytes, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    product_s, copy_s = best_s(lambda: torch.mm(left, right)), best_s(lambda: target.copy_(source))
    description = f"largest product, {size:,} squared, and largest copy, {num_bytes >> 20:,} MiB, of 20 seen here"
    name = torch.cuda.get_device_name()
    return Peak(name, "bf16", 2 * size**3 / product_s, 2 * num_bytes / copy_s, description, is_measured=True)


def best_s(work: Callable[[], object]) -> float:
    """Return the seconds of the fastest of 20 turns on the GPU, after three that do not count."""
    seconds = []
    for _ in range(23):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3)
    return min(seconds[3:])


def clocks_under_load(device: torch.device, *, is_tiny: bool = False) -> str:
    """Return what `clocks` says while the device multiplies matrices, for about a second."""
    if device.type == "cpu":
        return ""
    size = 256 if is_tiny else 8192
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    for _ in range(600):
        torch.mm(left, right)
    description = clocks(device)
    torch.cuda.synchronize(device)
    return description


def as_row(peak: Peak | None) -> dict[str, Any] | None:
    """Return a peak in TFLOP/s and TB/s."""
    if peak is None:
        return None
    rounded = {"tflops": round(peak.flops_per_s / 1e12, 3), "tb_per_s": round(peak.bytes_per_s / 1e12, 4)}
    return {"device": peak.device, **rounded, "source": peak.source}


def clocks(device: torch.device) -> str:
    """Return what nvidia-smi says of clocks, power and temperature now; nothing where it is not, or says nothing."""
    program = shutil.which("nvidia-smi")
    if device.type != "cuda" or program is None:
        return ""
    args = "clocks.sm,clocks.mem,clocks.max.sm,power.draw,power.limit,temperature.gpu"
    command = [program, f"--query-gpu={args}", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
