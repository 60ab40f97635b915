"""`measure.clock`: where each second of a loop goes, on a clock that only moves when a test says so."""

import random
from collections.abc import Iterator

import pytest

from paceline.measure import Clock, ClockSummary, NullClock, StageClock, build_clock
from paceline.measure import clock as clock_module


class FakeTime:
    """Seconds that pass only when they are spent. Multiples of 1/8 add up without rounding."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds

    def spend(self, seconds: float) -> None:
        self.seconds += seconds


@pytest.fixture
def now() -> FakeTime:
    return FakeTime()


def spend_step(clock: Clock, now: FakeTime, forward_s: float = 1.0, backward_s: float = 2.0) -> None:
    with clock.stage("forward"):
        now.spend(forward_s)
    now.spend(0.25)
    with clock.stage("backward"):
        now.spend(backward_s)
    clock.end_step(images=32)


def host_s(summary: ClockSummary) -> dict[str, float]:
    return {name: total.host_s for name, total in summary.stages.items()}


def test_stages_and_other_add_up_to_the_wall_clock(now: FakeTime) -> None:
    clock = StageClock(now=now)
    for _ in range(4):
        spend_step(clock, now)

    summary = clock.drain()

    assert (summary.n, summary.images, summary.wall_s) == (4, 128, 13.0)
    assert host_s(summary) == {"forward": 4.0, "backward": 8.0, "other": 1.0}
    assert summary.step_s == (3.25,) * 4
    assert sum(total.share for total in summary.stages.values()) == pytest.approx(1.0)


def test_stages_add_up_for_any_seconds(now: FakeTime) -> None:
    """The sum differs from the wall clock by the rounding of doubles alone: 1e-12 is far above it."""
    draw = random.Random(0)
    clock = StageClock(now=now, warmup_steps=3)
    for _ in range(200):
        spend_step(clock, now, draw.random(), draw.random())

    summary = clock.drain()

    assert sum(host_s(summary).values()) == pytest.approx(summary.wall_s, rel=1e-12)
    assert sum(summary.step_s) == pytest.approx(summary.wall_s, rel=1e-12)


def test_warmup_is_timed_but_not_counted(now: FakeTime) -> None:
    clock = StageClock(now=now, warmup_steps=2)
    spend_step(clock, now, forward_s=50.0)
    spend_step(clock, now, forward_s=10.0)
    spend_step(clock, now)

    summary = clock.drain()

    assert (summary.n, summary.wall_s) == (1, 3.25)
    assert host_s(summary) == {"forward": 1.0, "backward": 2.0, "other": 0.25}
    assert summary.warmup_s == summary.excluded_s == 64.5


def test_a_pause_is_in_no_step(now: FakeTime) -> None:
    clock = StageClock(now=now)
    spend_step(clock, now)
    with clock.paused("evaluate"):
        now.spend(100.0)
    with clock.paused("checkpoint"):
        now.spend(10.0)
    spend_step(clock, now)
    with clock.paused("evaluate"):
        now.spend(50.0)

    summary = clock.drain()

    assert summary.step_s == (3.25, 3.25)
    assert summary.pauses == {"evaluate": 150.0, "checkpoint": 10.0}
    assert summary.excluded_s == 160.0
    assert summary.unfinished_s == 0.0


def test_every_second_since_the_clock_was_built_is_in_one_row(now: FakeTime) -> None:
    clock = StageClock(now=now, warmup_steps=1)
    now.spend(0.5)
    spend_step(clock, now)
    now.spend(0.5)
    with clock.paused("evaluate"):
        now.spend(8.0)
    now.spend(0.5)
    spend_step(clock, now)
    now.spend(0.5)

    summary = clock.drain()

    assert summary.warmup_s == 3.75
    assert summary.wall_s == 4.25
    assert summary.unfinished_s == 0.5
    assert summary.elapsed_s == now() - 1000.0


def test_micro_batches_of_a_step_add_up(now: FakeTime) -> None:
    clock = StageClock(now=now)
    for _ in range(3):
        with clock.stage("forward"):
            now.spend(1.0)
        with clock.stage("backward"):
            now.spend(2.0)
    clock.end_step(images=96)

    summary = clock.drain()

    assert summary.n == 1
    assert host_s(summary) == {"forward": 3.0, "backward": 6.0, "other": 0.0}


def test_each_wait_for_a_batch_is_data_wait_and_the_work_is_not(now: FakeTime) -> None:
    def loader() -> Iterator[int]:
        for batch in range(3):
            now.spend(1.0)
            yield batch

    clock = StageClock(now=now)
    batches = []
    for batch in clock.batches(loader()):
        batches.append(batch)
        now.spend(4.0)
        clock.end_step(images=1)

    summary = clock.drain()

    assert batches == [0, 1, 2]
    assert host_s(summary) == {"data_wait": 3.0, "other": 12.0}


def test_the_start_and_the_end_of_an_epoch_are_data_wait_of_the_step_that_follows(now: FakeTime) -> None:
    class Loader:
        def __iter__(self) -> Iterator[int]:
            now.spend(16.0)  # starts its workers
            return self.batches()

        def batches(self) -> Iterator[int]:
            yield 0
            now.spend(2.0)  # finds out that there is no more

    clock = StageClock(now=now)
    for _ in range(2):
        for _ in clock.batches(Loader()):
            clock.end_step(images=1)
        with clock.paused("evaluate"):
            now.spend(64.0)

    summary = clock.drain()

    assert summary.step_s == (16.0, 18.0)
    assert host_s(summary) == {"data_wait": 34.0, "other": 0.0}
    assert summary.unfinished_s == 2.0


def test_a_stage_that_raises_is_charged_and_closed(now: FakeTime) -> None:
    clock = StageClock(now=now)
    with pytest.raises(KeyError), clock.stage("forward"):
        now.spend(1.0)
        raise KeyError
    clock.end_step(images=1)

    assert host_s(clock.drain()) == {"forward": 1.0, "other": 0.0}


def test_a_step_that_was_not_finished_is_in_no_total(now: FakeTime) -> None:
    clock = StageClock(now=now)
    spend_step(clock, now)
    with clock.stage("forward"):
        now.spend(7.0)

    summary = clock.drain()

    assert host_s(summary)["forward"] == 1.0
    assert summary.unfinished_s == 7.0


def test_drain_reads_totals_and_the_clock_goes_on(now: FakeTime) -> None:
    clock = StageClock(now=now)
    spend_step(clock, now)
    first = clock.drain()
    spend_step(clock, now)

    assert (first.n, clock.drain().n) == (1, 2)
    assert clock.drain() == clock.drain()


def test_nothing_nests(now: FakeTime) -> None:
    clock = StageClock(now=now)
    with clock.stage("forward"):
        with pytest.raises(AssertionError, match="loss was entered inside forward"), clock.stage("loss"):
            pass
        with pytest.raises(AssertionError, match="evaluate was entered"), clock.paused("evaluate"):
            pass
        with pytest.raises(AssertionError, match="ended inside forward"):
            clock.end_step(images=1)
    with (
        clock.paused("evaluate"),
        pytest.raises(AssertionError, match="inside evaluate"),
        clock.stage("loss"),
    ):
        pass


def test_other_is_computed_and_cannot_be_entered(now: FakeTime) -> None:
    with pytest.raises(AssertionError, match="'other'"):
        StageClock(now=now).stage("other")


def test_no_steps_is_a_summary_of_zeros(now: FakeTime) -> None:
    clock = StageClock(now=now, warmup_steps=5)
    spend_step(clock, now)

    summary = clock.drain()

    assert (summary.n, summary.images, summary.wall_s, summary.step_s) == (0, 0, 0.0, ())
    assert {total.share for total in summary.stages.values()} == {0.0}
    assert summary.excluded_s == 3.25


def test_only_the_last_steps_are_kept_one_by_one(now: FakeTime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock_module, "KEPT_STEPS", 2)
    clock = StageClock(now=now)
    for seconds in (1.0, 2.0, 4.0):
        now.spend(seconds)
        clock.end_step(images=1)

    summary = clock.drain()

    assert summary.step_s == (2.0, 4.0)
    assert (summary.n, summary.wall_s) == (3, 7.0)


def test_the_null_clock_runs_the_same_loop_and_measures_nothing(now: FakeTime) -> None:
    clocks: list[Clock] = [NullClock(), StageClock(now=now)]
    seen = []
    for clock in clocks:
        for batch in clock.batches([1, 2]):
            seen.append(batch)
            spend_step(clock, now)
        with clock.paused("evaluate"):
            now.spend(1.0)

    assert seen == [1, 2, 1, 2]
    assert [clock.drain().n for clock in clocks] == [0, 2]
    assert clocks[0].drain().elapsed_s == 0.0


def test_the_switch_chooses_the_clock() -> None:
    assert isinstance(build_clock("off", device_type="cpu", warmup_steps=0), NullClock)
    assert isinstance(build_clock("on", device_type="cpu", warmup_steps=0), StageClock)
