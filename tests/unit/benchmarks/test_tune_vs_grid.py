"""Winners of both searches are compared in alternating pairs, each pair on its own samples."""

import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from paceline.recipe.load import Patch, load

FOLDER = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.delitem(sys.modules, "tune_vs_grid", raising=False)
    return importlib.import_module("tune_vs_grid")


def test_each_goes_first_in_every_other_pair_and_a_pair_shares_its_seed(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[str, int, int]] = []

    def rate(runner: object, name: str, patch: Patch, turn: int) -> float:
        made.append((name, dict(patch.assignments)["seed"], turn))
        return 98.0 if name == "tuned" else 100.0

    monkeypatch.setattr(benchmark, "rate", rate)
    ratio = benchmark.compared(SimpleNamespace(recipe=load("digits").recipe), Patch(), Patch(), 3)
    assert made == [
        ("tuned", 0, 1),
        ("grid-best", 0, 1),
        ("grid-best", 1, 2),
        ("tuned", 1, 2),
        ("tuned", 2, 3),
        ("grid-best", 2, 3),
    ]
    assert ratio.value == pytest.approx(0.98)  # rounding of logarithms
