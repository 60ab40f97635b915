"""Peak memory of this process."""

import resource

import torch

from paceline.core.results import MemoryResult


def peak_memory(device: torch.device) -> MemoryResult:
    """Return the peak memory of this process in bytes: its resident set, and what torch reserved on a GPU."""
    host_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # kilobytes on Linux (getrusage(2))
    device_bytes = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None
    return MemoryResult(host_bytes=host_bytes, device_bytes=device_bytes)
