"""Gradient buckets: how much of their communication backward hides, and what is left."""

import pytest

from paceline.core.results import BucketResult
from paceline.lab.predict.from_run import GradientBucket, assume_buckets, compute_exposed_s, convert_buckets


def a_second_a_byte(num_bytes: int) -> float:
    return float(num_bytes)


def test_without_buckets_nothing_is_exposed():
    assert compute_exposed_s([], a_second_a_byte) == 0


def test_a_single_bucket_is_exposed_as_a_whole():
    assert compute_exposed_s([GradientBucket(3, 0.0)], a_second_a_byte) == 3


def test_what_arrives_before_the_next_bucket_is_ready_is_hidden():
    assert compute_exposed_s([GradientBucket(2, 0.0), GradientBucket(1, 5.0)], a_second_a_byte) == 1


def test_buckets_wait_for_one_another():
    assert (
        compute_exposed_s([GradientBucket(4, 0.0), GradientBucket(4, 1.0), GradientBucket(1, 2.0)], a_second_a_byte)
        == 9 - 2
    )


def test_exposed_is_the_tail_or_all_that_backward_does_not_hide_whichever_is_more():
    buckets = [GradientBucket(2, 0.0), GradientBucket(2, 1.0), GradientBucket(2, 10.0)]
    for seconds_a_byte in (0.1, 1, 2, 5, 20):
        found = compute_exposed_s(buckets, lambda size, each=seconds_a_byte: size * each)
        assert found == pytest.approx(max(2 * seconds_a_byte, 6 * seconds_a_byte - 10))


def test_measured_buckets_are_counted_from_the_first_that_is_ready():
    found = [BucketResult(bytes=8, ready_s=ready_s, wire_s=1.0, n=2) for ready_s in (0.5, 2.5)]
    assert convert_buckets(found) == (GradientBucket(8, 0.0), GradientBucket(8, 2.0))


def test_assumed_buckets_hold_all_bytes_and_the_last_is_ready_as_backward_ends():
    buckets = assume_buckets(100 << 20, 3.0)
    assert sum(bucket.num_bytes for bucket in buckets) == 100 << 20
    assert [bucket.num_bytes >> 20 for bucket in buckets] == [1, 25, 25, 25, 24]
    assert buckets[0].ready_s == 0
    assert buckets[-1].ready_s == pytest.approx(3.0 * 99 / 100)  # the first has had its hundredth before


def test_a_small_network_is_one_assumed_bucket():
    assert assume_buckets(1000, 3.0) == (GradientBucket(1000, 0.0),)


def test_buckets_of_a_size_that_was_requested_have_it_from_the_first_on():
    assert [bucket.num_bytes for bucket in assume_buckets(10, 3.0, 4)] == [4, 4, 2]
