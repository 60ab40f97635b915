"""The version from git in a checkout, from metadata elsewhere."""

import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import paceline
from paceline.core.version import FIRST, checkout_version, version

ROOT = Path(__file__).parents[3]


def git(repository: Path, *arguments: str) -> str:
    who = (
        "-c",
        "user.name=a",
        "-c",
        "user.email=a@example.org",
        "-c",
        "commit.gpgsign=false",
        "-c",
        "tag.gpgsign=false",
    )
    done = subprocess.run(
        ["git", "-C", str(repository), *who, *arguments], capture_output=True, text=True, timeout=30, check=True
    )
    return done.stdout.strip()


def commit(repository: Path) -> str:
    """Make a commit, and return the beginning of its name."""
    git(repository, "commit", "--quiet", "--allow-empty", "--message", "more")
    return f"g{git(repository, 'rev-parse', '--short', 'HEAD')}"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    git(tmp_path, "init", "--quiet")
    (tmp_path / "file").write_text("1")
    git(tmp_path, "add", "file")
    return tmp_path


def test_a_commit_with_a_tag_is_that_version(repository: Path) -> None:
    commit(repository)
    git(repository, "tag", "v1.2.0")
    assert checkout_version(repository) == "1.2.0"


@pytest.mark.parametrize(("tag", "release"), [("v1.2.0", "1.2.1"), ("v0.9", "0.10"), ("v2.0.0rc1", "2.0.0rc2")])
def test_commits_behind_a_tag_lead_to_the_next_version(repository: Path, tag: str, release: str) -> None:
    commit(repository)
    git(repository, "tag", "--annotate", tag, "--message", tag)
    commit(repository)
    last = commit(repository)
    assert checkout_version(repository) == f"{release}.dev2+{last}"


def test_without_a_tag_commits_are_counted_from_the_first(repository: Path) -> None:
    commit(repository)
    last = commit(repository)
    assert checkout_version(repository) == f"{FIRST}.dev2+{last}"


def test_tags_that_are_no_versions_are_none(repository: Path) -> None:
    last = commit(repository)
    git(repository, "tag", "nightly")
    git(repository, "tag", "very-old")
    assert checkout_version(repository) == f"{FIRST}.dev1+{last}"


@pytest.mark.parametrize("tag", ["v1.0.0", None])
def test_uncommitted_changes_mark_the_version_dirty(repository: Path, tag: str | None) -> None:
    last = commit(repository)
    if tag:
        git(repository, "tag", tag)
    (repository / "file").write_text("2")
    assert checkout_version(repository) == f"{'1.0.1.dev0' if tag else '0.1.0.dev1'}+{last}.dirty"


def test_files_that_git_does_not_know_are_no_changes(repository: Path) -> None:
    commit(repository)
    git(repository, "tag", "v1.0.0")
    (repository / "notes").write_text("mine")
    assert checkout_version(repository) == "1.0.0"


def test_a_repository_around_the_package_is_ignored(repository: Path) -> None:
    commit(repository)
    (repository / "inside").mkdir()
    assert checkout_version(repository / "inside") is None


def test_a_repository_of_no_commit_has_none(repository: Path) -> None:
    assert checkout_version(repository) is None


def test_a_variable_for_another_repository_is_not_followed(
    repository: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(repository)
    git(repository, "tag", "v3.0")
    other = tmp_path_factory.mktemp("other")
    git(other, "init", "--quiet")
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    assert checkout_version(repository) == "3.0"


@pytest.mark.parametrize("variable", ["GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_COMMON_DIR"])
def test_what_git_sets_for_a_hook_of_another_repository_is_not_followed(
    variable: str, repository: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(repository)
    git(repository, "tag", "v3.0")
    other = tmp_path_factory.mktemp("other")
    git(other, "init", "--quiet")
    (other / "another").touch()
    git(other, "add", "another")
    files = {"GIT_INDEX_FILE": "index", "GIT_OBJECT_DIRECTORY": "objects", "GIT_COMMON_DIR": ""}
    monkeypatch.setenv(variable, str(other / ".git" / files[variable]))
    assert checkout_version(repository) == "3.0"


def test_no_command_of_the_repository_s_configuration_is_run(repository: Path) -> None:
    commit(repository)
    git(repository, "config", "core.fsmonitor", f"touch {repository}/executed; false")
    assert checkout_version(repository) is not None
    assert not (repository / "executed").exists()


def test_a_tag_that_installers_would_refuse_is_none(repository: Path) -> None:
    commit(repository)
    git(repository, "tag", "v1.0")
    last = commit(repository)
    git(repository, "tag", "v2-beta")
    assert checkout_version(repository) == f"1.1.dev1+{last}"
    git(repository, "tag", "v2beta")
    assert checkout_version(repository) == f"{FIRST}.dev2+{last}"


def test_a_shallow_clone_counts_no_commits(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    commit(repository)
    git(repository, "tag", "v1.0.0")
    last = commit(repository)
    clone = tmp_path_factory.mktemp("clone") / "it"
    git(repository, "clone", "--quiet", "--depth", "1", "--no-tags", f"file://{repository}", str(clone))
    assert checkout_version(clone) == f"{FIRST}.dev0+{last}"


@pytest.mark.parametrize(("name", "is_ours"), [("paceline", True), ("other-project", False)])
def test_the_version_of_a_program_that_has_a_copy_of_it_is_not_its_own(
    name: str, is_ours: bool, repository: Path
) -> None:
    copy = repository / "src" / "paceline" / "core" / "version.py"
    copy.parent.mkdir(parents=True)
    shutil.copy(ROOT / "src" / "paceline" / "core" / "version.py", copy)
    (repository / "pyproject.toml").write_text(f'[project]\nname = "{name}"\n')
    commit(repository)
    git(repository, "tag", "v9.9.0")
    assert (runpy.run_path(str(copy))["version"]() == "9.9.0") is is_ours


def test_without_git_there_is_none(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit(repository)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert checkout_version(repository) is None


def test_a_source_distribution_has_its_version_in_its_metadata(tmp_path: Path) -> None:
    (tmp_path / "PKG-INFO").write_text("Metadata-Version: 2.4\nName: paceline\nVersion: 1.2.3\n\nVersion: none\n")
    assert checkout_version(tmp_path) == "1.2.3"


def test_setup_py_reads_it_before_anything_is_installed() -> None:
    read = "import runpy, sys; print('checkout_version' in runpy.run_path(sys.argv[1]))"
    isolated = [sys.executable, "-I", "-S", "-c", read, ROOT / "src" / "paceline" / "core" / "version.py"]
    assert subprocess.run(isolated, capture_output=True, text=True, timeout=30, check=True).stdout == "True\n"
    assert 'VERSIONS["checkout_version"]' in (ROOT / "setup.py").read_text(encoding="utf-8")


def test_the_package_has_the_version_of_its_checkout() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("this is no checkout")
    assert paceline.__version__ == version() == checkout_version(ROOT)


def test_a_name_that_the_package_does_not_have_is_an_error() -> None:
    with pytest.raises(AttributeError, match="module 'paceline' has no attribute 'versoin'"):
        paceline.versoin  # noqa: B018
