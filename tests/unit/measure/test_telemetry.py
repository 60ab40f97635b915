"""Looking at a node beside a run: often enough, once more at the end, and never in the run's way."""

import importlib
import itertools
import threading
from typing import Any

import psutil
import pytest

from paceline.core.host import CgroupLimits
from paceline.core.units import Duration
from paceline.measure.telemetry import (
    SAMPLES_PER_DOUBLING,
    NodeSampler,
    NodeTelemetry,
    build_telemetry,
    sample_interval_s,
)

WAIT_S = 20.0
"""How long a test may wait for a thread at most."""
FIELDS = {
    "unix_s",
    "memory_bytes",
    "memory_total_bytes",
    "ranks_memory_bytes",
    "disk_read_bytes_per_s",
    "disk_written_bytes_per_s",
    "net_sent_bytes_per_s",
    "net_received_bytes_per_s",
    "gpus",
}


class Rows(list[dict[str, Any]]):
    """The rows that were written; `enough` is set with the third."""

    def __init__(self, *errors: OSError) -> None:
        self._errors = iter(errors)
        self.enough = threading.Event()

    def __call__(self, row: dict[str, Any]) -> None:
        self.append(row)
        if len(self) == 3:
            self.enough.set()
        for error in self._errors:
            raise error


class Gpus:
    """A node without GPUs."""

    def sample(self) -> list[dict[str, Any]]:
        return []

    def close(self) -> None: ...


def telemetry(write, warn=print, every_s: float = 0.001, gpus=None, **options: Any) -> NodeTelemetry:
    """Return a look at this machine, on which a second passes between looks."""
    seconds = itertools.count()
    node = NodeSampler(psutil, [psutil.Process().pid], CgroupLimits(), lambda: float(next(seconds)))
    return NodeTelemetry(node, gpus, every_s, write, warn, **options)


def test_rows_come_one_after_the_other_until_the_end() -> None:
    rows = Rows()
    with telemetry(rows):
        assert rows.enough.wait(WAIT_S)
    unsure = {"cpu", "others_cpu"}  # the kernel counts CPU time by 10 ms, and may know none
    assert all(set(row) - unsure == FIELDS for row in rows)
    stamps = [row["unix_s"] for row in rows]
    assert stamps == sorted(stamps)


def test_no_thread_is_left_after_the_end() -> None:
    with telemetry(Rows()):
        names = [(thread.name, thread.daemon) for thread in threading.enumerate()]
        assert ("paceline-telemetry", True) in names
    assert "paceline-telemetry" not in [thread.name for thread in threading.enumerate()]


def test_a_run_that_is_shorter_than_the_time_between_looks_has_one_at_its_end() -> None:
    rows, seconds = Rows(), iter([0.0, 0.6])
    with telemetry(rows, every_s=1e6, now=lambda: next(seconds)):
        pass
    assert len(rows) == 1


def test_an_end_just_after_a_sample_takes_no_other() -> None:
    rows, seconds = Rows(), iter([0.0, 0.4])
    with telemetry(rows, every_s=1e6, now=lambda: next(seconds)):
        pass
    assert rows == []


def test_a_disk_that_refuses_rows_is_one_warning_and_the_looks_go_on() -> None:
    said: list[str] = []
    rows = Rows(OSError(28, "No space left on device"), OSError(28, "No space left on device"))
    with telemetry(rows, said.append):
        assert rows.enough.wait(WAIT_S)
    assert said == ["measure.telemetry: a sample cannot be written: No space left on device (training goes on)"]


def test_a_look_that_never_ends_does_not_hold_up_the_end_of_a_run() -> None:
    looks, driver = threading.Event(), threading.Event()

    class Lost(Gpus):
        def sample(self) -> list[dict[str, Any]]:
            looks.set()
            assert driver.wait(WAIT_S)
            return []

    with telemetry(Rows(), gpus=Lost(), last_sample_s=0.01):
        assert looks.wait(WAIT_S)
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "paceline-telemetry"]
    driver.set()
    thread.join(WAIT_S)


def test_the_library_of_the_gpus_is_let_go_of_at_the_end() -> None:
    closed = []

    class Watched(Gpus):
        def close(self) -> None:
            closed.append("closed")

    with telemetry(Rows(), every_s=1e6, gpus=Watched()):
        assert not closed
    assert closed == ["closed"]


def without(*missing: str):
    """Return a loader of modules that finds all but these."""

    def load(name: str) -> Any:
        if name in missing:
            raise ModuleNotFoundError(name)
        return importlib.import_module(name)

    return load


def test_a_recipe_chooses_how_often() -> None:
    rows = Rows()
    built = build_telemetry(Duration(0.001, "s"), rows, print, gpus=())
    assert isinstance(built, NodeTelemetry) and built.missing == ""
    with built:
        assert rows.enough.wait(WAIT_S)
    assert rows[0]["gpus"] == [] and rows[0]["ranks_memory_bytes"] > 0


def test_a_recipe_that_asks_for_none_loads_nothing() -> None:
    assert build_telemetry("off", Rows(), print, load=without("psutil", "pynvml")) is None


@pytest.mark.parametrize("gpus", ["all", [0]])
def test_without_pynvml_the_node_is_sampled_and_the_reason_given(gpus) -> None:
    built = build_telemetry(Duration(5, "s"), Rows(), print, gpus=gpus, load=without("pynvml"))
    assert isinstance(built, NodeTelemetry) and "nvidia-ml-py is not installed" in built.missing


def looks_in(run_s: float, every_s: float) -> int:
    """Return how many looks a run of `run_s` seconds has."""
    looks, passed_s = 0, 0.0
    while passed_s <= run_s:
        passed_s += sample_interval_s(every_s, looks)
        looks += 1
    return looks


def test_the_longer_a_run_the_rarer_its_samples() -> None:
    assert [sample_interval_s(5.0, looks) for looks in (0, 999, 1000, 1999, 2000, 3000)] == [
        5.0,
        5.0,
        10.0,
        10.0,
        20.0,
        40.0,
    ]
    day_s = 86_400.0
    assert looks_in(3600.0, 5.0) == 721 and looks_in(day_s, 5.0) == 4143
    assert 1800 * looks_in(90 * day_s, 5.0) < 20e6  # bytes of three months, 1.8 KB a look at eight GPUs
    assert sample_interval_s(5.0, 10**9) < threading.TIMEOUT_MAX


def test_a_resumed_run_keeps_its_sampling_interval() -> None:
    rows = Rows()
    before = 40 * SAMPLES_PER_DOUBLING
    with telemetry(rows, every_s=0.001, samples_before=before, now=lambda: 0.0):
        assert not rows.enough.wait(0.0)
    assert rows == []  # the next look was due in 0.001 * 2**20 seconds
