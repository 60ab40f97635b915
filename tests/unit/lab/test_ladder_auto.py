"""The ladder `auto` proposes candidates for the bottleneck, and ends where there is too little to gain."""

from dataclasses import replace

import pytest

from paceline.core.results import RunResult, ThroughputResult, TimeResult
from paceline.lab.ladder import LadderState, propose_rung
from paceline.lab.ladder_file import Rung
from paceline.recipe.load import Patch, load

from .simulated_machine import starved

RECIPE = load("digits").recipe


@pytest.fixture
def state():
    """Return a function that gives a rung that stands, with a verdict and what was tried above it."""

    def stand(bottleneck: str, ceiling: str = "", tried: tuple[str, ...] = ()) -> LadderState:
        result = RunResult(
            status="completed",
            recipe_hash=RECIPE.hash,
            world_size=1,
            epochs=1.0,
            steps=5,
            images_seen=640,
            eval=None,
            best=None,
            throughput=ThroughputResult(images_per_s=100, spread=(100, 100), n=1, excluded_s=0),
            time=TimeResult(wall_s=4, startup_s=1, train_s=2, eval_s=0, checkpoint_s=0, to_target_s=None),
            stages={},
            verdict={"bottleneck": bottleneck, "evidence": "It is.", "ceiling": ceiling, "try": ""},
            lr="0.1",
            weights_sha256="ab",
            provenance={"device": "cpu", "logical_cores": 2},
        )
        return LadderState("base", Patch(), 1, is_cold=False, results=(result,), tried=tried)

    return stand


def test_what_cures_the_bottleneck_is_proposed_as_a_rung(state):
    rung = propose_rung(RECIPE, state("compute-bound"))
    assert isinstance(rung, Rung)
    assert (rung.name, rung.set, rung.parity) == ("precision-bf16", {"train.precision": "bf16"}, "same")
    assert "forward" in rung.expects
    assert rung.explains


def test_what_was_tried_is_not_proposed_again_and_at_last_nothing_is(state):
    tried: tuple[str, ...] = ()
    while isinstance(rung := propose_rung(RECIPE, state("compute-bound", tried=tried)), Rung):
        assert rung.name not in tried
        tried = (*tried, rung.name)
    assert len(tried) > 1
    assert rung == "base is compute-bound, and no setting is left that may help"


def test_a_ceiling_of_a_few_percent_ends_it(state):
    why = propose_rung(RECIPE, state("input-bound", "at most 1.02x without waiting for data, all else unchanged"))
    assert why == "base is input-bound, and removing that would gain less than 3.0 %"
    assert isinstance(propose_rung(RECIPE, state("input-bound", "at most 1.5x without waiting for data")), Rung)


def test_nothing_is_proposed_from_runs_that_shared_the_cores_with_other_programs(state):
    found = state("compute-bound")
    busy = replace(found, results=(starved(found.results[0]),))
    assert propose_rung(RECIPE, busy).startswith("other processes held the cores 62 % of the time as base was measured")
