"""Launchers, rank 0's address and port, and the time left of a job."""

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.lab.doctor import network
from paceline.lab.doctor.check import DoctorFinding, HostContext
from paceline.lab.doctor.network import check_rendezvous, find_port_owner

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
STEP = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "127.0.0.1",
}  # fmt: skip
NOW_S = 1_000_000.0


@pytest.fixture
def found(tmp_path: Path) -> Callable[..., dict[str, DoctorFinding]]:
    """Return a function from variables to findings."""

    def look(**environ: str) -> dict[str, DoctorFinding]:
        return {each.name: each for each in check_rendezvous(HostContext(environ, tmp_path, lambda: 0.0, NOW_S))}

    return look


@pytest.fixture
def taken() -> Iterator[str]:
    """A port that this process listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield str(server.getsockname()[1])


@pytest.fixture
def free() -> str:
    """A port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


def test_who_starts_ranks_is_reported(found) -> None:
    assert found() == {"launcher": DoctorFinding.ok("launcher", "none: set --ranks for several processes")}
    assert found(**TORCHRUN)["launcher"].found.startswith("torchrun: rank 1 of 4 (RANK=1, WORLD_SIZE=4")
    assert found(**STEP)["launcher"].found.startswith("slurm: rank 0 of 2 (")


def test_a_batch_script_that_starts_without_srun_is_worth_a_look(found) -> None:
    batch = found(SLURM_JOB_ID="7", SLURM_PROCID="0")["launcher"]
    assert batch.state == "look" and batch.found == "SLURM_JOB_ID=7, SLURM_PROCID=0" and "srun" in batch.advice
    assert found(SLURM_JOB_ID="7", SLURM_STEP_ID="0", SLURM_PROCID="0")["launcher"].state == "ok"


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({**TORCHRUN, "RANK": "4"}, "not a rank of a world"),
        ({**TORCHRUN, "WORLD_SIZE": "four"}, "'four' is not a number"),
        ({**STEP, "RANK": "0", "WORLD_SIZE": "1"}, "contradict Slurm's, which has started 2 tasks"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "each process would train alone"),
    ],
)
def test_variables_that_contradict_one_another_are_wrong(found, environ: dict[str, str], says: str) -> None:
    launcher = found(**environ)["launcher"]
    assert launcher.state == "wrong" and says in launcher.found


def test_ranks_of_torchrun_inside_a_step_contradict_nothing(found) -> None:
    agents = {**STEP, **TORCHRUN, "TORCHELASTIC_RUN_ID": "x"}
    assert found(**agents)["launcher"].state == "ok"
    same = {**STEP, "RANK": "0", "WORLD_SIZE": "2"}
    assert found(**same)["launcher"].state == "ok"


def test_the_machine_of_rank_0_must_have_an_address(found, monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(MASTER_ADDR="127.0.0.1")["meeting point"] == DoctorFinding.ok("meeting point", "127.0.0.1")

    def unknown(name: str) -> list[str]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(network, "resolve_addresses", unknown)
    point = found(**TORCHRUN, MASTER_ADDR="node0")["meeting point"]
    assert point.state == "wrong" and point.found == "'node0' has no address (Name or service not known)"
    assert "meeting point" not in found()


def test_a_port_that_another_program_listens_on_is_wrong_and_the_program_is_named(found, taken: str) -> None:
    port = found(MASTER_PORT=taken)["port"]
    program = Path("/proc/self/comm").read_text().strip()
    assert port.state == "wrong"
    assert port.found == f"{taken} is in use by {program} (process {os.getpid()})"
    assert found(**STEP, MASTER_PORT=taken)["port"].state == "wrong"


def test_a_port_that_is_free_is_well(found, free: str) -> None:
    assert found(MASTER_PORT=free, MASTER_ADDR="127.0.0.1")["port"] == DoctorFinding.ok("port", f"{free} is free")


@pytest.mark.parametrize(
    "environ",
    [
        {"MASTER_PORT": "0"},
        {"MASTER_ADDR": "192.0.2.1"},  # another machine's
        {**TORCHRUN},
        {**TORCHRUN, "RANK": "0", "LOCAL_RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "True"},
        {**TORCHRUN, "RANK": "0", "LOCAL_RANK": "0", "PACELINE_LAUNCHER_PID": "1", "PACELINE_STORE_FD": "3"},
    ],
    ids=["no port", "elsewhere", "not rank 0", "of the agent", "open already"],
)
def test_a_port_that_another_process_opens_is_not_checked(found, taken: str, environ: dict) -> None:
    assert "port" not in found(**{"MASTER_PORT": taken, **environ})


def test_who_holds_a_port_of_another_s_processes_cannot_be_seen(tmp_path: Path) -> None:
    assert find_port_owner(HostContext({}, tmp_path, lambda: 0.0, 0.0, tmp_path), 1234) == ""


@pytest.mark.parametrize(
    ("left_s", "state", "says"),
    [(7200, "ok", "2:00:00 h of the job"), (120, "look", "2:00 min of the job"), (-1, "look", "past its time limit")],
)
def test_the_time_that_a_job_has_left_is_reported(found, left_s: int, state: str, says: str) -> None:
    left = found(SLURM_JOB_END_TIME=str(int(NOW_S) + left_s))["time left"]
    assert left.state == state and says in left.found
