"""The limits of a container: the tightest of the group of this process and of those around it."""

import os
from pathlib import Path

import pytest

from paceline.core.limits import Limits, find_limits, usable_cores

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
    assert find_limits(groups / "proc", groups / "cgroup" / "job") == Limits(
        4 * GIB, groups / "cgroup" / "job", 2.5, groups / "cgroup" / "job"
    )


@pytest.mark.parametrize("text", ["max\n", "", "plenty\n"])
def test_a_group_without_a_limit_has_none(groups, text: str) -> None:
    for path in groups.glob("cgroup/**/*.max"):
        path.write_text(text)
    limits = find_limits(groups / "proc", groups / "cgroup")
    assert (limits.memory_bytes, limits.cores) == (float("inf"), float("inf"))


def test_a_system_without_groups_has_no_limits(tmp_path) -> None:
    assert find_limits(tmp_path / "proc", tmp_path / "cgroup") == Limits()


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


def test_version_1_says_minus_one_where_there_is_no_quota(first_version) -> None:
    (first_version / "cgroup" / "cpu,cpuacct" / "cpu.cfs_quota_us").write_text("-1\n")
    assert find_limits(first_version / "proc", first_version / "cgroup").cores == float("inf")


def test_usable_cores_are_those_the_process_may_run_on_or_its_quota_in_whole_ones(first_version) -> None:
    assert usable_cores(first_version / "proc", first_version / "cgroup") == 1
    (first_version / "cgroup" / "cpu,cpuacct" / "cpu.cfs_quota_us").write_text("20000\n")
    assert usable_cores(first_version / "proc", first_version / "cgroup") == 1
    (first_version / "cgroup" / "cpu,cpuacct" / "cpu.cfs_quota_us").write_text("-1\n")
    assert usable_cores(first_version / "proc", first_version / "cgroup") == len(os.sched_getaffinity(0))
