"""Findings: their fields, their JSON, and the worst of several."""

import pytest

from paceline.core.errors import WorldError
from paceline.lab.doctor.check import DoctorFinding, find_worst_state, has_problem

OK, LOOK, WRONG = (
    DoctorFinding.ok("a", "1"),
    DoctorFinding.warning("b", "2", "mend"),
    DoctorFinding.problem("c", "3", "mend"),
)


@pytest.mark.parametrize(("state", "advice"), [("ok", "mend"), ("look", ""), ("wrong", "")])
def test_there_is_advice_where_and_only_where_something_is_to_be_done(state: str, advice: str) -> None:
    with pytest.raises(AssertionError):
        DoctorFinding("a", state, "1", advice)  # type: ignore[arg-type]


def test_the_worst_state_of_several_is_reported() -> None:
    assert (
        find_worst_state([]),
        find_worst_state([OK]),
        find_worst_state([LOOK, OK]),
        find_worst_state([OK, WRONG, LOOK]),
    ) == ("ok", "ok", "look", "wrong")
    assert has_problem([OK, WRONG]) and not has_problem([OK, LOOK])


def test_a_finding_of_another_place_names_it() -> None:
    assert LOOK.with_location("rank 1 (hostB)").to_dict() == {
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
    assert DoctorFinding.from_error("port", WorldError(message)) == DoctorFinding.problem("port", found, advice)
