"""How far the clocks of two hosts are apart, by messages through the store that all ranks meet at.

The estimate is Cristian's (1989, doi 10.1007/BF01784024), as in NTP: a clock that was read while a question was under
way is taken to have been read half-way, and the fastest of several questions says the most.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from torch.distributed import Store  # type: ignore[attr-defined]

from paceline.core.units import seconds
from paceline.lab.doctor.facts import Facts
from paceline.lab.doctor.finding import Finding

MOST_APART_S: Final = 1.0
"""Less is neither seen in records, whose times are of seconds, nor in how long ago a rank was heard of."""
_TRIES: Final = 8


@dataclass(frozen=True)
class Offset:
    """How far a clock is ahead of rank 0's, which is known to within `error_s`."""

    ahead_s: float
    error_s: float


def ask(store: Store, rank: int, now: Callable[[], float]) -> None:
    """Compare this rank's clock `now` with rank 0's, which calls `answer`, and leave what came of it there."""
    found: list[Offset] = []
    for number in range(_TRIES):
        sent_s = now()
        store.set(f"ask/{rank}/{number}", "")
        theirs_s = float(store.get(f"answer/{rank}/{number}"))
        came_s = now()
        found.append(Offset((sent_s + came_s) / 2 - theirs_s, abs(came_s - sent_s) / 2))
    best = min(found, key=lambda each: each.error_s)
    store.set(f"offset/{rank}", f"{best.ahead_s!r} {best.error_s!r}")


def answer(store: Store, ranks: Sequence[int], now: Callable[[], float]) -> dict[int, Offset]:
    """Tell `ranks`, one after another, what rank 0's clock `now` says; return how far theirs are ahead of it."""
    found = {}
    for rank in ranks:
        for number in range(_TRIES):
            store.get(f"ask/{rank}/{number}")  # returns when it was asked
            store.set(f"answer/{rank}/{number}", repr(now()))
        found[rank] = Offset(*map(float, store.get(f"offset/{rank}").split()))
    return found


def judge_clocks(offsets: Mapping[int, Offset], ranks: Mapping[int, Facts]) -> list[Finding]:
    """Return what is to be said of the clocks of hosts, by the rank that was asked on each; nothing of one host."""
    wrong = {rank: each for rank, each in offsets.items() if abs(each.ahead_s) - each.error_s > MOST_APART_S}
    if not offsets:
        return []
    if not wrong:
        most_s = max(abs(each.ahead_s) + each.error_s for each in offsets.values())
        return [Finding.ok("clocks", f"at most {seconds(most_s)} apart")]
    told = [_told(ranks[rank], each) for rank, each in wrong.items()]
    shown = "; ".join(told[:4]) + (f"; and {len(told) - 4} more" if len(told) > 4 else "")
    advice = "set them by NTP (chronyc tracking, timedatectl): times in logs and attempts, and who was heard of last"
    return [Finding.look("clocks", shown, f"{advice}, would be wrong")]


def _told(rank: Facts, offset: Offset) -> str:
    direction = "ahead of" if offset.ahead_s > 0 else "behind"
    return f"{rank.where} is {seconds(abs(offset.ahead_s))} {direction} rank 0 (to within {seconds(offset.error_s)})"
