"""Compare the facts of ranks: what must be equal, and what must not be shared. Pure.

Device and address of a rank are not reported again if its own findings already have a problem.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Final

from paceline.core.errors import WorldError
from paceline.core.units import count
from paceline.lab.doctor.facts import COMPARED_VERSIONS, RankFacts
from paceline.lab.doctor.finding import DoctorFinding, find_worst_state
from paceline.lab.doctor.links import is_loopback

_MUST_AGREE: Final = ("paceline", "torch", "nccl")
"""Ranks with different versions of these would wait in different places, or cannot communicate."""
_MAX_SHOWN: Final = 4
_FindingKey = tuple[str, str, str]
"""Identity of a finding: name, state and advice. The found value may contain an amount that differs."""


def compare_ranks(ranks: Sequence[RankFacts]) -> list[DoctorFinding]:
    """Return findings on ranks, in rank order, before they communicate; those without problem, too."""
    hosts = group_by_machine(ranks)
    names = ", ".join(islice((each[0].host for each in hosts), 8)) + (", ..." if len(hosts) > 8 else "")
    summary = DoctorFinding.ok("ranks", f"{count(len(ranks), 'rank')} joined, on {count(len(hosts), 'host')}: {names}")
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
    found: dict[str, list[RankFacts]] = defaultdict(list)
    for rank in ranks:
        found[rank.machine].append(rank)
    return list(found.values())


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


def _summarize_findings(findings: Sequence[DoctorFinding], places: Sequence[list[RankFacts]]) -> list[DoctorFinding]:
    """Return `findings` of one name with their ranks, or the worst for all ranks if there are many."""
    if len(findings) <= _MAX_SHOWN:
        return [finding.with_location(format_ranks(having)) for finding, having in zip(findings, places, strict=True)]
    state = find_worst_state(findings)
    finding, having = next(pair for pair in zip(findings, places, strict=True) if pair[0].state == state)
    found = f"{having[0].label}: {finding.found}; and {len(findings) - 1} more like it"
    everywhere = sorted({rank.rank: rank for each in places for rank in each}.items())
    return [replace(finding, found=found).with_location(format_ranks([rank for _, rank in everywhere]))]


def format_ranks(ranks: Sequence[RankFacts]) -> str:
    """Return `rank 1 (hostB)` or `ranks 2-3, 6 (hostB, hostC)`: ranges, shortened."""
    numbers, hosts = _format_ranges([rank.rank for rank in ranks]), list(dict.fromkeys(rank.host for rank in ranks))
    shown = [", ".join(each[:_MAX_SHOWN]) + (", ..." if len(each) > _MAX_SHOWN else "") for each in (numbers, hosts)]
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown[0]} ({shown[1]})"


def _format_ranges(numbers: Sequence[int]) -> list[str]:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ["-".join(map(str, run)) for run in runs]


def _compare_versions(ranks: Sequence[RankFacts]) -> list[DoctorFinding]:
    """Compare the versions of ranks; a missing one is reported by the rank itself."""
    found = []
    for name in COMPARED_VERSIONS:
        by_version = _group_ranks((rank.versions[name], rank) for rank in ranks if name in rank.versions)
        if len(by_version) > 1:
            descriptions = "; ".join(
                f"{version}: {format_ranks(having)}" for version, having in _sort_most_common_first(by_version)
            )
            title, advice = f"versions of {name}", f"install the same {name} for all ranks"
            found.append(
                (DoctorFinding.problem if name in _MUST_AGREE else DoctorFinding.warning)(title, descriptions, advice)
            )
    return found


def _compare_local_ranks(ranks: Sequence[RankFacts]) -> list[DoctorFinding]:
    """Find machines whose ranks disagree on their number, or that lack a local rank 0."""
    found = []
    for local_ranks in group_by_machine(ranks):
        ranks_by_size = _group_ranks((f"{rank.local_world_size}", rank) for rank in local_ranks)
        sizes = {rank.local_world_size for rank in local_ranks}
        advice = "set LOCAL_RANK and LOCAL_WORLD_SIZE for each rank, or start them with torchrun, srun or --ranks"
        if len(sizes) > 1:
            text = "; ".join(f"{size}: {format_ranks(saying)}" for size, saying in ranks_by_size.items())
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
    for refusal, having in refused.items():
        found.append(DoctorFinding.from_error("device", WorldError(refusal)).with_location(format_ranks(having)))
    if found:
        return found
    kinds = _group_ranks((rank.device.partition(":")[0], rank) for rank in ranks)
    if len(kinds) > 1:
        descriptions = "; ".join(f"{kind}: {format_ranks(having)}" for kind, having in _sort_most_common_first(kinds))
        return [
            DoctorFinding.problem(
                "device", f"not all ranks use the same kind of device: {descriptions}", "set parallel.device"
            )
        ]
    return []


def _find_shared_gpus(ranks: Sequence[RankFacts]) -> list[DoctorFinding]:
    """Find GPUs that several ranks use: each gets a share of memory and speed, and NCCL refuses them."""
    shared = [
        having for having in _group_ranks((rank.gpu, rank) for rank in ranks if rank.gpu).values() if len(having) > 1
    ]
    advice = "give each rank its own GPU: LOCAL_RANK, CUDA_VISIBLE_DEVICES, srun --gpus-per-task"
    return [DoctorFinding.problem("GPUs", f"one GPU is used by {format_ranks(having)}", advice) for having in shared]


def _check_addresses(ranks: Sequence[RankFacts]) -> list[DoctorFinding]:
    """Find ranks whose gloo would listen where ranks of other hosts cannot connect."""
    if len(group_by_machine(ranks)) < 2 or any(rank.gpu for rank in ranks):
        return []
    found = []
    unreachable = [rank for rank in ranks if is_loopback(rank.interface.address)]
    reachable = [rank for rank in ranks if not is_loopback(rank.interface.address)]
    for name, having in _group_ranks((rank.towards_main, rank) for rank in unreachable).items():
        what = f"gloo would listen on {having[0].interface.address}, which other hosts cannot reach"
        good = next((rank.interface.name for rank in reachable if rank.interface.name), "")
        suggested = name if name not in ("", "lo") else good or "the interface between the hosts"
        advice = f"set GLOO_SOCKET_IFNAME={suggested}, or make the host's name resolve to its address"
        found.append(DoctorFinding.problem("addresses", what, advice).with_location(format_ranks(having)))
    for address, having in _group_ranks((rank.interface.address, rank) for rank in reachable).items():
        if address and len(group_by_machine(having)) > 1:
            name = having[0].interface.name
            what, advice = f"several hosts have the address {address} ({name})", "set GLOO_SOCKET_IFNAME to another"
            found.append(DoctorFinding.problem("addresses", what, advice).with_location(format_ranks(having)))
    return found


def _compare_cores(ranks: Sequence[RankFacts]) -> list[DoctorFinding]:
    """Find ranks with less than half of the others' cores: all ranks wait for the slowest in each step."""
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
    found: dict[str, list[RankFacts]] = defaultdict(list)
    for key, rank in pairs:
        found[key].append(rank)
    return found


def _sort_most_common_first(of: Mapping[str, list[RankFacts]]) -> list[tuple[str, list[RankFacts]]]:
    return sorted(of.items(), key=lambda each: -len(each[1]))
