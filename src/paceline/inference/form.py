"""The forms in which a classifier leaves paceline, as one protocol, and what a file says of itself."""

import json
from pathlib import Path
from typing import Protocol

import torch

import paceline
from paceline.core.class_table import printable
from paceline.core.errors import PacelineError
from paceline.inference.classifier import Classifier
from paceline.inference.network import Network
from paceline.inference.parity import Answer

OUTPUT = "logits"


class Form(Protocol):
    """A kind of file, or folder, that holds a classifier."""

    @property
    def suffix(self) -> str:
        """How its name ends; empty for a folder."""
        ...

    @property
    def library(self) -> str:
        """The library that the Hugging Face Hub is told loads it."""
        ...

    @property
    def facts(self) -> tuple[tuple[str, str], ...]:
        """What there is to tell of every file of this form: (name, text)."""
        ...

    def write(self, network: Network, classifier: Classifier, path: Path) -> None:
        """Write `network`, which is that of `classifier`, to `path`. Raise `PacelineError` for one that cannot be."""
        ...

    def open(self, path: Path) -> Answer:
        """Return what answers from the file at `path`, read as its users read it."""
        ...

    def usage(self, name: str) -> str:
        """Return lines of Python that load the file called `name` and ask it for logits."""
        ...


def example(classifier: Classifier, network: Network) -> torch.Tensor:
    """Return two black images as the network takes them: of one, torch.export would make a batch that is always one."""
    size, channels = classifier.preprocessing.image_size, classifier.preprocessing.channels
    return network.inputs(torch.zeros(2, channels, size, size, dtype=torch.uint8))


def exported_program(classifier: Classifier, network: Network) -> torch.export.ExportedProgram:
    """Return `network` as a graph for a batch of any size, without the paths of the sources it was traced from.

    Raise `PacelineError` for a network of which there is none.
    """
    try:
        batch = torch.export.Dim("batch", min=1)
        inputs = (example(classifier, network),)
        program = torch.export.export(network.module, inputs, dynamic_shapes={"images": {0: batch}})
    except Exception as error:  # whatever a network does in Python makes the tracer raise
        first = " ".join(str(error).split())[:150]
        raise PacelineError(
            f"model.name: {classifier.recipe.model.name} cannot be traced for a batch of any size: {first} "
            "(use --format safetensors)"
        ) from error
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)
    return program


def quoted(text: str) -> str:
    """Return `text` as Python writes it between double quotes, whatever is in it."""
    return json.dumps(text, ensure_ascii=not text.isprintable())


def metadata(classifier: Classifier, network: Network) -> dict[str, str]:
    """Return what a file says of itself, as JSON by name: `classes`, `preprocessing`, and what `paceline` knows of it.

    The classes are in the order of the logits. In `preprocessing`, `resize` is what the short side is scaled to before
    the centre of `image_size` pixels squared is cut out, or null where the whole image is; `mean` and `std` are of
    pixels in [0, 1], and `input` says what is left to do.
    """
    preprocessing = classifier.preprocessing
    told = {
        "classes": [printable(each) for each in classifier.classes],
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
    return {name: json.dumps(value) for name, value in told.items()}
