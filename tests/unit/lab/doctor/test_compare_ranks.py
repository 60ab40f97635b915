"""Every difference between ranks is reported once, with its ranks."""

import json
from typing import Any

import pytest

from paceline.lab.doctor.check import DoctorFinding
from paceline.lab.doctor.ranks import RankFacts, compare_clocks, compare_ranks, format_ranks, rate_all_reduce
from paceline.lab.predict.network import AllReduceMeasurement, AllReduceTiming, fit_link

MEGA = 1e6

SHM = DoctorFinding("shared memory", "warning", "0.1 GiB free", "start the container with --shm-size=8g")
QUOTA = DoctorFinding("disk", "error", "read-only", "name another folder")


def ranks(hosts: int = 2, each: int = 2, **values) -> list[RankFacts]:
    """Return ranks of healthy hosts a, b, ..., one after another."""
    return [
        RankFacts(
            rank=host * each + local,
            host="abcdefghijklmnopqrst"[host],
            machine=f"machine {host}",
            versions={"paceline": "1.0", "torch": "2.15.0", "python": "3.11.2"},
            interface="eth0",
            **values,
        )
        for host in range(hosts)
        for local in range(each)
    ]


def replace(rank: RankFacts, **values: Any) -> RankFacts:
    return rank.model_copy(update=values)


def problems(found: list[RankFacts]) -> list[DoctorFinding]:
    return [each for each in compare_ranks(found, len(found)) if each.state != "ok"]


def amiss(found: list[RankFacts]) -> list[tuple[str, str, str]]:
    """Return name, state and place of what is not as it should be."""
    return [(each.name, each.state, each.where) for each in problems(found)]


def test_equal_ranks_have_no_problem() -> None:
    (only,) = compare_ranks(ranks(), 4)
    assert (only.name, only.state, only.found) == ("ranks", "ok", "4 ranks joined, on 2 hosts: a, b")


def test_one_rank_with_another_torch_is_named() -> None:
    found = ranks()
    found[3] = replace(found[3], versions={**found[3].versions, "torch": "2.14.1"})
    (other,) = problems(found)
    assert (other.name, other.state) == ("versions of torch", "error")
    assert other.found == "2.15.0: ranks 0-2 (a, b); 2.14.1: rank 3 (b)"


def test_another_python_is_worth_a_look_and_a_missing_version_is_none() -> None:
    found = ranks()
    found[1] = replace(found[1], versions={**found[1].versions, "python": "3.12.1"})
    found[2] = replace(found[2], versions={"paceline": "1.0", "torch": "2.15.0"})
    assert amiss(found) == [("versions of python", "warning", "")]


def test_a_rank_without_a_device_is_reported_as_its_refusal() -> None:
    found = ranks()
    found[2] = replace(found[2], refusal="parallel.device: auto: 2 ranks on a node with 1 GPU (start 1)")
    (other,) = problems(found)
    assert other == DoctorFinding(
        "device", "error", "parallel.device: auto: 2 ranks on a node with 1 GPU", "start 1", "rank 2 (b)"
    )


def test_ranks_on_other_kinds_of_devices_are_reported() -> None:
    found = [replace(rank, device="cpu" if rank.host == "a" else "cuda") for rank in ranks()]
    assert amiss(found) == [("device", "error", "")]


def test_what_is_amiss_on_one_host_is_reported_once_with_its_ranks() -> None:
    found = ranks(hosts=3)
    found[2:4] = [replace(rank, own=(SHM,)) for rank in found[2:4]]
    assert amiss(found) == [("shared memory", "warning", "ranks 2-3 (b)")]


def test_what_is_amiss_with_rank_0_too_is_not_reported_again() -> None:
    assert not amiss(ranks(own=(SHM, DoctorFinding("memory", "ok", "much"))))


def test_what_is_amiss_with_rank_0_otherwise_is_reported_of_the_others() -> None:
    found = ranks()
    found[0] = replace(found[0], own=(DoctorFinding("shared memory", "warning", "none", "mount it"),))
    found[2] = replace(found[2], own=(SHM,))
    assert amiss(found) == [("shared memory", "warning", "rank 2 (b)")]


def test_many_findings_of_one_name_are_reported_once() -> None:
    found = ranks(hosts=6, each=1)
    found[1:] = [
        replace(r, own=(DoctorFinding("host name", "warning", "none", f"add {r.host} to /etc/hosts"),))
        for r in found[1:]
    ]
    found[4] = replace(found[4], own=(DoctorFinding("host name", "error", "another's", "correct it"),))
    first, other = problems(found)
    assert (first.state, first.where) == (
        "warning",
        "ranks 1-3, 5 (b, c, d, f)",
    ) and first.advice == "add b to /etc/hosts"
    assert (other.state, other.where, other.found) == ("error", "rank 4 (e)", "another's")


def test_many_ranks_are_listed_in_runs_and_few_hosts_by_name() -> None:
    many = ranks(hosts=8, each=4)
    assert format_ranks(many[4:]) == "ranks 4-31 (b, c, d, e, f and 2 more)"
    assert format_ranks(many[::4]) == "ranks 0, 4, 8, 12, 16 and 3 more (a, b, c, d, e and 3 more)"


def test_clocks_that_are_far_apart_are_named() -> None:
    two = ranks(hosts=2, each=1)
    assert not compare_clocks({}, two)
    assert compare_clocks({1: 0.004}, two) == [DoctorFinding("clocks", "ok", "at most 4 ms apart")]
    (ahead,) = compare_clocks({1: 7.003}, two)
    assert ahead.state == "warning" and ahead.found == "rank 1 (b) is 7.00 s ahead of rank 0" and "NTP" in ahead.advice
    assert compare_clocks({1: -7.003}, two)[0].found == "rank 1 (b) is 7.00 s behind rank 0"


def test_another_paceline_may_send_more_or_less() -> None:
    values = json.loads(ranks(own=(SHM,))[1].model_dump_json())
    values["colour"] = "blue"
    values["own"][0]["mood"] = "good"
    del values["device"], values["interface"]
    read = RankFacts.model_validate_json(json.dumps(values))
    assert (read.rank, read.device, read.interface, read.own) == (1, "cpu", "", (SHM,))


def measured(num_ranks: int, bit_per_s: float, hop_s: float = 50e-6, backend: str = "gloo") -> AllReduceMeasurement:
    """Return what a ring with such links would take."""

    def taken(num_bytes: int) -> AllReduceTiming:
        seconds = 2 * (num_ranks - 1) * (hop_s + 8 * num_bytes / num_ranks / bit_per_s)
        return AllReduceTiming(bytes=num_bytes, median_s=1.3 * seconds, p10_s=seconds, p90_s=2 * seconds, n=9)

    return fit_link(backend, num_ranks, 1, [taken(num_bytes) for num_bytes in (1 << 16, 1 << 20, 1 << 24)])


@pytest.mark.parametrize(("bit_per_s", "state"), [(8e9, "ok"), (0.94e9, "ok"), (95 * MEGA, "warning")])
def test_a_link_below_half_a_gigabit_is_slow(bit_per_s: float, state: str) -> None:
    found = rate_all_reduce(measured(2, bit_per_s), ranks(2, 1))
    assert (found.name, found.state) == ("all-reduce", state)


def test_the_figures_and_what_they_cost_are_reported() -> None:
    found = rate_all_reduce(measured(2, 0.4e9), ranks(2, 1))
    assert found.found == (
        "gloo over eth0: 0.400 Gbit/s and 49.8 µs per hop, between 2 hosts: 100 MB of gradients take 2.00 s per step"
    )
    assert "ethtool eth0" in found.advice and "GLOO_SOCKET_IFNAME" in found.advice
    assert "NCCL_SOCKET_IFNAME" in rate_all_reduce(measured(2, 0.4e9, backend="nccl"), ranks(2, 1)).advice


def test_one_host_is_not_blamed_for_how_fast_its_memory_is() -> None:
    found = rate_all_reduce(measured(16, 50 * MEGA), ranks(1, 16))
    assert found.state == "ok" and "16 ranks of one host" in found.found


def test_hops_of_milliseconds_are_worth_a_look() -> None:
    assert rate_all_reduce(measured(2, 5e9, hop_s=1e-3), ranks(2, 1)).state == "ok"
    assert rate_all_reduce(measured(2, 5e9, hop_s=10e-3), ranks(2, 1)).state == "warning"
