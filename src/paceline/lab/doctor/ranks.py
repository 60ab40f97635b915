"""Look at the ranks that a launcher has started, together: whether they fit one another, and what their links do.

First each says what it is, through the store that all meet at, where nothing can hang: a rank with another torch might
in a collective. Only where nothing is wrong they join and are timed, with a short time limit of their own.
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
"""How long ranks are waited for: importing torch from a cold network disk takes a minute."""
_TELL_S: Final = 60.0
"""How long ranks that have met may take to say what they are: to start a GPU, and to look at the machine."""
_JOIN_S: Final = 60.0
"""How long a message between two ranks may take: 64 MiB take 6 s at 100 Mbit/s."""
_JOIN_EACH_S: Final = 0.25
"""For each rank where that is more, as gloo connects each with each before the first message. Assumed, not measured."""
_ANSWER_S: Final = 15.0
"""How much later than one rank another may notice that it has lost the first."""
_EACH_S: Final = 0.4
"""For each size of an all-reduce; six sizes are timed, fewer over a slow link."""
_SEE: Final = "see what ranks say in the output of torchrun or srun, and whether their GPUs answer (nvidia-smi)"
_IS_SLOW: Final = "is slow"


@dataclass(frozen=True)
class Clocks:
    """What a rank tells the time by: `unix_s` is seconds since 1970, which ranks compare, `now_s` is never set."""

    unix_s: Callable[[], float] = unix_s
    now_s: Callable[[], float] = now_s


@dataclass(frozen=True)
class _Round:
    """Ranks that have met, as this one knows them: all `ranks` on rank 0, else its own; `firsts` are one of a host."""

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
    """Return on rank 0 what is to be said of the ranks of `world`, and None on the others. Every rank must call it.

    `own` is what each found on its own machine. `environ` are the variables, for the interface that gloo is told to
    use, and `section` says what the ranks compute on. Raise `WorldError` on a rank that does not reach rank 0, and
    `PeerLostError` on one that another has left; on rank 0, ranks that do not come or stay are a finding.
    """
    section = (section or Parallel()).model_copy(update={"timeout": Duration(_MEET_S, "s")})
    found: list[Finding] = []
    try:
        with meeting(world, section) as met:
            for each in _looked(met, own, environ, section, clocks or Clocks()):
                found.append(each)  # one by one: what was found before a rank is lost stays
    except (WorldError, PeerLostError) as error:
        if not world.is_main:
            raise
        if not any((each.name, each.state) == ("ranks", "wrong") for each in found):
            found += _not_met(error, own, world)
    return tuple(found) if world.is_main else None


def exchange(store: Store, mine: Facts, world_size: int, wait_s: float) -> tuple[Facts, ...]:
    """Tell rank 0 what this rank is; return there what ranks have said within `wait_s`, and the own on the others."""
    store.set(f"facts/{mine.rank}", mine.to_json())
    if mine.rank:
        return (mine,)
    keys = [f"facts/{rank}" for rank in range(world_size)]
    with contextlib.suppress(RuntimeError):  # time ran out
        store.wait(keys, timedelta(seconds=wait_s))
    silent = set(absent(store, keys))
    texts = store.multi_get([key for key in keys if key not in silent])
    return tuple(Facts.from_json(text.decode()) for text in texts)


def _looked(
    met: Meeting, own: Sequence[Finding], environ: Mapping[str, str], section: Parallel, clocks: Clocks
) -> Iterator[Finding]:
    """Yield what there is to say of the ranks; on those other than rank 0, nothing.

    Raise `PeerLostError` on rank 0 at the end where some have not said what they are, which is a finding by then.
    """
    assert met.store is not None, "a rank alone has nobody to fit"
    store, world = PrefixStore("doctor", met.store), met.world
    device, refusal = _device(section, world)
    mine = facts_of(
        world, own, describe_machine(), environ, device=str(device or ""), gpu=_gpu(device), refusal=refusal
    )
    ranks = exchange(store, mine, world.world_size, _TELL_S)
    found = _compared(ranks, world.world_size) if world.is_main else []
    yield from found
    firsts = json.loads(met.share("firsts", json.dumps([each[0].rank for each in by_machine(ranks)])))
    here = _Round(met, store, ranks, firsts, clocks)
    clocks_found = _compare_clocks(here)
    yield from clocks_found
    goes_on = worst((*own, *found, *clocks_found)) != "wrong"
    if met.share("goes on", "yes" if goes_on else "") and device is not None:
        yield from _timed(here, section, device)
    if world.is_main and len(ranks) < world.world_size:
        raise PeerLostError("ranks are silent", is_explained=True)  # so that nobody waits for them to leave


def _compared(ranks: Sequence[Facts], world_size: int) -> list[Finding]:
    """Return what `ranks`, those that have said what they are, are amiss in; and on which of a world there are none."""
    found = judge_ranks(ranks)
    silent = sorted(set(range(world_size)) - {rank.rank for rank in ranks})
    if not silent:
        return found
    shown = ", ".join(map(str, silent[:8])) + (", ..." if len(silent) > 8 else "")
    what = f"{count(world_size, 'rank')} met; {'rank' if len(silent) == 1 else 'ranks'} {shown} died or hung since"
    # How many met is not known any more, nor whether the first rank of a host is among the silent.
    told = [each for each in found if each.name not in ("ranks", "local ranks")]
    return [Finding.wrong("ranks", what, _SEE), *told]


def _device(section: Parallel, world: World) -> tuple[torch.device | None, str]:
    """Return the device of this rank, or why there is none."""
    try:
        return choose_device(section, world), ""
    except WorldError as error:
        return None, str(error)


def _gpu(device: torch.device | None) -> str:
    if device is None or device.type != "cuda":
        return ""
    return str(torch.cuda.get_device_properties(device).uuid)


def _compare_clocks(here: _Round) -> list[Finding]:
    """Compare the clocks of the first rank of each host with rank 0's; only there something is to be said."""
    asking = [first for first in here.firsts if first]
    if here.rank in asking:
        ask(here.store, here.rank, here.clocks.unix_s)
    return [] if here.rank else judge_clocks(answer(here.store, asking, here.clocks.unix_s), here.by_number)


def _timed(here: _Round, section: Parallel, device: torch.device) -> list[Finding]:
    """Time all-reduces, and pairs of hosts where those are slow. What fails is a finding, on rank 0."""
    met, world = here.met, here.met.world
    set_threads(section, world)
    join_s = _join_s(world)
    found: list[Finding] = []
    try:
        with joined(replace(met, timeout=timedelta(seconds=join_s)), section, device):
            measured = measure_joined(world, device, each_s=_EACH_S)
            found += [judge_speed(measured, here.ranks)] if world.is_main else []
            if met.share(_IS_SLOW, "yes" if worst(found) != "ok" else ""):
                pairs = _pairs(here, device)
                found = [blame(each, pairs, here.by_number) for each in found]
    except (RuntimeError, WorldError) as error:
        if world.is_main:
            met.share(_IS_SLOW, "")  # which others may wait for
        here.store.set(f"end/{world.rank}", _said(error))
        return [*found, _failed(here, join_s)] if world.is_main else []
    here.store.set(f"end/{world.rank}", "")
    return found


def _pairs(here: _Round, device: torch.device) -> Mapping[Pair, float]:
    """Return on rank 0 the bytes a second between each two hosts, where they are few, but more than two."""
    if not 2 < len(here.firsts) <= MOST_HOSTS or here.rank not in here.firsts:
        return {}
    timed = time_pairs(here.firsts, here.rank, device, here.clocks.now_s)
    here.store.set(f"pairs/{here.rank}", json.dumps([[*pair, bytes_per_s] for pair, bytes_per_s in timed.items()]))
    if here.rank:
        return {}
    rows = [row for first in here.firsts for row in json.loads(here.store.get(f"pairs/{first}"))]
    return {(low, high): bytes_per_s for low, high, bytes_per_s in rows}


def _join_s(world: World) -> float:
    return max(_JOIN_S, _JOIN_EACH_S * world.world_size)


def _failed(here: _Round, join_s: float) -> Finding:
    """Return what ranks say of a collective that failed: the first that say something, and who says nothing."""
    told, silent, patience_s = list[str](), list[str](), join_s + _ANSWER_S
    for rank in here.ranks:
        try:
            here.store.wait([f"end/{rank.rank}"], timedelta(seconds=patience_s))
        except RuntimeError:
            silent.append(f"{rank.where} does not answer")
            patience_s = 0.1  # the others have had their time by now
        else:
            said = here.store.get(f"end/{rank.rank}").decode()
            told += [f"{rank.where}: {said}"] if said else []
    names = ", ".join(sorted({rank.interface.name for rank in here.ranks} - {""})) or "unknown"
    advice = (
        "see whether each host can call the others on any port (firewall, VPN, containers), and name the interface "
        f"between them by GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME (now {names})"
    )
    return Finding.wrong("all-reduce", f"fails within {seconds(join_s)}: {'; '.join(told[:2] + silent[:2])}", advice)


def _said(error: Exception) -> str:
    """Return the first line of `error`, without the place in a library's source that it was raised at."""
    return re.sub(r"^\[\S+\] ", "", str(error).partition("\n")[0]) or type(error).__name__


def _not_met(error: PacelineError, own: Sequence[Finding], world: World) -> tuple[Finding, ...]:
    """Return why the ranks have not met or stayed, unless a finding of this machine has named the port already."""
    if any(each.state == "wrong" and str(world.master_port) in each.found for each in own):
        return ()
    if isinstance(error, PeerLostError):
        return (Finding.wrong("ranks", str(error), _SEE),)
    return (Finding.refused("ranks", error),)
