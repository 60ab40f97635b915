"""Read CIFAR's batch files without numpy's unpickling."""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import DataError
from paceline.data.sources.places import printable
from paceline.data.sources.restricted_pickle import RefusedPickleError, load_restricted_pickle

PixelArray = NDArray[np.uint8]
_ALLOWED_CONTENT = (
    "a CIFAR file may hold only text, numbers and arrays of uint8 (remove it and fetch the data set again)"
)


# The files are pickles that numpy 1 and Python 2 wrote. The names that a pickled array refers to map to stand-ins that
# accept only uint8 bytes, so that an untrusted file cannot run code or pass sizes to C code.
def read_cifar_batch(path: Path, *, labels_key: str, num_classes: int) -> tuple[PixelArray, NDArray[np.int64]]:
    """Return (uint8 images [N, 32, 32, 3], int64 labels [N]) of one batch file. Raise `DataError` naming the file."""
    entry = _read_cifar_dict(path)
    array, labels = entry.get("data"), entry.get(labels_key)
    if not isinstance(array, _ArrayStandIn) or array.pixels is None or array.pixels.shape[1:] != (3072,):
        raise DataError(f"{printable(path)}: its 'data' is not uint8 [N, 3072]; {_ALLOWED_CONTENT}")
    if (
        not isinstance(labels, list)
        or len(labels) != len(array.pixels)
        or not all(type(label) is int and 0 <= label < num_classes for label in labels)
    ):
        raise DataError(
            f"{printable(path)}: its '{labels_key}' is not a list of {len(array.pixels)} numbers from 0 to "
            f"{num_classes - 1}; remove it and fetch the data set again"
        )
    planes = array.pixels.reshape(-1, 3, 32, 32)
    return np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), np.array(labels, dtype=np.int64)


def read_cifar_class_names(path: Path, *, key: str, num_classes: int) -> tuple[str, ...]:
    """Return the class names in a `meta` file. Raise `DataError` naming the file."""
    names = _read_cifar_dict(path).get(key)
    if not isinstance(names, list) or len(names) != num_classes or not all(isinstance(name, str) for name in names):
        raise DataError(f"{printable(path)}: its '{key}' is not a list of {num_classes} names; {_ALLOWED_CONTENT}")
    return tuple(names)


def _read_cifar_dict(path: Path) -> dict[object, object]:
    entry = load_restricted_pickle(
        path, allowed_globals=_build_array_globals(), hint=_ALLOWED_CONTENT, encoding="latin1"
    )
    if not isinstance(entry, dict):
        raise DataError(f"{printable(path)}: holds a {type(entry).__name__}, not a dict; {_ALLOWED_CONTENT}")
    return entry


def _build_array_globals() -> dict[str, object]:
    # New objects per file, as a pickle can modify what it gets.
    def reconstruct(array_type: object, shape: object, typecode: object) -> _ArrayStandIn:
        return _ArrayStandIn()

    def dtype(code: object, align: object, copy: object) -> _DtypeStandIn:
        if code != "u1":
            raise RefusedPickleError(f"holds an array of {code!r}")
        return _DtypeStandIn()

    def encode(text: str, encoding: str) -> bytes:
        if encoding != "latin1":
            raise RefusedPickleError(f"asks for the text encoding {encoding!r}")
        return text.encode("latin1")

    return {
        "numpy.core.multiarray._reconstruct": reconstruct,
        "numpy._core.multiarray._reconstruct": reconstruct,
        "numpy.ndarray": "numpy.ndarray",
        "numpy.dtype": dtype,
        "_codecs.encode": encode,
    }


class _DtypeStandIn:
    """Stand-in for `numpy.dtype('u1')`."""

    def __setstate__(self, state: object) -> None:
        pass  # byte order and alignment do not matter for single bytes


@dataclass
class _ArrayStandIn:
    """Stand-in for a uint8 `numpy.ndarray`; `pixels` is None until `__setstate__`."""

    pixels: PixelArray | None = None

    def __setstate__(self, state: tuple[int, tuple[int, ...], object, bool, bytes | str]) -> None:
        _, shape, dtype, is_fortran, content = state
        raw = content.encode("latin1") if isinstance(content, str) else content  # Python 2 had one type for both
        if not isinstance(dtype, _DtypeStandIn) or not isinstance(raw, bytes) or len(raw) != math.prod(shape):
            raise RefusedPickleError(f"holds an array of shape {shape} whose content does not fit")
        self.pixels = np.frombuffer(raw, dtype=np.uint8).reshape(shape, order="F" if is_fortran else "C")
