"""Host names, gloo's interface, launchers and the port of rank 0."""

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.lab.doctor import check, network
from paceline.lab.doctor.check import HostContext, Outcome, ok
from paceline.lab.doctor.network import check_gloo, check_host_name, check_launcher, check_port, find_gloo_interface

LO, ETH, DOCKER = ("lo", "127.0.0.1"), ("eth0", "10.0.0.1"), ("docker0", "172.17.0.1")
TWO_NODES = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "10.0.0.1"}
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
STEP = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "127.0.0.1",
}  # fmt: skip


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Outcome, Outcome]]:
    """Return a function from interfaces, the address of `node1`, which this host is, and variables to the outcomes of
    host name and gloo.
    """

    def look(there: tuple[tuple[str, str], ...], address: str, *, ours: str = "", **environ: str):
        monkeypatch.setattr(socket, "gethostname", lambda: "node1")
        monkeypatch.setattr(socket, "if_nameindex", lambda: list(enumerate(name for name, _ in there)))
        monkeypatch.setattr(network, "host_address", lambda name: address)
        monkeypatch.setattr(network, "interface_addresses", lambda: dict(there))
        monkeypatch.setattr(network, "address_to", lambda host: "10.0.0.1")
        monkeypatch.setattr(check, "interface_to", lambda master_addr: ours)
        here = HostContext(environ, tmp_path)
        return check_host_name(here), check_gloo(here)

    return look


def test_one_machine_needs_no_more_than_its_loopback(found) -> None:
    name, gloo = found((LO,), "127.0.0.1")
    assert name == ok("node1 is 127.0.0.1")
    assert gloo == ok("uses the loopback: all ranks are on this machine")


def test_ranks_of_two_nodes_meet_by_the_address_of_the_host_s_name(found) -> None:
    assert found((LO, ETH), "10.0.0.1", **TWO_NODES)[1] == ok("uses eth0 10.0.0.1, by this host's name")


def test_a_host_without_an_address_is_wrong_where_ranks_must_meet_by_it(found) -> None:
    (state, what, advice), _ = found((LO, ETH), "")
    assert state == "warning" and "/etc/hosts" in advice and what == "node1 has no address of this machine"
    name, gloo = found((LO, ETH), "", **TWO_NODES)
    assert name[0] == "error"
    assert gloo[0] == "error" and gloo[2] == "set GLOO_SOCKET_IFNAME=eth0 on every node"
    name, gloo = found((LO, ETH), "", **TWO_NODES, GLOO_SOCKET_IFNAME="eth0")
    assert name[0] == "warning" and gloo[0] == "ok"


def test_a_name_that_stands_for_the_loopback_is_wrong_between_nodes(found) -> None:
    name, gloo = found((LO, ETH), "127.0.0.1", **TWO_NODES)
    assert name[0] == "ok" and gloo[0] == "error" and gloo[1].startswith("uses lo 127.0.0.1")


def test_bridges_to_containers_are_never_advised(found) -> None:
    assert found((LO, DOCKER), "", **TWO_NODES)[1][2] == "set GLOO_SOCKET_IFNAME=NAME on every node"


@pytest.mark.parametrize("address", ["127.0.1.1", ""])
def test_a_run_takes_the_way_to_rank_0_where_the_host_s_name_leads_nowhere(found, address: str) -> None:
    """As on Debian, where the name leads to 127.0.1.1."""
    name, gloo = found((LO, DOCKER, ETH), address, ours="eth0", **TWO_NODES)
    assert name[0] != "error" and gloo[0] == "ok" and gloo[1].startswith("uses eth0 10.0.0.1, chosen by paceline")
    assert found((LO, DOCKER, ETH), address, ours="eth0")[1][1].startswith("uses the loopback")


def test_an_interface_that_is_requested_and_is_not_there_is_named(found) -> None:
    state, what, advice = found((LO, ETH), "127.0.0.1", GLOO_SOCKET_IFNAME="ib7")[1]
    assert state == "error" and "there is no ib7" in what and "eth0, lo" in advice


def test_this_host_passes_its_own_checks(tmp_path: Path) -> None:
    here = HostContext({}, tmp_path)
    assert check_host_name(here)[0] != "error" and check_gloo(here)[0] == "ok"
    assert find_gloo_interface({"GLOO_SOCKET_IFNAME": "lo,eth0"}) == LO
    assert find_gloo_interface({"GLOO_SOCKET_IFNAME": "eth77"}) == ("eth77", "")


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


def launcher(**environ: str) -> Outcome:
    return check_launcher(HostContext(environ, Path()))


def port(**environ: str) -> Outcome | None:
    return check_port(HostContext(environ, Path()))


def test_who_starts_ranks_is_reported() -> None:
    assert launcher() == ok("none: set --ranks for several processes")
    assert launcher(**TORCHRUN)[1].startswith("torchrun: rank 1 of 4 (RANK=1, WORLD_SIZE=4")
    assert launcher(**STEP)[1].startswith("slurm: rank 0 of 2 (")


def test_a_batch_script_that_starts_without_srun_is_worth_a_look() -> None:
    state, what, advice = launcher(SLURM_JOB_ID="7", SLURM_PROCID="0")
    assert state == "warning" and what == "SLURM_JOB_ID=7, SLURM_PROCID=0" and "srun" in advice
    assert launcher(SLURM_JOB_ID="7", SLURM_STEP_ID="0", SLURM_PROCID="0")[0] == "ok"


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({**TORCHRUN, "RANK": "4"}, "not a rank of a world"),
        ({**TORCHRUN, "WORLD_SIZE": "four"}, "'four' is not a number"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "each process would train alone"),
    ],
)
def test_variables_that_cannot_start_ranks_are_wrong(environ: dict[str, str], says: str) -> None:
    state, what, _ = launcher(**environ)
    assert state == "error" and says in what


def test_a_port_that_another_program_listens_on_is_wrong_and_the_program_is_named(taken: str) -> None:
    outcome = port(MASTER_PORT=taken)
    assert outcome is not None and outcome[0] == "error"
    assert outcome[1].startswith(f"{taken} is in use by ") and outcome[1].endswith(f"(process {os.getpid()})")
    assert port(**STEP, MASTER_PORT=taken)[0] == "error"


def test_a_port_that_is_free_is_well(free: str) -> None:
    assert port(MASTER_PORT=free, MASTER_ADDR="127.0.0.1") == ok(f"{free} is free")


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
def test_a_port_that_another_process_opens_is_not_checked(taken: str, environ: dict) -> None:
    assert port(**{"MASTER_PORT": taken, **environ}) is None
