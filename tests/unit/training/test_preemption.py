"""Stop signals are recorded, not acted upon, and handlers are restored afterwards."""

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from paceline.core.interrupts import Interrupts
from paceline.core.process import ignore_stop_signals

ASKING = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP]


@pytest.fixture(autouse=True)
def handlers() -> Iterator[list]:
    """Give each signal a handler of the test's, which says that it was not noted, and see that it is back after."""
    escaped: list[int] = []

    def escape(number, frame) -> None:
        escaped.append(number)

    before = [signal.signal(number, escape) for number in ASKING]
    yield escaped
    after = [signal.signal(number, handler) for number, handler in zip(ASKING, before, strict=True)]
    assert after == [escape] * len(ASKING)


@pytest.mark.parametrize("number", ASKING)
def test_a_signal_is_recorded_and_ends_nothing(number: signal.Signals, handlers: list) -> None:
    with Interrupts() as interrupts:
        assert interrupts.requested == ""
        os.kill(os.getpid(), number)
        assert interrupts.requested == number.name
    assert handlers == []


# matrix: 20
def test_the_first_signal_is_recorded() -> None:
    with Interrupts() as interrupts:
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
        interrupts.request("SIGHUP")
        assert interrupts.requested == "SIGUSR1"


def test_a_stop_can_be_requested_from_any_thread() -> None:
    with Interrupts() as interrupts:
        asking = threading.Thread(target=interrupts.request, args=("SIGTERM",))
        asking.start()
        asking.join(timeout=10)
        assert interrupts.requested == "SIGTERM"


# matrix: 20
def test_a_second_ctrl_c_does_not_wait() -> None:
    with Interrupts() as interrupts:
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert interrupts.requested == "SIGINT"


def test_handlers_are_restored_after_an_error(handlers: list) -> None:
    with pytest.raises(RuntimeError), Interrupts():
        raise RuntimeError
    for number in ASKING:
        os.kill(os.getpid(), number)
    assert handlers == ASKING


def test_a_signal_that_was_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts:
            os.kill(os.getpid(), signal.SIGHUP)
            assert interrupts.requested == ""
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


# matrix: 20
def test_a_process_that_ignores_signals_at_exit_keeps_ignoring_them() -> None:
    before = [signal.getsignal(number) for number in ASKING]
    with Interrupts():
        ignore_stop_signals()
    try:
        assert [signal.getsignal(number) for number in ASKING] == [signal.SIG_IGN] * len(ASKING)
        for number in ASKING:
            os.kill(os.getpid(), number)
    finally:
        for number, handler in zip(ASKING, before, strict=True):
            signal.signal(number, handler)


def test_outside_the_main_thread_only_requests_are_recorded(handlers: list) -> None:
    noted: list[str] = []

    def work() -> None:
        with Interrupts() as interrupts:
            os.kill(os.getpid(), signal.SIGTERM)
            noted.append(interrupts.requested)
            interrupts.request("SIGTERM")
            noted.append(interrupts.requested)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(timeout=10)
    assert noted == ["", "SIGTERM"]
    assert handlers == [signal.SIGTERM]


def test_a_nested_context_lasts_until_the_outer_exit(handlers: list) -> None:
    interrupts = Interrupts()
    with interrupts:
        with interrupts:
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupts.requested == "SIGTERM"
    os.kill(os.getpid(), signal.SIGTERM)
    assert handlers == [signal.SIGTERM]


def test_the_first_signal_is_announced_if_configured(capfd) -> None:
    with Interrupts(announces=True):
        for number in (signal.SIGTERM, signal.SIGUSR1):
            os.kill(os.getpid(), number)
        assert capfd.readouterr().err == "stopping after this step (SIGTERM): the run is being saved\n"
    with Interrupts():
        os.kill(os.getpid(), signal.SIGTERM)
    assert capfd.readouterr().err == ""
