"""Which convolutions corrupt the heap in channels_last on a CPU? Torch alone, without paceline.

Each case is trained for a few steps in a process of its own, which crashes or not:

    python benchmarks/channels_last.py
    ONEDNN_MAX_CPU_ISA=AVX2 python benchmarks/channels_last.py

oneDNN computes the filters' gradient of a strided 1x1 convolution from a copy of the images. It books `inputs` numbers
per pixel for the copy and steps through it by 16 (AVX-512) or 8 (AVX2) where there are fewer inputs
(https://github.com/uxlfoundation/oneDNN/issues/6035). A small batch may survive: then the writes end in memory that
nobody uses at the time. Once no case crashes on any processor, `find_overflowing_convolutions` in
`paceline.models.validate` and the refusals that rest on it can go.
"""

import argparse
import subprocess
import sys
from dataclasses import dataclass

import torch
from torch.nn import functional

STEPS = 20
LIMIT_S = 300


@dataclass(frozen=True)
class Case:
    """A convolution and what is done with it."""

    inputs: int
    outputs: int = 8
    kernel: int = 1
    stride: int = 2
    size: int = 64
    batch: int = 16
    layout: str = "channels_last"
    dtype: str = "float32"
    gradient: str = "filters"

    def arguments(self) -> list[str]:
        """Return the fields as text, in order."""
        return [str(value) for value in vars(self).values()]


CASES = (
    *(Case(inputs) for inputs in (1, 2, 3, 6, 7, 8, 12, 15, 16, 17, 24)),
    *(Case(6, outputs) for outputs in (1, 16, 24, 32)),
    *(Case(6, kernel=kernel) for kernel in (2, 3)),
    *(Case(6, stride=stride) for stride in (1, 4)),
    *(Case(6, size=size) for size in (16, 32, 48, 65, 128)),
    Case(6, batch=1),
    Case(6, layout="contiguous"),
    Case(6, dtype="bfloat16"),
    Case(6, gradient="images"),
    Case(6, gradient="none"),
)


def train(case: Case) -> None:
    """Run `STEPS` forward and backward passes of `case` on one thread."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layout = getattr(torch, "channels_last" if case.layout == "channels_last" else "contiguous_format")
    dtype = getattr(torch, case.dtype)
    for _ in range(STEPS):
        images = torch.randn(case.batch, case.inputs, case.size, case.size).to(dtype).contiguous(memory_format=layout)
        filters = torch.randn(case.outputs, case.inputs, case.kernel, case.kernel).to(dtype)
        filters = filters.contiguous(memory_format=layout).requires_grad_(case.gradient == "filters")
        images.requires_grad_(case.gradient == "images")
        output = functional.conv2d(images, filters, stride=case.stride, padding=case.kernel // 2)
        if case.gradient != "none":
            output.backward(torch.randn_like(output))


def main() -> None:
    """Train every case, or the one whose fields are given, and print which crash."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("fields", nargs="*", help="of one case, to run in this process")
    fields = parser.parse_args().fields
    if fields:
        kinds = [type(value) for value in vars(Case(1)).values()]
        train(Case(*(kind(word) for kind, word in zip(kinds, fields, strict=True))))
        return
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}")
    print("inputs outputs kernel stride size batch layout dtype gradient: exit code")
    for case in CASES:
        command = [sys.executable, __file__, *case.arguments()]
        try:
            code = subprocess.run(command, stderr=subprocess.DEVNULL, check=False, timeout=LIMIT_S).returncode
            ended = f"{code} CRASHED" if code < 0 else str(code)
        except subprocess.TimeoutExpired:
            ended = "HANGS"  # a corrupted heap may also end in a lock that nobody lets go of
        print(f"{' '.join(case.arguments())}: {ended}", flush=True)


if __name__ == "__main__":
    main()
