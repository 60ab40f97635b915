"""Every family of timm's classifiers is trained and exported, as the record and the page say."""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import timm

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "benchmarks" / "results" / "timm-families.json"
ROWS = json.loads(RECORD.read_text())["families"]
SAMPLE = ("test_resnet", "test_vit")  # a convolutional network, and a transformer for images of one size


@pytest.fixture
def families(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.delitem(sys.modules, "timm_families", raising=False)
    return importlib.import_module("timm_families")


def tried(forking, folder: Path, *names: str) -> list[dict]:
    """Return the rows of the models of `names`, trained and exported now."""
    script = [str(ROOT / "benchmarks" / "timm_families.py"), "--models", *names, "--json", "new.json"]
    process = forking.start(script, folder, {})
    _, err = process.communicate(timeout=280)
    assert process.returncode == 0, err
    rows: list[dict] = json.loads((folder / "new.json").read_text())["families"]
    return rows


def outcome(row: dict) -> tuple:
    return tuple(row[name] for name in ("family", "model", "parameters", "image_size", "train", "torch"))


def test_some_families_are_trained_and_exported(forking, tmp_path: Path) -> None:
    expected = [row for row in ROWS if row["model"] in SAMPLE]
    assert len(expected) == 2 and not any(row["train"] or row["torch"] for row in expected)
    assert [*map(outcome, tried(forking, tmp_path, *SAMPLE))] == [*map(outcome, expected)]


@pytest.mark.long
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["family"])
def test_each_family_is_trained_and_exported_or_has_the_recorded_reason(forking, tmp_path: Path, row: dict) -> None:
    (found,) = tried(forking, tmp_path, row["model"])
    assert outcome(found) == outcome(row)


def test_the_record_has_every_family_and_the_page_has_the_record(families: ModuleType) -> None:
    recorded = json.loads(RECORD.read_text())
    if recorded["timm"] == timm.__version__:
        assert [row["family"] for row in ROWS] == timm.list_modules()
    page = (ROOT / "docs" / "reference" / "models.md").read_text()
    assert families.table(families.Row(**row) for row in ROWS) in page
    works = sum(not (row["train"] or row["torch"]) for row in ROWS)
    assert works == len(ROWS)
    assert f"All {works} families of timm {recorded['timm']}" in page
