"""Read untrusted pickles without running code."""

# A pickle can call every global that it names. Here only the globals that the caller allows are resolved, and the
# opcodes are checked first, so that a small file cannot allocate much memory.

import io
import pickle
import pickletools
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO, Final

from paceline.core.errors import DataError
from paceline.core.files import read_bytes
from paceline.data.files import printable

_MEMO_OPCODES: Final = {"PUT", "BINPUT", "LONG_BINPUT"}


class RefusedPickleError(ValueError):
    """A pickle that refers to more than data."""


class RestrictedUnpickler(pickle.Unpickler):
    """Build plain values (None, bool, numbers, str, bytes, tuples, lists, sets, dicts) and the allowed globals.

    `allowed_globals` maps dotted global names to their replacements.
    """

    def __init__(self, file: BinaryIO, *, allowed_globals: Mapping[str, object], encoding: str) -> None:
        super().__init__(file, encoding=encoding)
        self._allowed_globals = allowed_globals

    def find_class(self, module: str, name: str) -> object:
        """Return the replacement of `module.name` without an import. Raise `RefusedPickleError` if there is none."""
        try:
            return self._allowed_globals[f"{module}.{name}"]
        except KeyError:
            raise RefusedPickleError(f"refers to {module}.{name}") from None

    def persistent_load(self, pid: object) -> object:
        """Raise `RefusedPickleError`, as there are no objects outside the file."""
        raise RefusedPickleError(f"refers to the persistent object {pid!r}")


def _check_memo_size(content: bytes) -> None:
    # The C unpickler allocates the memo up to the largest index. `genops` raises ValueError for strings longer than the
    # file. It takes 0.4 us per opcode (measured), three times as long as unpickling.
    for opcode, number, _ in pickletools.genops(content):
        if opcode.name in _MEMO_OPCODES and number is not None and number > len(content):
            raise RefusedPickleError(f"needs memory for {number:,} values, in {len(content):,} bytes")


def load_restricted_pickle(
    path: Path, *, hint: str, allowed_globals: Mapping[str, object] | None = None, encoding: str = "utf-8"
) -> object:
    """Return the value pickled in `path`; `encoding` is of Python 2's strings.

    Raise `DataError`, ending in `hint`, for an unreadable file and a global that is not in `allowed_globals`.
    """
    try:
        content = read_bytes(path)
        _check_memo_size(content)
        return RestrictedUnpickler(io.BytesIO(content), allowed_globals=allowed_globals or {}, encoding=encoding).load()
    except RefusedPickleError as error:
        problem = printable(str(error))[:120]
    except OSError as error:
        problem = f"cannot be read: {error.strerror or error}"
    except Exception as error:  # the unpickler raises nearly anything on malformed input, including MemoryError
        problem = f"is not a readable pickle ({printable(str(error))[:120] or type(error).__name__})"
    raise DataError(f"{printable(path)}: {problem}; {hint}")
