"""Specifications of GPUs: a YAML file per GPU, of the package or the user's own."""

from importlib import resources
from pathlib import Path
from typing import Final, TypeVar

from pydantic import Field, ValidationError

from paceline.core.errors import RecipeError, suggest_similar
from paceline.lab.predict.network import INTRA_NODE_LINKS
from paceline.recipe.errors import explain
from paceline.recipe.schema.base import Section
from paceline.recipe.yaml import YamlDocument, read_yaml_file

GPUS: Final = Path(str(resources.files("paceline.lab") / "quote" / "gpus"))
_SUFFIXES: Final = (".yaml", ".yml")
T = TypeVar("T", bound=Section)


class Gpu(Section):
    """A GPU as its datasheet describes it."""

    name: str = Field(min_length=1, max_length=80)
    """Torch's name for it."""
    source: str
    """Document that states the numbers."""
    date: str
    """Year, and month if known, of the document."""
    tflops: dict[str, float]
    """Peak TFLOP/s without sparsity by number format: `fp32`, and `tf32`, `fp16` and `bf16` if it has them."""
    gb_per_s: float = Field(gt=0)
    """Bandwidth of its memory."""
    memory_gb: float = Field(gt=0)
    """Size of its memory that programs can use, in units of 2^30 bytes."""
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


def read_checked(path: Path, model: type[T]) -> tuple[T, YamlDocument]:
    """Read a YAML file as `model`. Raise `RecipeError` with the line of a wrong value."""
    document = read_yaml_file(path)
    try:
        return model.model_validate(document.values), document
    except ValidationError as error:
        field, message = explain(error, document.values, model)
        raise RecipeError(f"{path}:{document.find_line(field)}: {field}: {message}") from None


def read_gpu(name: str) -> Gpu:
    """Return the GPU of that name, or of a YAML file. Raise `RecipeError` if there is none, or it is invalid."""
    path = Path(name) if name.endswith(_SUFFIXES) else GPUS / f"{name.lower()}.yaml"
    if not name.endswith(_SUFFIXES) and name.lower() not in list_gpu_names():
        known = list_gpu_names()
        fix = suggest_similar(name, known) or f" (use one of {', '.join(known)}, or a .yaml file)"
        raise RecipeError(f"--gpu: {name!r} is unknown{fix}")
    if not path.is_file():
        raise RecipeError(f"--gpu: {path}: is not a file (copy one of {GPUS})")
    gpu, document = read_checked(path, Gpu)
    if "fp32" not in gpu.tflops or not all(rate > 0 for rate in gpu.tflops.values()):
        raise RecipeError(f"{path}: tflops: {gpu.tflops} has no rate for fp32, or one that is not above 0 (set both)")
    if gpu.link not in INTRA_NODE_LINKS:
        line = document.find_line("link")
        raise RecipeError(f"{path}:{line}: link: {gpu.link!r} is unknown (use one of {', '.join(INTRA_NODE_LINKS)})")
    return gpu
