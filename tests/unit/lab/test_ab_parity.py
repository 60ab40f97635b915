"""Losses of pairs of runs show whether two settings train alike, or leave it open."""

import json

import pytest

from paceline.core.run_dir import RunDir
from paceline.lab.ab_test import LOSS_TOLERANCE, assess_parity, format_parity_caveat, is_disqualifying, read_mean_losses


def run_with(folder, records):
    """Return a run directory whose losses are recorded as (step, loss)."""
    folder.mkdir(parents=True, exist_ok=True)
    rundir = RunDir(folder)
    lines = [json.dumps({"step": step, "loss": loss}) + "\n" for step, loss in records]
    rundir.steps.write_text("".join(lines), encoding="utf-8")
    return rundir


def losses(tmp_path, here, below, after):
    return read_mean_losses(run_with(tmp_path / "here", here), run_with(tmp_path / "below", below), after)


def test_losses_are_means_over_the_steps_after_the_warm_up(tmp_path):
    here = [(5, 9.0), (10, 8.0), (20, 3.0), (25, 6.0)]
    below = [(5, 9.0), (10, 8.0), (20, 2.0), (25, 4.0)]
    assert losses(tmp_path, here, below, after=10) == ((10 * 3.0 + 5 * 6.0) / 15, (10 * 2.0 + 5 * 4.0) / 15)


def test_a_record_that_began_in_the_warm_up_is_left_out(tmp_path):
    here, below = [(8, 9.0), (16, 8.0), (24, 3.0)], [(8, 7.0), (16, 6.0), (24, 1.0)]
    assert losses(tmp_path, here, below, after=10) == (3.0, 1.0)


def test_losses_of_runs_that_record_unequally_often_are_of_the_same_steps(tmp_path):
    """Both fall by one a step: means over other steps would differ where training does not."""
    often = [(step, 100.0 - step + 0.5 * 5) for step in range(5, 31, 5)]
    rarely = [(step, 100.0 - step + 0.5 * 10) for step in range(10, 31, 10)]
    one, other = losses(tmp_path, often, rarely, after=5)
    assert one == other == 100.0 - 20  # at the middle of steps 10 to 30


@pytest.mark.parametrize(
    ("here", "below"),
    [
        ([], []),
        ([(5, 1.0)], [(5, 1.0)]),
        ([(10, 1.0), (20, float("nan"))], [(10, 1.0), (20, 1.0)]),
        ([(10, 1.0), (20, 1.0)], []),
        ([(12, 1.0), (24, 1.0)], [(10, 1.0), (20, 1.0), (24, 1.0)]),
    ],
)
def test_without_numbers_of_the_same_steps_after_the_warm_up_there_are_no_losses(tmp_path, here, below):
    assert losses(tmp_path, here, below, after=10) is None


def test_without_the_file_or_with_a_damaged_one_there_are_no_losses(tmp_path):
    whole = run_with(tmp_path / "whole", [(1, 1.0), (2, 1.0)])
    damaged = RunDir(tmp_path)
    assert read_mean_losses(whole, damaged, after=0) is None
    damaged.steps.write_text('{"step": 1}\nno record\n', encoding="utf-8")
    assert read_mean_losses(whole, damaged, after=0) is None


def test_equal_losses_are_the_same_with_no_gap():
    found = assess_parity([2.0, 3.0], [2.0, 3.0])
    assert (found.verdict, found.gap.value, found.gap.low, found.gap.high) == ("same", 0.0, 0.0, 0.0)
    assert (found.loss, found.loss_below, found.tolerance) == (2.5, 2.5, LOSS_TOLERANCE)
    assert found.why == "loss +0.00% (+0.00% to +0.00%) in 2 pairs: within 2%"


def test_a_gap_that_lies_all_beyond_the_tolerance_differs_either_way():
    assert assess_parity([1.1, 2.2, 3.3], [1.0, 2.0, 3.0]).verdict == "differs"
    assert assess_parity([0.9, 1.8, 2.7], [1.0, 2.0, 3.0]).verdict == "differs"


def test_scattered_gaps_leave_it_open_however_small_their_mean():
    found = assess_parity([1.1, 0.9], [1.0, 1.0])
    assert found.verdict == "open"
    assert found.why.endswith("in 2 pairs: too few to decide whether within 2%")


def test_a_single_pair_leaves_it_open():
    found = assess_parity([1.0], [1.0])
    assert (found.verdict, found.gap.low) == ("open", None)
    assert found.why == "loss +0.00% in one pair, so its scatter is unknown"


def test_a_small_gap_that_is_significant_is_still_the_same():
    """Equivalence is asked for, not whether chance alone explains the difference."""
    found = assess_parity([1.01, 1.011, 1.009], [1.0, 1.0, 1.0])
    assert found.gap.is_above(0)
    assert found.verdict == "same"


def test_losses_that_differ_on_average_forbid_a_setting_though_their_interval_leaves_it_open():
    found = assess_parity([1.04, 1.05, 1.03], [1.0, 1.0, 1.0])
    assert found.verdict == "open"
    assert is_disqualifying(found)
    assert is_disqualifying(assess_parity([1.1, 1.1], [1.0, 1.0]))
    assert not is_disqualifying(assess_parity([1.1, 0.9], [1.0, 1.0]))
    assert not is_disqualifying(assess_parity([1.0, 1.0], [1.0, 1.0]))


def test_what_is_not_forbidden_is_not_therefore_proved():
    assert format_parity_caveat(assess_parity([1.0, 1.0], [1.0, 1.0])) == ""
    assert format_parity_caveat(assess_parity([1.1, 0.9], [1.0, 1.0])) == "; not proved to train alike"
    assert format_parity_caveat(None).endswith(
        "no losses of the same steps were recorded after the warm-up (set log.every lower)"
    )
