"""Cores: affinity, quota, the request to Slurm, and which are near a GPU."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.lab.doctor.check import DoctorFinding, HostContext
from paceline.lab.doctor.host import check_cores, parse_core_list

IN_STEP = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "2"}
MINE = len(os.sched_getaffinity(0))


@pytest.fixture
def found(tmp_path: Path) -> Callable[..., dict[str, DoctorFinding]]:
    """Return a function from variables to what is found of a machine whose files are below the test's folder."""

    def look(**environ: str) -> dict[str, DoctorFinding]:
        here = HostContext(environ, tmp_path, lambda: 0.0, 0.0, tmp_path)
        return {finding.name: finding for finding in check_cores(here)}

    return look


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def node(root: Path, number: int, cores: str) -> None:
    write(root / f"sys/devices/system/node/node{number}/cpulist", cores)


def gpu(root: Path, address: str, number: int) -> None:
    (root / "proc/driver/nvidia/gpus" / address).mkdir(parents=True)
    write(root / f"sys/bus/pci/devices/{address.lower()}/numa_node", str(number))


def test_the_cores_that_this_process_may_use_are_reported(found) -> None:
    assert found()["cores"] == DoctorFinding.ok("cores", f"{MINE} of {os.cpu_count()} usable")


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
    cores = found()["cores"]
    assert cores.state == "look" and cores.found.endswith("usable, but only 0.5 s of CPU time per second")
    assert "paceline uses 1," in cores.advice


@pytest.mark.skipif(MINE < 2, reason="a whole quota below the cores takes two")
def test_a_whole_quota_is_worth_a_look_only_where_the_ranks_are_more(found, tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/job")
    write(tmp_path / "sys/fs/cgroup/job/cpu.max", "100000 100000")
    cores = f"{MINE} of {os.cpu_count()} usable"
    assert found()["cores"] == DoctorFinding.ok("cores", f"{cores}, 1 s of CPU time per second")
    two = found(RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", LOCAL_WORLD_SIZE="2")["cores"]
    assert two.state == "look" and two.found == f"{cores}, but only 1 s of CPU time per second for 2 ranks"


def test_ranks_that_are_bound_to_cores_of_their_own_have_others_than_this_one(found) -> None:
    step = {**IN_STEP, "SLURM_STEP_NUM_TASKS": str(MINE + 1)}
    assert found(**step, SLURM_CPUS_ON_NODE=str(MINE + 1))["cores"].state == "ok"
    assert found(**step, SLURM_CPUS_ON_NODE=str(MINE))["cores"].state == "look"


def test_fewer_cores_than_were_requested_from_slurm_are_worth_a_look(found) -> None:
    cores = found(**IN_STEP, SLURM_CPUS_PER_TASK=str(MINE + 1))["cores"]
    assert cores.state == "look" and cores.found.endswith(f"{MINE + 1} per task were requested from Slurm")
    assert found(**IN_STEP, SLURM_CPUS_PER_TASK="1", SLURM_STEP_TASKS_PER_NODE="1(x2)")["cores"].state == "ok"


def test_more_ranks_than_cores_are_worth_a_look(found) -> None:
    many = str(MINE + 1)
    cores = found(RANK="0", WORLD_SIZE=many, LOCAL_RANK="0", LOCAL_WORLD_SIZE=many)["cores"]
    assert cores.state == "look" and cores.found.endswith(f"for {many} ranks")


def test_limits_on_threads_are_reported(found) -> None:
    assert found()["threads"].found == "set for each rank"
    assert found(OMP_NUM_THREADS="4")["threads"].found == "OMP_NUM_THREADS=4 (set for each rank by parallel.threads)"


def test_nodes_of_memory_report_their_cores_and_gpus(found, tmp_path: Path) -> None:
    assert found()["NUMA"].found == "not reported by the kernel"
    node(tmp_path, 0, f"0-{os.cpu_count()}")
    node(tmp_path, 10, "")
    node(tmp_path, 2, "9000-9001")
    gpu(tmp_path, "0000:1B:00.0", 0)
    gpu(tmp_path, "0000:99:00.0", -1)
    expected = f"3 nodes: 0 has cores 0-{os.cpu_count()} and GPU 0000:1B:00.0; 2 has cores 9000-9001; 10 has no cores"
    assert found()["NUMA"] == DoctorFinding.ok("NUMA", expected)


def test_a_process_bound_far_from_every_gpu_is_worth_a_look(found, tmp_path: Path) -> None:
    node(tmp_path, 0, f"0-{os.cpu_count()}")
    node(tmp_path, 1, "9000-9001")
    gpu(tmp_path, "0000:1b:00.0", 1)
    numa = found()["NUMA"]
    assert numa.state == "look" and numa.found.endswith("this process may use no core near a GPU")
    assert "--gpus-per-task=1" in numa.advice and "closest" not in numa.advice


def test_lists_of_cores_are_read_as_the_kernel_writes_them() -> None:
    assert parse_core_list("0-3,8,10-11") == {0, 1, 2, 3, 8, 10, 11}
    assert parse_core_list("") == parse_core_list("(null)") == set()
