"""A full disk does not end a run, and nothing else is forgiven."""

import resource
import signal
from pathlib import Path

import pytest

from paceline.core.run_dir import RunDir, read_lines
from paceline.recipe.load import Patch, load
from paceline.training.logging.base import StepRecord
from paceline.training.logging.build import build_sinks
from paceline.training.logging.files import SafeSink

RECIPE = load("digits", Patch.parse(["log.tensorboard=off"])).recipe


class Heard:
    """Note the warnings, and nothing else."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def started(self, plan, step) -> None: ...

    def step(self, record) -> None: ...

    def evaluated(self, record) -> None: ...

    def warned(self, message: str) -> None:
        self.warnings.append(message)

    def finished(self, result) -> None: ...

    def close(self) -> None: ...


# matrix: 30
def test_records_that_a_full_disk_refuses_are_told_once_and_come_when_there_is_room(tmp_path: Path) -> None:
    """A limit on the size of files stands for the full disk: it fails at the same call, and can be lifted."""
    rundir, heard = RunDir(tmp_path), Heard()
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    sinks = build_sinks(rundir, RECIPE, 0, [heard])
    try:
        sinks.step(StepRecord(1, 0.1, 8, 1.0, 0.1, 1.0, 1.0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (rundir.steps.stat().st_size + 10, limits[1]))
        for step in (2, 3):
            sinks.step(StepRecord(step, 0.1, 8, 1.0, 0.1, 1.0, 1.0))
        assert list(read_lines(rundir.steps))[-1]["step"] == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    sinks.step(StepRecord(4, 0.1, 8, 1.0, 0.1, 1.0, 1.0))
    sinks.close()
    assert [line["step"] for line in read_lines(rundir.steps)] == [1, 2, 3, 4]
    assert heard.warnings == ["log: a record cannot be written: File too large (training continues; fix the cause)"]


def test_only_what_the_disk_refuses_is_forgiven() -> None:
    class Broken(Heard):
        def step(self, record) -> None:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        SafeSink(Broken(), Heard()).step(StepRecord(1, 0.1, 8, 1.0, 0.1, 1.0, 1.0))
