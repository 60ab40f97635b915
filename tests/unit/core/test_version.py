"""The version: setuptools-scm's as configured in pyproject.toml, and at run time the installed package's."""

import importlib.metadata
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import paceline

ROOT = Path(__file__).parents[3]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a repository that has our pyproject.toml, and the commit v1.2.0."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", "pyproject.toml")
    commit(tmp_path)
    git(tmp_path, "tag", "v1.2.0")
    return tmp_path


def git(repository: Path, *arguments: str) -> str:
    who = ("user.name=a", "user.email=a@example.org", "commit.gpgsign=false", "tag.gpgsign=false")
    command = ["git", "-C", str(repository), *(word for each in who for word in ("-c", each)), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()


def commit(repository: Path) -> str:
    """Make a commit, and return the beginning of its name."""
    git(repository, "commit", "--quiet", "--allow-empty", "--message", "more")
    return git(repository, "rev-parse", "--short", "HEAD")


def version_of(root: Path) -> str:
    pytest.importorskip("setuptools_scm", reason="setuptools-scm is not installed: pip install setuptools-scm")
    command = [sys.executable, "-m", "setuptools_scm"]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60, check=True).stdout.strip()


def test_a_tag_is_a_version_and_commits_after_it_lead_to_the_next(checkout: Path) -> None:
    assert version_of(checkout) == "1.2.0"
    last = commit(checkout)
    git(checkout, "tag", "nightly-2026")
    assert version_of(checkout) == f"1.2.1.dev1+g{last}"


def test_an_archive_without_repository_and_metadata_has_a_version(checkout: Path) -> None:
    inside = checkout / "inside"
    inside.mkdir()
    shutil.copy(ROOT / "pyproject.toml", inside)
    assert version_of(inside) == "0.1.0.dev0"


def test_the_package_has_the_version_of_its_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", {"paceline": "1.2.3"}.__getitem__)
    assert paceline.__version__ == "1.2.3"


def test_a_checkout_that_is_not_installed_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert paceline.__version__ == "0+unknown"


def test_a_name_that_the_package_does_not_have_is_an_error() -> None:
    with pytest.raises(AttributeError, match="module 'paceline' has no attribute 'versoin'"):
        paceline.versoin  # noqa: B018
