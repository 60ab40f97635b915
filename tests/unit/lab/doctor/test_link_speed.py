"""Links are rated by the times of all-reduces."""

import pytest

from paceline.lab.doctor.check import DoctorFinding
from paceline.lab.doctor.compare_ranks import RankFacts, blame_slow_hosts, rate_all_reduce
from paceline.lab.doctor.network import Interface
from paceline.lab.predict.network import AllReduceMeasurement, AllReduceTiming, fit_link

MEGA = 1e6


def ranks(hosts: int, each: int = 1, *, speed: float = 10e9, by_turns: bool = False, **values) -> list[RankFacts]:
    return [
        RankFacts(
            rank,
            host=f"host{host}",
            machine=f"machine {host}",
            interface=Interface("eth0", f"10.0.0.{host}", speed),
            **values,
        )
        for rank in range(hosts * each)
        for host in [rank % hosts if by_turns else rank // each]
    ]


def measured(num_ranks: int, bit_per_s: float, hop_s: float = 50e-6, backend: str = "gloo") -> AllReduceMeasurement:
    """Return what a ring with such links would take."""

    def taken(num_bytes: int) -> AllReduceTiming:
        seconds = 2 * (num_ranks - 1) * (hop_s + 8 * num_bytes / num_ranks / bit_per_s)
        return AllReduceTiming(bytes=num_bytes, median_s=1.3 * seconds, p10_s=seconds, p90_s=2 * seconds, n=9)

    return fit_link(backend, num_ranks, 1, [taken(num_bytes) for num_bytes in (1 << 16, 1 << 20, 1 << 24)])


@pytest.mark.parametrize(
    ("line", "bit_per_s", "state"),
    [
        (10e9, 8e9, "ok"),
        (10e9, 1.46e9, "ok"),  # of a busy machine
        (10e9, 0.94e9, "look"),  # a line of 10 that has fallen back to 1
        (10e9, 95 * MEGA, "look"),
        (1e9, 0.94e9, "ok"),
        (0.1e9, 94 * MEGA, "look"),  # as good as it can be, and too slow
        (0, 0.94e9, "ok"),
        (0, 95 * MEGA, "look"),
        (100e9, 12e9, "ok"),  # as much as one connection does
    ],
)
def test_a_link_is_slow_by_itself_or_for_what_it_is_made_for(line: float, bit_per_s: float, state: str) -> None:
    found = rate_all_reduce(measured(2, bit_per_s), ranks(2, speed=line))
    assert (found.name, found.state) == ("all-reduce", state)


def test_the_figures_and_what_they_cost_are_reported() -> None:
    found = rate_all_reduce(measured(2, 0.8e9), ranks(2))
    assert found.found == (
        "gloo over eth0: 0.800 Gbit/s and 49.8 µs per hop, nominal 10 Gbit/s, between 2 hosts: "
        "100 MB of gradients take 1.00 s per step"
    )
    assert "ethtool eth0" in found.advice and "GLOO_SOCKET_IFNAME" in found.advice


def test_one_host_is_not_blamed_for_how_fast_its_memory_is() -> None:
    found = rate_all_reduce(measured(16, 50 * MEGA), ranks(1, 16))
    assert found.state == "ok" and "16 ranks of one host" in found.found


def test_a_ring_that_leaves_each_host_several_times_has_a_part_of_the_line_each() -> None:
    """Ranks dealt out by turns: each of four connections over a link of 10 Gbit/s may be as slow as 0.28."""
    slow = measured(8, 0.7e9)
    assert rate_all_reduce(slow, ranks(2, 4)).state == "look"
    assert rate_all_reduce(slow, ranks(2, 4, by_turns=True)).state == "ok"


def test_hops_of_milliseconds_are_worth_a_look() -> None:
    assert rate_all_reduce(measured(2, 5e9, hop_s=1e-3), ranks(2)).state == "ok"
    assert rate_all_reduce(measured(2, 5e9, hop_s=10e-3), ranks(2)).state == "look"


def test_gpus_that_have_infiniband_and_do_not_use_it_are_found() -> None:
    there = ranks(2, gpu="GPU-1", infiniband_bit_per_s=400e9)
    assert rate_all_reduce(measured(2, 300e9, backend="nccl"), there).state == "ok"
    found = rate_all_reduce(measured(2, 20e9, backend="nccl"), there)
    assert found.state == "look" and "NCCL_IB_HCA" in found.advice and "400 Gbit/s" in found.found


def test_the_host_that_is_slow_to_all_others_is_named() -> None:
    three = {rank.rank: rank for rank in ranks(3)}
    finding = DoctorFinding.warning("all-reduce", "gloo: slow", "see")
    named = blame_slow_hosts(finding, {(0, 1): 1e9, (0, 2): 12 * MEGA, (1, 2): 11 * MEGA}, three)
    assert (named.state, named.where) == ("look", "rank 2 (host2)")
    assert named.found == "gloo: slow; rank 2 (host2) only reaches 0.0960 Gbit/s, while the others reach 8 Gbit/s"
    assert blame_slow_hosts(finding, {(0, 1): 12 * MEGA, (0, 2): 12 * MEGA, (1, 2): 11 * MEGA}, three) == finding
    assert blame_slow_hosts(finding, {}, three) == finding
