"""What ranks must have in common, or must not share, judged from what each says of itself. Values in, findings out.

Of a rank that a finding of its own keeps from running, neither device nor address is said to be wrong a second time.
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
"""Ranks of different ones wait for one another in different places, or cannot speak to one another at all."""
_SHOWN: Final = 4
_Key = tuple[str, str, str]
"""What makes two findings the same: name, state and advice. What was found may be an amount, which differs."""


def judge_ranks(ranks: Sequence[Facts]) -> list[Finding]:
    """Return what is to be said of ranks, in their order, before they do anything together: what is well, too."""
    hosts = by_machine(ranks)
    names = ", ".join(islice((each[0].host for each in hosts), 8)) + (", ..." if len(hosts) > 8 else "")
    met = Finding.ok("ranks", f"{count(len(ranks), 'rank')} met, of {count(len(hosts), 'host')}: {names}")
    sound = [rank for rank in ranks if worst(rank.own) != "wrong"]
    together = (*_versions(ranks), *_places(ranks), *_gpus(ranks), *_cores(ranks))
    return [met, *together, *_devices(sound), *_addresses(sound), *of_other_hosts(ranks)]


def by_machine(ranks: Iterable[Facts]) -> list[list[Facts]]:
    """Return the ranks of each machine, in the order of their first ones."""
    found: dict[str, list[Facts]] = defaultdict(list)
    for rank in ranks:
        found[rank.machine].append(rank)
    return list(found.values())


def of_other_hosts(ranks: Sequence[Facts]) -> list[Finding]:
    """Return the findings of ranks that rank 0 has not made of itself, once each, with where they were made.

    More than a few of one name, such as those that name their hosts, are told by the worst of them.
    """
    own = {_key(finding) for finding in ranks[0].own}
    places: dict[_Key, list[Facts]] = defaultdict(list)
    first: dict[_Key, Finding] = {}
    for rank in ranks[1:]:
        for finding in rank.own:
            key = _key(finding)
            if finding.state != "ok" and key not in own:
                first.setdefault(key, finding)
                places[key].append(rank)
    named: dict[str, list[_Key]] = defaultdict(list)
    for key in first:
        named[key[0]].append(key)
    return [
        finding
        for keys in named.values()
        for finding in _few([first[key] for key in keys], [places[key] for key in keys])
    ]


def _key(finding: Finding) -> _Key:
    return finding.name, finding.state, finding.advice


def _few(findings: Sequence[Finding], places: Sequence[list[Facts]]) -> list[Finding]:
    """Return `findings` of one name with their places, or the worst for all places where they are many."""
    if len(findings) <= _SHOWN:
        return [finding.at(listed(having)) for finding, having in zip(findings, places, strict=True)]
    state = worst(findings)
    finding, having = next(pair for pair in zip(findings, places, strict=True) if pair[0].state == state)
    found = f"{having[0].where}: {finding.found}; and {len(findings) - 1} more like it"
    everywhere = sorted({rank.rank: rank for each in places for rank in each}.items())
    return [replace(finding, found=found).at(listed([rank for _, rank in everywhere]))]


def listed(ranks: Sequence[Facts]) -> str:
    """Return `rank 1 (hostB)` or `ranks 2-3, 6 (hostB, hostC)`: numbers in runs, and not more than a few of each."""
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
    """Compare the versions of ranks; where one has none of something, it is not there, which its own findings say."""
    found = []
    for name in VERSIONS:
        of = _grouped((rank.versions[name], rank) for rank in ranks if name in rank.versions)
        if len(of) > 1:
            told = "; ".join(f"{version}: {listed(having)}" for version, having in _usual_first(of))
            title, advice = f"versions of {name}", f"install the same {name} for all ranks"
            found.append((Finding.wrong if name in _MUST_AGREE else Finding.look)(title, told, advice))
    return found


def _places(ranks: Sequence[Facts]) -> list[Finding]:
    """Find machines whose ranks disagree on how many of them are there, or of which none is the first."""
    found = []
    for here in by_machine(ranks):
        told = _grouped((f"{rank.local_world_size}", rank) for rank in here)
        sizes = {rank.local_world_size for rank in here}
        advice = "give each rank its LOCAL_RANK and LOCAL_WORLD_SIZE, or start them with torchrun, srun or --ranks"
        if len(sizes) > 1:
            words = "; ".join(f"{size}: {listed(saying)}" for size, saying in told.items())
            found.append(Finding.wrong("local ranks", f"one host is said to have so many ranks: {words}", advice))
        elif all(rank.local_rank for rank in here):
            words = f"{listed(here)}: none is local rank 0, which downloads, stages and looks after its host"
            found.append(Finding.wrong("local ranks", words, advice))
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
        told = "; ".join(f"{kind}: {listed(having)}" for kind, having in _usual_first(kinds))
        return [Finding.wrong("device", f"not all ranks compute on the same: {told}", "set parallel.device")]
    return []


def _gpus(ranks: Sequence[Facts]) -> list[Finding]:
    """Find GPUs that several ranks have taken: each has half of its memory and speed, and NCCL refuses them."""
    shared = [having for having in _grouped((rank.gpu, rank) for rank in ranks if rank.gpu).values() if len(having) > 1]
    advice = "give each rank a GPU of its own: LOCAL_RANK, CUDA_VISIBLE_DEVICES, srun --gpus-per-task"
    return [Finding.wrong("GPUs", f"one GPU is the device of {listed(having)}", advice) for having in shared]


def _addresses(ranks: Sequence[Facts]) -> list[Finding]:
    """Find ranks whose gloo would listen where ranks of other hosts cannot call."""
    if len(by_machine(ranks)) < 2 or any(rank.gpu for rank in ranks):
        return []
    found = []
    deaf = [rank for rank in ranks if is_loopback(rank.interface.address)]
    heard = [rank for rank in ranks if not is_loopback(rank.interface.address)]
    for name, having in _grouped((rank.towards_main, rank) for rank in deaf).items():
        what = f"gloo would listen on {having[0].interface.address}, which no other host can call"
        good = next((rank.interface.name for rank in heard if rank.interface.name), "")
        asked = name if name not in ("", "lo") else good or "the interface that the hosts share"
        advice = f"set GLOO_SOCKET_IFNAME={asked}, or let the host's name stand for its address"
        found.append(Finding.wrong("addresses", what, advice).at(listed(having)))
    for address, having in _grouped((rank.interface.address, rank) for rank in heard).items():
        if address and len(by_machine(having)) > 1:
            name = having[0].interface.name
            what, advice = f"several hosts say that they are {address} ({name})", "set GLOO_SOCKET_IFNAME to another"
            found.append(Finding.wrong("addresses", what, advice).at(listed(having)))
    return found


def _cores(ranks: Sequence[Facts]) -> list[Finding]:
    """Find ranks with less than half of the cores that others have: all wait for the slowest in each step."""
    most = max(rank.cores for rank in ranks)
    poor = [rank for rank in ranks if rank.cores < most / 2]
    if not poor:
        return []
    what = (
        f"{min(rank.cores for rank in poor)} a rank, where others have {most}: all wait for the slowest in every step"
    )
    return [Finding.look("cores", what, "give all ranks the same (srun --cpus-per-task)").at(listed(poor))]


def _grouped(pairs: Iterable[tuple[str, Facts]]) -> dict[str, list[Facts]]:
    found: dict[str, list[Facts]] = defaultdict(list)
    for key, rank in pairs:
        found[key].append(rank)
    return found


def _usual_first(of: Mapping[str, list[Facts]]) -> list[tuple[str, list[Facts]]]:
    return sorted(of.items(), key=lambda each: -len(each[1]))
