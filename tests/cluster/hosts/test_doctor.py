"""`paceline doctor` on ranks of several hosts: what is wrong between them is named, and with healthy ones nothing."""

import json
from pathlib import Path

PLANTED = Path(__file__).parents[2] / "planted.py"
PORT = "29400"


def told(
    hosts, *, faults: str = "", on: str = "", names: tuple[str, ...] = ("host1", "host2"), of: str = "ranks"
) -> tuple[int, list[dict]]:
    """Return the exit code of the first host's rank, and what it says of all, or of itself where `of` is "machine".

    `faults` are planted on host `on`.
    """
    world = {"MASTER_ADDR": hosts.address(names[0]), "MASTER_PORT": PORT, "WORLD_SIZE": str(len(names))}
    one = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    started = [
        hosts.start(
            name,
            *((str(PLANTED), faults) if name == on else ("-P", "-m", "paceline")),
            *("doctor", "--json"),
            RANK=str(rank),
            **world,
            **one,
        )
        for rank, name in enumerate(names)
    ]
    ends = hosts.completed(*started)
    assert [(end.code, end.out) for end in ends[1:]] == [(0, "")] * (len(names) - 1), ends
    assert not [line for end in ends for line in end.errors], ends
    return ends[0].code, json.loads(ends[0].out)[of]


def amiss(rows: list[dict]) -> list[tuple[str, str, str]]:
    return [(row["name"], row["state"], row["where"]) for row in rows if row["state"] != "ok"]


def found(rows: list[dict], name: str) -> str:
    (text,) = [row["found"] for row in rows if row["name"] == name]
    return text


def test_nothing_is_amiss_between_two_healthy_hosts(hosts) -> None:
    for _ in range(3):  # whoever else uses the cores holds up what is sent, too
        _, rows = told(hosts)
        if not amiss(rows):
            break
    assert not amiss(rows) and [row["name"] for row in rows] == ["ranks", "clocks", "all-reduce"], rows
    assert "gloo over eth0" in found(rows, "all-reduce") and "nominal 10 Gbit/s" in found(rows, "all-reduce")


def test_a_slow_link_is_found_and_the_host_that_it_leads_to_is_named(hosts) -> None:
    hosts.shape("100mbit", "host3")
    _, rows = told(hosts, names=("host1", "host2", "host3"))
    assert amiss(rows) == [("all-reduce", "look", "rank 2 (host3)")], rows
    text = found(rows, "all-reduce")
    # Three hosts send at once, and the bucket lets 64 kB through: 0.09 to 0.1 Gbit/s; a busy machine may halve that.
    assert 0.04 < float(text.partition("eth0: ")[2].partition(" Gbit/s")[0]) < 0.13, text


def test_a_link_between_two_hosts_that_is_slow_is_found(hosts) -> None:
    hosts.shape("100mbit", "host1", "host2")
    code, rows = told(hosts)
    assert amiss(rows) == [("all-reduce", "look", "")], rows
    assert code == 0, "a run works, but slowly"


def test_each_of_three_faults_of_a_host_is_named_with_it_and_nothing_is_sent(hosts) -> None:
    hosts.machines["host2"]("mount", "-o", "remount,size=1m", "/dev/shm")
    code, rows = told(hosts, faults="torch,clock", on="host2")
    assert code == 1
    assert {(name, state) for name, state, _ in amiss(rows)} >= {
        ("versions of torch", "wrong"),
        ("clocks", "look"),
    }, rows
    assert [where for name, _, where in amiss(rows) if name == "shared memory"] == ["rank 1 (host2)"], rows
    assert len(amiss(rows)) == 3 and "all-reduce" not in [row["name"] for row in rows], rows
    assert "rank 1 (host2) is 7.00 s ahead of rank 0" in found(rows, "clocks")
    assert "2.0.1: rank 1 (host2)" in found(rows, "versions of torch")


def test_a_host_whose_name_leads_to_itself_is_well_beside_its_own_containers(hosts, tmp_path: Path) -> None:
    """As on Debian with Docker: a run takes eth0 all the same, on rank 0's host too."""
    own = tmp_path / "hosts"
    own.write_text("127.0.0.1 localhost\n127.0.1.1 host1\n")
    hosts.machines["host1"]("mount", "--bind", str(own), "/etc/hosts")
    for args in ("link add docker0 type bridge", "address add 172.17.0.1/16 dev docker0", "link set docker0 up"):
        hosts.machines["host1"]("ip", *args.split())
    code, rows = told(hosts, of="machine")
    assert code == 0 and not [row for row in rows if row["state"] == "wrong"], rows
    assert "uses eth0 " in found(rows, "gloo") and "by paceline" in found(rows, "gloo")
