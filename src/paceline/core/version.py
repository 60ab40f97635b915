"""The version of the package, and a digest of its source code.

setup.py runs this file before the package is installed, so it imports nothing of paceline.
"""

import hashlib
import re
from functools import cache
from pathlib import Path
from typing import Final

FIRST: Final = "0.1.0"
"""The version before the first tag, and without git or metadata."""

_RELEASE: Final = r"\d+(\.\d+)*((a|b|rc)\d+)?(\.post\d+)?"
"""Tags that are versions by PEP 440: https://peps.python.org/pep-0440/"""
_DESCRIBED: Final = re.compile(
    rf"v(?P<tag>{_RELEASE})-(?P<distance>\d+)-(?P<commit>g[0-9a-f]+)(?P<dirty>-dirty)?", re.ASCII
)
_GIT_VARIABLES: Final = (
    "GIT_ALTERNATE_OBJECT_DIRECTORIES",
    "GIT_COMMON_DIR",
    "GIT_DIR",
    "GIT_GRAFT_FILE",
    "GIT_INDEX_FILE",
    "GIT_NAMESPACE",
    "GIT_OBJECT_DIRECTORY",
    "GIT_REPLACE_REF_BASE",
    "GIT_SHALLOW_FILE",
    "GIT_WORK_TREE",
)
"""Variables that make git read another repository. Git sets some of them for hooks."""
_GIT_TIMEOUT_S: Final = 5.0
"""Do not wait for a disk that hangs."""


@cache
def version() -> str:
    """Return the version of the running code, from its checkout or its installation."""
    root = Path(__file__).parents[3]
    return (_is_our_checkout(root) and checkout_version(root)) or _installed_version() or f"{FIRST}.dev0"


def checkout_version(root: Path) -> str | None:
    """Return the version of the source tree `root`: from git, or the metadata of a source distribution; else None."""
    if (root / ".git").exists():
        return _version_from_git(root)
    if (root / "PKG-INFO").exists():
        return _version_in_metadata((root / "PKG-INFO").read_text(encoding="utf-8"))
    return None


def _is_our_checkout(root: Path) -> bool:
    """Return whether `root` is paceline's own repository, not that of a program that vendors a copy."""
    project = root / "pyproject.toml"
    if not (root / "src" / "paceline" / "core" / Path(__file__).name).exists() or not project.is_file():
        return False
    return re.search(r'^name = "paceline"$', project.read_text(encoding="utf-8"), re.MULTILINE) is not None


def _installed_version() -> str | None:
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        return installed("paceline")
    except PackageNotFoundError:
        return None


def _version_from_git(root: Path) -> str | None:
    described = _git(root, "describe", "--tags", "--match", "v[0-9]*", "--exclude", "v*-*", "--long", "--dirty")
    if described is not None and (found := _DESCRIBED.fullmatch(described)):
        distance, dirty = int(found["distance"]), bool(found["dirty"])
        if not distance and not dirty:
            return found["tag"]
        return _development(_next_version(found["tag"]), distance, found["commit"], dirty=dirty)
    commit = _git(root, "describe", "--always", "--dirty", "--exclude", "*")
    # No release tag yet. A shallow clone lacks the commits to count.
    is_shallow = _git(root, "rev-parse", "--is-shallow-repository") == "true"
    count = "0" if is_shallow else _git(root, "rev-list", "--count", "HEAD")
    if commit is None or count is None:
        return None
    return _development(FIRST, int(count), f"g{commit.removesuffix('-dirty')}", dirty=commit.endswith("-dirty"))


def _development(release: str, distance: int, commit: str, *, dirty: bool) -> str:
    return f"{release}.dev{distance}+{commit}{'.dirty' if dirty else ''}"


def _next_version(version: str) -> str:
    """Return `version` with its last number incremented: 1.2.0 gives 1.2.1, and 1.2.0rc1 gives 1.2.0rc2."""
    return re.sub(r"\d+$", lambda last: str(int(last[0]) + 1), version)


def _version_in_metadata(metadata: str) -> str | None:
    found = re.search(r"^Version: (\S+)$", metadata, re.MULTILINE)
    return found[1] if found else None


def _git(root: Path, *arguments: str) -> str | None:
    """Return the output of git for `root`, or None if git fails or is missing."""
    import subprocess  # only a checkout needs it

    # Read this repository even if variables name another or it has another owner (--git-dir skips git's check of the
    # owner). Its configuration is not trusted: a core.fsmonitor program would be run. Optional locks would fail in a
    # read-only checkout or collide with other processes.
    unset = [word for name in _GIT_VARIABLES for word in ("-u", name)]
    place = ["--git-dir", str(root / ".git"), "--work-tree", str(root)]
    command = ["env", *unset, "git", "-c", "core.fsmonitor=false", "--no-optional-locks", *place, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


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
