"""The arithmetic of the benchmarks of `paceline watch`."""

import importlib
import sys
from itertools import accumulate
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


def test_overhead_compares_neighboring_steps_without_those_that_evaluate(imported):
    is_on = [number % 4 in (0, 3) for number in range(40)]
    steps_s = [0.101 if each else 0.1 for each in is_on]
    steps_s[30] += 5
    times_s = list(accumulate(steps_s))
    watch_scripts = imported("watch_scripts")
    cpu_s = [2 * each for each in times_s]
    pairs = watch_scripts.pair_steps({"times_s": times_s, "cpu_s": cpu_s, "is_on": is_on})
    assert [each for pair in pairs["cpu_s"] for each in pair] == pytest.approx([0.2, 0.202] * 14)
    for name, step_s in (("times_s", 0.1), ("cpu_s", 0.2)):
        assert watch_scripts.overhead_of(pairs[name], step_s) == {
            "mean": 0.01,
            "low": 0.01,
            "high": 0.01,
            "median": 0.01,
            "n": 14,
        }


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
