"""Buckets on the wire: what backward hides, and what is left of them after it."""

import pytest

from paceline.core.results import BucketResult
from paceline.lab.predict.simulate import Bucket, assumed, of_results, simulate


def a_second_a_byte(num_bytes: int) -> float:
    return float(num_bytes)


def test_without_buckets_nothing_is_exposed():
    assert simulate([], a_second_a_byte).exposed_s == 0


def test_a_single_bucket_is_exposed_as_a_whole():
    found = simulate([Bucket(3, 0.0)], a_second_a_byte)
    assert (found.exposed_s, found.wire_s) == (3, 3)


def test_what_arrives_before_the_next_bucket_is_ready_is_hidden():
    found = simulate([Bucket(2, 0.0), Bucket(1, 5.0)], a_second_a_byte)
    assert [(each.begins_s, each.ends_s) for each in found.sent] == [(0, 2), (5, 6)]
    assert found.exposed_s == 1


def test_buckets_wait_for_one_another():
    found = simulate([Bucket(4, 0.0), Bucket(4, 1.0), Bucket(1, 2.0)], a_second_a_byte)
    assert [each.begins_s for each in found.sent] == [0, 4, 8]
    assert found.exposed_s == 9 - 2


def test_exposed_is_the_tail_or_all_that_backward_does_not_hide_whichever_is_more():
    buckets = [Bucket(2, 0.0), Bucket(2, 1.0), Bucket(2, 10.0)]
    for seconds_a_byte in (0.1, 1, 2, 5, 20):
        found = simulate(buckets, lambda size, each=seconds_a_byte: size * each)
        assert found.exposed_s == pytest.approx(max(2 * seconds_a_byte, 6 * seconds_a_byte - 10))


def test_measured_buckets_are_counted_from_the_first_that_is_ready():
    found = [BucketResult(bytes=8, ready_s=ready_s, wire_s=1.0, n=2) for ready_s in (0.5, 2.5)]
    assert of_results(found) == (Bucket(8, 0.0), Bucket(8, 2.0))


def test_assumed_buckets_hold_all_bytes_and_the_last_is_ready_as_backward_ends():
    buckets = assumed(100 << 20, 3.0)
    assert sum(bucket.num_bytes for bucket in buckets) == 100 << 20
    assert [bucket.num_bytes >> 20 for bucket in buckets] == [1, 25, 25, 25, 24]
    assert buckets[0].ready_s == 0
    assert buckets[-1].ready_s == pytest.approx(3.0 * 99 / 100)  # the first has had its hundredth before


def test_a_small_network_is_one_assumed_bucket():
    assert assumed(1000, 3.0) == (Bucket(1000, 0.0),)
