"""What averaging costs a step, and how much of it hides behind backward."""

import pytest

from paceline.core.results import BucketResult
from paceline.measure.straggler import communication_result

BUCKETS = (
    BucketResult(bytes=1000, ready_s=0.0, wire_s=0.02, n=5),
    BucketResult(bytes=24, ready_s=0.01, wire_s=0.03, n=5),
)


def test_without_buckets_there_is_what_a_step_waits_for() -> None:
    found = communication_result(0.02, 0.1)
    assert (found.exposed_s, found.share) == (0.02, pytest.approx(0.2))
    assert (found.bytes, found.wire_s, found.overlap, found.buckets) == (None, None, None, ())


def test_what_is_not_waited_for_overlaps_with_backward() -> None:
    found = communication_result(0.01, 0.1, wire_s=0.04, buckets=BUCKETS)
    assert (found.bytes, found.wire_s, found.buckets) == (1024, 0.04, BUCKETS)
    assert found.overlap == pytest.approx(0.75)


def test_waiting_for_buffers_too_is_no_negative_overlap() -> None:
    assert communication_result(0.05, 0.1, wire_s=0.04, buckets=BUCKETS).overlap == 0.0


def test_no_step_is_no_share() -> None:
    assert communication_result(0.0, 0.0, wire_s=0.0).share == 0.0
    assert communication_result(0.0, 0.0, wire_s=0.0).overlap == 0.0
