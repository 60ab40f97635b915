"""The bill of materials: every file of a release, and every package of the lock file with the hashes of its files."""

import hashlib
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]
FILES = ("paceline-1.2.0.tar.gz", "paceline-1.2.0-cp311-abi3-manylinux_2_28_x86_64.whl")


@pytest.fixture(scope="module")
def program() -> ModuleType:
    pytest.importorskip("cyclonedx", reason="install cyclonedx-python-lib[json-validation]")
    spec = importlib.util.spec_from_file_location("sbom", ROOT / ".ci" / "sbom.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where a dataclass looks for its module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def written(program: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """Return a bill, which its program has checked against the schema of CycloneDX 1.6."""
    folder = tmp_path_factory.mktemp("sbom")
    for name in FILES:
        (folder / name).write_text(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["sbom.py", str(folder), "--out", str(folder / "made" / "bill.json")])
        program.main()
    return json.loads((folder / "made" / "bill.json").read_text())


def locked() -> dict[str, tuple[str, set[str]]]:
    """Return the version and the hashes of each package in requirements.lock, by a reading of its own."""
    found: dict[str, tuple[str, set[str]]] = {}
    for line in (ROOT / "requirements.lock").read_text().splitlines():
        if "==" in line and not line.startswith("#"):
            name, _, version = line.rstrip(" \\").partition("==")
            found[name] = (version, set())
        elif "--hash=sha256:" in line:
            found[name][1].add(line.strip().rstrip(" \\").removeprefix("--hash=sha256:"))
    assert len(found) > 50
    return found


def test_it_lists_every_locked_package_with_its_version_and_its_hashes(written: dict) -> None:
    listed = {
        each["name"]: (each["version"], {one["content"] for one in each["externalReferences"][0]["hashes"]})
        for each in written["components"]
    }
    assert listed == locked()
    assert all(
        one["alg"] == "SHA-256" for each in written["components"] for one in each["externalReferences"][0]["hashes"]
    )


def test_it_is_of_the_files_of_the_release(written: dict) -> None:
    subject = written["metadata"]["component"]
    assert (subject["name"], subject["version"], subject["purl"]) == ("paceline", "1.2.0", "pkg:pypi/paceline@1.2.0")
    assert subject["licenses"] == [{"license": {"id": "Apache-2.0"}}]
    listed = {each["name"]: each["hashes"][0]["content"] for each in subject["components"]}
    assert listed == {name: hashlib.sha256(name.encode()).hexdigest() for name in FILES}


def test_it_says_what_paceline_itself_asks_for(written: dict) -> None:
    (asked,) = (each["dependsOn"] for each in written["dependencies"] if each["ref"] == "pkg:pypi/paceline@1.2.0")
    names = {each.removeprefix("pkg:pypi/").partition("@")[0] for each in asked}
    assert {"torch", "numpy", "pydantic"} <= names
    assert "absl-py" not in names


def test_it_names_no_machine(written: dict) -> None:
    text = json.dumps({key: value for key, value in written.items() if key != "$schema"})
    assert str(ROOT) not in text
    assert all(
        each["url"].startswith("pkg:pypi/") for one in written["components"] for each in one["externalReferences"]
    )


def test_files_of_two_versions_are_no_release(program: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="not of one version"):
        program.bill([tmp_path / FILES[0], tmp_path / "paceline-1.3.0.tar.gz"], "")


def test_a_folder_without_a_release_is_refused(
    program: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["sbom.py", str(tmp_path), "--out", str(tmp_path / "bill.json")])
    with pytest.raises(SystemExit):
        program.main()
    assert "holds neither a source distribution nor a wheel (run make wheel)" in capsys.readouterr().err
