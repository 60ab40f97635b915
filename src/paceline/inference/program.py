"""Export a torch.export program, `.pt2`: a graph that torch loads without paceline."""

import json
import warnings
from pathlib import Path

import torch
from torch import Tensor

from paceline.inference.classifier import Classifier
from paceline.inference.form import export_metadata, quote_python, trace_program
from paceline.inference.network import ExportModel
from paceline.inference.parity import LogitsFunction

# File in the archive with class names and preprocessing.
METADATA_FILE = "paceline.json"


class TorchExportFormat:
    """Write a program, and load it with torch."""

    suffix = ".pt2"
    library = "pytorch"
    facts = (("torch", torch.__version__),)

    def write(self, network: ExportModel, classifier: Classifier, path: Path) -> None:
        """Write the program, with class names and preprocessing in `paceline.json` beside the graph."""
        program = trace_program(classifier, network)
        # Example inputs would be the only pickle in the archive. torch.export.load reads it with weights_only, and
        # without if that fails, so that an untrusted .pt2 can run code.
        program.example_inputs = None
        values = {name: json.loads(value) for name, value in export_metadata(classifier, network).items()}
        torch.export.save(program, str(path), extra_files={METADATA_FILE: json.dumps(values)})

    def open(self, path: Path) -> LogitsFunction:
        """Return the program as a module."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch 2.11 warns about buffers that it reads itself
            module = torch.export.load(str(path)).module()

        def answer(images: Tensor) -> Tensor:
            logits: Tensor = module(images)
            return logits

        return answer

    def usage(self, name: str) -> str:
        """Return code that loads the program and computes logits."""
        return f"""\
import json
import warnings

import torch

extra = {{"{METADATA_FILE}": ""}}
program = torch.export.load({quote_python(name)}, extra_files=extra).module()
classes = json.loads(extra["{METADATA_FILE}"])["classes"]
logits = program(images)
print([classes[index] for index in logits.argmax(dim=1)])
"""
