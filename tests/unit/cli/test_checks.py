"""What `paceline doctor` looks at: on this machine all of it is found, and on a bad one it says what to do."""

import resource
import shutil
import socket
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.cli.checks import Check, machine_checks
from paceline.data.native import WHAT_IS_LOST

NAMES = [
    "versions", "cores", "threads", "GPUs", "native core", "memory", "shared memory", "open files", "disk", "host name",
    "loopback", "launcher", "network",
]  # fmt: skip
Usage = namedtuple("Usage", "total used free")


def looked_at(folder: Path, root: Path = Path("/"), **environ: str) -> dict[str, Check]:
    return {check.name: check for check in machine_checks(environ, folder, root)}


def test_everything_is_looked_at_once_and_told(tmp_path: Path) -> None:
    found = list(machine_checks({}, tmp_path))
    assert [check.name for check in found] == NAMES
    assert all(check.found for check in found)
    assert found[0].to_dict() == {"name": "versions", "state": "ok", "found": found[0].found, "advice": ""}


def test_a_folder_that_is_not_there_yet_is_judged_by_the_one_above(tmp_path: Path) -> None:
    assert looked_at(tmp_path / "a" / "b")["disk"].found.endswith(f" free at {tmp_path}/a/b")


def test_little_room_is_worth_a_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1 << 40, 0, 64 << 20))
    found = looked_at(tmp_path)
    assert "--shm-size" in found["shared memory"].advice and found["shared memory"].found.startswith("0.1 GiB")
    assert "--run-dir" in found["disk"].advice


def test_a_container_s_limits_count_and_not_its_host_s(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 67108864 kB\nMemAvailable: 33554432 kB\n")
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("1073741824\n")
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text("50000 100000\n")
    found = looked_at(tmp_path, tmp_path)
    assert found["memory"].found == "1.0 GiB of 1.0 GiB free" and found["memory"].advice
    assert found["cores"].found.endswith("but limited to the time of 0.5") and found["cores"].advice
    assert found["shared memory"].found == f"no {tmp_path}/dev/shm"


def test_few_open_files_are_worth_a_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (64, 4096))
    found = looked_at(tmp_path)["open files"]
    assert (found.found, found.advice) == ("64 (at most 4,096)", "ulimit -n 1024")


def test_whether_there_is_a_native_core_is_told_and_what_is_lost_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.data.native.native", lambda: SimpleNamespace(isa=lambda: "avx2"))
    found = looked_at(tmp_path)["native core"]
    assert (found.found, found.is_ok) == ("built, uses avx2", True)
    monkeypatch.setattr("paceline.data.native.native", lambda: None)
    found = looked_at(tmp_path)["native core"]
    assert (found.found, found.advice) == ("none", WHAT_IS_LOST)


def test_a_host_without_an_address_is_worth_a_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*words: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert "/etc/hosts" in looked_at(tmp_path)["host name"].advice


def test_launchers_are_seen_and_contradictions_told(tmp_path: Path) -> None:
    torchrun = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert looked_at(tmp_path, **torchrun)["launcher"].found.startswith("torchrun: rank 1 of 4 (RANK=1, WORLD_SIZE=4")
    assert "no place in a world" in looked_at(tmp_path, **{**torchrun, "RANK": "4"})["launcher"].advice
    batch = looked_at(tmp_path, SLURM_JOB_ID="7", SLURM_PROCID="0")["launcher"]
    assert batch.found == "SLURM_JOB_ID=7, SLURM_PROCID=0" and "srun" in batch.advice


def test_an_interface_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert looked_at(tmp_path, GLOO_SOCKET_IFNAME="lo")["network"].is_ok
    assert "lo" in looked_at(tmp_path, GLOO_SOCKET_IFNAME="ib7")["network"].advice
