"""Estimate the clock offset of hosts by messages through the ranks' store.

Cristian's algorithm (1989, doi 10.1007/BF01784024), as in NTP: the remote clock is assumed to be read half-way through
a request, and the fastest of several requests is the most exact.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from torch.distributed import Store  # type: ignore[attr-defined]

from paceline.core.units import seconds
from paceline.lab.doctor.facts import RankFacts
from paceline.lab.doctor.finding import DoctorFinding

MAX_CLOCK_OFFSET_S: Final = 1.0
"""Smaller offsets affect neither records, whose timestamps are in seconds, nor the age of heartbeats."""
_NUM_TRIES: Final = 8


@dataclass(frozen=True)
class ClockOffset:
    """How far a clock is ahead of rank 0's, and the error of the estimate, in seconds."""

    ahead_s: float
    error_s: float


def probe_clock(store: Store, rank: int, now: Callable[[], float]) -> None:
    """Compare this rank's clock `now` with rank 0's, which calls `serve_clock`, and store the result for rank 0."""
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
    """Return findings on the clocks of hosts, by the probed rank of each; none for a single host."""
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
