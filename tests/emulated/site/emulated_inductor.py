"""Let torch.compile generate Inductor's code on an emulated GPU, and skip Triton's kernels.

Memory is allocated, reused and freed as by compiled code on a GPU. Outputs of the skipped kernels are zeros.
"""

import re
from typing import Any

import emulated_kernels
import torch
import torch._inductor.config
import torch.utils._triton
import triton
from torch._inductor.async_compile import AsyncCompile
from triton.backends.compiler import GPUTarget

_SHARED_MEMORY = 232_448
"""Bytes per block of an H100."""
_HEADER = re.compile(r"^def triton_\w+\(([^)]*)\)", re.MULTILINE)


class _Zeros:
    def __init__(self, source: str) -> None:
        header = _HEADER.search(source)
        assert header is not None
        self._names = [name.strip() for name in header[1].split(",")]

    def run(self, *args: Any, **options: Any) -> None:
        """Write zeros to the outputs."""
        for name, value in zip(self._names, args, strict=False):
            if name.startswith(("out_ptr", "in_out_ptr")):
                value.zero_()


class _Driver:
    """What Triton asks the driver of its device."""

    class utils:  # noqa: N801
        @staticmethod
        def get_device_properties(device: int) -> dict[str, int]:
            return {"max_shared_mem": _SHARED_MEMORY, "multiprocessor_count": 132, "warpSize": 32}

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)


def install() -> None:
    """Let `torch.compile` generate code in this process."""
    torch.compile = emulated_kernels.real_compile
    torch.backends.cudnn.enabled = True  # which decides on the memory formats of convolutions
    torch._inductor.config.compile_threads = 1
    torch._inductor.config.size_asserts = False  # the emulated convolutions choose formats of their own
    torch.utils._triton.has_triton = torch.utils._triton.has_triton_package = lambda *args, **options: True
    triton.runtime.driver.set_active(_Driver())
    AsyncCompile.triton = lambda self, name, source, *args, **options: _Zeros(source)
    AsyncCompile.wait = lambda *args: None
