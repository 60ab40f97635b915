"""Simulate DDP's gradient buckets during backward: the communication time that is exposed. Pure, torch-free.

DDP sends each bucket when its gradients are ready (Li et al. 2020, arXiv 2006.15704), one at a time. Not modeled:
concurrent buckets, and backward slowed down by communication.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from paceline.core.results import BucketResult

FIRST_BYTES: Final = 1 << 20
BUCKET_BYTES: Final = 25 << 20
"""Torch's `bucket_cap_mb`, after a first bucket of 1 MiB."""


@dataclass(frozen=True)
class GradientBucket:
    """Gradients that are sent together, ready `ready_s` seconds after the first ones of the step."""

    num_bytes: int
    ready_s: float


def compute_exposed_s(buckets: Sequence[GradientBucket], all_reduce_s: Callable[[int], float]) -> float:
    """Return the seconds of communication after backward ends, with the last bucket ready.

    `all_reduce_time_s` returns the seconds of an all-reduce of a number of bytes.
    """
    free_s = backward_ends_s = 0.0
    for bucket in buckets:
        free_s = max(free_s, bucket.ready_s) + all_reduce_s(bucket.num_bytes)
        backward_ends_s = max(backward_ends_s, bucket.ready_s)
    return max(0.0, free_s - backward_ends_s)


def convert_buckets(buckets: Sequence[BucketResult]) -> tuple[GradientBucket, ...]:
    """Return measured buckets, with times relative to the first."""
    first_s = min((bucket.ready_s for bucket in buckets), default=0.0)
    return tuple(GradientBucket(bucket.bytes, bucket.ready_s - first_s) for bucket in buckets)


def assume_buckets(num_bytes: int, backward_s: float, bucket_bytes: int | None = None) -> tuple[GradientBucket, ...]:
    """Return the buckets that torch would make, ready in backward in proportion to their bytes.

    `bucket_bytes` is the configured size, also of the first bucket; None for torch's default.
    """
    # Gradients of the last layers come first. If early layers, with few weights, take most of the time, more
    # communication is hidden than assumed here.
    sizes = _split_into_buckets(num_bytes, bucket_bytes or FIRST_BYTES, bucket_bytes or BUCKET_BYTES)
    sent, buckets = 0, []
    for each in sizes:
        sent += each
        buckets.append(GradientBucket(each, backward_s * (sent - sizes[0]) / num_bytes))
    return tuple(buckets)


def _split_into_buckets(num_bytes: int, first: int, others: int) -> list[int]:
    sizes = [min(first, num_bytes)]
    while (left := num_bytes - sum(sizes)) > 0:
        sizes.append(min(others, left))
    return sizes
