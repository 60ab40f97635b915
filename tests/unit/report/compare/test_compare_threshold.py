"""The level below which a comparison fails."""

from dataclasses import replace

import pytest

from paceline.core.errors import RecipeError
from paceline.report.compare_runs import Threshold, check_thresholds, parse_thresholds


@pytest.fixture
def result(made, compared, tmp_path):
    """Return a comparison with a group that is half as fast and one that misses the target."""
    base = made.Made()
    slow, bad = replace(base, batch=64, epoch_s=40, images_per_s=1300), replace(base, batch=32, best=0.5)
    folders = [made.write(tmp_path / f"b{run.batch}", run) for run in (base, slow, bad)]
    return compared(*folders, target=0.8)


@pytest.mark.parametrize(
    "word, found",
    [
        ("1.2", Threshold("speedup", 1.2)),
        ("top1=0.75", Threshold("top1", 0.75)),
        ("gap=-0.01", Threshold("gap", -0.01)),
        ("images_per_s=1e3", Threshold("images_per_s", 1000)),
    ],
)
def test_a_measure_may_be_named_and_is_the_speed_up_else(word, found):
    assert parse_thresholds([word], "top1") == [found]


@pytest.mark.parametrize(
    "word, text",
    [
        ("speed=1", r"^--fail-below: 'speed' is not measured \(did you mean 'speedup'\?\) \(use speedup, gap, "),
        ("top5=0.5", r"^--fail-below: 'top5' is not measured .*images_per_s, top1\)$"),
        ("fast", r"^--fail-below: 'fast' has no number \(write \[METRIC=\]VALUE, such as speedup=1.2\)$"),
        ("nan", r"^--fail-below: 'nan' has no number"),
        ("inf", r"^--fail-below: 'inf' has no number"),
        ("top1=75", r"^--fail-below: 'top1=75' is not an accuracy \(write a number from 0 to 1, such as top1=0.75\)$"),
        ("gap=-1.5", r"^--fail-below: 'gap=-1.5' is not an accuracy"),
    ],
)
def test_an_invalid_threshold_is_refused(word, text):
    with pytest.raises(RecipeError, match=text):
        parse_thresholds([word], "top1")


def test_who_falls_below_is_named_with_its_runs_and_by_how_much(result):
    slow, bad = check_thresholds(result, [Threshold("speedup", 0.9)])
    assert slow.startswith("batch 64 (") and slow.endswith(
        "/b64): speedup is 0.5x of batch 128, 0.4x below the minimum of 0.9x"
    )
    assert "speedup is unknown, as it or the first group does not reach the target; the minimum is 0.9x" in bad


@pytest.mark.parametrize(
    "measure, passes, fails",
    [("top1", 0.5, 0.51), ("gap", -0.31, -0.29), ("images_per_s", 1300, 1301)],
)
def test_each_measure_fails_below_its_level_and_not_at_it(result, measure, passes, fails):
    assert check_thresholds(result, [Threshold(measure, passes)]) == []
    assert len(check_thresholds(result, [Threshold(measure, fails)])) == 1


def test_the_first_group_has_no_threshold(result):
    assert check_thresholds(result, [Threshold("images_per_s", 2000)])[0].startswith("batch 64")
    assert len(check_thresholds(result, [Threshold("images_per_s", 5000)])) == 2


def test_nothing_to_compare_with_is_no_pass(made, compared, tmp_path):
    alone = compared(made.write(tmp_path / "a", made.Made()))
    assert check_thresholds(alone, []) == []
    with pytest.raises(RecipeError, match=r"^--fail-below: there is nothing to compare with"):
        check_thresholds(alone, [Threshold("top1", 0.1)])
