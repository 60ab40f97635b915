"""Time what the links between ranks do: all-reduces among all, and messages to and fro between pairs of hosts."""

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import torch
import torch.distributed as dist

Pair = tuple[int, int]
BYTES: Final = 1 << 20
"""At 100 Mbit/s that takes 84 ms, and at 10 Gbit/s several times as long as a hop."""
_TRIES: Final = 2


def time_pairs(
    ranks: Sequence[int], rank: int, device: torch.device, now: Callable[[], float], num_bytes: int = BYTES
) -> dict[Pair, float]:
    """Send `num_bytes` to and fro between each two of `ranks`, and return the bytes a second of the own, lower, ones.

    Each of `ranks` must call it. Pairs that share no rank are timed at the same time, so that n ranks take n - 1 turns;
    the fastest of some tries counts. `now` is a clock in seconds.
    """
    found: dict[Pair, float] = {}
    message = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    sign = torch.zeros(1, dtype=torch.uint8, device=device)
    for pairs in turns(ranks):
        for pair in pairs:
            if rank == pair[0]:
                found[pair] = 2 * num_bytes / min(_there_and_back(sign, message, pair[1], now) for _ in range(_TRIES))
            elif rank == pair[1]:
                for _ in range(_TRIES):
                    _returned(sign, pair[0])
                    _returned(message, pair[0])
    return found


def turns(ranks: Sequence[int]) -> Iterator[list[Pair]]:
    """Yield turns in which nobody is twice, and which have each pair once, lower rank first: the circle method.

    It is how the rounds of a tournament are drawn up: https://en.wikipedia.org/wiki/Round-robin_tournament.
    """
    ring: list[int | None] = [*ranks, *([None] if len(ranks) % 2 else [])]
    for _ in range(len(ring) - 1):
        half = len(ring) // 2
        opposite = zip(ring[:half], reversed(ring[half:]), strict=True)
        yield [(min(one, other), max(one, other)) for one, other in opposite if one is not None and other is not None]
        ring = [ring[0], ring[-1], *ring[1:-1]]


def _there_and_back(sign: torch.Tensor, message: torch.Tensor, peer: int, now: Callable[[], float]) -> float:
    """Return the seconds that `message` takes to `peer` and back; a `sign` before it says that both are there."""
    _sent(sign, peer)
    began_s = now()
    _sent(message, peer)
    return now() - began_s


def _sent(numbers: torch.Tensor, peer: int) -> None:
    dist.send(numbers, peer)
    dist.recv(numbers, peer)
    _settle(numbers)


def _returned(numbers: torch.Tensor, peer: int) -> None:
    dist.recv(numbers, peer)
    dist.send(numbers, peer)
    _settle(numbers)


def _settle(numbers: torch.Tensor) -> None:
    if numbers.is_cuda:
        torch.cuda.synchronize(numbers.device)
