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


@dataclass(frozen=True)
class Sent:
    """A bucket on the wire, in seconds after the first one of the step was ready."""

    bucket: Bucket
    begins_s: float
    ends_s: float


@dataclass(frozen=True)
class Overlap:
    """What sending a step's buckets came to: `wire_s` in all, `exposed_s` of it after backward has ended."""

    sent: tuple[Sent, ...]
    wire_s: float
    exposed_s: float


def simulate(buckets: Sequence[Bucket], all_reduce_s: Callable[[int], float]) -> Overlap:
    """Send buckets in their order, each once it is ready and the one before has arrived.

    `all_reduce_s` returns the seconds of an all-reduce of so many bytes. Backward ends as the last bucket is ready.
    """
    sent: list[Sent] = []
    free_s = 0.0
    for bucket in buckets:
        begins_s = max(free_s, bucket.ready_s)
        free_s = begins_s + all_reduce_s(bucket.num_bytes)
        sent.append(Sent(bucket, begins_s, free_s))
    backward_ends_s = max((bucket.ready_s for bucket in buckets), default=0.0)
    return Overlap(tuple(sent), free_s, max(0.0, free_s - backward_ends_s))


def of_results(buckets: Sequence[BucketResult]) -> tuple[Bucket, ...]:
    """Return measured buckets; what a run says is counted from the first of them, whichever that is."""
    first_s = min((bucket.ready_s for bucket in buckets), default=0.0)
    return tuple(Bucket(bucket.bytes, bucket.ready_s - first_s) for bucket in buckets)


def assumed(num_bytes: int, backward_s: float) -> tuple[Bucket, ...]:
    """Return the buckets that torch would make of so many bytes, ready as evenly in backward as bytes go.

    They were not measured. The last layers' gradients come first; that as many bytes take as long is not so where
    early layers, which have few weights, compute the most: there more of sending is hidden than this has.
    """
    sizes = _sizes(num_bytes)
    sent, buckets = 0, []
    for each in sizes:
        sent += each
        buckets.append(Bucket(each, backward_s * (sent - sizes[0]) / num_bytes))
    return tuple(buckets)


def _sizes(num_bytes: int) -> list[int]:
    sizes = [min(FIRST_BYTES, num_bytes)]
    while (left := num_bytes - sum(sizes)) > 0:
        sizes.append(min(BUCKET_BYTES, left))
    return sizes
