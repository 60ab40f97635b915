"""Specifications of GPUs from their datasheets: a YAML file per GPU in `gpus`."""

import re
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Final

from pydantic import Field

from paceline.recipe.schema.base import Section
from paceline.recipe.yaml import read_yaml_file

GPUS: Final = Path(str(resources.files("paceline.measure") / "gpus"))
NUMBER_FORMATS: Final = ("fp64", "fp32", "tf32", "fp16", "bf16")


class Gpu(Section):
    """A GPU as its datasheet describes it."""

    name: str = Field(min_length=1, max_length=80)
    """Torch's name for it."""
    pattern: str = ""
    """Regular expression that finds torch's names for it; without one, no device is taken for it."""
    source: str
    """Document that states the numbers."""
    date: str
    """Year, and month if known, of the document."""
    tflops: dict[str, float]
    """Peak TFLOP/s without sparsity by number format: `fp32`, and `fp64`, `tf32`, `fp16` and `bf16` if it has them."""
    gb_per_s: float = Field(gt=0)
    """Bandwidth of its memory."""
    memory_gb: float = Field(gt=0)
    """Size of its memory that programs can use, as torch reports it, in units of 2^30 bytes."""
    multiprocessors: int = Field(gt=0)
    """Number of streaming multiprocessors."""
    boost_ghz: float = Field(gt=0)
    """Their boost clock."""
    launch_us: float = Field(gt=0)
    """Time of an empty kernel in microseconds."""
    link: str = "pcie4"
    """Link between GPUs of a node: a name that `--network` knows."""

    def flops_per_s(self, precision: str) -> float:
        """Return the peak in a number format; that of fp32 if the GPU does not have the format."""
        return self.tflops.get(precision, self.tflops["fp32"]) * 1e12


def list_gpu_names() -> list[str]:
    """Return the names of the GPUs of the package."""
    return sorted(path.stem for path in GPUS.glob("*.yaml"))


def find_gpu(device: str) -> Gpu | None:
    """Return the GPU by torch's name for it, such as `NVIDIA A100-SXM4-80GB`; None if it is not one of the package."""
    # A MIG slice has a fraction of the GPU that its name does not state.
    if "MIG" in device:
        return None
    return next((gpu for gpu in _read_gpus() if gpu.pattern and re.search(gpu.pattern, device)), None)


@cache
def _read_gpus() -> tuple[Gpu, ...]:
    return tuple(Gpu.model_validate(read_yaml_file(GPUS / f"{name}.yaml").values) for name in list_gpu_names())
