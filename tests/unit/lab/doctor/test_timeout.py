"""Calls that do not answer are abandoned after a timeout; results and errors are passed on."""

import threading

import pytest

from paceline.lab.doctor.check import call_with_timeout


def test_an_answer_is_returned_and_an_error_raised() -> None:
    assert call_with_timeout(lambda: 7) == 7
    assert call_with_timeout(lambda: None) is None

    def fail() -> None:
        raise FileNotFoundError(2, "No such file")

    with pytest.raises(FileNotFoundError):
        call_with_timeout(fail)


def test_who_does_not_answer_is_not_waited_for() -> None:
    never = threading.Event()
    try:
        with pytest.raises(TimeoutError, match=r"^no answer within 1 ms$"):
            call_with_timeout(never.wait, timeout_s=0.001)
    finally:
        never.set()
