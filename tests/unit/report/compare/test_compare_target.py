"""The target accuracy without --target: of runs that learned."""

import pytest

from paceline.report.compare_findings import chance_accuracy, choose_target, near_chance_accuracy
from paceline.report.compare_model import read_compared_run


@pytest.fixture
def bests(made, compared, tmp_path):
    """Return a function that compares runs of these best accuracies, with a learning rate each."""

    def work(*accuracies, num_classes=10, metric="top1", target=None):
        runs = [
            made.write(tmp_path / f"r{index}", made.Made(lr=1.0 + index, best=best, num_classes=num_classes))
            for index, best in enumerate(accuracies)
        ]
        return compared(*runs, metric=metric, target=target)

    return work


def test_a_run_at_chance_does_not_set_the_target(bests):
    found = bests(0.72, 0.51, 0.1003)
    assert (found.target, found.target_from) == (0.51, "lowest_learnt")
    assert [each.reached for each in found.groups] == [1, 1, 0]
    assert "lr 3.0 does not reach 51 %: its best is 10.03 %." in found.sentences
    assert found.notes == (
        "The target ignores r2 (at best 10.03 %): a run counts as not having learned if its best is below "
        "half of the best run's (36.00 %), or not above near chance (12 %, where guessing gives 10 %).",
    )


@pytest.mark.parametrize(
    "accuracies, classes, target",
    [
        ((0.72, 0.36), 10, 0.36),
        ((0.72, 0.35), 10, 0.72),
        ((0.2, 0.12), 10, 0.2),
        ((0.2, 0.121), 10, 0.121),
        ((0.95, 0.6), 2, 0.95),
        ((0.95, 0.61), 2, 0.61),
    ],
)
def test_half_of_the_best_and_a_fifth_above_chance_are_the_least(bests, accuracies, classes, target):
    assert bests(*accuracies, num_classes=classes).target == target


def test_without_a_trained_run_the_page_explains_the_missing_target(bests):
    found = bests(0.1, 0.11)
    assert (found.target, found.target_from) == (None, "chance")
    assert [each.to_target_s for each in found.groups] == [None, None]
    assert found.notes == (
        "No run has learned, as no best accuracy is above near chance (12 %, where guessing gives 10 %): there is no "
        "target to compare (set --target).",
    )


def test_a_requested_target_is_used_at_any_level(bests):
    found = bests(0.72, 0.1003, target=0.1)
    assert (found.target, found.target_from, found.notes) == (0.1, "asked", ())


def test_an_untrained_first_group_does_not_reach_the_target(bests):
    found = bests(0.1, 0.8)
    assert found.sentences[0] == "lr 2.0 reaches 80 % (after 2 min 40 s), which lr 1.0 does not reach."


def test_guesses_of_five_are_right_five_times_as_often(made, tmp_path):
    run = read_compared_run(made.write(tmp_path / "a", made.Made(num_classes=8)), "top5")
    assert (chance_accuracy(run, "top1"), chance_accuracy(run, "top5")) == (1 / 8, 5 / 8)
    assert (chance_accuracy(run, "top3"), chance_accuracy(run, "f1"), chance_accuracy(run, "auroc")) == (
        3 / 8,
        1 / 8,
        0.5,
    )
    assert near_chance_accuracy(run, "top5") == pytest.approx(0.7)  # rounding


def test_of_how_many_classes_nothing_is_known_any_accuracy_is_above_chance(made, tmp_path):
    path = made.write(tmp_path / "a", made.Made(best=0.02))
    (path / "plan.json").unlink()
    assert choose_target([read_compared_run(path, "top1")], "top1", None).level == 0.02
