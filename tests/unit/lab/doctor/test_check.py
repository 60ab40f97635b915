"""Findings: their fields, their JSON, and the worst of several; and calls that do not answer."""

import threading

import pytest

from paceline.core.errors import WorldError
from paceline.lab.doctor.check import DoctorFinding, call_with_timeout, failure, failure_by, find_worst_state

OK, LOOK, WRONG = (
    DoctorFinding("a", "ok", "1"),
    DoctorFinding("b", "warning", "2", "mend"),
    DoctorFinding("c", "error", "3", "mend"),
)


@pytest.mark.parametrize(("state", "advice"), [("ok", "mend"), ("warning", ""), ("error", "")])
def test_there_is_advice_where_and_only_where_something_is_to_be_done(state: str, advice: str) -> None:
    with pytest.raises(AssertionError):
        DoctorFinding("a", state, "1", advice)  # type: ignore[arg-type]


def test_the_worst_state_of_several_is_reported() -> None:
    assert (
        find_worst_state([]),
        find_worst_state([OK]),
        find_worst_state([LOOK, OK]),
        find_worst_state([OK, WRONG, LOOK]),
    ) == ("ok", "ok", "warning", "error")


def test_a_finding_of_another_place_names_it() -> None:
    assert LOOK.with_location("rank 1 (hostB)").to_dict() == {
        "name": "b", "state": "warning", "found": "2", "advice": "mend", "where": "rank 1 (hostB)",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("message", "found", "advice"),
    [
        ("PORT: 1 (of 2) is taken (take 3)", "PORT: 1 (of 2) is taken", "take 3"),
        ("a.jpg is broken (starts with 'x'); remove it", "a.jpg is broken (starts with 'x')", "remove it"),
        ("it is broken", "it is broken", "fix it"),
    ],
)
def test_an_error_s_last_brackets_or_words_are_the_advice(message: str, found: str, advice: str) -> None:
    assert failure_by(WorldError(message)) == failure(found, advice)


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
