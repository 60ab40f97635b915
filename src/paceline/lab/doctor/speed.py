"""Rate the measured speed between hosts against their nominal links, and find slow hosts. Torch-free."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from paceline.core.units import count, number, seconds
from paceline.lab.doctor.alike import format_ranks, group_by_machine
from paceline.lab.doctor.facts import RankFacts
from paceline.lab.doctor.finding import DoctorFinding
from paceline.lab.doctor.links import GIGA
from paceline.lab.predict.measured import AllReduceMeasurement, AllReduceTiming

MAX_PAIRED_HOSTS: Final = 16
"""Largest number of hosts that are timed in pairs; n - 1 rounds of more would take too long."""
_SLOW_BIT_PER_S: Final = 0.5 * GIGA
"""Half of the slowest network sold today: a lower rate means bad settings, sharing or a defect."""
_MIN_NOMINAL_SHARE: Final = 1 / 9
"""Smallest acceptable share of the nominal rate.

gloo reached a seventh of 10 Gbit/s while ten programs kept its 2 cores busy (median of all-reduces of 100 MB over a
virtual link, measured); a link that negotiated the next lower speed reaches a tenth.
"""
_MAX_CONNECTION_BIT_PER_S: Final = 10 * GIGA
"""Approximate limit of one TCP connection: faster links are not expected to be saturated by one."""
_MAX_HOP_S: Final = 5e-3
"""Ethernet takes 30 to 100 microseconds; a hop of milliseconds leaves the building."""
_SLOW_HOST_RATIO: Final = 0.5
_EXAMPLE_GRADIENT_BYTES: Final = 100e6
"""Example: bytes of the gradients of ResNet-50 in float32."""


def rate_all_reduce(measured: AllReduceMeasurement, ranks: Sequence[RankFacts]) -> DoctorFinding:
    """Return a finding on all-reduces between `ranks`, in rank order.

    A warning below 0.5 Gbit/s between hosts; below a ninth of the slowest interface's nominal rate (at most 10 Gbit/s,
    or InfiniBand's if GPUs use it); or for hops of more than 5 ms.
    """
    # The largest message gives the bandwidth, the smallest the latency, both at the 10th percentile, as other processes
    # may use the link.
    bit_per_s, hop_s = _compute_link_rate(measured.times[-1], measured.ranks), _compute_hop_s(measured)
    measured_text = (
        f"{measured.backend}{_format_interfaces(ranks)}: {_format_gbit(bit_per_s)} and {seconds(hop_s)} per hop"
    )
    hosts = group_by_machine(ranks)
    if len(hosts) < 2:
        return DoctorFinding.ok("all-reduce", f"{measured_text}, between {count(len(ranks), 'rank')} of one host")
    nominal = _find_nominal_rate(ranks)
    made_for = f", nominal {_format_gbit(nominal)}" if nominal else ""
    step_s = 2 * (measured.ranks - 1) / measured.ranks * _EXAMPLE_GRADIENT_BYTES * 8 / bit_per_s
    example = f"100 MB of gradients take {seconds(step_s)} per step"
    costs = f"{measured_text}{made_for}, between {count(len(hosts), 'host')}: {example}"
    if bit_per_s < _compute_min_rate(nominal, ranks):
        return DoctorFinding.warning("all-reduce", costs, _advise_slow_link(ranks))
    if hop_s > _MAX_HOP_S:
        return DoctorFinding.warning(
            "all-reduce", costs, "use hosts of one network: each step waits for two hops per rank"
        )
    return DoctorFinding.ok("all-reduce", costs)


def blame_slow_hosts(
    finding: DoctorFinding, pairs: Mapping[tuple[int, int], float], ranks: Mapping[int, RankFacts]
) -> DoctorFinding:
    """Add the slow hosts to `finding`: those whose best rate is below half of the best of all.

    `pairs` has bytes per second between the first ranks of at least three hosts.
    """
    best: dict[int, float] = {}
    for pair, bytes_per_s in pairs.items():
        for rank in pair:
            best[rank] = max(best.get(rank, 0.0), bytes_per_s)
    fastest = max(best.values(), default=0.0)
    slow = [rank for rank in sorted(best) if best[rank] < _SLOW_HOST_RATIO * fastest]
    if not slow:
        return finding
    where = format_ranks([ranks[rank] for rank in slow])
    rates = f"{_format_gbit(8 * max(best[rank] for rank in slow))}, while the others reach {_format_gbit(8 * fastest)}"
    found = f"{finding.found}; {where} only reaches {rates}"
    advice = f"check the adapter, cable and port of {where} (ethtool), or leave it out"
    return replace(finding, found=found, advice=advice, where=where)


def _compute_link_rate(timed: AllReduceTiming, ranks: int) -> float:
    """Return the bits per second over a link of a ring."""
    return 8 * 2 * (ranks - 1) / ranks * timed.bytes / timed.p10_s


def _compute_hop_s(measured: AllReduceMeasurement) -> float:
    """Return the smallest message's seconds per hop, without its transfer time."""
    small, hops = measured.times[0], 2 * (measured.ranks - 1)
    bytes_s = 8 * hops / measured.ranks * small.bytes / _compute_link_rate(measured.times[-1], measured.ranks)
    return max(0.0, small.p10_s - bytes_s) / hops


def _compute_min_rate(nominal: float, ranks: Sequence[RankFacts]) -> float:
    capped = nominal if _has_infiniband(ranks) else min(nominal, _MAX_CONNECTION_BIT_PER_S)
    return max(_SLOW_BIT_PER_S, _MIN_NOMINAL_SHARE * capped) / _count_ring_crossings(ranks)


def _count_ring_crossings(ranks: Sequence[RankFacts]) -> int:
    """Return how often gloo's ring, in rank order, leaves a host; NCCL orders its own ring."""
    if any(rank.gpu for rank in ranks):
        return 1
    after = [*ranks[1:], ranks[0]]
    leaving = [one.machine for one, other in zip(ranks, after, strict=True) if one.machine != other.machine]
    return max(leaving.count(machine) for machine in set(leaving))


def _find_nominal_rate(ranks: Sequence[RankFacts]) -> float:
    """Return the nominal bits per second of the slowest link; 0 if unknown."""
    if _has_infiniband(ranks):
        return min(rank.infiniband_bit_per_s for rank in ranks)
    return min((rank.interface.bit_per_s for rank in ranks if rank.interface.bit_per_s), default=0.0)


def _has_infiniband(ranks: Sequence[RankFacts]) -> bool:
    return all(rank.infiniband_bit_per_s and rank.gpu for rank in ranks)


def _format_interfaces(ranks: Sequence[RankFacts]) -> str:
    if any(rank.gpu for rank in ranks):
        return ""
    names = sorted({rank.interface.name for rank in ranks} - {""})
    return f" over {', '.join(names[:4])}" if names else ""


def _advise_slow_link(ranks: Sequence[RankFacts]) -> str:
    send_less = "or send less: parallel.compression=bf16, or a larger data.batch_size"
    if _has_infiniband(ranks):
        return f"check with NCCL_DEBUG=INFO whether NCCL uses it (NCCL_IB_HCA, NCCL_IB_DISABLE, GPUDirect), {send_less}"
    name = next((rank.interface.name for rank in ranks if rank.interface.name), "")
    variable = "NCCL_SOCKET_IFNAME" if any(rank.gpu for rank in ranks) else "GLOO_SOCKET_IFNAME"
    return f"check the link (ethtool {name or 'INTERFACE'}), select a faster one by {variable}, {send_less}"


def _format_gbit(bit_per_s: float) -> str:
    return f"{number(bit_per_s / GIGA)} Gbit/s"
