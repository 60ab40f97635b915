"""Identify the code that runs: a digest of the package's files, beside its version."""

import hashlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any


@cache
def source_digest() -> str:
    """Return the SHA-256 of the package's files, or "" if they cannot be read, as in a zip archive."""
    return package_digest(Path(__file__).parents[1])


def package_digest(package: Path) -> str:
    """Return the SHA-256 of the names and contents of all .py and .so files below `package`.

    "" if there are no files, or one cannot be read.
    """
    # Hidden files are left by editors.
    files = [path for kind in ("*.py", "*.so") for path in package.rglob(kind) if not path.name.startswith(".")]
    digest = hashlib.sha256()
    try:
        for path in sorted(files):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(package).as_posix()} {len(content)}\n".encode())
            digest.update(content)
    except OSError:
        return ""
    return digest.hexdigest() if files else ""


def code_version(machine: Mapping[str, Any]) -> str:
    """Return paceline's version in `machine.json`, followed by its digest unless the version is a release's; or ""."""
    version, digest = str(machine.get("paceline", "")), str(machine.get("paceline_sha256", ""))
    # A checkout's version is that of its installation, and its files may have changed since then.
    return f"{version} {digest[:12]}" if "+" in version and digest else version
