"""Losses of pairs of runs tell whether two settings train alike, or that they do not tell."""

import json

import pytest

from paceline.core.rundir import RunDir
from paceline.lab.parity import TOLERANCE, mean_loss, parity_of


def run_with(folder, records):
    """Return a run directory whose losses are recorded as (step, loss)."""
    folder.mkdir(parents=True, exist_ok=True)
    rundir = RunDir(folder)
    lines = [json.dumps({"step": step, "loss": loss}) + "\n" for step, loss in records]
    rundir.steps.write_text("".join(lines), encoding="utf-8")
    return rundir


def test_the_loss_is_the_mean_over_the_steps_after_the_warm_up(tmp_path):
    rundir = run_with(tmp_path, [(5, 9.0), (10, 8.0), (20, 3.0), (25, 6.0)])
    assert mean_loss(rundir, after=10) == (10 * 3.0 + 5 * 6.0) / 15


def test_a_record_that_began_in_the_warm_up_is_left_out(tmp_path):
    rundir = run_with(tmp_path, [(8, 9.0), (16, 8.0), (24, 3.0)])
    assert mean_loss(rundir, after=10) == 3.0


@pytest.mark.parametrize("records", [[], [(5, 1.0)], [(10, 1.0), (20, float("nan"))]])
def test_without_a_number_after_the_warm_up_there_is_no_loss(tmp_path, records):
    assert mean_loss(run_with(tmp_path, records), after=10) is None


def test_without_the_file_or_with_a_damaged_one_there_is_no_loss(tmp_path):
    assert mean_loss(RunDir(tmp_path), after=0) is None
    (tmp_path / "steps.jsonl").write_text('{"step": 1}\nno record\n', encoding="utf-8")
    assert mean_loss(RunDir(tmp_path), after=0) is None


def test_equal_losses_are_the_same_with_no_gap():
    found = parity_of([2.0, 3.0], [2.0, 3.0])
    assert (found.verdict, found.gap.value, found.gap.low, found.gap.high) == ("same", 0.0, 0.0, 0.0)
    assert (found.loss, found.loss_below, found.tolerance) == (2.5, 2.5, TOLERANCE)
    assert found.why == "loss +0.00% (+0.00% to +0.00%) in 2 pairs: within 2%"


def test_a_gap_that_lies_all_beyond_the_tolerance_differs_either_way():
    assert parity_of([1.1, 2.2, 3.3], [1.0, 2.0, 3.0]).verdict == "differs"
    assert parity_of([0.9, 1.8, 2.7], [1.0, 2.0, 3.0]).verdict == "differs"


def test_scattered_gaps_leave_it_open_however_small_their_mean():
    found = parity_of([1.1, 0.9], [1.0, 1.0])
    assert found.verdict == "open"
    assert found.why.endswith("in 2 pairs: too few to tell whether within 2%")


def test_a_single_pair_leaves_it_open():
    found = parity_of([1.0], [1.0])
    assert (found.verdict, found.gap.low) == ("open", None)
    assert found.why == "loss +0.00% in one pair, which does not tell how much that scatters"


def test_a_small_gap_that_is_significant_is_still_the_same():
    """Equivalence is asked for, not whether chance alone explains the difference."""
    found = parity_of([1.01, 1.011, 1.009], [1.0, 1.0, 1.0])
    assert found.gap.is_above(0)
    assert found.verdict == "same"
