"""All checks of this machine run once, and it is fit for a run; packages, load and the run directory."""

import os
import shutil
import subprocess
import sys
from collections import namedtuple
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.data.native import NATIVE_MISSING_MESSAGE
from paceline.lab.doctor import host
from paceline.lab.doctor.check import HostContext, Outcome, ok
from paceline.lab.doctor.host import HOST_CHECKS, check_disk, check_host, check_load

Usage = namedtuple("Usage", "total used free")
CORES = sorted(os.sched_getaffinity(0))
SECOND_NODE = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "10.0.0.1"}


def test_every_check_runs_once(tmp_path: Path) -> None:
    found = list(check_host(HostContext({"CUDA_VISIBLE_DEVICES": ""}, tmp_path)))  # GPUs have their own test
    of_gpus = {"NCCL", "GPU health", "port"}
    assert [finding.name for finding in found] == [name for name, _ in HOST_CHECKS if name not in of_gpus]
    assert all(finding.found for finding in found) and not [each for each in found if each.state == "error"]
    assert not list(tmp_path.iterdir())


def test_a_package_that_is_missing_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "numpy":
            raise PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(host, "version", version)
    state, found, _ = host.check_versions(HostContext({}, tmp_path))
    assert state == "error" and found.endswith("torch 1.0, torchvision 1.0; no numpy")


def test_whether_there_is_a_native_core_is_reported_and_what_is_lost_without(tmp_path: Path, monkeypatch) -> None:
    here = HostContext({}, tmp_path)
    monkeypatch.setattr(host, "load_native", lambda: SimpleNamespace(isa=lambda: "avx2"))
    assert host.check_native_core(here) == ok("built, uses avx2")
    monkeypatch.setattr(host, "load_native", lambda: None)
    state, found, advice = host.check_native_core(here)
    assert state == "warning" and f"{found} ({advice})" == NATIVE_MISSING_MESSAGE


def test_real_busy_processes_are_a_load() -> None:
    """Processes of a session of their own whose parent has ended are no descendants."""
    script = "import subprocess, sys; start = [sys.executable, '-S', '-c', sys.argv[2]];"
    script += "[print(subprocess.Popen(start, stdout=-3, stderr=-3).pid)"  # DEVNULL
    script += " for _ in range(int(sys.argv[1]))]"
    count = "import time\nend = time.monotonic() + 60\nwhile time.monotonic() < end: pass"
    starter = [sys.executable, "-S", "-c", script, str(2 * len(CORES)), count]
    said = subprocess.run(starter, capture_output=True, text=True, check=True, timeout=60).stdout
    pids = list(map(int, said.split()))
    try:
        assert len(pids) == 2 * len(CORES)
        state, found, advice = check_load(HostContext({}, Path()))
    finally:
        for pid in pids:
            os.kill(pid, 9)
    assert state == "warning" and "cores busy" in found and "before measuring" in advice


def test_what_paceline_uses_itself_is_no_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """All cores are busy for a second, of which this process had all."""
    seconds = iter([0.0, 0.0, 1.0 * len(CORES), 1.0 * len(CORES)])
    monkeypatch.setattr(host, "read_core_time", lambda psutil, cores: host_time(next(seconds)))
    monkeypatch.setattr(host, "_read_own_cpu_s", lambda here: next(seconds))
    monkeypatch.setattr(host, "_SAMPLE_S", 0.0)
    state, found, _ = check_load(HostContext({}, Path()))
    assert state == "ok" and f"0.0 of {len(CORES)} cores busy" in found


def host_time(busy_s: float) -> SimpleNamespace:
    return SimpleNamespace(busy_s=busy_s, available_s=busy_s)


def probe(folder: Path, **environ: str) -> Outcome:
    return check_disk(HostContext(environ, folder))


def test_room_is_reported_also_of_a_folder_that_is_not_there_yet_and_nothing_stays(tmp_path: Path) -> None:
    state, found, _ = probe(tmp_path / "a" / "b")
    assert state != "error" and found.endswith(f" free at {tmp_path}/a/b")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_to_is_wrong(tmp_path: Path) -> None:
    state, found, _ = probe(Path("/proc/self/runs"))
    assert state == "error" and found.startswith("/proc/self/runs cannot be written to: ")
    (tmp_path / "runs").touch()
    assert probe(tmp_path / "runs")[0] == "error", "a file in place of a folder"


@pytest.mark.parametrize(("free", "total", "state"), [(10**9, 10**12, "warning"), (10**10, 10**12, "ok"), (0, 0, "ok")])
def test_little_room_is_worth_a_look(tmp_path: Path, monkeypatch, free: int, total: int, state: str) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(total, 0, free))
    assert probe(tmp_path)[0] == state


def test_one_process_of_each_node_opens_a_file(tmp_path: Path) -> None:
    assert probe(Path("/proc/self/runs"), **SECOND_NODE)[0] == "error"
    beside = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert probe(Path("/proc/self/runs"), **beside)[0] == "ok", "the first of its node says so"
