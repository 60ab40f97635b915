"""Network interfaces of this machine, and the one that gloo listens on."""

import socket

from paceline.lab.doctor import network
from paceline.lab.doctor.network import (
    Interface,
    find_gloo_interface,
    find_interface_towards,
    is_loopback,
    list_interfaces,
    read_infiniband_bit_per_s,
)

THERE = (Interface("lo", "127.0.0.1"), Interface("eth0", "10.0.0.5", 10e9), Interface("ib0", "10.1.0.5", 200e9))


def test_the_loopback_has_its_address_and_no_speed() -> None:
    (loopback,) = [each for each in list_interfaces() if each.name == "lo"]
    assert loopback == Interface("lo", "127.0.0.1")
    assert [each.name for each in list_interfaces()] == [name for _, name in socket.if_nameindex()]


def test_the_variable_chooses_also_what_is_not_there() -> None:
    assert find_gloo_interface(THERE, {"GLOO_SOCKET_IFNAME": "ib0,eth0"}) == THERE[2]
    assert find_gloo_interface(THERE, {"GLOO_SOCKET_IFNAME": "eth7"}) == Interface("eth7")


def test_without_a_variable_the_name_of_the_host_chooses(monkeypatch) -> None:
    monkeypatch.setattr(network, "host_address", lambda host: "10.0.0.5")
    assert find_gloo_interface(THERE, {}) == THERE[1]
    monkeypatch.setattr(network, "host_address", lambda host: "127.0.1.1")
    assert find_gloo_interface(THERE, {}) == Interface("", "127.0.1.1")


def test_a_name_without_an_address_leaves_the_loopback(monkeypatch) -> None:
    def unknown(*arguments, **more):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert find_gloo_interface(THERE, {}) == THERE[0]


def test_the_way_to_this_host_is_its_loopback_and_to_nowhere_there_is_none() -> None:
    assert find_interface_towards(THERE, "127.0.0.1") == THERE[0]
    assert find_interface_towards(THERE, "host.invalid").name == ""


def test_addresses_that_only_this_host_can_call() -> None:
    assert [is_loopback(each) for each in ("127.0.1.1", "::1", "10.0.0.5", "")] == [True, True, False, False]


def test_the_fastest_infiniband_port_that_is_up_counts(tmp_path) -> None:
    assert read_infiniband_bit_per_s(tmp_path) == 0
    for adapter, rate, state in (("a", "100 Gb/sec (4X EDR)", "4: ACTIVE"), ("b", "400 Gb/sec (4X NDR)", "1: DOWN")):
        port = tmp_path / "class" / "infiniband" / adapter / "ports" / "1"
        port.mkdir(parents=True)
        (port / "rate").write_text(f"{rate}\n")
        (port / "state").write_text(f"{state}\n")
    assert read_infiniband_bit_per_s(tmp_path) == 100e9
