"""The protocol of export formats, and the metadata of exported files."""

import json
from pathlib import Path
from typing import Protocol

import torch

import paceline
from paceline.core.class_table import printable_class_name
from paceline.core.errors import PacelineError
from paceline.inference.classifier import Classifier
from paceline.inference.network import ExportModel
from paceline.inference.parity import LogitsFunction

OUTPUT_NAME = "logits"


class ExportFormat(Protocol):
    """A kind of exported file or folder."""

    @property
    def suffix(self) -> str:
        """Return the file suffix; empty for a folder."""
        ...

    @property
    def library(self) -> str:
        """Return the library name for the Hugging Face Hub."""
        ...

    @property
    def facts(self) -> tuple[tuple[str, str], ...]:
        """Return facts about every file of this format as (name, text)."""
        ...

    def write(self, network: ExportModel, classifier: Classifier, path: Path) -> None:
        """Write `network`, the export model of `classifier`, to `path`. Raise `PacelineError` if that is impossible."""
        ...

    def open(self, path: Path) -> LogitsFunction:
        """Return a function that computes logits with the file at `path`, loaded as users load it."""
        ...

    def usage(self, name: str) -> str:
        """Return Python code that loads the file `name` and computes logits."""
        ...


def example_inputs(classifier: Classifier, network: ExportModel) -> torch.Tensor:
    """Return two black images as the model's input; with one, torch.export would specialize the batch size to 1."""
    size, channels = classifier.preprocessing.image_size, classifier.preprocessing.channels
    return network.prepare_inputs(torch.zeros(2, channels, size, size, dtype=torch.uint8))


def trace_program(classifier: Classifier, network: ExportModel) -> torch.export.ExportedProgram:
    """Return `network` as a graph for any batch size, without source paths.

    Raise `PacelineError` if it cannot be traced.
    """
    try:
        batch = torch.export.Dim("batch", min=1)
        inputs = (example_inputs(classifier, network),)
        program = torch.export.export(network.module, inputs, dynamic_shapes={"images": {0: batch}})
    except Exception as error:  # the tracer raises anything that the model's Python code does
        first = " ".join(str(error).split())[:150]
        raise PacelineError(
            f"model.name: {classifier.recipe.model.name} cannot be traced for a batch of any size: {first} "
            "(use --format safetensors)"
        ) from error
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)
    return program


def quote_python(text: str) -> str:
    """Return `text` as a Python string literal in double quotes."""
    return json.dumps(text, ensure_ascii=not text.isprintable())


def export_metadata(classifier: Classifier, network: ExportModel) -> dict[str, str]:
    """Return the metadata of a file as JSON by name: `classes` in the order of the logits, `preprocessing`, `paceline`.

    In `preprocessing`, `resize` is the short side before the center crop to `image_size` pixels squared (null without
    crop), `mean` and `std` are of pixels in [0, 1], and `input` is the layout that the model expects.
    """
    preprocessing = classifier.preprocessing
    values = {
        "classes": [printable_class_name(each) for each in classifier.classes],
        "preprocessing": {
            "image_size": preprocessing.image_size,
            "resize": preprocessing.resize,
            "interpolation": "bilinear, antialiased",
            "channels": preprocessing.channels,
            "mean": list(preprocessing.mean),
            "std": list(preprocessing.std),
            "input": network.layout,
        },
        "paceline": {
            "version": paceline.__version__,
            "recipe": classifier.recipe.hash,
            "model": classifier.recipe.model.name,
            "checkpoint": classifier.checkpoint.name,
        },
    }
    return {name: json.dumps(value) for name, value in values.items()}
