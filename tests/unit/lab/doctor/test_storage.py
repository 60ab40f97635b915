"""The run directory: writable, its free space and its speed; and no file stays in it."""

import errno
import itertools
import os
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.lab.doctor.check import DoctorFinding, HostContext
from paceline.lab.doctor.storage import check_storage, measure_disk_speed

Usage = namedtuple("Usage", "total used free")
MIB = 2**20


def ticking(*steps_s: float) -> Callable[[], float]:
    """Return a clock that advances by these seconds at each reading."""
    times = itertools.accumulate(itertools.cycle(steps_s), initial=0.0)
    return lambda: next(times)


def found(folder: Path, step_s: float = 0.01, **environ: str) -> dict[str, DoctorFinding]:
    here = HostContext(environ, folder, ticking(step_s), 0.0)
    return {finding.name: finding for finding in check_storage(here)}


def test_room_and_speed_are_reported_and_nothing_stays(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    findings = found(tmp_path / "runs")
    assert findings["disk"].found.endswith(f" free at {tmp_path}/runs") and findings["disk speed"].state == "ok"
    assert not list((tmp_path / "runs").iterdir())


def test_a_folder_that_is_not_there_yet_is_rated_by_the_one_above(tmp_path: Path) -> None:
    assert found(tmp_path / "a" / "b")["disk"].found.endswith(f" free at {tmp_path}/a/b")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_to_is_wrong() -> None:
    findings = found(Path("/proc/self/runs"))
    assert set(findings) == {"disk"} and findings["disk"].state == "wrong"
    assert findings["disk"].found.startswith("/proc/self/runs cannot be written to: ")


def test_a_file_in_place_of_a_folder_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    assert found(tmp_path / "runs")["disk"].state == "wrong"


def test_a_full_disk_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(number: int, data: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    assert found(tmp_path)["disk"].found.endswith("cannot be written to: No space left on device")


@pytest.mark.parametrize(("free", "total", "state"), [(10**9, 10**12, "look"), (10**10, 10**12, "ok"), (0, 0, "ok")])
def test_little_room_is_worth_a_look(tmp_path: Path, monkeypatch, free: int, total: int, state: str) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(total, 0, free))
    assert found(tmp_path)["disk"].state == state


def test_a_slow_disk_is_worth_a_look_and_is_not_tried_for_long(tmp_path: Path) -> None:
    findings = found(tmp_path, 0.3)["disk speed"]
    assert findings.state == "look" and findings.found == "writes 14.0 MB/s, reads 14.0 MB/s"  # 4 MiB in 0.3 s


def test_a_fast_disk_is_tried_by_more_than_a_first_block(tmp_path: Path) -> None:
    # The clock advances by 10 ms for the first block and in between, and by 70 ms for the seven that follow.
    speed = measure_disk_speed(tmp_path, ticking(0.01, 0.0, 0.07, 0.0))
    assert speed.write_bytes_per_s == pytest.approx(7 * 4 * MIB / 0.07)  # sums of tenths are not exact in binary
    assert speed.read_bytes_per_s == pytest.approx(7 * 4 * MIB / 0.07)


SECOND_NODE = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "10.0.0.1"}


def test_rank_0_alone_times_the_disk_and_of_other_nodes_one_process_opens_a_file(tmp_path: Path, monkeypatch) -> None:
    def write(number: int, data: object) -> int:
        raise AssertionError("the disk was timed")

    monkeypatch.setattr(os, "write", write)
    assert set(found(tmp_path, **SECOND_NODE)) == {"disk"} and not list(tmp_path.iterdir())
    assert found(Path("/proc/self/runs"), **SECOND_NODE)["disk"].state == "wrong"
    beside = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert found(Path("/proc/self/runs"), **beside)["disk"].state == "ok", "the first of its node says so"
