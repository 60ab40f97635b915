"""Somebody else's sink, which can fail and hang: the run neither ends nor waits for it."""

import threading

import pytest

from paceline.core.errors import RecipeError
from paceline.training.logging import async_sink
from paceline.training.logging.async_sink import AsyncSink, TimeBudget
from paceline.training.logging.base import SinkGroup

WAIT_S = 30.0
"""No test takes it; one that hangs ends by it."""


def beside(inner, warnings: list[str], patience_s: float = WAIT_S) -> AsyncSink:
    """Return a sink that passes to `inner`, which is there when it is returned."""
    return AsyncSink(lambda: inner, "wandb", warnings.append, TimeBudget(patience_s), TimeBudget(WAIT_S))


def broken(told, *names: str):
    """Return a sink whose methods `names` fail after noting the call."""

    def failing(name: str):
        def fail(self, *words) -> None:
            getattr(type(told), name)(self, *words)
            raise ConnectionError(f"{name}:\n  no network")

        return fail

    return type("Broken", (type(told),), {name: failing(name) for name in names})()


def tell(inner, warnings: list[str], plan, step, evaluation, result) -> None:
    sink = beside(inner, warnings)
    sink.started(plan, 0)
    sink.step(step(2))
    sink.evaluated(evaluation(2))
    sink.warned("a")
    sink.step(step(4))
    sink.finished(result("completed"))
    sink.close()


ALL = [("started", 0), ("step", 2), ("evaluated", 2), ("warned", "a"), ("step", 4), ("finished", "completed"), "close"]


def test_everything_comes_in_order_and_has_come_when_it_is_closed(told, plan, step, evaluation, result) -> None:
    warnings: list[str] = []
    tell(told, warnings, plan, step, evaluation, result)
    assert told.calls == ALL
    assert warnings == []


def test_failures_are_told_once_and_what_comes_after_them_is_tried(told, plan, step, evaluation, result) -> None:
    warnings: list[str] = []
    inner = broken(told, "step", "evaluated", "finished", "close")
    tell(inner, warnings, plan, step, evaluation, result)
    assert inner.calls == ALL
    assert warnings == [
        "wandb: ConnectionError: step: no network (training continues; the run directory has every record)"
    ]


def test_a_sink_that_cannot_start_is_told_nothing_more(told, plan, step, evaluation, result) -> None:
    warnings: list[str] = []
    inner = broken(told, "started")
    tell(inner, warnings, plan, step, evaluation, result)
    assert inner.calls == [("started", 0)]
    assert len(warnings) == 1


def test_one_that_cannot_be_made_is_one_warning(plan, step, result) -> None:
    def make():
        raise RecipeError("log.sinks[0].name: a:B raised OSError (mend it)")

    warnings: list[str] = []
    sink = AsyncSink(make, "log.sinks[0]: a:B", warnings.append, TimeBudget(WAIT_S), TimeBudget(WAIT_S))
    sink.started(plan, 0)
    sink.step(step(2))
    sink.finished(result("completed"))
    sink.close()
    assert warnings == [
        "log.sinks[0].name: a:B raised OSError (mend it) (training continues; the run directory has every record)"
    ]


def test_one_that_is_never_made_is_waited_for_no_longer_than_it_may_take(step) -> None:
    let_go = threading.Event()
    warnings: list[str] = []
    told: list[int] = []

    class Late:
        def step(self, record) -> None:
            told.append(record.step)

        def close(self) -> None: ...

    def make() -> Late:
        assert let_go.wait(WAIT_S)
        return Late()

    sink = AsyncSink(make, "wandb", warnings.append, TimeBudget(0.0), TimeBudget(0.0))
    sink.step(step(2))
    sink.close()
    left = "did not finish within 0 s; the remaining records are dropped"
    assert [warning.split(" (training")[0] for warning in warnings] == [f"wandb: {left}"]
    let_go.set()
    sink._thread.join(WAIT_S)
    assert told == [2]


def test_what_asks_to_leave_the_program_ends_neither_it_nor_its_own_thread(told, plan, step) -> None:
    class Leaving(type(told)):
        def step(self, record) -> None:
            super().step(record)
            raise SystemExit(3)

    def make():
        raise SystemExit(3)

    warnings: list[str] = []
    inner = Leaving()
    sinks = [beside(inner, warnings), AsyncSink(make, "b", warnings.append, TimeBudget(WAIT_S), TimeBudget(WAIT_S))]
    for sink in sinks:
        sink.step(step(2))
        sink.step(step(4))
        sink.close()
    assert inner.calls == [("step", 2), ("step", 4), "close"]
    assert sorted(warning.split(" (training")[0] for warning in warnings) == [
        "b: SystemExit: 3",
        "wandb: SystemExit: 3",
    ]


class Hanging:
    """A sink that hangs in `log_step` until it is let go, and then fails."""

    def __init__(self) -> None:
        self.let_go = threading.Event()
        self.hangs = threading.Event()

    def step(self, record) -> None:
        self.hangs.set()
        assert self.let_go.wait(WAIT_S)
        raise ConnectionError

    def close(self) -> None: ...


def test_a_sink_that_hangs_holds_nothing_up_and_is_left_behind(step) -> None:
    warnings: list[str] = []
    inner = Hanging()
    sink = beside(inner, warnings, 0.0)
    sink.step(step(2))
    assert inner.hangs.wait(WAIT_S)
    sink.step(step(4))
    sink.close()
    left = "did not finish within 0 s; the remaining records are dropped"
    assert [warning.split(" (training")[0] for warning in warnings] == [f"wandb: {left}"]
    inner.let_go.set()
    sink._thread.join(WAIT_S)
    assert not sink._thread.is_alive()
    assert len(warnings) == 1  # what fails later has no reader


def test_what_waits_is_bounded(step, result, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_sink, "MAX_QUEUED", 3)
    warnings: list[str] = []
    inner = Hanging()
    sink = beside(inner, warnings, 0.0)
    sink.step(step(1))
    assert inner.hangs.wait(WAIT_S)
    for number in range(2, 10):
        sink.step(step(number))
    assert sink._calls.qsize() == 3
    sink.finished(result("completed"))
    assert sink._calls.qsize() == 3 + 3  # a result is taken all the same, and that the sink is to end
    assert [warning.split(" (training")[0] for warning in warnings] == [
        "wandb: does not respond, and 3 records are queued"
    ]
    inner.let_go.set()
    sink.close()


def test_patience_is_shared_and_begins_with_the_first_who_asks() -> None:
    times = iter([100.0, 104.0, 120.0])
    patience = TimeBudget(10.0, now=lambda: next(times))
    assert [patience.remaining_s() for _ in range(3)] == [10.0, 6.0, 0.0]


def test_all_are_asked_to_end_before_the_first_is_waited_for(told) -> None:
    ended = threading.Event()

    class First(type(told)):
        def close(self) -> None:
            assert ended.wait(WAIT_S)

    class Second(type(told)):
        def close(self) -> None:
            ended.set()

    warnings: list[str] = []
    asides = [beside(sink, warnings) for sink in (First(), Second())]
    SinkGroup(asides, [sink.request_close for sink in asides]).close()  # of a run that failed, so none has ended yet
    assert warnings == []


def test_a_result_has_the_sink_end_before_it_is_waited_for(told, result) -> None:
    ended = threading.Event()

    class Ending(type(told)):
        def close(self) -> None:
            ended.set()

    sink = beside(Ending(), [])
    sink.finished(result("completed"))
    assert ended.wait(WAIT_S)
    sink.close()
