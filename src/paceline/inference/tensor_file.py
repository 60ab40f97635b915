"""Read and write safetensors files with metadata, atomically and without following links to devices."""

import json
from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
from torch import Tensor

from paceline.core.files import read_bytes, replace_file


def write_tensors(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, str]) -> None:
    """Write a safetensors file with `facts` as its metadata, atomically. Raise `OSError`."""
    whole = {name: each.contiguous() for name, each in tensors.items()}
    with replace_file(path) as file:
        file.write(safetensors.torch.save(whole, dict(facts)))


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and the metadata of a safetensors file. Raise `OSError`, and `ValueError` if it is damaged."""
    content = read_bytes(path)
    try:
        tensors = safetensors.torch.load(content)
    except safetensors.SafetensorError as error:
        raise ValueError(str(error)) from None
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return tensors, header.get("__metadata__", {})
