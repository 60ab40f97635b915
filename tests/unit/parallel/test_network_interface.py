"""The interface on which ranks of several hosts connect, from names and interfaces; no network."""

import pytest

from paceline.parallel import network_interface
from paceline.parallel.network_interface import interface_to


@pytest.fixture
def host(monkeypatch):
    """Return a function that makes this host one of the given first address, interfaces and way to the master."""
    monkeypatch.setattr("sys.platform", "linux")

    def has(own: str, towards: str, default: str = "", **addresses: str) -> None:
        monkeypatch.setattr(network_interface, "host_address", lambda name: own)
        monkeypatch.setattr(
            network_interface,
            "address_to",
            lambda name: default if name == network_interface._DOCUMENTATION_ADDRESS else towards,
        )
        monkeypatch.setattr(network_interface, "interface_addresses", lambda: {"lo": "127.0.0.1", **addresses})

    return has


def test_no_interface_is_set_if_the_host_name_resolves_to_a_reachable_address(host) -> None:
    host("10.0.0.2", "10.1.0.2", eth0="10.0.0.2", ib0="10.1.0.2")
    assert interface_to("10.1.0.1") == ""


@pytest.mark.parametrize("own", ["127.0.1.1", "::1", ""])
def test_otherwise_the_interface_to_the_master_is_used(host, own: str) -> None:
    host(own, "10.1.0.2", eth0="10.0.0.2", ib0="10.1.0.2")
    assert interface_to("10.1.0.1") == "ib0"


@pytest.mark.parametrize("towards", ["127.0.0.1", ""])
def test_on_the_masters_host_the_only_interface_is_used(host, towards: str) -> None:
    host("127.0.1.1", towards, eth0="10.0.0.2")
    assert interface_to("host1") == "eth0"


@pytest.mark.parametrize("bridge", ["docker0", "br-0f3a", "virbr0", "veth12ab"])
def test_bridges_to_containers_are_not_used(host, bridge: str) -> None:
    host("127.0.1.1", "127.0.0.1", **{bridge: "172.17.0.1"}, eth0="10.0.0.2")
    assert interface_to("host1") == "eth0"
    host("127.0.1.1", "127.0.0.1", default="172.17.0.1", **{bridge: "172.17.0.1"})
    assert interface_to("host1") == ""


def test_of_several_interfaces_the_default_route_is_used(host) -> None:
    host("127.0.1.1", "127.0.1.1", default="10.1.0.2", eth0="10.0.0.2", docker0="172.17.0.1", ib0="10.1.0.2")
    assert interface_to("host1") == "ib0"


def test_several_interfaces_without_a_default_route_give_none(host) -> None:
    host("127.0.1.1", "127.0.1.1", eth0="10.0.0.2", ib0="10.1.0.2")
    assert interface_to("host1") == ""


def test_systems_other_than_linux_use_gloos_default(host, monkeypatch) -> None:
    host("127.0.1.1", "10.0.0.2", eth0="10.0.0.2")
    monkeypatch.setattr("sys.platform", "darwin")
    assert interface_to("host1") == ""


def test_addresses_and_interfaces_come_from_the_system() -> None:
    assert network_interface.host_address("localhost") in ("127.0.0.1", "::1")
    assert network_interface.address_to("127.0.0.1") == "127.0.0.1"
    assert "127.0.0.1" in network_interface.interface_addresses().values()


def test_a_host_name_is_not_an_own_address() -> None:
    assert [network_interface.is_own_address(each) for each in ("", "::1", "fe80::1%eth0", "nonsense")] == [
        True,
        True,
        False,
        False,
    ]
