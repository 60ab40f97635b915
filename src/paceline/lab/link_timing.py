"""Time the links between ranks: all-reduces among all ranks, and round trips between pairs."""

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import torch
import torch.distributed as dist

from paceline.core.world import World
from paceline.lab.predict.network import AllReduceMeasurement, AllReduceTiming, fit_link
from paceline.measure.allreduce_bench import time_all_reduces
from paceline.measure.timer import now_s

RankPair = tuple[int, int]
PAIR_MESSAGE_BYTES: Final = 1 << 20
"""Takes 84 ms at 100 Mbit/s, and several times a hop's latency at 10 Gbit/s."""
_NUM_TRIES: Final = 2


def measure_all_reduces(world: World, device: torch.device, *, seconds_per_size: float = 1.0) -> AllReduceMeasurement:
    """Time all-reduces of the ranks of `world`, `seconds_per_size` seconds per size (collective)."""
    timed = time_all_reduces(device, now_s, each_s=seconds_per_size)
    times = [
        AllReduceTiming(bytes=each.num_bytes, median_s=each.median_s, p10_s=each.p10_s, p90_s=each.p90_s, n=each.n)
        for each in timed
    ]
    return fit_link(dist.get_backend(), world.world_size, world.num_nodes, times)


def time_rank_pairs(
    ranks: Sequence[int], rank: int, device: torch.device, now: Callable[[], float], num_bytes: int = PAIR_MESSAGE_BYTES
) -> dict[RankPair, float]:
    """Return the bytes per second between this rank and each higher one of `ranks`; all of them must call it.

    Takes the fastest round trip of `num_bytes`. Disjoint pairs run concurrently, so n ranks take n - 1 rounds. `now` is
    a clock in seconds.
    """
    rates: dict[RankPair, float] = {}
    message = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    ready = torch.zeros(1, dtype=torch.uint8, device=device)
    for pairs in schedule_pairs(ranks):
        for pair in pairs:
            if rank == pair[0]:
                rates[pair] = (
                    2 * num_bytes / min(_time_round_trip(ready, message, pair[1], now) for _ in range(_NUM_TRIES))
                )
            elif rank == pair[1]:  # the mirror image of `_time_round_trip`
                for _ in range(_NUM_TRIES):
                    _receive_and_send(ready, pair[0])
                    _receive_and_send(message, pair[0])
    return rates


def schedule_pairs(ranks: Sequence[int]) -> Iterator[list[RankPair]]:
    """Yield rounds of disjoint pairs that cover each pair once, lower rank first, by the circle method.

    https://en.wikipedia.org/wiki/Round-robin_tournament
    """
    circle: list[int | None] = [*ranks, *([None] if len(ranks) % 2 else [])]
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        opposite = zip(circle[:half], reversed(circle[half:]), strict=True)
        yield [
            (min(first, second), max(first, second))
            for first, second in opposite
            if first is not None and second is not None
        ]
        circle = [circle[0], circle[-1], *circle[1:-1]]


def _time_round_trip(ready: torch.Tensor, message: torch.Tensor, peer: int, now: Callable[[], float]) -> float:
    # A first round trip of one byte, so that both sides are ready when the clock starts.
    _send_and_receive(ready, peer)
    start_s = now()
    _send_and_receive(message, peer)
    return now() - start_s


def _send_and_receive(numbers: torch.Tensor, peer: int) -> None:
    dist.send(numbers, peer)
    dist.recv(numbers, peer)
    _synchronize(numbers)


def _receive_and_send(numbers: torch.Tensor, peer: int) -> None:
    dist.recv(numbers, peer)
    dist.send(numbers, peer)
    _synchronize(numbers)


def _synchronize(numbers: torch.Tensor) -> None:
    if numbers.is_cuda:
        torch.cuda.synchronize(numbers.device)
