"""Whether what was timed between hosts is what their links are made for, and which host is the slow one. Torch-free.

Between hosts only: within one, all-reduces are as fast as its memory and its cores, which nobody plugs in wrongly.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from paceline.core.units import count, number, seconds
from paceline.lab.doctor.alike import by_machine, listed
from paceline.lab.doctor.facts import Facts
from paceline.lab.doctor.finding import Finding
from paceline.lab.doctor.links import GIGA
from paceline.lab.predict.measured import Measured, TimedReduce

MOST_HOSTS: Final = 16
"""How many hosts are timed in pairs; of more, n - 1 turns would take long, and nccl-tests or iperf3 say as much."""
_SLOW_BIT_PER_S: Final = 0.5 * GIGA
"""Half of what the slowest network sold today does: below it something is set, shared or broken."""
_SHARE: Final = 1 / 9
"""Of what a line is made for. gloo did a seventh of 10 Gbit/s while ten programs kept its 2 cores busy (median of
all-reduces of 100 MB over a virtual link, measured), and a line that fell back to the speed below does a tenth.
"""
_MOST_BIT_PER_S: Final = 10 * GIGA
"""What one connection of the kernel's does at most, near enough: faster lines are not expected to be filled by one."""
_LONG_HOP_S: Final = 5e-3
"""Ethernet takes 30 to 100 microseconds; a hop of milliseconds leaves the building."""
_HALF: Final = 0.5
_GRADIENTS: Final = 100e6
"""Bytes of the gradients of ResNet-50 in float32, as an example."""


def judge_speed(found: Measured, ranks: Sequence[Facts]) -> Finding:
    """Return what is to be said of all-reduces between `ranks`, in their order.

    Worth a look are less than 0.5 Gbit/s between hosts; less than a ninth of what the slowest interface is made for,
    counted up to 10 Gbit/s, or of InfiniBand where GPUs have it; and hops of more than 5 ms. The largest message says
    how fast, the smallest how late, and of each a fast one (its 10th percentile), as others may be busy.
    """
    bit_per_s, hop_s = _rate(found.times[-1], found.ranks), _hop_s(found)
    told = f"{found.backend}{_over(ranks)}: {_gbit(bit_per_s)} and {seconds(hop_s)} a hop"
    hosts = by_machine(ranks)
    if len(hosts) < 2:
        return Finding.ok("all-reduce", f"{told}, between {count(len(ranks), 'rank')} of one host")
    nominal = _nominal(ranks)
    made_for = f", made for {_gbit(nominal)}" if nominal else ""
    step_s = 2 * (found.ranks - 1) / found.ranks * _GRADIENTS * 8 / bit_per_s
    costs = f"{told}{made_for}, between {count(len(hosts), 'host')}: 100 MB of gradients take {seconds(step_s)} a step"
    if bit_per_s < _least(nominal, ranks):
        return Finding.look("all-reduce", costs, _advice(ranks))
    if hop_s > _LONG_HOP_S:
        return Finding.look("all-reduce", costs, "use hosts of one network: each step waits for two hops a rank")
    return Finding.ok("all-reduce", costs)


def blame(finding: Finding, pairs: Mapping[tuple[int, int], float], ranks: Mapping[int, Facts]) -> Finding:
    """Return `finding` with the hosts that are slow whoever they talk to: at best half as fast as others are at best.

    `pairs` has bytes a second between the first ranks of three hosts or more. None is named where all are slow alike.
    """
    best: dict[int, float] = {}
    for pair, bytes_per_s in pairs.items():
        for rank in pair:
            best[rank] = max(best.get(rank, 0.0), bytes_per_s)
    most = max(best.values(), default=0.0)
    slow = [rank for rank in sorted(best) if best[rank] < _HALF * most]
    if not slow:
        return finding
    where = listed([ranks[rank] for rank in slow])
    rates = f"{_gbit(8 * max(best[rank] for rank in slow))}, where the others do {_gbit(8 * most)}"
    found = f"{finding.found}; {where} sends and receives {rates}"
    advice = f"look at the adapter, cable and port of {where} (ethtool), or leave it out"
    return replace(finding, found=found, advice=advice, where=where)


def _rate(timed: TimedReduce, ranks: int) -> float:
    """Return the bits a second over a link of a ring."""
    return 8 * 2 * (ranks - 1) / ranks * timed.bytes / timed.p10_s


def _hop_s(found: Measured) -> float:
    """Return what the smallest message takes a hop beyond what its bytes do."""
    small, hops = found.times[0], 2 * (found.ranks - 1)
    bytes_s = 8 * hops / found.ranks * small.bytes / _rate(found.times[-1], found.ranks)
    return max(0.0, small.p10_s - bytes_s) / hops


def _least(nominal: float, ranks: Sequence[Facts]) -> float:
    """Return the bits a second below which the links are slow."""
    capped = nominal if _has_infiniband(ranks) else min(nominal, _MOST_BIT_PER_S)
    return max(_SLOW_BIT_PER_S, _SHARE * capped) / _crossings(ranks)


def _crossings(ranks: Sequence[Facts]) -> int:
    """Return how often gloo's ring, which goes by the numbers of the ranks, leaves a host; NCCL makes its own."""
    if any(rank.gpu for rank in ranks):
        return 1
    after = [*ranks[1:], ranks[0]]
    leaving = [one.machine for one, other in zip(ranks, after, strict=True) if one.machine != other.machine]
    return max(leaving.count(machine) for machine in set(leaving))


def _nominal(ranks: Sequence[Facts]) -> float:
    """Return the bits a second that the slowest link is made for; 0 where nobody knows."""
    if _has_infiniband(ranks):
        return min(rank.infiniband_bit_per_s for rank in ranks)
    return min((rank.interface.bit_per_s for rank in ranks if rank.interface.bit_per_s), default=0.0)


def _has_infiniband(ranks: Sequence[Facts]) -> bool:
    return all(rank.infiniband_bit_per_s and rank.gpu for rank in ranks)


def _over(ranks: Sequence[Facts]) -> str:
    if any(rank.gpu for rank in ranks):
        return ""
    names = sorted({rank.interface.name for rank in ranks} - {""})
    return f" over {', '.join(names[:4])}" if names else ""


def _advice(ranks: Sequence[Facts]) -> str:
    send_less = "or send less: parallel.compression=bf16, or a larger data.batch_size"
    if _has_infiniband(ranks):
        return f"see with NCCL_DEBUG=INFO whether NCCL uses it (NCCL_IB_HCA, NCCL_IB_DISABLE, GPUDirect), {send_less}"
    name = next((rank.interface.name for rank in ranks if rank.interface.name), "")
    variable = "NCCL_SOCKET_IFNAME" if any(rank.gpu for rank in ranks) else "GLOO_SOCKET_IFNAME"
    return f"see what the link does (ethtool {name or 'INTERFACE'}), name a faster one by {variable}, {send_less}"


def _gbit(bit_per_s: float) -> str:
    return f"{number(bit_per_s / GIGA)} Gbit/s"
