"""Host names and interfaces: what gloo and NCCL would use, and when that cannot work."""

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.lab.doctor import network
from paceline.lab.doctor.check import DoctorFinding, HostContext
from paceline.lab.doctor.network import Interface, check_network, find_nccl_interfaces

LO, ETH, FAST = Interface("lo", "127.0.0.1"), Interface("eth0", "10.0.0.1", 1e9), Interface("ens3", "10.1.0.1", 1e11)
IB, DOCKER, DOWN = Interface("ib0", "10.2.0.1"), Interface("docker0", "172.17.0.1"), Interface("eth1")
TWO_NODES = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "10.0.0.1"}


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, DoctorFinding]]:
    """Return a function from interfaces, addresses of `node1`, which this host is, and variables to findings."""

    def look(
        there: tuple[Interface, ...], addresses: list[str], *, ours: str = "", gpus: int = 0, **environ: str
    ) -> dict[str, DoctorFinding]:
        def resolved(name: str) -> list[str]:
            if not addresses:
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
            return addresses

        monkeypatch.setattr(socket, "gethostname", lambda: "node1")
        monkeypatch.setattr(network, "resolve_addresses", resolved)
        monkeypatch.setattr(network, "list_interfaces", lambda: there)
        monkeypatch.setattr(network, "is_local_address", lambda address: address in {each.address for each in there})
        monkeypatch.setattr(network, "find_gloo_interface", lambda there, environ: _chosen(there, addresses, environ))
        monkeypatch.setattr(network, "interface_to", lambda master_addr: ours)
        monkeypatch.setattr(network, "find_interface_towards", lambda there, host: ETH)
        monkeypatch.setattr(network, "count_gpus", lambda environ, devices: gpus)
        here = HostContext(environ, tmp_path, lambda: 0.0, 0.0, tmp_path)
        return {finding.name: finding for finding in check_network(here)}

    return look


def _chosen(there: tuple[Interface, ...], addresses: list[str], environ: dict[str, str]) -> Interface:
    asked = environ.get("GLOO_SOCKET_IFNAME")
    return next(each for each in there if each.name == asked or (not asked and each.address in addresses))


def test_one_machine_needs_no_more_than_its_loopback(found) -> None:
    findings = found((LO,), ["127.0.0.1"])
    assert {finding.state for finding in findings.values()} == {"ok"}
    assert findings["host name"].found == "node1 is 127.0.0.1" and findings["interfaces"].found == "only the loopback"
    assert findings["gloo"].found == "uses the loopback: all ranks are on this machine"


def test_ranks_of_two_nodes_meet_by_the_address_of_the_host_s_name(found) -> None:
    findings = found((LO, ETH), ["10.0.0.1"], **TWO_NODES)
    assert {finding.state for finding in findings.values()} == {"ok"}
    assert findings["interfaces"].found == "eth0 10.0.0.1 (1 Gbit/s)"
    assert findings["gloo"].found == "uses eth0 10.0.0.1 (1 Gbit/s), by this host's name"


def test_a_host_without_an_address_is_wrong_where_ranks_must_meet_by_it(found) -> None:
    alone = found((LO, ETH), [])["host name"]
    assert alone.state == "look" and "/etc/hosts" in alone.advice
    assert alone.found == "node1 has no address (Name or service not known)"
    findings = found((LO, ETH), [], **TWO_NODES)
    assert findings["host name"].state == "wrong"
    assert findings["gloo"].state == "wrong" and findings["gloo"].advice == "set GLOO_SOCKET_IFNAME=eth0 on every node"
    findings = found((LO, ETH), [], **TWO_NODES, GLOO_SOCKET_IFNAME="eth0")
    assert findings["host name"].state == "look" and findings["gloo"].state == "ok"


def test_a_name_that_stands_for_another_machine_or_the_loopback_is_wrong_between_nodes(found) -> None:
    assert "not this machine" in found((LO, ETH), ["10.9.9.9"])["host name"].found
    findings = found((LO, ETH), ["127.0.0.1"], **TWO_NODES)
    assert findings["host name"].state == "ok"
    assert findings["gloo"].state == "wrong" and findings["gloo"].found.startswith("uses lo 127.0.0.1")


def test_no_interface_but_the_loopback_is_wrong_between_nodes(found) -> None:
    assert found((LO, DOWN), ["127.0.0.1"], **TWO_NODES)["interfaces"].state == "wrong"


@pytest.mark.parametrize("addresses", [["127.0.1.1"], []])
def test_a_run_takes_the_way_to_rank_0_where_the_host_s_name_leads_nowhere(found, addresses: list[str]) -> None:
    """As on Debian, where the name leads to 127.0.1.1."""
    findings = found((LO, DOCKER, ETH), addresses, ours="eth0", **TWO_NODES)
    assert not [finding for finding in findings.values() if finding.state == "wrong"]
    assert findings["gloo"].found.startswith("uses eth0 10.0.0.1 (1 Gbit/s), chosen by paceline")
    assert found((LO, DOCKER, ETH), addresses, ours="eth0")["gloo"].found.startswith("uses the loopback")


def test_the_way_to_rank_0_is_advised_before_others_and_bridges_never(found) -> None:
    findings = found((LO, DOCKER, IB, ETH), [], **TWO_NODES)["gloo"]
    assert findings.state == "wrong" and findings.advice == "set GLOO_SOCKET_IFNAME=eth0 on every node"
    findings = found((LO, DOCKER), [], **TWO_NODES)
    assert findings["gloo"].advice == "set GLOO_SOCKET_IFNAME=NAME on every node"
    assert findings["interfaces"].state == "wrong" and "docker0 172.17.0.1" in findings["interfaces"].found


@pytest.mark.parametrize(
    ("gpus", "environ", "is_told"),
    [(0, TWO_NODES, False), (1, {}, False), (1, TWO_NODES, True), (2, {}, True)],
)
def test_nccl_is_reported_only_where_ranks_have_gpus(found, gpus: int, environ: dict, is_told: bool) -> None:
    assert ("NCCL's sockets" in found((LO, ETH), ["10.0.0.1"], gpus=gpus, **environ)) == is_told


def test_a_slow_interface_is_worth_a_look_where_a_faster_one_is_named(found) -> None:
    slow = found((LO, ETH, FAST), ["10.0.0.1"], **TWO_NODES)["gloo"]
    assert slow.state == "look" and slow.advice.startswith("set GLOO_SOCKET_IFNAME=ens3 on every node")
    assert found((LO, ETH, DOCKER), ["10.0.0.1"], **TWO_NODES)["gloo"].state == "ok"
    assert found((LO, ETH, FAST), ["10.1.0.1"], **TWO_NODES)["gloo"].state == "ok"


def test_interfaces_that_are_requested_and_are_not_there_are_named(found) -> None:
    gloo = found((LO, ETH), ["127.0.0.1"], GLOO_SOCKET_IFNAME="ib7")["gloo"]
    assert gloo.state == "wrong" and "there is no ib7" in gloo.found and "eth0, lo" in gloo.advice
    nccl = found((LO, ETH), ["127.0.0.1"], gpus=2, NCCL_SOCKET_IFNAME="=ib7")["NCCL's sockets"]
    assert nccl.state == "wrong" and nccl.found == "NCCL_SOCKET_IFNAME==ib7 matches no interface"
    assert found((LO, ETH), ["127.0.0.1"], GLOO_SOCKET_IFNAME="eth0")["gloo"].state == "ok"


@pytest.mark.parametrize(
    ("there", "asked", "taken"),
    [
        ((LO, ETH, IB), "", [IB]),
        ((LO, ETH, FAST, DOCKER, DOWN), "", [ETH, FAST]),
        ((LO, DOCKER), "", [DOCKER]),
        ((LO,), "", [LO]),
        ((LO, ETH, FAST, IB), "e", [IB]),  # one letter is as good as none
        ((LO, ETH, FAST, IB), "en,ib", [FAST, IB]),
        ((LO, ETH, FAST, IB), "^e,lo", [IB]),
        ((LO, ETH, FAST, IB), "=eth0,ens3", [ETH, FAST]),
        ((LO, ETH, FAST, IB), "=eth", []),
        ((LO, ETH, FAST), "^=eth0", [LO, FAST]),
        ((LO, ETH, DOWN), "eth1", []),
    ],
)
def test_nccl_takes_interfaces_by_what_their_names_begin_with(there, asked: str, taken: list[Interface]) -> None:
    assert find_nccl_interfaces(there, asked) == taken


def test_this_host_passes_its_own_checks(tmp_path: Path) -> None:
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    findings = {finding.name: finding for finding in check_network(HostContext(hidden, tmp_path, lambda: 0.0, 0.0))}
    assert findings["loopback"] == DoctorFinding.ok("loopback", "127.0.0.1 can be reached")
    assert list(findings) == ["host name", "loopback", "interfaces", "gloo"]
    assert network.is_local_address("127.0.0.1") and not network.is_local_address(
        "192.0.2.1"
    )  # an address of documents: RFC 5737
