"""The limits of a container: the tightest of the group of this process and of those around it."""

import os
from pathlib import Path

import pytest

from paceline.core.host import (
    CgroupLimits,
    find_limits,
    free_memory_bytes,
    oom_kills,
    rank_cores,
    share_of_cores,
    usable_cores,
)
from paceline.core.world import World

GIB = 2**30


@pytest.fixture
def groups(tmp_path) -> Path:
    """A process in group /job/step: the job may use 2.5 cores, and its step 3 GiB of the job's 4."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text("4:memory:/elsewhere\n0::/job/step\n")
    (tmp_path / "cgroup" / "job" / "step").mkdir(parents=True)
    for name, text in {
        "job/memory.max": f"{4 * GIB}\n",
        "job/cpu.max": "250000 100000\n",
        "job/cpu.stat": "usage_usec 1500000\nuser_usec 900000\n",
        "job/step/memory.max": f"{3 * GIB}\n",
        "job/step/memory.current": f"{2 * GIB}\n",
        "job/step/memory.stat": f"anon {GIB}\ninactive_file {GIB // 2}\n",
        "job/step/cpu.max": "max 100000\n",
    }.items():
        (tmp_path / "cgroup" / name).write_text(text)
    return tmp_path


def test_the_tightest_limit_of_each_kind_counts_and_what_its_group_uses(groups) -> None:
    limits = find_limits(groups / "proc", groups / "cgroup")
    assert (limits.memory_bytes, limits.cores) == (3 * GIB, 2.5)
    assert limits.used_memory_bytes() == 1.5 * GIB  # the kernel can drop half a GiB of pages of files at once
    assert limits.cpu_s() == 1.5


def test_a_container_sees_its_own_group_as_the_outermost(groups) -> None:
    (groups / "proc" / "self" / "cgroup").write_text("0::/\n")
    assert find_limits(groups / "proc", groups / "cgroup" / "job") == CgroupLimits(
        4 * GIB, groups / "cgroup" / "job", 2.5, groups / "cgroup" / "job"
    )


@pytest.mark.parametrize("text", ["max\n", "", "plenty\n"])
def test_a_group_without_a_limit_has_none(groups, text: str) -> None:
    for path in groups.glob("cgroup/**/*.max"):
        path.write_text(text)
    limits = find_limits(groups / "proc", groups / "cgroup")
    assert (limits.memory_bytes, limits.cores) == (float("inf"), float("inf"))


def test_a_system_without_groups_has_no_limits(tmp_path) -> None:
    assert find_limits(tmp_path / "proc", tmp_path / "cgroup") == CgroupLimits()


@pytest.fixture
def first_version(tmp_path) -> Path:
    """A process that Docker lets use a core and a half, which sees its own group as the outermost."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text("3:cpuset:/docker/1f\n2:cpu,cpuacct:/docker/1f\n0::/docker/1f\n")
    group = tmp_path / "cgroup" / "cpu,cpuacct"
    group.mkdir(parents=True)
    for name, text in {
        "cpu.cfs_quota_us": "150000",
        "cpu.cfs_period_us": "100000",
        "cpuacct.usage": "2500000000",
    }.items():
        (group / name).write_text(f"{text}\n")
    return tmp_path


def test_the_quota_of_version_1_counts_and_what_its_group_has_spent(first_version) -> None:
    limits = find_limits(first_version / "proc", first_version / "cgroup")
    assert (limits.cores, limits.memory_bytes, limits.cpu_s()) == (1.5, float("inf"), 2.5)


def test_version_1_has_a_quota_of_minus_one_without_a_limit(first_version) -> None:
    (first_version / "cgroup" / "cpu,cpuacct" / "cpu.cfs_quota_us").write_text("-1\n")
    assert find_limits(first_version / "proc", first_version / "cgroup").cores == float("inf")


def test_usable_cores_are_those_the_process_may_run_on_or_its_quota_in_whole_ones(first_version) -> None:
    assert usable_cores(first_version / "proc", first_version / "cgroup") == 1
    (first_version / "cgroup" / "cpu,cpuacct" / "cpu.cfs_quota_us").write_text("20000\n")
    assert usable_cores(first_version / "proc", first_version / "cgroup") == 1
    (first_version / "cgroup" / "cpu,cpuacct" / "cpu.cfs_quota_us").write_text("-1\n")
    assert usable_cores(first_version / "proc", first_version / "cgroup") == len(os.sched_getaffinity(0))


def slurm(ranks: int, given: int) -> World:
    """Return the world of a task of Slurm's, one of `ranks` on a node of whose CPUs it has `given` to them."""
    return World(0, ranks, 0, ranks, launcher="slurm", allocated_cpus=given, local_tasks=ranks if given else 1)


def torchrun(ranks: int, given: int = 0) -> World:
    return World(0, ranks, 0, ranks, launcher="torchrun", allocated_cpus=given)


UNLIMITED = float("inf")


@pytest.mark.parametrize(
    ("world", "own", "launchers", "quota", "cores"),
    [
        pytest.param(World(0, 4, 0, 4), 64, 64, UNLIMITED, 16, id="to be started here"),
        pytest.param(World(0, 4, 0, 4, launcher="local"), 64, 64, UNLIMITED, 16, id="started here"),
        pytest.param(World(0, 3, 0, 3, launcher="local"), 2, 2, UNLIMITED, 1, id="more ranks than cores"),
        pytest.param(slurm(4, 32), 8, 8, UNLIMITED, 8, id="bound by srun --cpus-per-task=8"),
        pytest.param(slurm(4, 32), 32, 32, UNLIMITED, 8, id="limited to the step's CPUs, not bound"),
        pytest.param(slurm(4, 32), 16, 16, UNLIMITED, 8, id="two bound to each socket"),
        pytest.param(slurm(4, 32), 1, 1, UNLIMITED, 1, id="bound to a core, though the step has more"),
        pytest.param(slurm(4, 16), 64, 64, UNLIMITED, 4, id="neither bound nor limited, beside other jobs"),
        pytest.param(slurm(4, 64), 8, 8, UNLIMITED, 8, id="a thread of each core, given both"),
        pytest.param(slurm(4, 0), 64, 64, UNLIMITED, 16, id="a Slurm that does not say"),
        pytest.param(torchrun(4), 64, 64, UNLIMITED, 16, id="torchrun"),
        pytest.param(torchrun(4), 32, 64, UNLIMITED, 16, id="torchrun --numa-binding=node"),
        pytest.param(torchrun(4), 16, 64, UNLIMITED, 16, id="torchrun --numa-binding=exclusive"),
        pytest.param(torchrun(4), 8, 64, UNLIMITED, 8, id="torchrun --numa-binding=core-complex"),
        pytest.param(torchrun(4, 32), 64, 64, UNLIMITED, 8, id="torchrun in a step of one task"),
        pytest.param(World(launcher="single", allocated_cpus=6), 64, 64, UNLIMITED, 6, id="a batch script"),
        pytest.param(torchrun(4), 64, 64, 10.5, 2, id="a quota for all ranks"),
        pytest.param(torchrun(4), 64, 64, 0.5, 1, id="a quota of less than a core"),
    ],
)
def test_a_rank_has_what_is_its_own_and_its_share_of_what_is_not(world, own, launchers, quota, cores) -> None:
    assert share_of_cores(world, own, launchers, quota) == cores


def test_ranks_of_one_machine_share_its_cores_as_ever() -> None:
    for cores in range(1, 20):
        for quota in (UNLIMITED, 0.3, 1.0, 2.5, 7.9, 30.0):
            for ranks in range(1, 9):
                usable = max(1, int(min(cores, quota)))
                assert share_of_cores(World(0, ranks, 0, ranks), cores, cores, quota) == max(1, usable // ranks)


def test_a_bound_rank_has_its_own_cores_under_any_launcher(tmp_path, monkeypatch) -> None:
    cpus = {0: range(8), os.getppid(): range(64)}
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(cpus[process]))
    nowhere = (tmp_path / "proc", tmp_path / "cgroup")
    assert rank_cores(torchrun(4), *nowhere) == 8
    assert rank_cores(slurm(4, 32), *nowhere) == 8
    assert rank_cores(World(0, 4, 0, 4), *nowhere) == 2  # all four are yet to be started from here


def test_a_launcher_that_has_ended_is_taken_to_have_had_the_cores_of_its_rank(tmp_path, monkeypatch) -> None:
    def affinity(process: int) -> set[int]:
        if process:
            raise ProcessLookupError
        return set(range(8))

    monkeypatch.setattr(os, "sched_getaffinity", affinity)
    assert rank_cores(torchrun(4), tmp_path / "proc", tmp_path / "cgroup") == 2


def test_processes_that_the_kernel_ended_for_want_of_memory_are_counted(tmp_path: Path) -> None:
    proc, mount = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text("4:memory:/job\n0::/job\n")
    assert oom_kills(proc, mount) == 0
    (proc / "vmstat").write_text("pgfault 12\noom_kill 1\n")  # of the whole machine
    assert oom_kills(proc, mount) == 1
    (mount / "memory" / "job").mkdir(parents=True)
    (mount / "memory" / "job" / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    assert oom_kills(proc, mount) == 2
    (mount / "job").mkdir()
    (mount / "job" / "memory.events").write_text("low 0\nhigh 0\nmax 9\noom 4\noom_kill 3\n")
    assert oom_kills(proc, mount) == 3


def test_free_memory_is_that_of_the_machine_or_of_the_group(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 64 kB\nMemFree: 4 kB\nMemAvailable: 16 kB\n")
    monkeypatch.setattr("paceline.core.host.memory_left_bytes", lambda: float("inf"))
    assert free_memory_bytes(tmp_path) == 16 * 1024
    monkeypatch.setattr("paceline.core.host.memory_left_bytes", lambda: 1000.0)
    assert free_memory_bytes(tmp_path) == 1000
