"""Memory, shared memory and open files: what a run needs, and what the machine has."""

import resource
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.core.pixels import PixelFormat
from paceline.data import workers
from paceline.data.loaders.process import BATCHES_PER_WORKER
from paceline.lab.doctor import host
from paceline.lab.doctor.check import DoctorFinding, HostContext
from paceline.lab.doctor.host import HOST_CHECKS

Usage = namedtuple("Usage", "total used free")
GB = 10**9
ONE_WORKER = 3 * 2 * workers.estimate_batch_bytes(64, PixelFormat(3), 224)


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, DoctorFinding]]:
    """Return a function from variables to what is found of a machine of 4 cores, whose files the test writes."""
    monkeypatch.setattr(host, "rank_cores", lambda world, proc, mount: max(1, 4 // world.local_world_size))
    (tmp_path / "dev/shm").mkdir(parents=True)

    def look(**environ: str) -> dict[str, DoctorFinding]:
        here = HostContext(environ, tmp_path, tmp_path)
        checks = [(name, check) for name, check in HOST_CHECKS if name in ("memory", "shared memory", "open files")]
        return {name: DoctorFinding(name, *check(here)) for name, check in checks}

    return look


def ranks(num: int) -> dict[str, str]:
    return {"RANK": "0", "WORLD_SIZE": str(num), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(num)}


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_what_a_worker_takes_is_what_training_reckons_with() -> None:
    assert host._PREFETCHED_BATCHES == BATCHES_PER_WORKER
    assert host._FILES_PER_WORKER == 2 * (workers._FILES_PER_WORKER + workers._TENSORS_PER_BATCH * BATCHES_PER_WORKER)


def test_a_container_s_memory_counts_and_not_its_host_s(found, tmp_path: Path, monkeypatch) -> None:
    machine = SimpleNamespace(total=64 * GB, available=32 * GB)
    monkeypatch.setattr("psutil.virtual_memory", lambda: machine)
    assert found()["memory"] == DoctorFinding("memory", "ok", "32 GB free of 64 GB")
    write(tmp_path / "proc/self/cgroup", "0::/job\n")
    group = tmp_path / "sys/fs/cgroup/job"
    write(group / "memory.max", "8000000000\n")
    assert found()["memory"] == DoctorFinding("memory", "ok", "8 GB free of 8 GB that this container or job may use")
    write(group / "memory.current", "7000000000\n")
    write(group / "memory.stat", "anon 6000000000\ninactive_file 500000000\n")
    memory = found()["memory"]
    assert memory.state == "warning" and memory.found.startswith("1.50 GB free of 8 GB")


@pytest.mark.parametrize(
    ("free", "num", "state"),
    [
        (4 * GB, 1, "ok"),
        (2**29 - 1, 1, "warning"),
        (ONE_WORKER, 1, "warning"),
        (ONE_WORKER - 1, 1, "error"),
        (4 * ONE_WORKER - 1, 4, "error"),
    ],
)
def test_shared_memory_is_rated_by_batches_of_photographs(found, monkeypatch, free: int, num: int, state: str) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(GB, 0, free))
    shared = found(**ranks(num))["shared memory"]
    assert shared.state == state, shared
    assert ("--shm-size" in shared.advice) == (state != "ok")


def test_no_shared_memory_at_all_is_wrong(found, tmp_path: Path) -> None:
    (tmp_path / "dev/shm").rmdir()
    assert found()["shared memory"].state == "error"


@pytest.mark.parametrize(
    ("soft", "hard", "num", "state"),
    [
        (160, 160, 1, "ok"),  # 64 for the rank, and 24 for each of 4 workers
        (159, 160, 1, "warning"),
        (159, 159, 1, "error"),
        (137, 137, 2, "ok"),  # of two ranks, each has half of the workers, and 21 + 2 * 2 files of gloo's
        (136, 4096, 2, "warning"),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 1024, "ok"),
        (1024, 4096, 1024, "warning"),
    ],
)
def test_open_files_are_rated_by_ranks_and_workers(
    found, monkeypatch, soft: int, hard: int, num: int, state: str
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, hard))
    files = found(**ranks(num))["open files"]
    assert files.state == state, files
    assert ("ulimit -n" in files.advice) == (state != "ok")


def test_shared_memory_is_for_the_workers_that_the_cores_of_a_bound_rank_serve(found, monkeypatch) -> None:
    """Each of 4 ranks that are bound to 4 cores of their own has 3 workers, not those of a quarter of its cores."""
    monkeypatch.setattr(host, "rank_cores", lambda world, proc, mount: 4)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(GB, 0, 4 * ONE_WORKER))
    assert "3 workers per rank" in found(**ranks(4))["shared memory"].found
