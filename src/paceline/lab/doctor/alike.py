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
from paceline.lab.doctor.facts import VERSIONS, Facts
from paceline.lab.doctor.finding import Finding, worst
from paceline.lab.doctor.links import is_loopback

_MUST_AGREE: Final = ("paceline", "torch", "nccl")
"""Ranks with different versions of these would wait in different places, or cannot communicate."""
_SHOWN: Final = 4
_Key = tuple[str, str, str]
"""Identity of a finding: name, state and advice. The found value may contain an amount that differs."""


def judge_ranks(ranks: Sequence[Facts]) -> list[Finding]:
    """Return findings on ranks, in rank order, before they communicate; those without problem, too."""
    hosts = by_machine(ranks)
    names = ", ".join(islice((each[0].host for each in hosts), 8)) + (", ..." if len(hosts) > 8 else "")
    summary = Finding.ok("ranks", f"{count(len(ranks), 'rank')} joined, on {count(len(hosts), 'host')}: {names}")
    sound = [rank for rank in ranks if worst(rank.own) != "wrong"]
    together = (*_versions(ranks), *_places(ranks), *_gpus(ranks), *_cores(ranks))
    return [summary, *together, *_devices(sound), *_addresses(sound), *of_other_hosts(ranks)]


def by_machine(ranks: Iterable[Facts]) -> list[list[Facts]]:
    """Return the ranks of each machine, in the order of their first ranks."""
    found: dict[str, list[Facts]] = defaultdict(list)
    for rank in ranks:
        found[rank.machine].append(rank)
    return list(found.values())


def of_other_hosts(ranks: Sequence[Facts]) -> list[Finding]:
    """Return the findings of ranks that differ from rank 0's, once each, with their ranks.

    If more than a few share a name, only the worst is returned.
    """
    known = {_key(finding) for finding in ranks[0].own}
    ranks_by_key: dict[_Key, list[Facts]] = defaultdict(list)
    first: dict[_Key, Finding] = {}
    for rank in ranks[1:]:
        for finding in rank.own:
            key = _key(finding)
            if finding.state != "ok" and key not in known:
                first.setdefault(key, finding)
                ranks_by_key[key].append(rank)
    keys_by_name: dict[str, list[_Key]] = defaultdict(list)
    for key in first:
        keys_by_name[key[0]].append(key)
    return [
        finding
        for keys in keys_by_name.values()
        for finding in _few([first[key] for key in keys], [ranks_by_key[key] for key in keys])
    ]


def _key(finding: Finding) -> _Key:
    return finding.name, finding.state, finding.advice


def _few(findings: Sequence[Finding], places: Sequence[list[Facts]]) -> list[Finding]:
    """Return `findings` of one name with their ranks, or the worst for all ranks if there are many."""
    if len(findings) <= _SHOWN:
        return [finding.at(listed(having)) for finding, having in zip(findings, places, strict=True)]
    state = worst(findings)
    finding, having = next(pair for pair in zip(findings, places, strict=True) if pair[0].state == state)
    found = f"{having[0].where}: {finding.found}; and {len(findings) - 1} more like it"
    everywhere = sorted({rank.rank: rank for each in places for rank in each}.items())
    return [replace(finding, found=found).at(listed([rank for _, rank in everywhere]))]


def listed(ranks: Sequence[Facts]) -> str:
    """Return `rank 1 (hostB)` or `ranks 2-3, 6 (hostB, hostC)`: ranges, shortened."""
    numbers, hosts = _runs([rank.rank for rank in ranks]), list(dict.fromkeys(rank.host for rank in ranks))
    shown = [", ".join(each[:_SHOWN]) + (", ..." if len(each) > _SHOWN else "") for each in (numbers, hosts)]
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown[0]} ({shown[1]})"


def _runs(numbers: Sequence[int]) -> list[str]:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ["-".join(map(str, run)) for run in runs]


def _versions(ranks: Sequence[Facts]) -> list[Finding]:
    """Compare the versions of ranks; a missing one is reported by the rank itself."""
    found = []
    for name in VERSIONS:
        by_version = _grouped((rank.versions[name], rank) for rank in ranks if name in rank.versions)
        if len(by_version) > 1:
            descriptions = "; ".join(f"{version}: {listed(having)}" for version, having in _usual_first(by_version))
            title, advice = f"versions of {name}", f"install the same {name} for all ranks"
            found.append((Finding.wrong if name in _MUST_AGREE else Finding.look)(title, descriptions, advice))
    return found


def _places(ranks: Sequence[Facts]) -> list[Finding]:
    """Find machines whose ranks disagree on their number, or that lack a local rank 0."""
    found = []
    for local_ranks in by_machine(ranks):
        ranks_by_size = _grouped((f"{rank.local_world_size}", rank) for rank in local_ranks)
        sizes = {rank.local_world_size for rank in local_ranks}
        advice = "set LOCAL_RANK and LOCAL_WORLD_SIZE for each rank, or start them with torchrun, srun or --ranks"
        if len(sizes) > 1:
            text = "; ".join(f"{size}: {listed(saying)}" for size, saying in ranks_by_size.items())
            found.append(Finding.wrong("local ranks", f"ranks of one host disagree on their number: {text}", advice))
        elif all(rank.local_rank for rank in local_ranks):
            text = f"{listed(local_ranks)}: none is local rank 0, which downloads and stages data"
            found.append(Finding.wrong("local ranks", text, advice))
    return found


def _devices(ranks: Sequence[Facts]) -> list[Finding]:
    refused = _grouped((rank.refusal, rank) for rank in ranks if rank.refusal)
    found = []
    for refusal, having in refused.items():
        found.append(Finding.refused("device", WorldError(refusal)).at(listed(having)))
    if found:
        return found
    kinds = _grouped((rank.device.partition(":")[0], rank) for rank in ranks)
    if len(kinds) > 1:
        descriptions = "; ".join(f"{kind}: {listed(having)}" for kind, having in _usual_first(kinds))
        return [
            Finding.wrong("device", f"not all ranks use the same kind of device: {descriptions}", "set parallel.device")
        ]
    return []


def _gpus(ranks: Sequence[Facts]) -> list[Finding]:
    """Find GPUs that several ranks use: each gets a share of memory and speed, and NCCL refuses them."""
    shared = [having for having in _grouped((rank.gpu, rank) for rank in ranks if rank.gpu).values() if len(having) > 1]
    advice = "give each rank its own GPU: LOCAL_RANK, CUDA_VISIBLE_DEVICES, srun --gpus-per-task"
    return [Finding.wrong("GPUs", f"one GPU is used by {listed(having)}", advice) for having in shared]


def _addresses(ranks: Sequence[Facts]) -> list[Finding]:
    """Find ranks whose gloo would listen where ranks of other hosts cannot connect."""
    if len(by_machine(ranks)) < 2 or any(rank.gpu for rank in ranks):
        return []
    found = []
    unreachable = [rank for rank in ranks if is_loopback(rank.interface.address)]
    reachable = [rank for rank in ranks if not is_loopback(rank.interface.address)]
    for name, having in _grouped((rank.towards_main, rank) for rank in unreachable).items():
        what = f"gloo would listen on {having[0].interface.address}, which other hosts cannot reach"
        good = next((rank.interface.name for rank in reachable if rank.interface.name), "")
        suggested = name if name not in ("", "lo") else good or "the interface between the hosts"
        advice = f"set GLOO_SOCKET_IFNAME={suggested}, or make the host's name resolve to its address"
        found.append(Finding.wrong("addresses", what, advice).at(listed(having)))
    for address, having in _grouped((rank.interface.address, rank) for rank in reachable).items():
        if address and len(by_machine(having)) > 1:
            name = having[0].interface.name
            what, advice = f"several hosts have the address {address} ({name})", "set GLOO_SOCKET_IFNAME to another"
            found.append(Finding.wrong("addresses", what, advice).at(listed(having)))
    return found


def _cores(ranks: Sequence[Facts]) -> list[Finding]:
    """Find ranks with less than half of the others' cores: all ranks wait for the slowest in each step."""
    max_cores = max(rank.cores for rank in ranks)
    short = [rank for rank in ranks if rank.cores < max_cores / 2]
    if not short:
        return []
    what = f"{min(rank.cores for rank in short)} per rank, but others have {max_cores}: all ranks wait for the slowest"
    return [Finding.look("cores", what, "give all ranks the same (srun --cpus-per-task)").at(listed(short))]


def _grouped(pairs: Iterable[tuple[str, Facts]]) -> dict[str, list[Facts]]:
    found: dict[str, list[Facts]] = defaultdict(list)
    for key, rank in pairs:
        found[key].append(rank)
    return found


def _usual_first(of: Mapping[str, list[Facts]]) -> list[tuple[str, list[Facts]]]:
    return sorted(of.items(), key=lambda each: -len(each[1]))
