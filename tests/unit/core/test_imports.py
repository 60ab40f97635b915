"""The context for imports of large packages."""

import gc
from collections.abc import Iterator

import pytest

from paceline.core.imports import fast_imports


@pytest.fixture(autouse=True)
def _without_frozen_objects() -> Iterator[None]:
    """Search all objects for cycles, as a new program does; other tests leave out what was imported."""
    gc.unfreeze()
    yield
    gc.freeze()


def test_cycles_are_not_searched_in_the_context_and_are_after_it():
    with fast_imports():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_after_an_error_cycles_are_searched_too():
    with pytest.raises(ImportError), fast_imports():
        raise ImportError
    assert gc.isenabled()


def test_a_collector_that_was_off_or_had_frozen_objects_stays_as_it_was():
    gc.disable()
    gc.freeze()
    try:
        with fast_imports():
            pass
        assert not gc.isenabled()
        assert gc.get_freeze_count()  # some of them may have been freed
    finally:
        gc.unfreeze()
        gc.enable()


def test_objects_of_the_context_can_still_be_collected():
    class Cycle:
        pass

    with fast_imports():
        cycle = Cycle()
        cycle.itself = cycle
        del cycle
    gc.collect()
    assert not any(type(each).__name__ == "Cycle" for each in gc.get_objects())
