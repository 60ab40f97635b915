"""A torch.export program, `.pt2`: the network as a graph that torch alone loads, without paceline.

A `.pt2` is a zip of JSON, raw tensors and one pickle, the inputs it was traced with, which torch.export.load reads
with `weights_only` and, where that fails, without: so a `.pt2` from a stranger can run code. Ours hold no pickle: the
inputs are taken out.
"""

import json
import warnings
from pathlib import Path

import torch
from torch import Tensor

from paceline.inference.classifier import Classifier
from paceline.inference.form import exported_program, metadata, quoted
from paceline.inference.network import Network
from paceline.inference.parity import Answer

EXTRA = "paceline.json"
"""The file in the archive with class names and preprocessing."""


class Program:
    """Write a program, and ask it as torch loads it."""

    suffix = ".pt2"
    library = "pytorch"
    facts = (("torch", torch.__version__),)

    def write(self, network: Network, classifier: Classifier, path: Path) -> None:
        """Write the program, with class names and preprocessing in `paceline.json` beside the graph."""
        program = exported_program(classifier, network)
        program.example_inputs = None
        told = {name: json.loads(value) for name, value in metadata(classifier, network).items()}
        torch.export.save(program, str(path), extra_files={EXTRA: json.dumps(told)})

    def open(self, path: Path) -> Answer:
        """Return the program as a module."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch 2.11 warns of the buffers that it reads itself
            module = torch.export.load(str(path)).module()

        def answer(images: Tensor) -> Tensor:
            logits: Tensor = module(images)
            return logits

        return answer

    def usage(self, name: str) -> str:
        """Return lines that load the program and ask it."""
        return f"""\
import json
import warnings

import torch

extra = {{"{EXTRA}": ""}}
program = torch.export.load({quoted(name)}, extra_files=extra).module()
classes = json.loads(extra["{EXTRA}"])["classes"]
logits = program(images)
print([classes[index] for index in logits.argmax(dim=1)])
"""
