"""Findings: what they hold, what they say in JSON, and which of several is the worst."""

import pytest

from paceline.core.errors import WorldError
from paceline.lab.doctor.finding import Finding, is_any_wrong, worst

OK, LOOK, WRONG = Finding.ok("a", "1"), Finding.look("b", "2", "mend"), Finding.wrong("c", "3", "mend")


@pytest.mark.parametrize(("state", "advice"), [("ok", "mend"), ("look", ""), ("wrong", "")])
def test_there_is_advice_where_and_only_where_something_is_to_be_done(state: str, advice: str) -> None:
    with pytest.raises(AssertionError):
        Finding("a", state, "1", advice)  # type: ignore[arg-type]


def test_the_worst_state_of_several_is_told() -> None:
    assert (worst([]), worst([OK]), worst([LOOK, OK]), worst([OK, WRONG, LOOK])) == ("ok", "ok", "look", "wrong")
    assert is_any_wrong([OK, WRONG]) and not is_any_wrong([OK, LOOK])


def test_a_finding_of_another_place_says_so() -> None:
    assert LOOK.at("rank 1 (hostB)").to_dict() == {
        "name": "b", "state": "look", "found": "2", "advice": "mend", "where": "rank 1 (hostB)",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("message", "found", "advice"),
    [
        ("PORT: 1 (of 2) is taken (take 3)", "PORT: 1 (of 2) is taken", "take 3"),
        ("it is broken", "it is broken", "fix it"),
    ],
)
def test_an_error_s_last_brackets_are_the_advice(message: str, found: str, advice: str) -> None:
    assert Finding.refused("port", WorldError(message)) == Finding.wrong("port", found, advice)
