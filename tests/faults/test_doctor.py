"""`paceline doctor` reports exactly the one planted fault of a machine, and nothing on a healthy machine.

Each fault is planted for real, in namespaces, limits or a control group of the process, which needs root.
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
BUSY = {"memory", "disk", "load"}
"""Findings that a healthy but busy machine may have."""
WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; from paceline.cli import main; main()"
WITHOUT_NCCL = (
    "import torch; torch.distributed.is_nccl_available = lambda: False; from paceline.cli import main; main()"
)
CGROUPS = (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup"))
"""Hierarchies of control groups of version 1 and version 2."""


class DoctorReport(NamedTuple):
    """The output of doctor: its exit code, its overall state, and each finding by name."""

    code: int
    state: str
    findings: dict[str, dict[str, str]]

    def names(self, state: str) -> set[str]:
        """Return the names of the findings in `state`."""
        return {name for name, finding in self.findings.items() if finding["state"] == state}


@pytest.fixture
def doctor(tmp_path: Path) -> Callable[..., DoctorReport]:
    """Return a function that runs `paceline doctor` in the test's folder, by the program in `around`.

    Unless `python` is given, the program runs without torch, as on a machine without GPUs.
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
        report = json.loads(completed.stdout)
        return DoctorReport(completed.returncode, report["state"], {each["name"]: each for each in report["machine"]})

    return run


def in_namespaces(*kinds: str, script: str) -> list[str]:
    """Return a command that runs `script` and then a program in new namespaces; skip if that is not permitted."""
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, *kinds, "true"], capture_output=True, timeout=TIMEOUT_S).returncode:
        pytest.skip(f"no namespaces here: `unshare {' '.join(kinds)} true` fails (it needs root)")
    return [unshare, *kinds, "sh", "-ec", f'{script}\nexec "$@"', "sh"]


@pytest.fixture
def half_a_core() -> Iterator[Path]:
    """A control group whose processes may together use half a CPU second per second."""
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


def test_a_healthy_machine_has_no_finding(doctor) -> None:
    report = doctor()
    assert report.names("error") == set() and report.names("warning") <= BUSY, report.findings
    assert report.code == 0 and len(report.findings) > 10


def test_small_shared_memory_is_reported(doctor) -> None:
    report = doctor(in_namespaces("-m", script="mount -t tmpfs -o size=16m tmpfs /dev/shm"))
    assert (report.code, report.state, report.names("error")) == (1, "error", {"shared memory"})
    assert report.findings["shared memory"]["found"].startswith("16.8 MB free")


def test_a_low_limit_of_open_files_is_reported(doctor) -> None:
    report = doctor(["sh", "-ec", 'ulimit -n 64\nexec "$@"', "sh"])
    assert (report.code, report.names("error")) == (1, {"open files"})
    assert report.findings["open files"]["found"].startswith("64 (at most 64)")


def test_a_cpu_quota_is_reported(doctor, half_a_core: Path) -> None:
    report = doctor(["sh", "-ec", f'echo $$ > "{half_a_core}/cgroup.procs"\nexec "$@"', "sh"])
    assert (
        report.names("error") == set()
        and "cores" in report.names("warning")
        and report.names("warning") <= {"cores", *BUSY}
    )
    assert report.findings["cores"]["found"].endswith("but only 0.5 s of CPU time per second")


def test_an_unresolvable_host_name_is_reported(doctor) -> None:
    """The network namespace has no other interface, which paceline would use in place of the name's."""
    rename = "hostname no-such-host.invalid"
    nodes = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_JOB_NUM_NODES": "2"}
    report = doctor(in_namespaces("--uts", "--net", script=rename), **nodes)
    assert report.code == 1 and report.names("error") == {"host name", "gloo"}
    assert report.findings["host name"]["found"].startswith("no-such-host.invalid has no address")
    alone = doctor(in_namespaces("--uts", script=rename))
    assert alone.code == 0 and "host name" in alone.names("warning")


def test_a_port_in_use_is_reported_with_its_process(doctor) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        report = doctor(MASTER_PORT=str(server.getsockname()[1]))
    assert (report.code, report.names("error")) == (1, {"port"})
    assert report.findings["port"]["found"].endswith(f"(process {os.getpid()})")


def test_a_read_only_folder_is_reported(doctor, tmp_path: Path) -> None:
    script = f'mount -t tmpfs -o ro tmpfs "{tmp_path}"; cd "{tmp_path}"'
    report = doctor(in_namespaces("-m", script=script))
    assert (report.code, report.names("error")) == (1, {"disk"})
    assert report.findings["disk"]["found"] == "runs cannot be written to: Read-only file system"


def test_a_missing_nccl_is_reported(doctor) -> None:
    """The machine appears to have a GPU, and its torch was built without NCCL."""
    script = "mount -t tmpfs tmpfs /dev; mkdir -m 1777 /dev/shm; touch /dev/nvidia0; "
    script += "mknod -m 666 /dev/null c 1 3; mknod -m 666 /dev/urandom c 1 9"
    report = doctor(in_namespaces("-m", script=script), ("-c", WITHOUT_NCCL), CUDA_VISIBLE_DEVICES="0")
    assert (report.code, report.names("error")) == (1, {"GPUs", "NCCL"})
    assert report.findings["GPUs"]["found"].endswith("torch sees 0")
