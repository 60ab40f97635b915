"""Check the ranks of a launched job together: their facts, clocks and links.

Ranks first exchange facts through their store, where nothing can hang: a collective of ranks with different torch
versions might. Only if there is no problem they join and are timed, with short timeouts.
"""

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
from paceline.lab.collective import measure_joined
from paceline.lab.doctor.alike import by_machine, judge_ranks
from paceline.lab.doctor.clocks import answer, ask, judge_clocks
from paceline.lab.doctor.facts import Facts, facts_of
from paceline.lab.doctor.finding import Finding, worst
from paceline.lab.doctor.speed import MOST_HOSTS, blame, judge_speed
from paceline.lab.doctor.traffic import Pair, time_pairs
from paceline.measure.machine import describe_machine
from paceline.measure.rate import unix_s
from paceline.measure.timing import now_s
from paceline.parallel.device import choose_device, set_threads
from paceline.parallel.group import Meeting, joined, meeting
from paceline.parallel.rendezvous import absent
from paceline.recipe.schema.parallel import Parallel

_NOTHING: Final[Mapping[str, str]] = MappingProxyType({})
_MEET_S: Final = 120.0
"""Timeout of the rendezvous: importing torch from a cold network disk takes a minute."""
_TELL_S: Final = 60.0
"""Timeout for facts after the rendezvous: starting a GPU and checking the machine."""
_JOIN_S: Final = 60.0
"""Timeout of a message between two ranks: 64 MiB take 6 s at 100 Mbit/s."""
_JOIN_EACH_S: Final = 0.25
"""Timeout per rank, if more: gloo connects all pairs before the first message. Assumed, not measured."""
_ANSWER_S: Final = 15.0
"""Extra time until other ranks notice that they have lost one."""
_EACH_S: Final = 0.4
"""Seconds per all-reduce size; six sizes are timed, fewer over a slow link."""
_SEE: Final = "check the output of the ranks in torchrun or srun, and their GPUs (nvidia-smi)"
_IS_SLOW: Final = "is slow"


@dataclass(frozen=True)
class Clocks:
    """Clocks of a rank: `unix_s`, seconds since 1970, is compared; `now_s` is monotonic."""

    unix_s: Callable[[], float] = unix_s
    now_s: Callable[[], float] = now_s


@dataclass(frozen=True)
class _Round:
    """Ranks in the rendezvous: all `ranks` on rank 0, else this one; `firsts` are the first ranks of each host."""

    met: Meeting
    store: Store
    ranks: Sequence[Facts]
    firsts: Sequence[int]
    clocks: Clocks

    @property
    def rank(self) -> int:
        return self.met.world.rank

    @property
    def by_number(self) -> Mapping[int, Facts]:
        return {each.rank: each for each in self.ranks}


def between(
    world: World,
    own: Sequence[Finding],
    environ: Mapping[str, str] = _NOTHING,
    *,
    section: Parallel | None = None,
    clocks: Clocks | None = None,
) -> tuple[Finding, ...] | None:
    """Return findings on the ranks of `world` on rank 0, None on the others. Every rank must call it.

    `own` are the findings of each rank on its machine, `environ` the variables that select gloo's interface, and
    `section` selects the device. Raise `WorldError` on a rank that cannot reach rank 0, and `PeerLostError` on one
    whose peers have exited; on rank 0 missing ranks are findings.
    """
    section = (section or Parallel()).model_copy(update={"timeout": Duration(_MEET_S, "s")})
    findings: list[Finding] = []
    try:
        with meeting(world, section) as store:
            for each in _looked(store, own, environ, section, clocks or Clocks()):
                findings.append(each)  # one by one, to keep what precedes the loss of a rank
    except (WorldError, PeerLostError) as error:
        if not world.is_main:
            raise
        if not any((each.name, each.state) == ("ranks", "wrong") for each in findings):
            findings += _not_met(error, own, world)
    return tuple(findings) if world.is_main else None


def exchange(store: Store, mine: Facts, world_size: int, wait_s: float) -> tuple[Facts, ...]:
    """Send `mine` to rank 0; return there the facts that arrive within `wait_s`, on other ranks only their own."""
    store.set(f"facts/{mine.rank}", mine.to_json())
    if mine.rank:
        return (mine,)
    keys = [f"facts/{rank}" for rank in range(world_size)]
    with contextlib.suppress(RuntimeError):  # timed out
        store.wait(keys, timedelta(seconds=wait_s))
    silent = set(absent(store, keys))
    texts = store.multi_get([key for key in keys if key not in silent])
    return tuple(Facts.from_json(text.decode()) for text in texts)


def _looked(
    rank_store: Meeting, own: Sequence[Finding], environ: Mapping[str, str], section: Parallel, clocks: Clocks
) -> Iterator[Finding]:
    """Yield the findings on the ranks, on rank 0.

    Raise `PeerLostError` at the end on rank 0 if ranks have not sent facts, which is a finding by then.
    """
    assert rank_store.store is not None, "a single rank has no store"
    store, world = PrefixStore("doctor", rank_store.store), rank_store.world
    device, refusal = _device(section, world)
    own_facts = facts_of(
        world, own, describe_machine(), environ, device=str(device or ""), gpu=_gpu(device), refusal=refusal
    )
    ranks = exchange(store, own_facts, world.world_size, _TELL_S)
    found = _compared(ranks, world.world_size) if world.is_main else []
    yield from found
    firsts = json.loads(rank_store.share("firsts", json.dumps([each[0].rank for each in by_machine(ranks)])))
    session = _Round(rank_store, store, ranks, firsts, clocks)
    clocks_found = _compare_clocks(session)
    yield from clocks_found
    has_no_problem = worst((*own, *found, *clocks_found)) != "wrong"
    if rank_store.share("goes on", "yes" if has_no_problem else "") and device is not None:
        yield from _timed(session, section, device)
    if world.is_main and len(ranks) < world.world_size:
        raise PeerLostError("ranks are silent", is_explained=True)  # do not wait for them at exit


def _compared(ranks: Sequence[Facts], world_size: int) -> list[Finding]:
    """Return findings on the differences of `ranks`, and on ranks that have not sent facts."""
    found = judge_ranks(ranks)
    silent = sorted(set(range(world_size)) - {rank.rank for rank in ranks})
    if not silent:
        return found
    shown = ", ".join(map(str, silent[:8])) + (", ..." if len(silent) > 8 else "")
    what = f"{count(world_size, 'rank')} joined; {'rank' if len(silent) == 1 else 'ranks'} {shown} died or hung since"
    # The number of ranks is not known any more, nor whether a missing rank is the first of its host.
    others = [each for each in found if each.name not in ("ranks", "local ranks")]
    return [Finding.wrong("ranks", what, _SEE), *others]


def _device(section: Parallel, world: World) -> tuple[torch.device | None, str]:
    try:
        return choose_device(section, world), ""
    except WorldError as error:
        return None, str(error)


def _gpu(device: torch.device | None) -> str:
    if device is None or device.type != "cuda":
        return ""
    return str(torch.cuda.get_device_properties(device).uuid)


def _compare_clocks(session: _Round) -> list[Finding]:
    """Compare the clocks of the first rank of each host with rank 0's; findings on rank 0 only."""
    probed = [first for first in session.firsts if first]
    if session.rank in probed:
        ask(session.store, session.rank, session.clocks.unix_s)
    return [] if session.rank else judge_clocks(answer(session.store, probed, session.clocks.unix_s), session.by_number)


def _timed(session: _Round, section: Parallel, device: torch.device) -> list[Finding]:
    """Time all-reduces, and pairs of hosts if those are slow. On rank 0 failures are findings."""
    rank_store, world = session.met, session.met.world
    set_threads(section, world)
    join_s = _join_s(world)
    found: list[Finding] = []
    try:
        with joined(replace(rank_store, timeout=timedelta(seconds=join_s)), section, device):
            measured = measure_joined(world, device, each_s=_EACH_S)
            found += [judge_speed(measured, session.ranks)] if world.is_main else []
            if rank_store.share(_IS_SLOW, "yes" if worst(found) != "ok" else ""):
                pairs = _pairs(session, device)
                found = [blame(each, pairs, session.by_number) for each in found]
    except (RuntimeError, WorldError) as error:
        if world.is_main:
            rank_store.share(_IS_SLOW, "")  # others may wait for it
        session.store.set(f"end/{world.rank}", _said(error))
        return [*found, _failed(session, join_s)] if world.is_main else []
    session.store.set(f"end/{world.rank}", "")
    return found


def _pairs(session: _Round, device: torch.device) -> Mapping[Pair, float]:
    """Return on rank 0 the bytes per second between each two hosts, for 3 to `MOST_HOSTS` hosts."""
    if not 2 < len(session.firsts) <= MOST_HOSTS or session.rank not in session.firsts:
        return {}
    timed = time_pairs(session.firsts, session.rank, device, session.clocks.now_s)
    session.store.set(
        f"pairs/{session.rank}", json.dumps([[*pair, bytes_per_s] for pair, bytes_per_s in timed.items()])
    )
    if session.rank:
        return {}
    rows = [row for first in session.firsts for row in json.loads(session.store.get(f"pairs/{first}"))]
    return {(low, high): bytes_per_s for low, high, bytes_per_s in rows}


def _join_s(world: World) -> float:
    return max(_JOIN_S, _JOIN_EACH_S * world.world_size)


def _failed(session: _Round, join_s: float) -> Finding:
    """Return a finding on a failed collective: the first errors of ranks, and the ranks that do not answer."""
    errors, silent, remaining_s = list[str](), list[str](), join_s + _ANSWER_S
    for rank in session.ranks:
        try:
            session.store.wait([f"end/{rank.rank}"], timedelta(seconds=remaining_s))
        except RuntimeError:
            silent.append(f"{rank.where} does not respond")
            remaining_s = 0.1  # the others had the full timeout already
        else:
            message = session.store.get(f"end/{rank.rank}").decode()
            errors += [f"{rank.where}: {message}"] if message else []
    names = ", ".join(sorted({rank.interface.name for rank in session.ranks} - {""})) or "unknown"
    advice = (
        "check that hosts can reach each other on any port (firewall, VPN, containers), and select the interface "
        f"between them by GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME (now {names})"
    )
    return Finding.wrong("all-reduce", f"fails within {seconds(join_s)}: {'; '.join(errors[:2] + silent[:2])}", advice)


def _said(error: Exception) -> str:
    """Return the first line of `error`, without the source location in a library."""
    return re.sub(r"^\[\S+\] ", "", str(error).partition("\n")[0]) or type(error).__name__


def _not_met(error: PacelineError, own: Sequence[Finding], world: World) -> tuple[Finding, ...]:
    """Return a finding on a failed rendezvous, unless another one already names the port."""
    if any(each.state == "wrong" and str(world.master_port) in each.found for each in own):
        return ()
    if isinstance(error, PeerLostError):
        return (Finding.wrong("ranks", str(error), _SEE),)
    return (Finding.refused("ranks", error),)
