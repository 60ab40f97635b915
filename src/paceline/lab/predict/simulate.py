"""Backward, and the buckets that are sent while it runs: how much of sending a step has to wait for. Pure, torch-free.

DDP sends a bucket as soon as its gradients are there (Li et al. 2020, arXiv 2006.15704), and one after the other: what
is on the wire is a queue. What it does not do: two buckets at once, or backward that slows down as they are sent.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from paceline.core.results import BucketResult

FIRST_BYTES: Final = 1 << 20
BUCKET_BYTES: Final = 25 << 20
"""Torch's `bucket_cap_mb`, after a first bucket of 1 MiB."""


@dataclass(frozen=True)
class Bucket:
    """Gradients that are sent at once, ready `ready_s` seconds after the first of the step."""

    num_bytes: int
    ready_s: float


def exposed_s(buckets: Sequence[Bucket], all_reduce_s: Callable[[int], float]) -> float:
    """Return the seconds after backward in which buckets are still sent, each once it and the wire are ready.

    `all_reduce_s` returns the seconds of an all-reduce of so many bytes. Backward ends as the last bucket is ready.
    """
    free_s = backward_ends_s = 0.0
    for bucket in buckets:
        free_s = max(free_s, bucket.ready_s) + all_reduce_s(bucket.num_bytes)
        backward_ends_s = max(backward_ends_s, bucket.ready_s)
    return max(0.0, free_s - backward_ends_s)


def of_results(buckets: Sequence[BucketResult]) -> tuple[Bucket, ...]:
    """Return measured buckets; what a run says is counted from the first of them, whichever that is."""
    first_s = min((bucket.ready_s for bucket in buckets), default=0.0)
    return tuple(Bucket(bucket.bytes, bucket.ready_s - first_s) for bucket in buckets)


def assumed(num_bytes: int, backward_s: float, bucket_bytes: int | None = None) -> tuple[Bucket, ...]:
    """Return the buckets that torch would make of so many bytes, ready as evenly in backward as bytes go.

    `bucket_bytes` is a size that was asked for, which the first has too; torch's own for None. They were not measured.
    The last layers' gradients come first; that as many bytes take as long is not so where early layers, which have few
    weights, compute the most: there more of sending is hidden than this has.
    """
    sizes = _sizes(num_bytes, bucket_bytes or FIRST_BYTES, bucket_bytes or BUCKET_BYTES)
    sent, buckets = 0, []
    for each in sizes:
        sent += each
        buckets.append(Bucket(each, backward_s * (sent - sizes[0]) / num_bytes))
    return tuple(buckets)


def _sizes(num_bytes: int, first: int, others: int) -> list[int]:
    sizes = [min(first, num_bytes)]
    while (left := num_bytes - sum(sizes)) > 0:
        sizes.append(min(others, left))
    return sizes
