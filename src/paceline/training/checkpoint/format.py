"""Checkpoint file format: safetensors for tensors, JSON for the rest, and a manifest with the SHA-256 of each file.

Nothing is unpickled, so a checkpoint cannot run code. Tensors are unsharded, so the files are the same for every
strategy and world size; state of individual ranks has one row per rank.
"""

import errno
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from paceline.core.errors import CheckpointError
from paceline.core.files import open_to_read, open_to_write
from paceline.core.json_file import MAX_BYTES, parse_json

FORMAT_VERSION = 2
MODEL, OPTIMIZER, AVERAGE = "model", "optimizer", "average"
_SUFFIX, _STATE, _MANIFEST = ".safetensors", "state.json", "manifest.json"
_REQUIRED_FILES = {MODEL + _SUFFIX, OPTIMIZER + _SUFFIX, _STATE}
_TENSOR_FILE = re.compile(r"[a-z_]+\.safetensors")
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
        os.fsync(file.fileno())  # before the rename of the folder, which could reach the disk first
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


@dataclass(frozen=True)
class Snapshot:
    """Contents of a checkpoint: unsharded tensors by part and name, and plain values for JSON.

    The parts `model` and `optimizer` always exist. `eval_groups` are the parts that evaluation needs.
    """

    tensors: Mapping[str, Mapping[str, Tensor]]
    values: Mapping[str, Any]
    eval_groups: frozenset[str] = frozenset({MODEL, AVERAGE})

    def weights_only(self) -> "Snapshot":
        """Return the parts that evaluation needs."""
        tensors = {name: part for name, part in self.tensors.items() if name in self.eval_groups}
        return Snapshot({OPTIMIZER: {}, **tensors}, {**self.values, "weights_alone": True}, self.eval_groups)

    @property
    def num_bytes(self) -> int:
        """Size of the tensors in bytes: all but some thousand bytes of a checkpoint."""
        return sum(tensor.nbytes for part in self.tensors.values() for tensor in part.values())


def write_checkpoint(folder: Path, snapshot: Snapshot) -> None:
    """Write and sync a checkpoint into a new, empty `folder`, the manifest last. Raise `OSError`."""
    assert {MODEL, OPTIMIZER} <= snapshot.tensors.keys(), "a checkpoint has a model and an optimizer"
    # The form of the manifest and the place of `format_version` never change: any version of paceline can tell a newer
    # checkpoint from a damaged one.
    digests = {}
    for name, tensors in snapshot.tensors.items():
        file = f"{name}{_SUFFIX}"
        assert _TENSOR_FILE.fullmatch(file), f"{name} is no name of a part"
        digests[file] = write_hashed_file(folder / file, safetensors_chunks(tensors))
    values = {"format_version": FORMAT_VERSION, **snapshot.values}
    digests[_STATE] = write_hashed_file(folder / _STATE, [_to_json(values)])
    write_hashed_file(folder / _MANIFEST, [_to_json(digests)])
    sync_folder(folder)


def verify_checkpoint(path: Path) -> None:
    """Raise `CheckpointError` if a file of checkpoint `path` is missing or damaged."""
    damage = find_damage(path)
    if damage:
        raise CheckpointError(f"{damage} (remove {path.name} to use the one before)")


def find_damage(path: Path) -> str:
    """Return a one-line description of the damage of checkpoint `path`, or an empty string."""
    if path.is_symlink():
        return f"{path}: cannot be read: it is a link"
    try:
        digests = _read_json_file(path / _MANIFEST)
        if not isinstance(digests, dict) or not digests.keys() >= _REQUIRED_FILES:
            raise ValueError(f"{_MANIFEST} does not list the checkpoint's files")
        unlisted = sorted({each.name for each in path.glob(f"*{_SUFFIX}")} - digests.keys())
        if unlisted:
            raise ValueError(f"{_MANIFEST} does not list {unlisted[0]}")
        foreign = next((name for name in digests if name != _STATE and not _TENSOR_FILE.fullmatch(name)), None)
        if foreign:
            raise ValueError(f"{_MANIFEST} lists {foreign!r:.80}, which is no file of a checkpoint")
        damaged = next((name for name, digest in digests.items() if file_sha256(path / name) != digest), None)
    except (OSError, ValueError) as error:
        return f"{path}: cannot be read: {error}"
    return f"{path / damaged}: is damaged: its SHA-256 is not the manifest's" if damaged else ""


def weights_digest(path: Path) -> str:
    """Return the SHA-256 of the digests of the weights, raw and averaged, in the manifest of checkpoint `path`.

    Raise `CheckpointError` if the manifest cannot be read.
    """
    try:
        digests = _read_json_file(path / _MANIFEST)
        assert isinstance(digests, dict), "the checkpoint was verified"
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path / _MANIFEST}: cannot be read: {error} (use another --checkpoint)") from None
    of_weights = "".join(str(digests.get(f"{part}{_SUFFIX}", "")) for part in (MODEL, AVERAGE))
    return hashlib.sha256(of_weights.encode()).hexdigest()


def read_state(path: Path) -> dict[str, Any]:
    """Return `state.json` of checkpoint `path`. Raise `CheckpointError` if it is damaged or of another format."""
    try:
        values = _read_json_file(path / _STATE)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path / _STATE}: cannot be read: {error} (remove {path.name} to use the one before)"
        ) from None
    version = values.get("format_version") if isinstance(values, dict) else None
    if version != FORMAT_VERSION:
        fix = "update paceline" if isinstance(version, int) and version > FORMAT_VERSION else "train it again"
        raise CheckpointError(f"{path}: has format {version!r:.20}, this paceline reads {FORMAT_VERSION} ({fix})")
    assert isinstance(values, dict)
    progress = values.get("train", {})
    if not isinstance(progress, dict):
        raise CheckpointError(
            f"{path / _STATE}: train: {progress!r:.40} is no progress (remove {path.name} to use the one before)"
        )
    return values


def is_weights_only(path: Path) -> bool:
    """Return whether checkpoint `path` has only weights. Raise `CheckpointError` as `read_state`."""
    return read_state(path).get("weights_alone") is True


def load_tensor_group(path: Path, name: str) -> dict[str, Tensor]:
    """Return the tensors of part `name` on the CPU, empty if checkpoint `path` lacks it.

    Digests are not checked; see `verify_checkpoint`. Raise `CheckpointError` for an unreadable file.
    """
    file = path / f"{name}{_SUFFIX}"
    if not os.path.lexists(file):
        return {}
    try:
        open_to_read(file, follow_links=False).close()
        return load_file(file)
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{file}: cannot be read: {error} (remove {path.name} to use the one before)") from None


def sync_folder(path: Path) -> None:
    """Sync the directory entries of `path` to disk. Raise `OSError`, except on file systems without this feature."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF):  # some file systems refuse; as PostgreSQL's fsync_fname
            raise
    finally:
        os.close(descriptor)


def _to_json(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values, indent=2, allow_nan=False).encode() + b"\n"


def _read_json_file(path: Path) -> object:
    """Return the contents of a JSON file. Raise `OSError` or `ValueError`."""
    with open_to_read(path, follow_links=False) as file:
        text = file.read(MAX_BYTES + 1)
    if len(text) > MAX_BYTES:
        raise ValueError(f"{path.name} is longer than {MAX_BYTES >> 20} MiB")
    try:
        values: object = parse_json(text)
    except ValueError as error:
        raise ValueError(f"{path.name} is not JSON: {error}") from None
    return values
