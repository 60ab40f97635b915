"""Load of other processes, from a made-up /proc and beside real busy processes."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.lab.doctor.check import DoctorFinding, HostContext
from paceline.lab.doctor.host import check_load

TICK = os.sysconf("SC_CLK_TCK")
CORES = sorted(os.sched_getaffinity(0))


class Kernel:
    """A table in which all cores are busy for a share of each second, of which paceline has used `own_s`."""

    def __init__(self, root: Path) -> None:
        self.root, self.now_s = root, 100.0
        (root / "proc" / str(os.getpid())).mkdir(parents=True)
        (root / "proc" / "loadavg").write_text("31.40 2.00 1.00 1/2 3\n")
        self.record(0.0, 0.0, 0.0)

    def record(self, busy_s: float, own_s: float, stolen_s: float) -> None:
        busy, stolen = round(busy_s * TICK / len(CORES)), round(stolen_s * TICK / len(CORES))
        lines = [f"cpu{core} {busy} 0 0 5 5 0 0 {stolen} 0 0" for core in CORES]
        (self.root / "proc" / "stat").write_text("\n".join(lines) + "\n")
        numbers = " ".join(["0"] * 10)
        stat = self.root / "proc" / str(os.getpid()) / "stat"
        stat.write_text(f"{os.getpid()} (x) S {numbers} {round(own_s * TICK)} 0 0 0")

    def look(self, busy_s: float, own_s: float = 0.0, stolen_s: float = 0.0) -> DoctorFinding:
        """Return what is found in a second in which so many seconds of cores were used."""

        def wait(seconds: float) -> None:
            self.now_s += 1.0
            self.record(busy_s, own_s, stolen_s)

        return check_load(HostContext({}, self.root, lambda: self.now_s, 0.0, root=self.root), wait)


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    return Kernel(tmp_path)


def test_cores_that_others_use_are_worth_a_look(kernel: Kernel) -> None:
    found = kernel.look(busy_s=0.75 * len(CORES))
    assert found.state == "look"
    assert f"{0.75 * len(CORES):.1f} of {len(CORES)} cores busy (75.0 %), load average 31.40" in found.found
    assert "stop them before measuring" in found.advice


def test_what_paceline_uses_itself_is_no_load(kernel: Kernel) -> None:
    assert kernel.look(busy_s=0.75 * len(CORES), own_s=0.75 * len(CORES)).state == "ok"


def test_a_little_is_reported_and_fine(kernel: Kernel) -> None:
    found = kernel.look(busy_s=0.05 * len(CORES))
    assert (found.state, found.advice) == ("ok", "")


def test_what_a_hypervisor_takes_is_reported_as_that(kernel: Kernel) -> None:
    found = kernel.look(busy_s=0.0, stolen_s=0.5 * len(CORES))
    assert found.state == "look" and "shared virtual machine" in found.advice


def test_where_the_kernel_does_not_report_nothing_is_claimed(tmp_path: Path) -> None:
    here = HostContext({}, tmp_path, time.perf_counter, 0.0, root=tmp_path)
    assert check_load(here) == DoctorFinding.ok("load", "not reported by the kernel")


def test_real_busy_processes_are_seen_and_those_that_this_one_started_are_its_own() -> None:
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
        found = check_load(HostContext({}, Path(), time.perf_counter, 0.0))
    finally:
        for pid in pids:
            os.kill(pid, 9)
    assert found.state == "look", found
