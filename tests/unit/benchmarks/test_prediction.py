"""The record of predicted tables is what the code says today, and the documented figures are the record's."""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture
def prediction(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    for name in ("prediction", "record"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("prediction")


def test_the_record_is_what_the_code_says_of_the_tutorials_tables(prediction: ModuleType) -> None:
    record = json.loads((ROOT / "benchmarks" / "results" / "prediction.json").read_text())
    found = prediction.tables()
    assert len(found) == 26
    results = prediction.all_judged({name: found[name] for name in prediction.TABLES})
    assert len(results) == 16
    for each in results:
        known = record[prediction.title_of(each)]
        # Rounding of another library of linear algebra; bounds are order statistics of 500 draws of 7 forms, of which
        # it may swap neighbours.
        assert each.error == pytest.approx(known["error"], abs=1e-4)
        assert (each.low, each.high) == pytest.approx((known["low"], known["high"]), abs=0.01)
        assert each.holds == (known["low"] <= 0 <= known["high"])


def test_documented_figures_are_the_records(prediction: ModuleType) -> None:
    record = json.loads((ROOT / "benchmarks" / "results" / "prediction.json").read_text())
    text = (ROOT / "docs" / "explanation" / "prediction.md").read_text()
    holding = sum(each["low"] <= 0 <= each["high"] for each in record.values())
    assert f"Of all {len(record)} intervals {holding} hold" in text
    for name in ("jsc, 1 4 16 32 to 64", "jsc, 1 4 16 32 to 128", "nersc, 1 4 8 to 16", "quant, 1 4 to 8"):
        each = record[name]
        assert f"{100 * each['error']:+.1f} %" in text
        assert f"{100 * each['low']:+.1f} to {100 * each['high']:+.1f} %" in text
