"""Compare the facts that ranks report about themselves, and rate the speed of the links between them. Torch-free."""

import json
import os
import socket
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import islice
from pathlib import Path
from typing import Any, Final, Self

from paceline.core.errors import WorldError
from paceline.core.host import rank_cores
from paceline.core.process import PROC
from paceline.core.source_digest import code_version
from paceline.core.units import count, number, seconds
from paceline.core.world import World
from paceline.lab.doctor.check import DoctorFinding, find_worst_state
from paceline.lab.doctor.network import (
    GIGA,
    NO_INTERFACE,
    Interface,
    find_gloo_interface,
    find_interface_towards,
    is_loopback,
    list_interfaces,
    read_infiniband_bit_per_s,
)
from paceline.lab.predict.network import AllReduceMeasurement, AllReduceTiming

COMPARED_VERSIONS: Final = ("paceline", "torch", "nccl", "driver", "cuda", "python", "torchvision", "numpy")
"""Versions from `describe_machine`, in the order of reports."""
_MUST_AGREE: Final = ("paceline", "torch", "nccl")
"""Ranks with different versions of these would wait in different places, or cannot communicate."""
_MAX_SHOWN: Final = 4
_FindingKey = tuple[str, str, str]
"""Identity of a finding: name, state and advice. The found value may contain an amount that differs."""
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


@dataclass(frozen=True)
class RankFacts:
    """Facts of one rank. `machine` is equal for ranks that share a network namespace, `gpu` for ranks that share a GPU.

    `refusal` explains why the rank has no `device`. `interface` is gloo's, `towards_main` the name of the interface of
    the route to rank 0, and `infiniband_bit_per_s` the nominal rate of the fastest adapter (0: none).
    """

    rank: int
    host: str = ""
    machine: str = ""
    pid: int = 0
    local_rank: int = 0
    local_world_size: int = 1
    versions: dict[str, str] = field(default_factory=dict)
    device: str = "cpu"
    gpu: str = ""
    refusal: str = ""
    cores: int = 1
    interface: Interface = NO_INTERFACE
    towards_main: str = ""
    infiniband_bit_per_s: float = 0.0
    own: tuple[DoctorFinding, ...] = ()

    @property
    def label(self) -> str:
        """Label such as `rank 3 (node07)`."""
        return f"rank {self.rank} ({self.host})"

    def to_json(self) -> str:
        """Return one line of JSON, which `from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read facts; unknown fields, of ranks with another version of paceline, are ignored."""
        values = _select_known_fields(cls, json.loads(text))
        values["interface"] = Interface(
            **_select_known_fields(Interface, values.get("interface", asdict(NO_INTERFACE)))
        )
        values["own"] = tuple(
            DoctorFinding(**_select_known_fields(DoctorFinding, each)) for each in values.get("own", ())
        )
        return cls(**values)


def collect_facts(
    world: World,
    own: Sequence[DoctorFinding],
    versions: Mapping[str, Any],
    environ: Mapping[str, str],
    *,
    device: str,
    gpu: str = "",
    refusal: str = "",
) -> RankFacts:
    """Collect the facts of this rank; `versions` is from `describe_machine`, and `gpu` identifies the GPU."""
    available = list_interfaces()
    known = {**versions, "paceline": code_version(versions)}
    return RankFacts(
        rank=world.rank,
        host=socket.gethostname(),
        machine=identify_machine(),
        pid=os.getpid(),
        local_rank=world.local_rank,
        local_world_size=world.local_world_size,
        versions={name: str(known[name]) for name in COMPARED_VERSIONS if known.get(name)},
        device=device,
        gpu=gpu,
        refusal=refusal,
        cores=rank_cores(world),
        interface=find_gloo_interface(available, environ),
        towards_main=find_interface_towards(available, world.master_addr).name,
        infiniband_bit_per_s=read_infiniband_bit_per_s(),
        own=tuple(own),
    )


def identify_machine(proc: Path = PROC) -> str:
    """Return an identifier that processes in the same network namespace share."""
    try:
        boot = (proc / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {(proc / 'self/ns/net').readlink()}"
    except OSError:
        return socket.gethostname()


def _select_known_fields(kind: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    return {each.name: values[each.name] for each in fields(kind) if each.name in values}


def compare_ranks(ranks: Sequence[RankFacts]) -> list[DoctorFinding]:
    """Return findings on ranks, in rank order, before they communicate."""
    hosts = group_by_machine(ranks)
    names = ", ".join(islice((each[0].host for each in hosts), 8)) + (", ..." if len(hosts) > 8 else "")
    summary = DoctorFinding.ok("ranks", f"{count(len(ranks), 'rank')} joined, on {count(len(hosts), 'host')}: {names}")
    # Device and address of a rank are not reported again if its own findings already have a problem.
    sound = [rank for rank in ranks if find_worst_state(rank.own) != "wrong"]
    together = (
        *_compare_versions(ranks),
        *_compare_local_ranks(ranks),
        *_find_shared_gpus(ranks),
        *_compare_cores(ranks),
    )
    return [summary, *together, *_compare_devices(sound), *_check_addresses(sound), *collect_other_findings(ranks)]


def group_by_machine(ranks: Iterable[RankFacts]) -> list[list[RankFacts]]:
    """Return the ranks of each machine, in the order of their first ranks."""
    groups: dict[str, list[RankFacts]] = defaultdict(list)
    for rank in ranks:
        groups[rank.machine].append(rank)
    return list(groups.values())


def collect_other_findings(ranks: Sequence[RankFacts]) -> list[DoctorFinding]:
    """Return the findings of ranks that differ from rank 0's, once each, with their ranks.

    If more than a few share a name, only the worst is returned.
    """
    known = {_get_finding_key(finding) for finding in ranks[0].own}
    ranks_by_key: dict[_FindingKey, list[RankFacts]] = defaultdict(list)
    first: dict[_FindingKey, DoctorFinding] = {}
    for rank in ranks[1:]:
        for finding in rank.own:
            key = _get_finding_key(finding)
            if finding.state != "ok" and key not in known:
                first.setdefault(key, finding)
                ranks_by_key[key].append(rank)
    keys_by_name: dict[str, list[_FindingKey]] = defaultdict(list)
    for key in first:
        keys_by_name[key[0]].append(key)
    return [
        finding
        for keys in keys_by_name.values()
        for finding in _summarize_findings([first[key] for key in keys], [ranks_by_key[key] for key in keys])
    ]


def _get_finding_key(finding: DoctorFinding) -> _FindingKey:
    return finding.name, finding.state, finding.advice


def _summarize_findings(
    findings: Sequence[DoctorFinding], ranks_by_finding: Sequence[list[RankFacts]]
) -> list[DoctorFinding]:
    if len(findings) <= _MAX_SHOWN:
        return [
            finding.with_location(format_ranks(owners))
            for finding, owners in zip(findings, ranks_by_finding, strict=True)
        ]
    state = find_worst_state(findings)
    finding, owners = next(pair for pair in zip(findings, ranks_by_finding, strict=True) if pair[0].state == state)
    found = f"{owners[0].label}: {finding.found}; and {len(findings) - 1} more like it"
    everywhere = sorted({rank.rank: rank for each in ranks_by_finding for rank in each}.items())
    return [replace(finding, found=found).with_location(format_ranks([rank for _, rank in everywhere]))]


def format_ranks(ranks: Sequence[RankFacts]) -> str:
    """Return `rank 1 (hostB)` or `ranks 2-3, 6 (hostB, hostC)`, shortened."""
    numbers, hosts = _format_ranges([rank.rank for rank in ranks]), list(dict.fromkeys(rank.host for rank in ranks))
    shown = [", ".join(each[:_MAX_SHOWN]) + (", ..." if len(each) > _MAX_SHOWN else "") for each in (numbers, hosts)]
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown[0]} ({shown[1]})"


def _format_ranges(numbers: Sequence[int]) -> list[str]:
    runs: list[list[int]] = []
    for each in numbers:
        if runs and each == runs[-1][-1] + 1:
            runs[-1][1:] = [each]
        else:
            runs.append([each])
    return ["-".join(map(str, run)) for run in runs]


def _compare_versions(ranks: Sequence[RankFacts]) -> list[DoctorFinding]:
    # A missing version is reported by the rank itself.
    found = []
    for name in COMPARED_VERSIONS:
        by_version = _group_ranks((rank.versions[name], rank) for rank in ranks if name in rank.versions)
        if len(by_version) > 1:
            descriptions = "; ".join(
                f"{version}: {format_ranks(owners)}" for version, owners in _sort_most_common_first(by_version)
            )
            title, advice = f"versions of {name}", f"install the same {name} for all ranks"
            found.append(
                (DoctorFinding.problem if name in _MUST_AGREE else DoctorFinding.warning)(title, descriptions, advice)
            )
    return found


def _compare_local_ranks(ranks: Sequence[RankFacts]) -> list[DoctorFinding]:
    found = []
    for local_ranks in group_by_machine(ranks):
        ranks_by_size = _group_ranks((f"{rank.local_world_size}", rank) for rank in local_ranks)
        sizes = {rank.local_world_size for rank in local_ranks}
        advice = "set LOCAL_RANK and LOCAL_WORLD_SIZE for each rank, or start them with torchrun, srun or --ranks"
        if len(sizes) > 1:
            text = "; ".join(f"{size}: {format_ranks(owners)}" for size, owners in ranks_by_size.items())
            found.append(
                DoctorFinding.problem("local ranks", f"ranks of one host disagree on their number: {text}", advice)
            )
        elif all(rank.local_rank for rank in local_ranks):
            text = f"{format_ranks(local_ranks)}: none is local rank 0, which downloads and stages data"
            found.append(DoctorFinding.problem("local ranks", text, advice))
    return found


def _compare_devices(ranks: Sequence[RankFacts]) -> list[DoctorFinding]:
    refused = _group_ranks((rank.refusal, rank) for rank in ranks if rank.refusal)
    found = []
    for refusal, owners in refused.items():
        found.append(DoctorFinding.from_error("device", WorldError(refusal)).with_location(format_ranks(owners)))
    if found:
        return found
    kinds = _group_ranks((rank.device.partition(":")[0], rank) for rank in ranks)
    if len(kinds) > 1:
        descriptions = "; ".join(f"{kind}: {format_ranks(owners)}" for kind, owners in _sort_most_common_first(kinds))
        return [
            DoctorFinding.problem(
                "device", f"not all ranks use the same kind of device: {descriptions}", "set parallel.device"
            )
        ]
    return []


def _find_shared_gpus(ranks: Sequence[RankFacts]) -> list[DoctorFinding]:
    # Each rank would get a share of its memory and speed, and NCCL refuses them.
    shared = [
        owners for owners in _group_ranks((rank.gpu, rank) for rank in ranks if rank.gpu).values() if len(owners) > 1
    ]
    advice = "give each rank its own GPU: LOCAL_RANK, CUDA_VISIBLE_DEVICES, srun --gpus-per-task"
    return [DoctorFinding.problem("GPUs", f"one GPU is used by {format_ranks(owners)}", advice) for owners in shared]


def _check_addresses(ranks: Sequence[RankFacts]) -> list[DoctorFinding]:
    # Only gloo announces an address, and only other hosts need it.
    if len(group_by_machine(ranks)) < 2 or any(rank.gpu for rank in ranks):
        return []
    found = []
    unreachable = [rank for rank in ranks if is_loopback(rank.interface.address)]
    reachable = [rank for rank in ranks if not is_loopback(rank.interface.address)]
    for name, owners in _group_ranks((rank.towards_main, rank) for rank in unreachable).items():
        what = f"gloo would listen on {owners[0].interface.address}, which other hosts cannot reach"
        good = next((rank.interface.name for rank in reachable if rank.interface.name), "")
        suggested = name if name not in ("", "lo") else good or "the interface between the hosts"
        advice = f"set GLOO_SOCKET_IFNAME={suggested}, or make the host's name resolve to its address"
        found.append(DoctorFinding.problem("addresses", what, advice).with_location(format_ranks(owners)))
    for address, owners in _group_ranks((rank.interface.address, rank) for rank in reachable).items():
        if address and len(group_by_machine(owners)) > 1:
            name = owners[0].interface.name
            what, advice = f"several hosts have the address {address} ({name})", "set GLOO_SOCKET_IFNAME to another"
            found.append(DoctorFinding.problem("addresses", what, advice).with_location(format_ranks(owners)))
    return found


def _compare_cores(ranks: Sequence[RankFacts]) -> list[DoctorFinding]:
    # All ranks wait for the slowest one in each step.
    max_cores = max(rank.cores for rank in ranks)
    short = [rank for rank in ranks if rank.cores < max_cores / 2]
    if not short:
        return []
    what = f"{min(rank.cores for rank in short)} per rank, but others have {max_cores}: all ranks wait for the slowest"
    return [
        DoctorFinding.warning("cores", what, "give all ranks the same (srun --cpus-per-task)").with_location(
            format_ranks(short)
        )
    ]


def _group_ranks(pairs: Iterable[tuple[str, RankFacts]]) -> dict[str, list[RankFacts]]:
    groups: dict[str, list[RankFacts]] = defaultdict(list)
    for key, rank in pairs:
        groups[key].append(rank)
    return groups


def _sort_most_common_first(groups: Mapping[str, list[RankFacts]]) -> list[tuple[str, list[RankFacts]]]:
    return sorted(groups.items(), key=lambda each: -len(each[1]))


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
    # A healthy host reaches its full rate with at least one other, a slow one with none.
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
    return 8 * 2 * (ranks - 1) / ranks * timed.bytes / timed.p10_s


def _compute_hop_s(measured: AllReduceMeasurement) -> float:
    # Without the transfer of its bytes, a small message is the latency of its hops.
    small, hops = measured.times[0], 2 * (measured.ranks - 1)
    bytes_s = 8 * hops / measured.ranks * small.bytes / _compute_link_rate(measured.times[-1], measured.ranks)
    return max(0.0, small.p10_s - bytes_s) / hops


def _compute_min_rate(nominal: float, ranks: Sequence[RankFacts]) -> float:
    capped = nominal if _has_infiniband(ranks) else min(nominal, _MAX_CONNECTION_BIT_PER_S)
    return max(_SLOW_BIT_PER_S, _MIN_NOMINAL_SHARE * capped) / _count_ring_crossings(ranks)


def _count_ring_crossings(ranks: Sequence[RankFacts]) -> int:
    if any(rank.gpu for rank in ranks):
        return 1  # NCCL orders its own ring; gloo's is in rank order
    after = [*ranks[1:], ranks[0]]
    leaving = [one.machine for one, other in zip(ranks, after, strict=True) if one.machine != other.machine]
    return max(leaving.count(machine) for machine in set(leaving))


def _find_nominal_rate(ranks: Sequence[RankFacts]) -> float:
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
