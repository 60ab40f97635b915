"""Read pickles that came from elsewhere without letting them run anything.

A pickle is a program: it may call whatever it can name. Here it can name nothing but what the caller admits. Its
opcodes are walked over first, so that it can ask for no more memory than its length accounts for.
"""

import io
import pickle
import pickletools
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO, Final

from paceline.core.errors import DataError
from paceline.core.files import read_bytes
from paceline.data.sources.places import printable


class RefusedPickleError(ValueError):
    """A pickle that asks for more than data."""


class RestrictedUnpickler(pickle.Unpickler):
    """Build plain values: None, bool, numbers, str, bytes, tuples, lists, sets and dicts, and what is `admitted`.

    `admitted` maps dotted names, as the stream asks for them, to what it gets instead.
    """

    def __init__(self, file: BinaryIO, *, admitted: Mapping[str, object], encoding: str) -> None:
        super().__init__(file, encoding=encoding)
        self._admitted = admitted

    def find_class(self, module: str, name: str) -> object:
        """Return what is admitted under `module.name`; refuse anything else before it is imported."""
        try:
            return self._admitted[f"{module}.{name}"]
        except KeyError:
            raise RefusedPickleError(f"asks for {module}.{name}") from None

    def persistent_load(self, pid: object) -> object:
        """Refuse: there are no objects outside the stream."""
        raise RefusedPickleError(f"asks for the persistent object {pid!r}")


_PUTS: Final = {"PUT", "BINPUT", "LONG_BINPUT"}


def _refuse_large_memo(content: bytes) -> None:
    """Raise `RefusedPickleError` for a place in the memo beyond what `content` could fill, which is made room for.

    Texts and bytes that are longer than what is there make the walk raise `ValueError`. It takes about 0.4 us an
    opcode (measured), which is three times as long as reading them.
    """
    for opcode, number, _ in pickletools.genops(content):
        if opcode.name in _PUTS and number is not None and number > len(content):
            raise RefusedPickleError(f"asks for memory for {number:,} values, in {len(content):,} bytes")


def load_restricted(
    path: Path, *, allowed: str, admitted: Mapping[str, object] | None = None, encoding: str = "utf-8"
) -> object:
    """Return the value pickled in `path`. Raise `DataError` naming it when it asks for anything not admitted.

    `allowed` ends the message: what such a file may hold and how to mend it. Strings of Python 2 are read in
    `encoding`.
    """
    try:
        content = read_bytes(path)
        _refuse_large_memo(content)
        return RestrictedUnpickler(io.BytesIO(content), admitted=admitted or {}, encoding=encoding).load()
    except RefusedPickleError as error:
        problem = printable(str(error))[:120]
    except OSError as error:
        problem = f"cannot be read: {error.strerror or error}"
    except Exception as error:  # a malformed stream makes the unpickler raise nearly anything, MemoryError included
        problem = f"is not a readable pickle ({printable(str(error))[:120] or type(error).__name__})"
    raise DataError(f"{printable(path)}: {problem}; {allowed}")
