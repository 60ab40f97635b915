"""Parts of a batch add up to the whole of it, and batches to a table, by a clock that only the test moves."""

from paceline.core.results import LoaderResult
from paceline.data.timing import (
    BatchTiming,
    ClockBatchTimer,
    ClockLoaderStats,
    NoBatchTimer,
    NoLoaderStats,
    build_batch_timer,
    build_loader_stats,
)


class Hand:
    """A clock that shows what it was set to."""

    def __init__(self) -> None:
        self.s = 100.0

    def __call__(self) -> float:
        return self.s

    def pass_by(self, seconds: float) -> None:
        self.s += seconds


def test_each_part_gets_the_time_since_the_last_look_and_collating_the_rest() -> None:
    now = Hand()
    laps = ClockBatchTimer(now)
    now.pass_by(50)  # before the batch, in none of its parts
    laps.start()
    for _ in range(2):
        now.pass_by(1)
        laps.end_read(1000)
        now.pass_by(2)
        laps.end_stage("decode")
    now.pass_by(4)
    laps.end_stage("collate")
    now.pass_by(8)
    laps.end_stage("augment")
    now.pass_by(16)
    work = laps.finish(images=2, bytes_made=300)
    assert work == BatchTiming(2, 2.0, 4.0, 8.0, 20.0, 2000, 300, made_s=184.0)
    assert work.seconds == 34.0


def test_a_batch_that_came_to_nothing_leaves_nothing_behind() -> None:
    now = Hand()
    laps = ClockBatchTimer(now)
    laps.start()
    now.pass_by(3)
    laps.end_read(1000)
    laps.start()
    now.pass_by(1)
    assert laps.finish(images=1, bytes_made=10) == BatchTiming(1, collate_s=1.0, bytes_made=10, made_s=104.0)


def test_the_work_of_two_batches_is_their_sum_done_with_the_later_one() -> None:
    one, other = BatchTiming(1, 1.0, 2.0, 4.0, 8.0, 16, 32, 99.0), BatchTiming(2, 0.5, 0.25, 0.125, 0.0625, 3, 4, 98.0)
    assert one.add(other) == other.add(one) == BatchTiming(3, 1.5, 2.25, 4.125, 8.0625, 19, 36, 99.0)


def test_the_table_is_of_all_batches_handed_out() -> None:
    now = Hand()
    tally = ClockLoaderStats(now, workers=2, loader="processes")
    tally.start_workers(2)
    now.pass_by(1)  # the workers are started: no wait
    tally.request_batch(num_ready=0)
    now.pass_by(3)
    tally.deliver_batch(BatchTiming(10, 1.0, 0.5, 0.25, 0.125, 100, 200, made_s=104.0))
    now.pass_by(6)  # the rank computes
    tally.request_batch(num_ready=3)
    tally.deliver_batch(BatchTiming(10, 2.0, 0.0, 0.0, 0.125, 100, 200, made_s=105.0))
    assert tally.build_result() == LoaderResult(
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


def test_a_batch_behind_which_others_lie_ready_had_to_be_waited_for() -> None:
    now = Hand()
    tally = ClockLoaderStats(now, workers=2, loader="processes")
    tally.start_workers(2)
    tally.request_batch(num_ready=2)
    now.pass_by(1)
    tally.deliver_batch(BatchTiming(1, made_s=100.5))
    stats = tally.build_result()
    assert (stats.queue_depth, stats.ready) == (2.0, 0.0)


def test_no_time_counts_between_two_crews_of_workers() -> None:
    now = Hand()
    tally = ClockLoaderStats(now, workers=4, loader="processes")
    for crew in (4, 1):
        tally.start_workers(crew)
        tally.request_batch(num_ready=0)
        now.pass_by(2)
        tally.deliver_batch(BatchTiming(1, read_s=1.0))
        now.pass_by(1000)
    assert tally.build_result().busy == 2.0 / (4 * 2.0 + 1 * 2.0)


def test_before_the_first_batch_the_table_is_empty() -> None:
    stats = ClockLoaderStats(Hand(), workers=1, loader="processes").build_result()
    assert (stats.batches, stats.images, stats.ready, stats.queue_depth, stats.busy) == (0, 0, 0.0, 0.0, None)


def test_without_a_clock_nothing_is_timed() -> None:
    assert isinstance(build_batch_timer(None), NoBatchTimer) and isinstance(
        build_loader_stats(None, 2, "processes"), NoLoaderStats
    )
    assert build_batch_timer(None).finish(images=3, bytes_made=5) == BatchTiming()
    assert build_loader_stats(None, 2, "processes").build_result() is None
