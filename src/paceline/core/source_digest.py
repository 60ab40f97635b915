"""Which source files of paceline are running: a digest tells two changed checkouts apart, which a version cannot.

A commit that changes documents alone leaves it as it is, and so does writing a change down as a commit.
"""

import hashlib
from functools import cache
from pathlib import Path

from paceline import core


@cache
def source_digest() -> str:
    """Return the SHA-256 of the package's files; "" where they cannot be read, as from an archive."""
    return package_digest(Path(core.__file__).parents[1])


def package_digest(package: Path) -> str:
    """Return the SHA-256 of names and contents of all modules below `package`, those of Python and native ones.

    Hidden files are what editors leave. "" where there are none, or one cannot be read.
    """
    files = [path for kind in ("*.py", "*.so") for path in package.rglob(kind) if not path.name.startswith(".")]
    found = hashlib.sha256()
    try:
        for path in sorted(files):
            content = path.read_bytes()
            found.update(f"{path.relative_to(package).as_posix()} {len(content)}\n".encode())
            found.update(content)
    except OSError:
        return ""
    return found.hexdigest() if files else ""
