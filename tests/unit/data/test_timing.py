"""Stages of a batch add up to its time, and batches to a result, by a clock that only the test advances."""

from paceline.core.results import LoaderResult
from paceline.data.timing import BatchTimer, BatchTiming, LoaderStats


class ManualClock:
    """A clock that only `advance` moves."""

    def __init__(self) -> None:
        self.s = 100.0

    def __call__(self) -> float:
        return self.s

    def advance(self, seconds: float) -> None:
        self.s += seconds


def test_each_stage_gets_the_time_since_the_last_reading_and_collating_the_rest() -> None:
    now = ManualClock()
    timer = BatchTimer(now)
    now.advance(50)  # before the batch, in none of its parts
    timer.start()
    for _ in range(2):
        now.advance(1)
        timer.end_read(1000)
        now.advance(2)
        timer.end_stage("decode")
    now.advance(4)
    timer.end_stage("collate")
    now.advance(8)
    timer.end_stage("augment")
    now.advance(16)
    work = timer.finish(images=2, bytes_made=300)
    assert work == BatchTiming(2, 2.0, 4.0, 8.0, 20.0, 2000, 300, finished_at_s=184.0)
    assert work.seconds == 34.0


def test_an_unfinished_batch_is_discarded() -> None:
    now = ManualClock()
    timer = BatchTimer(now)
    timer.start()
    now.advance(3)
    timer.end_read(1000)
    timer.start()
    now.advance(1)
    assert timer.finish(images=1, bytes_made=10) == BatchTiming(1, collate_s=1.0, bytes_made=10, finished_at_s=104.0)


def test_the_sum_of_two_timings_ends_with_the_later_one() -> None:
    one, other = BatchTiming(1, 1.0, 2.0, 4.0, 8.0, 16, 32, 99.0), BatchTiming(2, 0.5, 0.25, 0.125, 0.0625, 3, 4, 98.0)
    assert one.add(other) == other.add(one) == BatchTiming(3, 1.5, 2.25, 4.125, 8.0625, 19, 36, 99.0)


def test_the_result_counts_all_delivered_batches() -> None:
    now = ManualClock()
    stats = LoaderStats(now, workers=2, loader="processes")
    stats.start_workers(2)
    now.advance(1)  # the workers are started: no wait
    stats.request_batch(num_ready=0)
    now.advance(3)
    stats.deliver_batch(BatchTiming(10, 1.0, 0.5, 0.25, 0.125, 100, 200, finished_at_s=104.0))
    now.advance(6)  # the rank computes
    stats.request_batch(num_ready=3)
    stats.deliver_batch(BatchTiming(10, 2.0, 0.0, 0.0, 0.125, 100, 200, finished_at_s=105.0))
    assert stats.build_result() == LoaderResult(
        workers=2,
        batches=2,
        images=20,
        read_s=3.0,
        decode_s=0.5,
        augment_s=0.25,
        collate_s=0.25,
        wait_s=3.0,
        queue_depth=1.5,
        ready=0.5,
        bytes_read=200,
        bytes_made=400,
        busy=4.0 / (2 * 10.0),
    )


def test_a_batch_that_was_not_ready_counts_as_waited_for_even_if_later_ones_were_ready() -> None:
    now = ManualClock()
    stats = LoaderStats(now, workers=2, loader="processes")
    stats.start_workers(2)
    stats.request_batch(num_ready=2)
    now.advance(1)
    stats.deliver_batch(BatchTiming(1, finished_at_s=100.5))
    result = stats.build_result()
    assert result is not None
    assert (result.queue_depth, result.ready) == (2.0, 0.0)


def test_time_without_workers_does_not_count() -> None:
    now = ManualClock()
    stats = LoaderStats(now, workers=4, loader="processes")
    for workers in (4, 1):
        stats.start_workers(workers)
        stats.request_batch(num_ready=0)
        now.advance(2)
        stats.deliver_batch(BatchTiming(1, read_s=1.0))
        now.advance(1000)
    result = stats.build_result()
    assert result is not None and result.busy == 2.0 / (4 * 2.0 + 1 * 2.0)


def test_before_the_first_batch_the_result_is_empty() -> None:
    result = LoaderStats(ManualClock(), workers=1, loader="processes").build_result()
    assert result is not None
    assert (result.batches, result.images, result.ready, result.queue_depth, result.busy) == (0, 0, 0.0, 0.0, None)


def test_without_a_clock_nothing_is_timed() -> None:
    assert BatchTimer(None).finish(images=3, bytes_made=5) == BatchTiming()
    assert LoaderStats(None, 2, "processes").build_result() is None
