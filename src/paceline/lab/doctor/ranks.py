"""Check the ranks of a launched job together: their facts, clocks and links."""

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from types import MappingProxyType
from typing import Final

import torch
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from paceline.core.errors import PacelineError, PeerLostError, WorldError
from paceline.core.units import Duration, count, seconds
from paceline.core.world import World
from paceline.lab.doctor.check import DoctorFinding, find_worst_state
from paceline.lab.doctor.compare_ranks import (
    MAX_PAIRED_HOSTS,
    RankFacts,
    blame_slow_hosts,
    collect_facts,
    compare_ranks,
    group_by_machine,
    rate_all_reduce,
)
from paceline.lab.link_timing import RankPair, measure_all_reduces, time_rank_pairs
from paceline.measure.machine import describe_machine
from paceline.measure.throughput import unix_s
from paceline.measure.timer import now_s
from paceline.parallel.device import choose_device, set_threads
from paceline.parallel.process_group import RankStore, process_group, rendezvous
from paceline.parallel.rendezvous import missing_keys
from paceline.recipe.schema.train import Parallel

MAX_CLOCK_OFFSET_S: Final = 1.0
"""Smaller offsets affect neither records, whose timestamps are in seconds, nor the age of heartbeats."""
_NUM_TRIES: Final = 8
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
_SLOW_KEY: Final = "is slow"


@dataclass(frozen=True)
class ClockOffset:
    """How far a clock is ahead of rank 0's, and the error of the estimate, in seconds."""

    ahead_s: float
    error_s: float


def probe_clock(store: Store, rank: int, now: Callable[[], float]) -> None:
    """Compare this rank's clock `now` with rank 0's, which calls `serve_clock`, and store the result for rank 0."""
    # Cristian's algorithm (1989, doi 10.1007/BF01784024), as in NTP: the remote clock is assumed to be read half-way
    # through a request, and the fastest of several requests is the most exact.
    offsets: list[ClockOffset] = []
    for number in range(_NUM_TRIES):
        sent_s = now()
        store.set(f"ask/{rank}/{number}", "")
        remote_s = float(store.get(f"answer/{rank}/{number}"))
        received_s = now()
        offsets.append(ClockOffset((sent_s + received_s) / 2 - remote_s, abs(received_s - sent_s) / 2))
    best = min(offsets, key=lambda each: each.error_s)
    store.set(f"offset/{rank}", f"{best.ahead_s!r} {best.error_s!r}")


def serve_clock(store: Store, ranks: Sequence[int], now: Callable[[], float]) -> dict[int, ClockOffset]:
    """Answer the requests of `ranks` with rank 0's clock `now`; return the offset of each."""
    offsets = {}
    for rank in ranks:
        for number in range(_NUM_TRIES):
            store.get(f"ask/{rank}/{number}")  # blocks until the request
            store.set(f"answer/{rank}/{number}", repr(now()))
        offsets[rank] = ClockOffset(*map(float, store.get(f"offset/{rank}").split()))
    return offsets


def compare_clocks(offsets: Mapping[int, ClockOffset], ranks: Mapping[int, RankFacts]) -> list[DoctorFinding]:
    """Return findings on the clocks of hosts, by the probed rank of each."""
    too_far = {rank: each for rank, each in offsets.items() if abs(each.ahead_s) - each.error_s > MAX_CLOCK_OFFSET_S}
    if not offsets:
        return []
    if not too_far:
        max_offset_s = max(abs(each.ahead_s) + each.error_s for each in offsets.values())
        return [DoctorFinding.ok("clocks", f"at most {seconds(max_offset_s)} apart")]
    descriptions = [_format_offset(ranks[rank], each) for rank, each in too_far.items()]
    shown = "; ".join(descriptions[:4]) + (f"; and {len(descriptions) - 4} more" if len(descriptions) > 4 else "")
    advice = "set them by NTP (chronyc tracking, timedatectl): timestamps in logs and attempts, and heartbeat ages"
    return [DoctorFinding.warning("clocks", shown, f"{advice}, would be wrong")]


def _format_offset(rank: RankFacts, offset: ClockOffset) -> str:
    direction = "ahead of" if offset.ahead_s > 0 else "behind"
    return f"{rank.label} is {seconds(abs(offset.ahead_s))} {direction} rank 0 (+/- {seconds(offset.error_s)})"


@dataclass(frozen=True)
class RankClocks:
    """Clocks of a rank: `unix_s`, seconds since 1970, is compared; `now_s` is monotonic."""

    unix_s: Callable[[], float] = unix_s
    now_s: Callable[[], float] = now_s


@dataclass(frozen=True)
class _CheckSession:
    """Ranks in the rendezvous: on rank 0 all `ranks`, else this one; `host_leaders` are the first of each host."""

    rank_store: RankStore
    store: Store
    ranks: Sequence[RankFacts]
    host_leaders: Sequence[int]
    clocks: RankClocks

    @property
    def rank(self) -> int:
        return self.rank_store.world.rank

    @property
    def ranks_by_number(self) -> Mapping[int, RankFacts]:
        return {each.rank: each for each in self.ranks}


def check_ranks(
    world: World,
    own: Sequence[DoctorFinding],
    environ: Mapping[str, str] = _NO_ENVIRON,
    *,
    section: Parallel | None = None,
    clocks: RankClocks | None = None,
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
            for each in _iter_findings(store, own, environ, section, clocks or RankClocks()):
                findings.append(each)  # one by one, to keep what precedes the loss of a rank
    except (WorldError, PeerLostError) as error:
        if not world.is_main:
            raise
        if not any((each.name, each.state) == ("ranks", "wrong") for each in findings):
            findings += _build_rendezvous_failure(error, own, world)
    return tuple(findings) if world.is_main else None


def exchange_facts(store: Store, mine: RankFacts, world_size: int, wait_s: float) -> tuple[RankFacts, ...]:
    """Send `mine` to rank 0; return there the facts that arrive within `wait_s`, on other ranks only their own."""
    store.set(f"facts/{mine.rank}", mine.to_json())
    if mine.rank:
        return (mine,)
    keys = [f"facts/{rank}" for rank in range(world_size)]
    with contextlib.suppress(RuntimeError):  # timed out
        store.wait(keys, timedelta(seconds=wait_s))
    silent = set(missing_keys(store, keys))
    texts = store.multi_get([key for key in keys if key not in silent])
    return tuple(RankFacts.from_json(text.decode()) for text in texts)


def _iter_findings(
    rank_store: RankStore,
    own: Sequence[DoctorFinding],
    environ: Mapping[str, str],
    section: Parallel,
    clocks: RankClocks,
) -> Iterator[DoctorFinding]:
    """Yield the findings on the ranks, on rank 0. Raise `PeerLostError` at the end if ranks have not sent facts."""
    assert rank_store.store is not None, "a single rank has no store"
    # Ranks exchange facts through the store, where nothing can hang: a collective of ranks with different torch
    # versions might. They are timed only if there is no problem, with short timeouts.
    store, world = PrefixStore("doctor", rank_store.store), rank_store.world
    device, refusal = _choose_rank_device(section, world)
    own_facts = collect_facts(
        world, own, describe_machine(), environ, device=str(device or ""), gpu=_get_gpu_uuid(device), refusal=refusal
    )
    ranks = exchange_facts(store, own_facts, world.world_size, _FACTS_TIMEOUT_S)
    found = _compare_reported_ranks(ranks, world.world_size) if world.is_main else []
    yield from found
    firsts = json.loads(rank_store.broadcast("firsts", json.dumps([each[0].rank for each in group_by_machine(ranks)])))
    session = _CheckSession(rank_store, store, ranks, firsts, clocks)
    clocks_found = _exchange_clocks(session)
    yield from clocks_found
    has_no_problem = find_worst_state((*own, *found, *clocks_found)) != "wrong"
    if rank_store.broadcast("goes on", "yes" if has_no_problem else "") and device is not None:
        yield from _time_links(session, section, device)
    if world.is_main and len(ranks) < world.world_size:
        raise PeerLostError("ranks are silent", is_explained=True)  # do not wait for them at exit


def _compare_reported_ranks(ranks: Sequence[RankFacts], world_size: int) -> list[DoctorFinding]:
    found = compare_ranks(ranks)
    silent = sorted(set(range(world_size)) - {rank.rank for rank in ranks})
    if not silent:
        return found
    shown = ", ".join(map(str, silent[:8])) + (", ..." if len(silent) > 8 else "")
    what = f"{count(world_size, 'rank')} joined; {'rank' if len(silent) == 1 else 'ranks'} {shown} died or hung since"
    # The number of ranks is not known any more, nor whether a missing rank is the first of its host.
    others = [each for each in found if each.name not in ("ranks", "local ranks")]
    return [DoctorFinding.problem("ranks", what, _OUTPUT_ADVICE), *others]


def _choose_rank_device(section: Parallel, world: World) -> tuple[torch.device | None, str]:
    try:
        return choose_device(section, world), ""
    except WorldError as error:
        return None, str(error)


def _get_gpu_uuid(device: torch.device | None) -> str:
    if device is None or device.type != "cuda":
        return ""
    return str(torch.cuda.get_device_properties(device).uuid)


def _exchange_clocks(session: _CheckSession) -> list[DoctorFinding]:
    # One rank per host, as ranks of a host share its clock.
    probed = [first for first in session.host_leaders if first]
    if session.rank in probed:
        probe_clock(session.store, session.rank, session.clocks.unix_s)
    return (
        []
        if session.rank
        else compare_clocks(serve_clock(session.store, probed, session.clocks.unix_s), session.ranks_by_number)
    )


def _time_links(session: _CheckSession, section: Parallel, device: torch.device) -> list[DoctorFinding]:
    rank_store, world = session.rank_store, session.rank_store.world
    set_threads(section, world)
    join_s = _compute_collective_timeout_s(world)
    found: list[DoctorFinding] = []
    try:
        with process_group(replace(rank_store, timeout=timedelta(seconds=join_s)), section, device):
            measured = measure_all_reduces(world, device, seconds_per_size=_TIME_PER_SIZE_S)
            found += [rate_all_reduce(measured, session.ranks)] if world.is_main else []
            if rank_store.broadcast(_SLOW_KEY, "yes" if find_worst_state(found) != "ok" else ""):
                pairs = _time_host_pairs(session, device)
                found = [blame_slow_hosts(each, pairs, session.ranks_by_number) for each in found]
    except (RuntimeError, WorldError) as error:
        if world.is_main:
            rank_store.broadcast(_SLOW_KEY, "")  # others may wait for it
        session.store.set(f"end/{world.rank}", _format_first_line(error))
        return [*found, _build_all_reduce_failure(session, join_s)] if world.is_main else []
    session.store.set(f"end/{world.rank}", "")
    return found


def _time_host_pairs(session: _CheckSession, device: torch.device) -> Mapping[RankPair, float]:
    # Two hosts have one link, and many would need too many rounds.
    if not 2 < len(session.host_leaders) <= MAX_PAIRED_HOSTS or session.rank not in session.host_leaders:
        return {}
    timed = time_rank_pairs(session.host_leaders, session.rank, device, session.clocks.now_s)
    session.store.set(
        f"pairs/{session.rank}", json.dumps([[*pair, bytes_per_s] for pair, bytes_per_s in timed.items()])
    )
    if session.rank:
        return {}
    rows = [row for first in session.host_leaders for row in json.loads(session.store.get(f"pairs/{first}"))]
    return {(low, high): bytes_per_s for low, high, bytes_per_s in rows}


def _compute_collective_timeout_s(world: World) -> float:
    return max(_COLLECTIVE_TIMEOUT_S, _TIMEOUT_PER_RANK_S * world.world_size)


def _build_all_reduce_failure(session: _CheckSession, join_s: float) -> DoctorFinding:
    errors, silent, remaining_s = list[str](), list[str](), join_s + _REPORT_MARGIN_S
    for rank in session.ranks:
        try:
            session.store.wait([f"end/{rank.rank}"], timedelta(seconds=remaining_s))
        except RuntimeError:
            silent.append(f"{rank.label} does not respond")
            remaining_s = 0.1  # the others had the full timeout already
        else:
            message = session.store.get(f"end/{rank.rank}").decode()
            errors += [f"{rank.label}: {message}"] if message else []
    names = ", ".join(sorted({rank.interface.name for rank in session.ranks} - {""})) or "unknown"
    advice = (
        "check that hosts can reach each other on any port (firewall, VPN, containers), and select the interface "
        f"between them by GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME (now {names})"
    )
    return DoctorFinding.problem(
        "all-reduce", f"fails within {seconds(join_s)}: {'; '.join(errors[:2] + silent[:2])}", advice
    )


def _format_first_line(error: Exception) -> str:
    # Without the source location that torch puts in front.
    return re.sub(r"^\[\S+\] ", "", str(error).partition("\n")[0]) or type(error).__name__


def _build_rendezvous_failure(
    error: PacelineError, own: Sequence[DoctorFinding], world: World
) -> tuple[DoctorFinding, ...]:
    # A port in use has been reported already, as the cause.
    if any(each.state == "wrong" and str(world.master_port) in each.found for each in own):
        return ()
    if isinstance(error, PeerLostError):
        return (DoctorFinding.problem("ranks", str(error), _OUTPUT_ADVICE),)
    return (DoctorFinding.from_error("ranks", error),)
