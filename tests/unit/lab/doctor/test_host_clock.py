"""The clock is synchronized, or that matters on several nodes."""

from pathlib import Path

import pytest

from paceline.lab.doctor.check import HostContext
from paceline.lab.doctor.host import check_clock, read_kernel_clock

TWO_NODES = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"}


@pytest.mark.parametrize(
    ("kept", "environ", "state", "says"),
    [
        ((0, 0.25), {}, "ok", "synchronized, at most 250 ms off"),
        ((5, 16.0), {}, "ok", "fine for one machine"),
        ((5, 16.0), TWO_NODES, "look", "not synchronized"),
        ((-1, 0.0), TWO_NODES, "ok", "not reported by the kernel"),
    ],
)
def test_a_clock_that_no_one_keeps_is_worth_a_look_on_several_nodes(
    kept: tuple[int, float], environ: dict[str, str], state: str, says: str
) -> None:
    finding = check_clock(HostContext(environ, Path(), lambda: 0.0, 0.0), lambda: kept)
    assert finding.state == state and finding.found.startswith(says)


def test_the_kernel_reports_its_clock() -> None:
    state, off_s = read_kernel_clock()
    assert -1 <= state <= 5 and 0 <= off_s <= 16  # the kernel's NTP_PHASE_MAX: it reckons with no more
