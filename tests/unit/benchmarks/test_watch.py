"""The arithmetic of the benchmarks of `paceline watch`."""

import importlib
import os
import subprocess
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
    watch_scripts = imported("watch_scripts")
    pairs = watch_scripts.pair_steps(plain, observed)
    overheads = [watch_scripts.overhead_of(pairs[name]) for name in ("times_s", "cpu_s")]
    assert [each["mean"] for each in overheads] == [each["median"] for each in overheads] == [0.01, 0.02]
    assert [each["n"] for each in overheads] == [19, 19]


TAKE_TURNS = """
import os, sys, time
from sitecustomize import Turns
turns = Turns(sys.argv[1], *sys.argv[2:])
time.sleep(0.1 * (sys.argv[2] == "plain"))
for step in range(4):
    with open(f"{sys.argv[1]}/log", "a") as log:
        log.write(sys.argv[2][0])
    turns.end()
"""


def test_two_runs_take_turns_from_the_second_step_on(tmp_path):
    sides = ("plain", "watched")
    for side in sides:
        os.mkfifo(tmp_path / f"{side}-0")
    environ = os.environ | {"PYTHONPATH": str(FOLDER / "watch_shim")}
    running = [
        subprocess.Popen([sys.executable, "-c", TAKE_TURNS, str(tmp_path), *pair], env=environ)
        for pair in (sides, sides[::-1])
    ]
    assert [each.wait(60) for each in running] == [0, 0]
    log = (tmp_path / "log").read_text()
    assert sorted(log[:2]) == ["p", "w"]
    assert log[2:] == "wpwpwp"


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
