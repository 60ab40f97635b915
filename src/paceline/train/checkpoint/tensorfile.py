"""Write and hash a file in one pass, and serialize tensors to the safetensors format.

safetensors reads these files, but its `save_file` (as of 0.5) holds the GIL throughout, which stops training even in
another thread, and hashing would need a second pass. Measured by `benchmarks/checkpoint.py`.
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
"""Bytes that are hashed and written at a time; these calls release the GIL."""

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


def write_hashed_file(path: Path, pieces: Iterable[bytes | memoryview]) -> str:
    """Write and sync a new file, and return its SHA-256 in hex. Raise `OSError`, also if the file exists."""
    digest = hashlib.sha256()
    with open_to_write(path, "xb") as file:
        for piece in pieces:
            file.write(piece)
            digest.update(piece)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def safetensors_chunks(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a safetensors file of `tensors`, on any device and in any layout.

    Eight bytes of length, a JSON header of dtypes, shapes and offsets, and the row-major little-endian data; widest
    dtypes first, for alignment (https://github.com/safetensors/safetensors#format).
    """
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header, end = {}, 0
    for name, tensor in ordered:
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": _dtype_name(name, tensor), "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for _, tensor in ordered:
        content = tensor_bytes(tensor)
        for start in range(0, len(content), CHUNK_BYTES):
            yield content[start : start + CHUNK_BYTES]


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the row-major bytes of `tensor`, without a copy if it is contiguous and on the CPU."""
    contiguous = tensor.detach().to("cpu").contiguous()
    return contiguous.reshape(-1).view(torch.uint8).numpy().data


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a regular file in hex. Raise `OSError`, also for links, pipes and devices."""
    with open_to_read(path, follow_links=False) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _dtype_name(name: str, tensor: Tensor) -> str:
    try:
        return _DTYPES[tensor.dtype]
    except KeyError:
        raise CheckpointError(
            f"{name}: {tensor.dtype} cannot be saved (convert it to {', '.join(_known_dtypes())})"
        ) from None


def _known_dtypes() -> list[str]:
    return [str(dtype).removeprefix("torch.") for dtype in _DTYPES]
