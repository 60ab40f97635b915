"""Check the ranks of a launched job together: their versions, devices, findings, clocks and links."""

import contextlib
import re
import socket
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from types import MappingProxyType
from typing import Final

import torch
from pydantic import BaseModel, ConfigDict
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from paceline.core.errors import PacelineError, PeerLostError, WorldError
from paceline.core.process import PROC, read_text_or_empty
from paceline.core.source_digest import code_version
from paceline.core.units import Duration, count, join_few, number, seconds
from paceline.core.world import World
from paceline.lab.doctor.check import DoctorFinding, failure_by, find_worst_state, ok, warning
from paceline.lab.doctor.network import find_gloo_interface
from paceline.lab.link_timing import measure_all_reduces
from paceline.lab.predict.network import GIGA, AllReduceMeasurement
from paceline.measure.machine import describe_machine
from paceline.measure.throughput import unix_s
from paceline.parallel.device import choose_device, set_threads
from paceline.parallel.process_group import RankStore, process_group, rendezvous
from paceline.parallel.rendezvous import missing_keys
from paceline.recipe.schema.train import Parallel

COMPARED_VERSIONS: Final = ("paceline", "torch", "nccl", "driver", "cuda", "python", "torchvision", "numpy")
"""Versions from `describe_machine`, in the order of reports."""
_MUST_AGREE: Final = ("paceline", "torch", "nccl")
"""Ranks with different versions of these would wait in different places, or cannot communicate."""
MAX_CLOCK_OFFSET_S: Final = 2.0
"""Smaller offsets affect neither records, whose timestamps are in seconds, nor the age of heartbeats; a message through
the store takes milliseconds, and longer on a busy machine.
"""
_SLOW_BIT_PER_S: Final = 0.5 * GIGA
"""Half of the slowest network sold today: a lower rate means bad settings, sharing or a defect."""
_MAX_HOP_S: Final = 5e-3
"""Ethernet takes 30 to 100 microseconds; a hop of milliseconds leaves the building."""
_EXAMPLE_GRADIENT_BYTES: Final = 100e6
"""Example: bytes of the gradients of ResNet-50 in float32."""
_NO_ENVIRON: Final[Mapping[str, str]] = MappingProxyType({})
_RENDEZVOUS_TIMEOUT_S: Final = 120.0
"""Timeout of the rendezvous: importing torch from a cold network disk takes a minute."""
_FACTS_TIMEOUT_S: Final = 60.0
"""Timeout for facts after the rendezvous: starting a GPU and checking the machine."""
_COLLECTIVE_TIMEOUT_S: Final = 60.0
"""Timeout of a message between two ranks: 64 MiB take 6 s at 100 Mbit/s."""
_TIMEOUT_PER_RANK_S: Final = 0.25
"""Timeout per rank, if more: gloo connects all pairs before the first message. Assumed, not measured."""
_REPORT_MARGIN_S: Final = 15.0
"""Extra time until other ranks notice that they have lost one."""
_TIME_PER_SIZE_S: Final = 0.4
"""Seconds per all-reduce size; six sizes are timed, fewer over a slow link."""
_OUTPUT_ADVICE: Final = "check the output of the ranks in torchrun or srun, and their GPUs (nvidia-smi)"


class RankFacts(BaseModel):
    """Facts of one rank. Unknown fields, of ranks with another version of paceline, are ignored.

    `machine` is equal for ranks that share a network namespace. `refusal` explains why the rank has no `device`.
    `interface` is gloo's, and `own` are the rank's findings on its machine.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")
    rank: int
    host: str = ""
    machine: str = ""
    versions: dict[str, str] = {}
    device: str = "cpu"
    refusal: str = ""
    interface: str = ""
    own: tuple[DoctorFinding, ...] = ()

    @property
    def label(self) -> str:
        """Label such as `rank 3 (node07)`."""
        return f"rank {self.rank} ({self.host})"


def check_ranks(
    world: World,
    own: Sequence[DoctorFinding],
    environ: Mapping[str, str] = _NO_ENVIRON,
    *,
    section: Parallel | None = None,
) -> tuple[DoctorFinding, ...] | None:
    """Return findings on the ranks of `world` on rank 0, None on the others. Every rank must call it.

    `own` are the findings of each rank on its machine, `environ` the variables that select gloo's interface, and
    `section` selects the device. Raise `WorldError` on a rank that cannot reach rank 0, and `PeerLostError` on one
    whose peers have exited; on rank 0 missing ranks are findings.
    """
    section = (section or Parallel()).model_copy(update={"timeout": Duration(_RENDEZVOUS_TIMEOUT_S, "s")})
    findings: list[DoctorFinding] = []
    try:
        with rendezvous(world, section) as store:
            for each in _iter_findings(store, own, environ, section):
                findings.append(each)  # one by one, to keep what precedes the loss of a rank
    except (WorldError, PeerLostError) as error:
        if not world.is_main:
            raise
        if not any((each.name, each.state) == ("ranks", "error") for each in findings):
            findings += _build_rendezvous_failure(error, own, world)
    return tuple(findings) if world.is_main else None


def _iter_findings(
    rank_store: RankStore, own: Sequence[DoctorFinding], environ: Mapping[str, str], section: Parallel
) -> Iterator[DoctorFinding]:
    """Yield the findings on the ranks, on rank 0. Raise `PeerLostError` at the end if ranks have not sent facts."""
    assert rank_store.store is not None, "a single rank has no store"
    # Ranks exchange facts through the store, where nothing can hang: a collective of ranks with different torch
    # versions might. They are timed only if there is no problem, with short timeouts.
    store, world = PrefixStore("doctor", rank_store.store), rank_store.world
    device: torch.device | None = None
    refusal = ""
    try:
        device = choose_device(section, world)
    except WorldError as error:
        refusal = str(error)
    ranks = exchange_facts(store, collect_facts(world, own, environ, device, refusal), world.world_size)
    offsets_s = _exchange_clocks(rank_store, store, ranks)
    found = [*compare_ranks(ranks, world.world_size), *compare_clocks(offsets_s, ranks)] if world.is_main else []
    yield from found
    has_problem = find_worst_state((*own, *found)) == "error"
    if rank_store.broadcast("goes on", "" if has_problem else "yes") and device is not None:
        yield from _time_links(rank_store, store, ranks, section, device)
    if world.is_main and len(ranks) < world.world_size:
        raise PeerLostError("ranks are silent", is_explained=True)  # do not wait for them at exit


def collect_facts(
    world: World, own: Sequence[DoctorFinding], environ: Mapping[str, str], device: torch.device | None, refusal: str
) -> RankFacts:
    """Collect the facts of this rank."""
    machine = describe_machine()
    versions = {**machine, "paceline": code_version(machine)}
    boot = read_text_or_empty(PROC / "sys/kernel/random/boot_id").strip()
    return RankFacts(
        rank=world.rank,
        host=socket.gethostname(),
        machine=f"{boot} {(PROC / 'self/ns/net').readlink()}" if boot else socket.gethostname(),
        versions={name: str(versions[name]) for name in COMPARED_VERSIONS if versions.get(name)},
        device=device.type if device else "",
        refusal=refusal,
        interface=find_gloo_interface(environ)[0],
        own=tuple(own),
    )


def exchange_facts(store: Store, mine: RankFacts, world_size: int) -> tuple[RankFacts, ...]:
    """Send `mine` to rank 0; return there the facts that arrive in time, on other ranks only their own."""
    store.set(f"facts/{mine.rank}", mine.model_dump_json())
    if mine.rank:
        return (mine,)
    keys = [f"facts/{rank}" for rank in range(world_size)]
    with contextlib.suppress(RuntimeError):  # timed out
        store.wait(keys, timedelta(seconds=_FACTS_TIMEOUT_S))
    silent = set(missing_keys(store, keys))
    texts = store.multi_get([key for key in keys if key not in silent])
    return tuple(RankFacts.model_validate_json(text) for text in texts)


def _exchange_clocks(rank_store: RankStore, store: Store, ranks: Sequence[RankFacts]) -> dict[int, float]:
    """Return on rank 0 by how many seconds the clock of each other host is ahead, by its first rank."""
    # Ranks that have sent their facts wait here, so they read their clocks when rank 0's message arrives.
    main_s = float(rank_store.broadcast("clock", repr(unix_s())))
    store.set(f"ahead/{rank_store.world.rank}", repr(unix_s() - main_s))
    if not rank_store.world.is_main:
        return {}
    firsts = [local_ranks[0].rank for local_ranks in _group_by(ranks, lambda each: each.machine).values()]
    return {rank: float(store.get(f"ahead/{rank}")) for rank in firsts if rank}


def compare_ranks(ranks: Sequence[RankFacts], world_size: int) -> list[DoctorFinding]:
    """Return findings on ranks, in rank order, before they communicate."""
    hosts = _group_by(ranks, lambda each: each.machine)
    names = join_few([local_ranks[0].host for local_ranks in hosts.values()])
    summary = ok(f"{count(len(ranks), 'rank')} joined, on {count(len(hosts), 'host')}: {names}")
    silent = sorted(set(range(world_size)) - {rank.rank for rank in ranks})
    if silent:
        shown = ", ".join(map(str, silent[:8])) + (", ..." if len(silent) > 8 else "")
        who = f"{'rank' if len(silent) == 1 else 'ranks'} {shown}"
        summary = ("error", f"{count(world_size, 'rank')} joined; {who} died or hung since", _OUTPUT_ADVICE)
    return [
        DoctorFinding("ranks", *summary),
        *_compare_versions(ranks),
        *_compare_devices(ranks),
        *collect_other_findings(ranks),
    ]


def _compare_versions(ranks: Sequence[RankFacts]) -> Iterator[DoctorFinding]:
    for name in COMPARED_VERSIONS:
        # A missing version is reported by the rank itself.
        having = [rank for rank in ranks if name in rank.versions]
        by_version = _group_by(having, lambda each, name=name: each.versions[name])  # type: ignore[misc]
        if len(by_version) > 1:
            state, advice = "error" if name in _MUST_AGREE else "warning", f"install the same {name} for all ranks"
            yield DoctorFinding(f"versions of {name}", state, _describe_groups(by_version), advice)  # type: ignore[arg-type]


def _compare_devices(ranks: Sequence[RankFacts]) -> Iterator[DoctorFinding]:
    # The device of a rank is not reported again if its own findings already have a problem.
    sound = [rank for rank in ranks if find_worst_state(rank.own) != "error"]
    refused = _group_by((rank for rank in sound if rank.refusal), lambda each: each.refusal)
    for refusal, owners in refused.items():
        yield DoctorFinding("device", *failure_by(WorldError(refusal)), format_ranks(owners))
    kinds = _group_by(sound, lambda each: each.device)
    if len(kinds) > 1 and not refused:
        found = f"not all ranks use the same kind of device: {_describe_groups(kinds)}"
        yield DoctorFinding("device", "error", found, "set parallel.device")


def collect_other_findings(ranks: Sequence[RankFacts]) -> list[DoctorFinding]:
    """Return the problems of other ranks that rank 0 does not have: one for each name and state, with its ranks."""
    # By the advice too: the found value may contain an amount that differs.
    known = {(each.name, each.state, each.advice) for each in ranks[0].own}
    first: dict[tuple[str, str], DoctorFinding] = {}
    owners: dict[tuple[str, str], list[RankFacts]] = defaultdict(list)
    for rank in ranks[1:]:
        for each in rank.own:
            if each.state != "ok" and (each.name, each.state, each.advice) not in known:
                first.setdefault((each.name, each.state), each)
                owners[each.name, each.state].append(rank)
    return [each.with_location(format_ranks(owners[key])) for key, each in first.items()]


def compare_clocks(offsets_s: Mapping[int, float], ranks: Sequence[RankFacts]) -> list[DoctorFinding]:
    """Return a finding on the clocks of other hosts, which are `offsets_s` seconds ahead of rank 0's."""
    if not offsets_s:
        return []
    labels = {rank.rank: rank.label for rank in ranks}
    far = [
        f"{labels[rank]} is {seconds(abs(ahead_s))} {'ahead of' if ahead_s > 0 else 'behind'} rank 0"
        for rank, ahead_s in offsets_s.items()
        if abs(ahead_s) > MAX_CLOCK_OFFSET_S
    ]
    if not far:
        return [DoctorFinding("clocks", "ok", f"at most {seconds(max(map(abs, offsets_s.values())))} apart")]
    advice = "set them by NTP (chronyc tracking, timedatectl): timestamps in logs and attempts, and heartbeat ages"
    return [DoctorFinding("clocks", "warning", join_few(far, "; "), f"{advice}, would be wrong")]


def format_ranks(ranks: Sequence[RankFacts]) -> str:
    """Return `rank 1 (hostB)` or `ranks 2-3, 6 (hostB, hostC)`, shortened."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank.rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank.rank]
        else:
            runs.append([rank.rank])
    numbers = join_few(["-".join(map(str, run)) for run in runs])
    hosts = join_few(list(dict.fromkeys(rank.host for rank in ranks)))
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {numbers} ({hosts})"


def _group_by(ranks: Iterable[RankFacts], key: Callable[[RankFacts], str]) -> dict[str, list[RankFacts]]:
    groups: dict[str, list[RankFacts]] = defaultdict(list)
    for rank in ranks:
        groups[key(rank)].append(rank)
    return groups


def _describe_groups(groups: Mapping[str, Sequence[RankFacts]]) -> str:
    most_common_first = sorted(groups.items(), key=lambda each: -len(each[1]))
    return "; ".join(f"{value}: {format_ranks(owners)}" for value, owners in most_common_first)


def _time_links(
    rank_store: RankStore, store: Store, ranks: Sequence[RankFacts], section: Parallel, device: torch.device
) -> list[DoctorFinding]:
    world = rank_store.world
    set_threads(section, world)
    join_s = _compute_collective_timeout_s(world)
    try:
        with process_group(replace(rank_store, timeout=timedelta(seconds=join_s)), section, device):
            measured = measure_all_reduces(world, device, seconds_per_size=_TIME_PER_SIZE_S)
    except (RuntimeError, WorldError) as error:
        store.set(f"end/{world.rank}", _format_first_line(error))
        return [_build_all_reduce_failure(store, ranks, join_s)] if world.is_main else []
    store.set(f"end/{world.rank}", "")
    return [rate_all_reduce(measured, ranks)] if world.is_main else []


def rate_all_reduce(measured: AllReduceMeasurement, ranks: Sequence[RankFacts]) -> DoctorFinding:
    """Return a finding on all-reduces between `ranks`: below 0.5 Gbit/s or with hops over 5 ms they are slow."""
    # The largest message gives the bandwidth, the smallest the latency, both at the 10th percentile, as other processes
    # may use the link.
    small, large, hops = measured.times[0], measured.times[-1], 2 * (measured.ranks - 1)
    bit_per_s = 8 * hops / measured.ranks * large.bytes / large.p10_s
    hop_s = max(0.0, small.p10_s - 8 * hops / measured.ranks * small.bytes / bit_per_s) / hops
    names = sorted({rank.interface for rank in ranks} - {""}) if measured.backend == "gloo" else []
    over = f" over {join_few(names)}" if names else ""
    found = f"{measured.backend}{over}: {number(bit_per_s / GIGA)} Gbit/s and {seconds(hop_s)} per hop"
    hosts = len({rank.machine for rank in ranks})
    if hosts < 2:
        return DoctorFinding("all-reduce", *ok(f"{found}, between {count(len(ranks), 'rank')} of one host"))
    step_s = hops / measured.ranks * _EXAMPLE_GRADIENT_BYTES * 8 / bit_per_s
    found = f"{found}, between {count(hosts, 'host')}: 100 MB of gradients take {seconds(step_s)} per step"
    if bit_per_s < _SLOW_BIT_PER_S:
        variable = "GLOO_SOCKET_IFNAME" if measured.backend == "gloo" else "NCCL_SOCKET_IFNAME"
        advice = (
            f"check the link (ethtool {names[0] if names else 'INTERFACE'}), select a faster one by {variable}, or "
        )
        advice += "send less: parallel.compression=bf16, or a larger data.batch_size"
        return DoctorFinding("all-reduce", *warning(found, advice))
    if hop_s > _MAX_HOP_S:
        advice = "use hosts of one network: each step waits for two hops per rank"
        return DoctorFinding("all-reduce", *warning(found, advice))
    return DoctorFinding("all-reduce", *ok(found))


def _compute_collective_timeout_s(world: World) -> float:
    return max(_COLLECTIVE_TIMEOUT_S, _TIMEOUT_PER_RANK_S * world.world_size)


def _build_all_reduce_failure(store: Store, ranks: Sequence[RankFacts], join_s: float) -> DoctorFinding:
    errors, silent, remaining_s = list[str](), list[str](), join_s + _REPORT_MARGIN_S
    for rank in ranks:
        try:
            store.wait([f"end/{rank.rank}"], timedelta(seconds=remaining_s))
        except RuntimeError:
            silent.append(f"{rank.label} does not respond")
            remaining_s = 0.1  # the others had the full timeout already
        else:
            message = store.get(f"end/{rank.rank}").decode()
            errors += [f"{rank.label}: {message}"] if message else []
    names = ", ".join(sorted({rank.interface for rank in ranks} - {""})) or "unknown"
    advice = (
        "check that hosts can reach each other on any port (firewall, VPN, containers), and select the interface "
        f"between them by GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME (now {names})"
    )
    found = f"fails within {seconds(join_s)}: {'; '.join(errors[:2] + silent[:2])}"
    return DoctorFinding("all-reduce", "error", found, advice)


def _format_first_line(error: Exception) -> str:
    # Without the source location that torch puts in front.
    return re.sub(r"^\[\S+\] ", "", str(error).partition("\n")[0]) or type(error).__name__


def _build_rendezvous_failure(
    error: PacelineError, own: Sequence[DoctorFinding], world: World
) -> tuple[DoctorFinding, ...]:
    # A port in use has been reported already, as the cause.
    if any(each.state == "error" and str(world.master_port) in each.found for each in own):
        return ()
    if isinstance(error, PeerLostError):
        return (DoctorFinding("ranks", "error", str(error), _OUTPUT_ADVICE),)
    return (DoctorFinding("ranks", *failure_by(error)),)
