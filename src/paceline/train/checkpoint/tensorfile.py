"""Write a file with its SHA-256 in one pass, onto the disk; tensors become a safetensors file.

The library reads these files, but does not write them: as late as 0.5 its `save_file` holds the interpreter's lock from
beginning to end, so that training stands still in its own thread too, and a digest would read every file once more.
Measured by `benchmarks/checkpoint.py`, whose last lines say how long another thread has to wait for either.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from paceline.core.errors import CheckpointError
from paceline.core.files import open_to_read, open_to_write

CHUNK_BYTES = 1 << 20
"""Hashed and written at a time, by calls that let other threads run."""

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_file(path: Path, pieces: Iterable[bytes | memoryview]) -> str:
    """Write a new file and return its SHA-256 as hex digits; it is on the disk by then. Raise `OSError` as open does.

    A file or link that is there already is never written to.
    """
    digest = hashlib.sha256()
    with open_to_write(path, "xb") as file:
        for piece in pieces:
            file.write(piece)
            digest.update(piece)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def tensor_pieces(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a safetensors file of `tensors`, which may be of any device and layout.

    Eight bytes of length, a JSON header of types, shapes and offsets, and the numbers, row by row, little-endian; the
    widest types come first, so that all are aligned (https://github.com/safetensors/safetensors#format).
    """
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header, end = {}, 0
    for name, tensor in ordered:
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": _dtype(name, tensor), "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for _, tensor in ordered:
        content = tensor_bytes(tensor)
        for start in range(0, len(content), CHUNK_BYTES):
            yield content[start : start + CHUNK_BYTES]


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of `tensor`, row by row; those of a contiguous one on the CPU are its own."""
    whole = tensor.detach().to("cpu").contiguous()
    return whole.reshape(-1).view(torch.uint8).numpy().data


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a plain file as hex digits. Raise `OSError`, also for a link, a pipe or a device."""
    with open_to_read(path, follow_links=False) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _dtype(name: str, tensor: Tensor) -> str:
    try:
        return _DTYPES[tensor.dtype]
    except KeyError:
        raise CheckpointError(f"{name}: {tensor.dtype} cannot be saved (convert it to {', '.join(_known())})") from None


def _known() -> list[str]:
    return [str(dtype).removeprefix("torch.") for dtype in _DTYPES]
