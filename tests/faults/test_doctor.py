"""`paceline doctor` on a machine with one thing wrong: it finds that and no other, and on a sound machine nothing.

Each fault is planted for real, in namespaces, limits or a control group of the process's own, which needs root.
"""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

TIMEOUT_S = 60
LAUNCHERS = ("RANK", "WORLD_SIZE", "MASTER_", "SLURM_", "TORCHELASTIC_", "GLOO_", "NCCL_")
BUSY = {"memory", "disk", "disk speed", "load"}
"""What may be worth a look on a sound machine while other programs keep it busy."""
WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; from paceline.cli import main; main()"
WITHOUT_NCCL = (
    "import torch; torch.distributed.is_nccl_available = lambda: False; from paceline.cli import main; main()"
)
CGROUPS = (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup"))
"""Of version 1, and of version 2."""


class DoctorReport(NamedTuple):
    """What doctor found: its exit code, its word for all, and each finding by its name."""

    code: int
    state: str
    findings: dict[str, dict[str, str]]

    def named(self, state: str) -> set[str]:
        """Return the names of what is in `state`."""
        return {name for name, finding in self.findings.items() if finding["state"] == state}


@pytest.fixture
def doctor(tmp_path: Path) -> Callable[..., DoctorReport]:
    """Return a function that runs `paceline doctor` in the test's folder, by the program in `around`.

    It has no torch, which a machine without GPUs is looked at without, unless `python` says otherwise.
    """

    def run(around: Sequence[str] = (), python: Sequence[str] = ("-c", WITHOUT_TORCH), **environ: str) -> DoctorReport:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
        completed = subprocess.run(
            [*around, sys.executable, "-P", *python, "doctor", "--json"],
            cwd=tmp_path,
            env={**inherited, "CUDA_VISIBLE_DEVICES": "", **environ},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        assert completed.stderr == "" and completed.stdout, completed
        told = json.loads(completed.stdout)
        return DoctorReport(completed.returncode, told["state"], {each["name"]: each for each in told["machine"]})

    return run


def in_namespaces(*kinds: str, script: str) -> list[str]:
    """Return what runs a program after `script`, in new namespaces of these kinds; skip where there may be none."""
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, *kinds, "true"], capture_output=True, timeout=TIMEOUT_S).returncode:
        pytest.skip(f"no namespaces here: `unshare {' '.join(kinds)} true` fails (it needs root)")
    return [unshare, *kinds, "sh", "-ec", f'{script}\nexec "$@"', "sh"]


@pytest.fixture
def half_a_core() -> Iterator[Path]:
    """A control group whose processes may compute for half a second a second, all together."""
    top = next((each for each in CGROUPS if (each / "cgroup.procs").exists()), None)
    if top is None:
        pytest.skip("no control groups here: /sys/fs/cgroup is not mounted")
    group = top / f"paceline-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error} (it needs root)")
    try:
        of_version_1 = group / "cpu.cfs_quota_us"
        name, quota = (of_version_1, "50000") if of_version_1.exists() else (group / "cpu.max", "50000 100000")
        if not name.exists():
            pytest.skip(f"{group}: has no quota (the cpu controller is not passed on)")
        name.write_text(quota)
        yield group
    finally:
        with contextlib.suppress(FileNotFoundError):
            group.rmdir()


def test_nothing_is_wrong_with_a_sound_machine(doctor) -> None:
    told = doctor()
    assert told.named("wrong") == set() and told.named("look") <= BUSY, told.findings
    assert told.code == 0 and len(told.findings) > 15


def test_small_shared_memory_is_found(doctor) -> None:
    told = doctor(in_namespaces("-m", script="mount -t tmpfs -o size=16m tmpfs /dev/shm"))
    assert (told.code, told.state, told.named("wrong")) == (1, "wrong", {"shared memory"})
    assert told.findings["shared memory"]["found"].startswith("16.8 MB free")


def test_a_low_limit_of_open_files_is_found(doctor) -> None:
    told = doctor(["sh", "-ec", 'ulimit -n 64\nexec "$@"', "sh"])
    assert (told.code, told.named("wrong")) == (1, {"open files"})
    assert told.findings["open files"]["found"].startswith("64 (at most 64)")


def test_a_quota_of_cpu_time_is_found(doctor, half_a_core: Path) -> None:
    told = doctor(["sh", "-ec", f'echo $$ > "{half_a_core}/cgroup.procs"\nexec "$@"', "sh"])
    assert told.named("wrong") == set() and "cores" in told.named("look") and told.named("look") <= {"cores", *BUSY}
    assert told.findings["cores"]["found"].endswith("but only 0.5 s of CPU time per second")


def test_a_host_that_does_not_resolve_is_found(doctor) -> None:
    """In a network of its own it has no other interface either, which paceline would take in the name's place."""
    rename = "hostname no-such-host.invalid"
    nodes = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_JOB_NUM_NODES": "2"}
    told = doctor(in_namespaces("--uts", "--net", script=rename), **nodes)
    assert told.code == 1 and told.named("wrong") == {"host name", "loopback", "interfaces", "gloo"}
    assert told.findings["host name"]["found"].startswith("no-such-host.invalid has no address")
    alone = doctor(in_namespaces("--uts", script=rename))
    assert alone.code == 0 and "host name" in alone.named("look")


def test_a_busy_port_is_found_and_its_holder_named(doctor) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        told = doctor(MASTER_PORT=str(server.getsockname()[1]))
    assert (told.code, told.named("wrong")) == (1, {"port"})
    assert told.findings["port"]["found"].endswith(f"(process {os.getpid()})")


def test_a_folder_that_is_read_only_is_found(doctor, tmp_path: Path) -> None:
    script = f'mount -t tmpfs -o ro tmpfs "{tmp_path}"; cd "{tmp_path}"'
    told = doctor(in_namespaces("-m", script=script))
    assert (told.code, told.named("wrong")) == (1, {"disk"})
    assert told.findings["disk"]["found"] == "runs cannot be written to: Read-only file system"


def test_a_missing_nccl_is_found(doctor) -> None:
    """The machine seems to have a GPU, and its torch has been built without NCCL."""
    script = "mount -t tmpfs tmpfs /dev; mkdir -m 1777 /dev/shm; touch /dev/nvidia0; "
    script += "mknod -m 666 /dev/null c 1 3; mknod -m 666 /dev/urandom c 1 9"
    told = doctor(in_namespaces("-m", script=script), ("-c", WITHOUT_NCCL), CUDA_VISIBLE_DEVICES="0")
    assert (told.code, told.named("wrong")) == (1, {"GPUs", "NCCL"})
    assert told.findings["GPUs"]["found"].endswith("torch sees 0")
