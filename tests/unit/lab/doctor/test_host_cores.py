"""Cores: affinity, quota, and the request to Slurm."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.lab.doctor.check import HostContext, Outcome, ok
from paceline.lab.doctor.host import check_cores

IN_STEP = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "2"}
MINE = len(os.sched_getaffinity(0))


@pytest.fixture
def found(tmp_path: Path) -> Callable[..., Outcome]:
    """Return a function from variables to what is found of a machine whose files are below the test's folder."""

    def look(**environ: str) -> Outcome:
        return check_cores(HostContext(environ, tmp_path, tmp_path))

    return look


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def test_the_cores_that_this_process_may_use_are_reported(found) -> None:
    assert found() == ok(f"{MINE} of {os.cpu_count()} usable")


@pytest.mark.parametrize(
    ("lines", "files"),
    [
        ("0::/job/step", {"job/cpu.max": "50000 100000", "job/step/cpu.max": "max 100000"}),
        ("1:cpu:/job", {"cpu/job/cpu.cfs_quota_us": "50000", "cpu/job/cpu.cfs_period_us": "100000"}),
    ],
    ids=["version 2", "version 1"],
)
def test_a_quota_of_cpu_time_below_the_cores_is_worth_a_look(found, tmp_path: Path, lines: str, files: dict) -> None:
    write(tmp_path / "proc/self/cgroup", lines)
    for name, text in files.items():
        write(tmp_path / "sys/fs/cgroup" / name, text)
    cores = found()
    assert cores[0] == "warning" and cores[1].endswith("usable, but only 0.5 s of CPU time per second")
    assert "paceline uses 1," in cores[2]


@pytest.mark.skipif(MINE < 2, reason="a whole quota below the cores takes two")
def test_a_whole_quota_is_worth_a_look_only_where_the_ranks_are_more(found, tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/job")
    write(tmp_path / "sys/fs/cgroup/job/cpu.max", "100000 100000")
    cores = f"{MINE} of {os.cpu_count()} usable"
    assert found() == ok(f"{cores}, 1 s of CPU time per second")
    two = found(RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", LOCAL_WORLD_SIZE="2")
    assert two[0] == "warning" and two[1] == f"{cores}, but only 1 s of CPU time per second for 2 ranks"


def test_ranks_that_are_bound_to_cores_of_their_own_have_others_than_this_one(found) -> None:
    step = {**IN_STEP, "SLURM_STEP_NUM_TASKS": str(MINE + 1)}
    assert found(**step, SLURM_CPUS_ON_NODE=str(MINE + 1))[0] == "ok"
    assert found(**step, SLURM_CPUS_ON_NODE=str(MINE))[0] == "warning"


def test_fewer_cores_than_were_requested_from_slurm_are_worth_a_look(found) -> None:
    cores = found(**IN_STEP, SLURM_CPUS_PER_TASK=str(MINE + 1))
    assert cores[0] == "warning" and cores[1].endswith(f"{MINE + 1} per task were requested from Slurm")
    assert found(**IN_STEP, SLURM_CPUS_PER_TASK="1", SLURM_STEP_TASKS_PER_NODE="1(x2)")[0] == "ok"


def test_more_ranks_than_cores_are_worth_a_look(found) -> None:
    many = str(MINE + 1)
    cores = found(RANK="0", WORLD_SIZE=many, LOCAL_RANK="0", LOCAL_WORLD_SIZE=many)
    assert cores[0] == "warning" and cores[1].endswith(f"for {many} ranks")


@pytest.mark.skipif(MINE < 2, reason="two NUMA nodes take two cores")
def test_binding_is_advised_for_ranks_that_share_several_numa_nodes(found, tmp_path: Path) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    for node, part in enumerate((cpus[:1], cpus[1:])):
        write(tmp_path / f"sys/devices/system/node/node{node}/cpulist", ",".join(map(str, part)))
    assert "NUMA" not in found()[1]
    together = {**IN_STEP, "SLURM_CPUS_ON_NODE": str(MINE)}
    assert found(**together)[1].endswith("on 2 NUMA nodes (parallel.bind=auto keeps each rank on one, next to its GPU)")
