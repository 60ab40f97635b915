"""The arithmetic of the benchmarks of `paceline watch`."""

import importlib
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def imported(monkeypatch):
    """Return a function that imports a benchmark by its name."""
    monkeypatch.syspath_prepend(str(FOLDER))

    def by_name(name):
        monkeypatch.delitem(sys.modules, name, raising=False)
        return importlib.import_module(name)

    return by_name


def test_overhead_compares_the_same_steps_without_those_that_evaluate(imported):
    plain = {"times_s": [0.1 * number for number in range(31)], "cpu_s": [0.2 * number for number in range(31)]}
    observed = {
        "times_s": [0.101 * number + 5 * (number > 20) for number in range(31)],
        "cpu_s": [0.204 * number + 5 * (number > 20) for number in range(31)],
    }
    assert imported("watch_scripts").overheads_of(plain, observed) == pytest.approx((0.1, 0.01, 0.02))


def test_an_answer_is_right_wrong_or_none(imported):
    watch_causes = imported("watch_causes")
    cause = watch_causes.Cause("timm", "forward", 0.1, watch_causes.STRAGGLER, ranks=2, stage="forward")
    answers = ("straggler-bound (forward)", "straggler-bound (rank 0)", "unknown", "compute-bound")
    assert [watch_causes.judge(cause, each) for each in answers] == ["right", "WRONG", "no answer", "WRONG"]
    none = watch_causes.Cause("timm")
    assert [watch_causes.judge(none, each) for each in answers] == ["WRONG", "WRONG", "right", "right"]


def test_there_are_30_causes_and_10_runs_without(imported):
    watch_causes = imported("watch_causes")
    assert (len(set(watch_causes.CAUSES)), len(set(watch_causes.CLEAN))) == (30, 10)
