"""The record of predicted tables is reproducible, and the documented figures are the record's."""

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

NAMES = {
    "Jülich, ResNet-50 on ImageNet, A100": "jsc",
    "NERSC, ResNet-50 on CIFAR-100, V100": "nersc",
    "a quantitative study, ResNet-18 in FP16": "quant",
    "a post on DDP, ResNet-50 on CIFAR-10, A100": "ddp-post",
}
SETS = {
    "DLPerf, ResNet-50 FP32, 8 sets": "resnet50 fp32",
    "DLPerf, ResNet-50 AMP, 8 sets": "resnet50 amp",
    "DLPerf, BERT FP32, 6 sets": "bert fp32",
}
ROOT = Path(__file__).parents[3]


@pytest.fixture
def prediction(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    for name in ("prediction", "record"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("prediction")


def test_the_record_is_what_the_code_states_of_the_tutorials_tables(prediction: ModuleType) -> None:
    record = json.loads((ROOT / "benchmarks" / "results" / "prediction.json").read_text())
    found = prediction.tables()
    assert len(found) == 26
    results = prediction.evaluate_tables({name: found[name] for name in prediction.TABLES})
    assert len(results) == 16
    for each in results:
        known = record[prediction.title_of(each)]
        # Rounding of another library of linear algebra; bounds are order statistics of 500 draws of 7 forms, of which
        # it may swap neighbors.
        assert each.error == pytest.approx(known["error"], abs=1e-4)
        assert (each.low, each.high) == pytest.approx((known["low"], known["high"]), abs=0.01)
        assert each.holds == (known["low"] <= 0 <= known["high"])


def test_documented_figures_are_the_records(prediction: ModuleType) -> None:
    record = json.loads((ROOT / "benchmarks" / "results" / "prediction.json").read_text())
    text = (ROOT / "docs" / "explanation" / "prediction.md").read_text()
    holding = sum(each["low"] <= 0 <= each["high"] for each in record.values())
    assert f"Of all {len(record)} intervals {holding} hold" in text
    checked = 0
    for table, used, ranks, error, interval in rows_of(text):
        if table in SETS:
            its = [each for name, each in record.items() if name.startswith(SETS[table]) and each["used"] == used]
            its = [each for each in its if each["ranks"] == ranks]
            errors = [abs(each["error"]) for each in its]
            assert f", {len(its)} sets" in table
            assert error == f"{100 * sum(errors) / len(errors):.1f} %, at most {100 * max(errors):.1f} %"
            assert interval == f"{sum(each['low'] <= 0 <= each['high'] for each in its)} of {len(its)} hold"
        else:
            each = record[f"{NAMES[table]}, {' '.join(map(str, used))} to {ranks}"]
            holds = "" if each["low"] <= 0 <= each["high"] else ", does not hold"
            assert error == f"{100 * each['error']:+.1f} %"
            assert interval == f"{100 * each['low']:+.1f} to {100 * each['high']:+.1f} %{holds}"
        checked += 1
    assert checked == 14


def rows_of(text: str) -> Iterator[tuple[str, list[int], int, str, str]]:
    """Yield the rows of the table of errors; an empty cell is that of the row above."""
    lines = text[text.index("| table | from ranks |") :].split("\n\n")[0].splitlines()[2:]
    table, used = "", ""
    for line in lines:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        table, used = cells[0] or table, cells[1] or used
        yield table, [int(each) for each in used.split(",")], int(cells[2]), cells[3], cells[4]
