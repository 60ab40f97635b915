"""The lock files of developers and of a release: what pyproject.toml asks for, pinned and with hashes."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
RELEASE = PROJECT["dependency-groups"]["release"]
LOCKS = {
    "requirements-dev.lock": ("3.11", [*PROJECT["project"]["dependencies"], *EXTRAS["dev"]]),
    "requirements-release.lock": ("3.12", RELEASE),
}


def packages(lock: str) -> dict[str, tuple[str, list[str]]]:
    """Return for each package of a lock file its version and its options."""
    text = "\n".join(line for line in (ROOT / lock).read_text().splitlines() if not line.lstrip().startswith("#"))
    found = {}
    for line in text.replace("\\\n", " ").splitlines():
        pinned, *options = line.split()
        name, _, version = pinned.partition("==")
        assert name not in found, f"{name} stands twice"
        found[name.partition("[")[0]] = (version, options)
    assert len(found) > 20
    return found


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_has_all_that_is_asked_for_at_a_version_that_fits(lock: str) -> None:
    python, texts = LOCKS[lock]
    here = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux", "extra": ""}
    wanted = [each for each in map(Requirement, texts) if each.marker is None or each.marker.evaluate(here)]
    locked = packages(lock)
    assert len(wanted) > 3
    assert [str(each) for each in wanted if canonicalize_name(each.name) not in locked] == [], "run make lock"
    wrong = [str(each) for each in wanted if Version(locked[canonicalize_name(each.name)][0]) not in each.specifier]
    assert wrong == [], "run make lock"


@pytest.mark.parametrize("lock", LOCKS)
def test_every_package_of_a_lock_is_pinned_and_has_hashes(lock: str) -> None:
    for name, (version, options) in packages(lock).items():
        assert re.fullmatch(r"[a-z0-9-]+", name), name
        assert Version(version)
        assert options, f"{name} has no hash"
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", option) for option in options), name


@pytest.mark.parametrize("lock", [*LOCKS, "requirements.lock"])
def test_a_lock_says_how_it_was_made_as_make_does_it_and_names_no_machine(lock: str) -> None:
    text = (ROOT / lock).read_text()
    (command,) = re.findall(r"^#\s+(uv pip compile .*)$", text, re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text()
    (recipe,) = re.findall(rf"^\t\$\(LOCK\) (.*) {re.escape(lock)} > /dev/null$", makefile, re.MULTILINE)
    for name in ("IMAGE", "LOCK_OPTIONS"):
        (value,) = re.findall(rf"^{name} := (.*)$", makefile, re.MULTILINE)
        recipe = recipe.replace(f"$({name})", value)
    assert command.replace(" --quiet --upgrade", "") == f"uv pip compile {recipe} {lock}"
    assert "://" not in text
    assert not re.search(r"(^|\s)/\w", text)


def test_developers_have_what_makes_a_release() -> None:
    assert len(RELEASE) > 2
    assert set(RELEASE) <= set(EXTRAS["dev"])
