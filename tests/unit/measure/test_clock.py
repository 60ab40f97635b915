"""`measure.clock`: where each second of a loop goes, on a clock that only moves when a test says so."""

import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import final

import pytest

from paceline.core.errors import PacelineError
from paceline.measure import EPOCH_BOUNDARY, Clock, ClockSummary, NullClock, StageClock, build_clock
from paceline.measure import clock as clock_module
from paceline.measure.clock import RECENT_STEPS, HostOnlyTimer, StageSeconds


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


def test_stages_and_the_residual_add_up_to_the_wall_clock(now: FakeTime) -> None:
    clock = StageClock(now=now)
    for _ in range(4):
        spend_step(clock, now)

    summary = clock.drain()

    assert (summary.n, summary.images, summary.wall_s) == (4, 128, 13.0)
    assert host_s(summary) == {"forward": 4.0, "backward": 8.0}
    assert summary.residual_s == 1.0
    assert summary.step_s == (3.25,) * 4
    assert [total.share for total in summary.stages.values()] == [4 / 13, 8 / 13]


def test_stages_add_up_for_any_seconds(now: FakeTime) -> None:
    """The sum differs from the wall clock by the rounding of doubles alone: 1e-12 is far above it."""
    draw = random.Random(0)
    clock = StageClock(now=now, warmup_steps=3)
    for _ in range(200):
        spend_step(clock, now, draw.random(), draw.random())

    summary = clock.drain()

    assert summary.residual_s == pytest.approx(197 * 0.25, rel=1e-12)
    assert sum(summary.step_s) == pytest.approx(summary.wall_s, rel=1e-12)


def test_warmup_is_timed_but_not_counted(now: FakeTime) -> None:
    clock = StageClock(now=now, warmup_steps=2)
    spend_step(clock, now, forward_s=50.0)
    spend_step(clock, now, forward_s=10.0)
    spend_step(clock, now)

    summary = clock.drain()

    assert (summary.n, summary.wall_s) == (1, 3.25)
    assert host_s(summary) == {"forward": 1.0, "backward": 2.0}
    assert summary.recent == {"forward": (1.0,), "backward": (2.0,)}
    assert summary.warmup_s == summary.excluded_s == 64.5


def test_shares_are_of_the_counted_steps_since_the_last_call(now: FakeTime) -> None:
    clock = StageClock(now=now, warmup_steps=1)
    spend_step(clock, now, forward_s=50.0)
    assert clock.pop_shares() == {}
    spend_step(clock, now, forward_s=1.0, backward_s=2.75)
    with clock.paused("evaluate"):
        now.spend(100.0)
    assert clock.pop_shares() == {"forward": 0.25, "backward": 0.6875}
    spend_step(clock, now, forward_s=3.0, backward_s=0.75)
    with clock.stage("forward"):
        now.spend(9.0)
        assert clock.pop_shares() == {"forward": 0.75, "backward": 0.1875}  # the open step counts later
    assert clock.pop_shares() == {}
    assert clock.drain().stages["forward"].host_s == 4.0
    assert NullClock().pop_shares() == {}


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
    assert (host_s(summary), summary.residual_s) == ({"forward": 3.0, "backward": 6.0}, 0.0)
    assert summary.recent == {"forward": (3.0,), "backward": (6.0,)}


class Loader:
    """Three batches an epoch: 16 s to start, 1 s each, 2 s to find out that there is no more, 4 s to shut down."""

    def __init__(self, now: FakeTime, num_batches: int = 3) -> None:
        self.now = now
        self.num_batches = num_batches
        self.num_open = 0

    def __iter__(self) -> Iterator[int]:
        self.now.spend(16.0)
        return self.batches()

    def batches(self) -> Iterator[int]:
        self.num_open += 1
        try:
            for batch in range(self.num_batches):
                self.now.spend(1.0)
                yield batch
            self.now.spend(2.0)
        finally:
            self.now.spend(4.0)
            self.num_open -= 1


def test_each_wait_for_a_batch_but_the_first_and_the_last_is_data_wait(now: FakeTime) -> None:
    clock = StageClock(now=now)
    batches = []
    for batch in clock.batches(Loader(now)):
        batches.append(batch)
        now.spend(8.0)
        clock.end_step(images=1)

    summary = clock.drain()

    assert batches == [0, 1, 2]
    assert (host_s(summary), summary.residual_s) == ({"data_wait": 2.0}, 24.0)
    assert summary.recent == {"data_wait": (0.0, 1.0, 1.0)}
    assert summary.step_s == (8.0, 9.0, 9.0)
    assert summary.pauses == {EPOCH_BOUNDARY: 16.0 + 1.0 + 2.0 + 4.0}
    assert summary.unfinished_s == 0.0


def test_an_epoch_boundary_is_in_no_step(now: FakeTime) -> None:
    clock = StageClock(now=now)
    for _ in range(2):
        for _ in clock.batches(Loader(now)):
            clock.end_step(images=1)
        with clock.paused("evaluate"):
            now.spend(64.0)

    summary = clock.drain()

    assert summary.step_s == (0.0, 1.0, 1.0) * 2
    assert summary.pauses == {EPOCH_BOUNDARY: 46.0, "evaluate": 128.0}
    assert summary.elapsed_s == now() - 1000.0


def test_an_epoch_without_batches_is_a_boundary(now: FakeTime) -> None:
    clock = StageClock(now=now)

    assert list(clock.batches(Loader(now, num_batches=0))) == []

    assert clock.drain().pauses == {EPOCH_BOUNDARY: 22.0}


def test_a_loader_that_is_left_early_is_dropped_in_the_boundary(now: FakeTime) -> None:
    clock = StageClock(now=now)
    loader = Loader(now)
    for batch in clock.batches(loader.batches()):
        clock.end_step(images=1)
        if batch == 1:
            break

    assert loader.num_open == 0
    assert clock.drain().pauses == {EPOCH_BOUNDARY: 1.0 + 4.0}


def test_a_generator_dropped_within_a_stage_does_not_disturb_it(now: FakeTime) -> None:
    clock = StageClock(now=now)
    batches = clock.batches(Loader(now))
    next(batches)
    with clock.stage("forward"):
        now.spend(1.0)
        del batches
    clock.end_step(images=1)

    assert host_s(clock.drain())["forward"] == 5.0


@final
class FragileDevice:
    """A device that must not be queried once it is broken; until then `on_wait` is called to wait for it."""

    def __init__(self, on_wait: Callable[[], None] = lambda: None) -> None:
        self.inner = HostOnlyTimer()
        self.on_wait = on_wait
        self.is_broken = False

    def begin(self, stage: str) -> None:
        self.inner.begin(stage)

    def charge(self, stage: str, start: object) -> None:
        assert not self.is_broken, "the device was asked"

    def discard_last(self) -> None:
        self.inner.discard_last()

    def end_step(self, *, counted: bool) -> None:
        self.inner.end_step(counted=counted)

    def synchronize(self) -> None:
        assert not self.is_broken, "the device was waited for"
        self.on_wait()

    def drain(self, host: StageSeconds) -> StageSeconds:
        return self.inner.drain(host)


@pytest.mark.parametrize("num_batches", [0, 2])
def test_an_error_of_a_loader_is_not_replaced_by_one_of_the_device(now: FakeTime, num_batches: int) -> None:
    device = FragileDevice()
    clock = StageClock(now=now, device=device)

    def loader() -> Iterator[int]:
        yield from range(num_batches)
        device.is_broken = True
        raise OSError("no more")

    with pytest.raises(OSError, match="no more"):
        for _ in clock.batches(loader()):
            clock.end_step(images=1)
    assert clock.current_stage == ""


def test_a_loop_that_an_error_ends_waits_for_no_device(now: FakeTime) -> None:
    device = FragileDevice()
    clock = StageClock(now=now, device=device)
    loader = Loader(now)

    with pytest.raises(KeyError):
        for _ in clock.batches(loader.batches()):
            device.is_broken = True
            raise KeyError

    assert loader.num_open == 0
    assert clock.drain().pauses == {EPOCH_BOUNDARY: 1.0 + 4.0}


def test_a_loader_that_ends_in_order_waits_for_the_device_before_the_boundary(now: FakeTime) -> None:
    clock = StageClock(now=now, device=FragileDevice(on_wait=lambda: now.spend(32.0)))
    for _ in clock.batches([1]):
        clock.end_step(images=1)

    summary = clock.drain()

    assert summary.pauses == {EPOCH_BOUNDARY: 0.0}
    assert (summary.wall_s, summary.unfinished_s) == (32.0, 32.0)


def test_steps_with_a_pause_in_them_or_before_are_marked(now: FakeTime) -> None:
    """One epoch of three batches, of which the first is warm-up; then a step alone, and one with a pause inside."""
    clock = StageClock(now=now, warmup_steps=1)
    for batch in clock.batches(Loader(now)):
        spend_step(clock, now)
        if batch == 1:
            with clock.paused("checkpoint"):
                now.spend(1.0)
    spend_step(clock, now)
    spend_step(clock, now)
    with clock.stage("forward"):
        now.spend(1.0)
    with clock.paused("evaluate"):
        pass
    clock.end_step(images=1)
    spend_step(clock, now)

    summary = clock.drain()

    assert summary.after_pause == (False, True, True, False, True, False)
    assert {len(seconds) for seconds in summary.recent.values()} == {6}


def test_a_turn_charges_the_rest_of_a_stage_to_another(now: FakeTime) -> None:
    clock = StageClock(now=now)
    with clock.stage("forward"):
        now.spend(1.0)
        clock.switch_stage("exposed_communication")
        assert clock.current_stage == "exposed_communication"
        now.spend(2.0)
        clock.switch_stage("forward")
        now.spend(4.0)
    with clock.stage("backward"):
        now.spend(8.0)
        clock.switch_stage("exposed_communication")
        now.spend(16.0)
    assert clock.current_stage == ""
    clock.end_step(images=1)

    summary = clock.drain()

    assert host_s(summary) == {"forward": 5.0, "backward": 8.0, "exposed_communication": 18.0}
    assert summary.residual_s == 0.0


def test_another_thread_may_turn_the_stage_that_waits_for_it(now: FakeTime) -> None:
    clock = StageClock(now=now)
    with clock.stage("backward"):
        now.spend(1.0)
        thread = threading.Thread(target=clock.switch_stage, args=("exposed_communication",))
        thread.start()
        thread.join(timeout=60)
        now.spend(2.0)
    clock.end_step(images=1)

    assert host_s(clock.drain()) == {"backward": 1.0, "exposed_communication": 2.0}


def test_a_turn_outside_of_stages_does_nothing(now: FakeTime) -> None:
    clock = StageClock(now=now)
    clock.switch_stage("exposed_communication")
    with clock.paused("evaluate"):
        clock.switch_stage("exposed_communication")
        now.spend(1.0)
        assert clock.current_stage == "evaluate"
    with clock.stage("forward"):
        pass
    clock.switch_stage("exposed_communication")
    now.spend(2.0)
    clock.end_step(images=1)

    summary = clock.drain()

    assert (host_s(summary), summary.residual_s) == ({"forward": 0.0}, 2.0)
    assert summary.pauses == {"evaluate": 1.0}


def test_a_stage_that_raises_is_charged_and_closed(now: FakeTime) -> None:
    clock = StageClock(now=now)
    with pytest.raises(KeyError), clock.stage("forward"):
        now.spend(1.0)
        raise KeyError
    clock.end_step(images=1)

    assert host_s(clock.drain()) == {"forward": 1.0}
    assert clock.current_stage == ""


def test_a_step_that_was_not_finished_is_in_no_total(now: FakeTime) -> None:
    clock = StageClock(now=now)
    spend_step(clock, now)
    with clock.stage("forward"):
        now.spend(7.0)

    summary = clock.drain()

    assert host_s(summary)["forward"] == 1.0
    assert summary.unfinished_s == 7.0


def test_drain_reads_totals_and_the_clock_continues(now: FakeTime) -> None:
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


def test_other_is_a_stage_like_any(now: FakeTime) -> None:
    clock = StageClock(now=now)
    with clock.stage("other"):
        now.spend(1.0)
    now.spend(2.0)
    clock.end_step(images=1)

    assert (host_s(clock.drain()), clock.drain().residual_s) == ({"other": 1.0}, 2.0)


def test_recent_steps_have_the_seconds_of_every_stage(now: FakeTime) -> None:
    """Two steps more than are kept; a stage that came late, or once only, has 0 in the other steps."""
    clock = StageClock(now=now, warmup_steps=1)
    for step in range(RECENT_STEPS + 3):
        with clock.stage("forward"):
            now.spend(float(step))
        if step == 8:
            with clock.stage("optimizer"):
                now.spend(0.5)
        clock.end_step(images=1)

    recent = clock.drain().recent

    assert recent["forward"] == tuple(float(step) for step in range(3, RECENT_STEPS + 3))
    assert recent["optimizer"] == (0.0,) * 5 + (0.5,) + (0.0,) * (RECENT_STEPS - 6)
    assert len(clock.drain().after_pause) == RECENT_STEPS


def test_no_steps_is_a_summary_of_zeros(now: FakeTime) -> None:
    clock = StageClock(now=now, warmup_steps=5)
    spend_step(clock, now)

    summary = clock.drain()

    assert (summary.n, summary.images, summary.wall_s, summary.step_s) == (0, 0, 0.0, ())
    assert {total.share for total in summary.stages.values()} == {0.0}
    assert summary.recent == {"forward": (), "backward": ()}
    assert (summary.residual_s, summary.starved) == (0.0, 0.0)
    assert summary.excluded_s == 3.25


def test_only_the_last_steps_are_kept_one_by_one(now: FakeTime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock_module, "MAX_STEP_TIMES", 2)
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
    assert [clock.drain().has_run for clock in clocks] == [False, True]


def test_the_switch_chooses_the_clock() -> None:
    assert isinstance(build_clock("off", device_type="cpu", warmup_steps=0), NullClock)
    assert isinstance(build_clock("on", device_type="cpu", warmup_steps=0), StageClock)


def test_the_table_has_a_row_for_every_second(now: FakeTime) -> None:
    clock = StageClock(now=now, warmup_steps=1)
    for _ in range(3):
        spend_step(clock, now)
    with clock.paused("evaluate"):
        now.spend(1200.0)
    now.spend(1.5)

    assert clock.drain().table() == (
        "stage                  host s  device s   share\n"
        "-----------------------------------------------\n"
        "forward                 2.000     2.000   30.8%\n"
        "backward                4.000     4.000   61.5%\n"
        "residual                0.500              7.7%\n"
        "= 2 measured steps      6.500            100.0%\n"
        "warm-up                 3.250\n"
        "pause: evaluate      1200.000\n"
        "after the last step     1.500\n"
        "= wall clock         1211.250"
    )


def test_the_table_of_no_steps_is_a_table() -> None:
    assert NullClock().drain().table().splitlines()[3].split() == ["=", "0", "measured", "steps", "0.000", "0.0%"]


def test_a_clock_for_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(PacelineError, match=r"^device: 'tpu' is not timed \(use cuda, cpu or auto\)$"):
        StageClock.for_device("tpu")  # type: ignore[arg-type]


def test_a_loop_on_the_host_needs_no_torch() -> None:
    code = (
        "import sys; from paceline.measure import StageClock; clock = StageClock.for_device('cpu'); "
        "clock.end_step(1); clock.drain().table(); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
