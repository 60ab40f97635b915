"""Describe the machine for `machine.json`: no host name, no user, no paths.

As a program it prints JSON, for callers that must not load a GPU driver themselves.
"""

import json
import os
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

PROC: Final = Path("/proc")

# Packages of the extra `images`; the pixels that they decode may depend on their version.
_IMAGE_PACKAGES = ("imagecodecs", "pillow-heif", "tifffile")


def describe_machine(proc: Path = PROC) -> dict[str, Any]:
    """Return versions, the CPU and what this process may use of it, and the GPUs that torch sees.

    `threads` are torch's compute threads, `memory_bytes` the machine's memory, `paceline_sha256` a digest of paceline's
    files. A value that cannot be read is "". `proc` is the kernel's proc file system.
    """
    import torch

    from paceline import __version__
    from paceline.core.source_digest import source_digest

    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "paceline": __version__,
        "paceline_sha256": source_digest(),
        "torch": str(torch.__version__),
        "torchvision": _version("torchvision"),
        "numpy": _version("numpy"),
        "pillow": _version("pillow"),
        **{name: found for name in _IMAGE_PACKAGES if (found := _version(name))},
        "cpu": _find_in_file(r"^model name\s*:\s*(.+)$", proc / "cpuinfo") or platform.machine(),
        "logical_cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "threads": torch.get_num_threads(),
        **(_describe_cuda(proc) if torch.cuda.is_available() else {}),
    }


def _describe_cuda(proc: Path) -> dict[str, Any]:
    import torch

    has_nccl = torch.distributed.is_nccl_available()
    nccl = torch.cuda.nccl.version() if has_nccl else ()  # type: ignore[no-untyped-call]
    return {
        "cuda_devices": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "cuda": str(torch.version.cuda),
        "driver": read_driver_version(proc),
        "nccl": ".".join(str(part) for part in nccl),
    }


def read_driver_version(proc: Path = PROC) -> str:
    """Return the version of the NVIDIA driver; "" without one."""
    return _find_in_file(r"^NVRM version:.*?\s(\d+\.\d+(?:\.\d+)?)\s", proc / "driver" / "nvidia" / "version")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _find_in_file(pattern: str, path: Path) -> str:
    try:
        match = re.search(pattern, path.read_text(), re.MULTILINE)
    except OSError:
        return ""
    return match[1].strip() if match else ""


if __name__ == "__main__":
    print(json.dumps(describe_machine()))
