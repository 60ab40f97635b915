"""`paceline doctor` on ranks of several hosts: faults between them are named, and healthy hosts have none."""

import json
import re
from pathlib import Path

PLANTED = Path(__file__).parents[2] / "planted.py"
PORT = "29400"


def run_doctor(
    hosts, *, faults: str = "", on: str = "", names: tuple[str, ...] = ("host1", "host2"), of: str = "ranks"
) -> tuple[int, list[dict]]:
    """Return the exit code of the first host's rank and the rows of all ranks, or its own if `of` is "machine".

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
    ends = hosts.wait_all(*started)
    assert [(end.code, end.out) for end in ends[1:]] == [(0, "")] * (len(names) - 1), str(ends)
    assert not [line for end in ends for line in end.errors], str(ends)
    return ends[0].code, json.loads(ends[0].out)[of]


def problems(rows: list[dict]) -> list[tuple[str, str, str]]:
    """Return name, state and place of the findings, except for the load of the machine that the hosts share."""
    return [(row["name"], row["state"], row["where"]) for row in rows if row["state"] != "ok" and row["name"] != "load"]


def finding(rows: list[dict], name: str) -> str:
    (text,) = [row["found"] for row in rows if row["name"] == name]
    return text


def test_two_healthy_hosts_have_no_problem(hosts) -> None:
    for _ in range(3):  # other processes on the cores delay messages too
        _, rows = run_doctor(hosts)
        if not problems(rows):
            break
    assert not problems(rows) and [row["name"] for row in rows] == ["ranks", "clocks", "all-reduce"], rows
    assert "gloo over eth0" in finding(rows, "all-reduce"), rows


def test_a_slow_link_between_two_hosts_is_reported(hosts) -> None:
    hosts.shape("100mbit", "host1", "host2")
    code, rows = run_doctor(hosts)
    assert problems(rows) == [("all-reduce", "warning", "")], rows
    assert code == 0, "a run works, but slowly"
    # The bucket passes 64 kB: 0.09 to 0.1 Gbit/s; a busy machine may halve that.
    text = finding(rows, "all-reduce")
    assert 0.04 < float(text.partition("eth0: ")[2].partition(" Gbit/s")[0]) < 0.13, text


def test_three_faults_of_a_host_are_named_and_no_collective_runs(hosts) -> None:
    hosts.machines["host2"]("mount", "-o", "remount,size=1m", "/dev/shm")
    code, rows = run_doctor(hosts, faults="torch,clock", on="host2")
    assert code == 1
    assert {(name, state) for name, state, _ in problems(rows)} >= {
        ("versions of torch", "error"),
        ("clocks", "warning"),
    }, rows
    assert [where for name, _, where in problems(rows) if name == "shared memory"] == ["rank 1 (host2)"], rows
    assert len(problems(rows)) == 3 and "all-reduce" not in [row["name"] for row in rows], rows
    assert re.search(r"rank 1 \(host2\) is (6\.9|7\.0)\d s ahead of rank 0", finding(rows, "clocks")), rows
    assert "2.0.1: rank 1 (host2)" in finding(rows, "versions of torch")


def test_a_loopback_host_name_and_a_container_bridge_are_no_problem(hosts, tmp_path: Path) -> None:
    """As on Debian with Docker: a run uses eth0 nevertheless, also on rank 0's host."""
    own = tmp_path / "hosts"
    own.write_text("127.0.0.1 localhost\n127.0.1.1 host1\n")
    hosts.machines["host1"]("mount", "--bind", str(own), "/etc/hosts")
    for args in ("link add docker0 type bridge", "address add 172.17.0.1/16 dev docker0", "link set docker0 up"):
        hosts.machines["host1"]("ip", *args.split())
    code, rows = run_doctor(hosts, of="machine")
    assert code == 0 and not [row for row in rows if row["state"] == "error"], rows
    assert "uses eth0 " in finding(rows, "gloo") and "by paceline" in finding(rows, "gloo")
