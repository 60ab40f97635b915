"""`core.errors`: exit codes that the documentation names, and the hint a typing slip gets."""

import pytest

from paceline.core import errors
from paceline.core.errors import PacelineError, PeerLostError, suggest_similar

EXIT_CODES = {
    "PacelineError": 2,
    "RecipeError": 2,
    "DataError": 2,
    "WorldError": 2,
    "CheckpointError": 4,
    "NonFiniteLossError": 3,
    "PeerLostError": 1,
    "WatchError": 1,
}


def test_every_error_has_its_documented_exit_code():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert {kind.__name__: kind.exit_code for kind in kinds} == EXIT_CODES


@pytest.mark.parametrize("name", EXIT_CODES)
def test_every_error_is_a_paceline_error_and_a_value_error(name):
    assert issubclass(getattr(errors, name), PacelineError)
    assert issubclass(getattr(errors, name), ValueError)


def test_a_lost_peer_error_has_its_message_and_whether_another_rank_reports_it():
    error = PeerLostError("rank 1 is gone", is_explained=True)
    assert (str(error), error.is_explained) == ("rank 1 is gone", True)


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("momentun", " (did you mean 'momentum'?)"),
        ("batchsize", " (did you mean 'batch_size'?)"),
        ("momentum", " (did you mean 'momentum'?)"),
        ("Batch_Size", " (did you mean 'batch_size'?)"),
        ("MOMENTUN", " (did you mean 'momentum'?)"),
        ("xyz", ""),
        ("", ""),
    ],
)
def test_near_miss_names_the_closest_known_word_or_nothing(word, hint):
    assert suggest_similar(word, ["lr", "momentum", "batch_size"]) == hint


def test_a_word_in_other_case_is_suggested_in_its_own_case():
    assert suggest_similar("adamW", ["adam", "adamw"]) == " (did you mean 'adamw'?)"
    assert suggest_similar("net", ["Nest", "Net"]) == " (did you mean 'Net'?)"


def test_near_miss_takes_any_iterable_and_none_at_all():
    assert suggest_similar("lr", {"lr": 1}.keys()) == " (did you mean 'lr'?)"
    assert suggest_similar("lr", []) == ""
