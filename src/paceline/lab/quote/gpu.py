"""The specification of a GPU to quote for: one of the package's, or the user's own file."""

from pathlib import Path
from typing import Final

from paceline.core.errors import RecipeError, suggest_similar
from paceline.lab.predict.network import INTRA_NODE_LINKS
from paceline.measure.gpu import GPUS, NUMBER_FORMATS, Gpu, list_gpu_names
from paceline.recipe.errors import validate_document
from paceline.recipe.yaml import read_yaml_file

_SUFFIXES: Final = (".yaml", ".yml")


def read_gpu(name: str) -> Gpu:
    """Return the GPU of that name, or of a YAML file. Raise `RecipeError` if there is none, or it is invalid."""
    path = Path(name) if name.endswith(_SUFFIXES) else GPUS / f"{name.lower()}.yaml"
    if not name.endswith(_SUFFIXES) and name.lower() not in list_gpu_names():
        known = list_gpu_names()
        fix = suggest_similar(name, known) or f" (use one of {', '.join(known)}, or a .yaml file)"
        raise RecipeError(f"--gpu: {name!r} is unknown{fix}")
    if not path.is_file():
        raise RecipeError(f"--gpu: {path}: is not a file (copy one of {GPUS})")
    document = read_yaml_file(path)
    gpu = validate_document(document, path, Gpu)
    unknown = next((each for each in gpu.tflops if each not in NUMBER_FORMATS), None)
    if unknown is not None:
        line = document.find_line(f"tflops.{unknown}")
        fix = suggest_similar(unknown, NUMBER_FORMATS) or f" (use one of {', '.join(NUMBER_FORMATS)})"
        raise RecipeError(f"{path}:{line}: tflops.{unknown}: is not a number format{fix}")
    if "fp32" not in gpu.tflops:
        line = document.find_line("tflops")
        raise RecipeError(f"{path}:{line}: tflops: {gpu.tflops} has no fp32 (add the TFLOP/s of fp32)")
    for number_format, rate in gpu.tflops.items():
        if not rate > 0:
            line = document.find_line(f"tflops.{number_format}")
            raise RecipeError(f"{path}:{line}: tflops.{number_format}: {rate} is not above 0 (set the TFLOP/s)")
    if gpu.link not in INTRA_NODE_LINKS:
        line = document.find_line("link")
        raise RecipeError(f"{path}:{line}: link: {gpu.link!r} is unknown (use one of {', '.join(INTRA_NODE_LINKS)})")
    return gpu
