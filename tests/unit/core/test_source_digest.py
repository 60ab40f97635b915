"""The digest of paceline's files: it changes with them, and with nothing else."""

from pathlib import Path

import pytest

from paceline.core.source_digest import code_version, package_digest, source_digest


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Return a package of three modules, one of them native."""
    (tmp_path / "deep").mkdir()
    for name in ("a.py", "deep/b.py", "c.abi3.so"):
        (tmp_path / name).write_text(name, encoding="utf-8")
    return tmp_path


def test_it_is_that_of_the_package_that_runs() -> None:
    import paceline

    assert source_digest() == package_digest(Path(paceline.__file__).parent) != ""


def test_what_is_no_module_changes_nothing(package: Path) -> None:
    before = package_digest(package)
    for name in ("notes.md", ".#a.py", "a.pyc"):
        (package / name).write_text("x", encoding="utf-8")
    (package / "deep" / ".a.py").symlink_to("nowhere")
    (package / "a.py").touch()
    assert package_digest(package) == before and len(before) == 64


@pytest.mark.parametrize("name", ["a.py", "deep/b.py", "c.abi3.so", "deep/new.py"])
def test_every_module_counts(package: Path, name: str) -> None:
    before = package_digest(package)
    (package / name).write_text("edited", encoding="utf-8")
    assert package_digest(package) != before


def test_a_module_that_moves_is_another(package: Path) -> None:
    before = package_digest(package)
    (package / "a.py").rename(package / "deep" / "a.py")
    assert package_digest(package) != before


def test_where_nothing_can_be_read_there_is_none(package: Path) -> None:
    (package / "gone.py").symlink_to("nowhere")
    assert package_digest(package) == package_digest(package / "absent") == ""


def test_code_of_a_checkout_is_named_by_its_files_too() -> None:
    """A checkout keeps the version of its installation while its files change; a release's files do not."""
    digest = "0123456789abcdef"
    assert code_version({"paceline": "1.2.1.dev5+g1a2b3c4", "paceline_sha256": digest}) == (
        "1.2.1.dev5+g1a2b3c4 0123456789ab"
    )
    assert code_version({"paceline": "1.2.0", "paceline_sha256": digest}) == "1.2.0"
    assert code_version({"paceline": "1.2.1.dev5+g1a2b3c4"}) == "1.2.1.dev5+g1a2b3c4"
    assert code_version({}) == ""
