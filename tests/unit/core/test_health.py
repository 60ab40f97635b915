"""Each finding about learning where it is due, and silence where it is not."""

import math

import pytest

from paceline.core.health import (
    MIN_STEPS,
    EvalPoint,
    RunHistory,
    eval_points,
    find_problems,
    is_suspicious,
    training_losses,
)
from paceline.core.results import BatchNormCheck, ClassCount, EvalResult

NAMES = ("top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot")


def point(step: int, top1: float, loss: float = 0.5, images: int = 10_000, **more: float) -> EvalPoint:
    return EvalPoint(step=step, epoch=step / 60, images=images, top1=top1, loss=loss, **{"raw_top1": top1, **more})


def matrix(rows: list[list[int]]) -> dict[str, object]:
    """Return the tables of a confusion matrix."""
    classes = tuple(
        ClassCount(NAMES[number % 10] + "2" * (number // 10), sum(row), row[number]) for number, row in enumerate(rows)
    )
    return {"classes": classes, "confusion": rows}


def even(top1: float, images: int = 1000, classes: int = 10) -> dict[str, object]:
    """Return tables of mistakes that are spread evenly."""
    right = round(top1 * images)
    wrong, left = divmod(images - right, classes - 1)
    rows = [[wrong] * classes for _ in range(classes)]
    for number, row in enumerate(rows):
        row[number] = right
        row[(number + 1) % classes] += left
    return matrix(rows)


def constant(share: float, images: int = 1000, classes: int = 10, predicted: int = 8) -> dict[str, object]:
    """Return tables in which `share` of every class are taken for one class, and the rest are right."""
    rows = []
    for number in range(classes):
        row = [0] * classes
        row[number] = images - round(share * images)
        row[predicted] += round(share * images)
        rows.append(row)
    return matrix(rows)


def ended(*points: EvalPoint, **fields: object) -> RunHistory:
    return RunHistory(points, **{"status": "completed", "steps": points[-1].step if points else 100, **fields})


def names(history: RunHistory) -> list[str]:
    return [each.name for each in find_problems(history)]


def finding(history: RunHistory, name: str):
    found = [each for each in find_problems(history) if each.name == name]
    assert len(found) == 1, names(history)
    return found[0]


def test_one_class_predicted_for_nearly_everything_names_the_class_and_the_counts() -> None:
    found = finding(ended(point(180, 0.154), **constant(0.94)), "one_class_predicted")
    assert found.severity == "error" and found.advice
    assert "'bag'" in found.evidence and "8,460 of the 9,000 images of other classes" in found.evidence
    assert found.numbers["wrong"] == 8460 and "10.00 %" in found.evidence


@pytest.mark.parametrize(
    ("tables", "why"),
    [
        (constant(0.75), "a quarter is right"),
        (even(0.9), "healthy"),
        (matrix([[90, 0], [3, 0]]), "three images of the other class"),
        (matrix([[9900, 0], [60, 40]]), "a rare class of which two fifths are found"),
        ({"classes": even(0.1)["classes"]}, "more classes than a matrix is kept for"),
    ],
)
def test_one_class_predicted_is_not_reported_if(tables: dict[str, object], why: str) -> None:
    assert "one_class_predicted" not in names(ended(point(180, 0.5), **tables)), why


def test_a_rare_class_that_is_never_predicted_is_one_class_predicted_at_any_top1() -> None:
    assert names(ended(point(180, 0.99), **matrix([[9900, 0], [100, 0]]))) == ["one_class_predicted"]


@pytest.mark.parametrize("top1", [0.08, 0.1, 0.104])
def test_at_chance_compares_with_always_predicting_the_most_frequent_class(top1: float) -> None:
    found = finding(ended(point(180, top1), **even(top1)), "at_chance")
    assert found.severity == "error" and "10.00 %" in found.evidence and found.numbers["guess"] == 0.1


@pytest.mark.parametrize(
    ("tables", "why"),
    [
        (even(0.12), "significantly above chance on 10,000 images"),
        (even(0.1, images=2), "20 images cannot tell 10 % from 20 %"),
        (even(0.01, images=3, classes=100), "300 images cannot tell 1 % from 2 %"),
        (matrix([[9700, 200], [20, 80]]), "top-1 below the share of the frequent class, and the rare one is found"),
        (matrix([[50]]), "one class"),
    ],
)
def test_at_chance_is_not_reported_if(tables: dict[str, object], why: str) -> None:
    top1 = sum(each.correct for each in tables["classes"]) / sum(each.images for each in tables["classes"])
    assert "at_chance" not in names(ended(point(180, top1), **tables)), why


def test_the_advice_on_a_useless_model_follows_from_its_training_loss() -> None:
    flat = [(step, 2.31) for step in range(25, 181, 25)]
    fell = [(step, 2.3 - step / 150) for step in range(25, 181, 25)]
    advice = [
        finding(ended(point(180, 0.1), losses=losses, **even(0.1)), "at_chance").advice for losses in (flat, fell)
    ]
    assert "Nothing was learned" in advice[0] and "2.31" in advice[0] and "2.30" in advice[0]
    assert "evaluation sees something else" in advice[1] and "1.4" in advice[1]


@pytest.mark.parametrize(
    "short",
    [
        {"status": "completed", "points": (point(MIN_STEPS - 1, 0.1),)},
        {"status": "preempted", "points": (point(59, 0.1),)},  # within the first epoch: the rate may still warm up
        {"status": "preempted", "points": (point(10, 0.6, 1.0), point(20, 0.1, 9.0))},
        {"status": None, "points": (point(59, 0.1),)},
        {"status": "preempted", "points": ()},
    ],
)
def test_a_short_run_has_no_findings(short: dict[str, object]) -> None:
    history = RunHistory(**short, losses=[(5, 2.0), (15, 1.5), (20, 1.0)], steps=20, **constant(1.0))
    assert find_problems(history) == () and not is_suspicious(history)


def test_weights_that_are_evaluated_alone_are_never_too_short() -> None:
    history = RunHistory((point(0, 0.1),), is_alone=True, **constant(1.0))
    assert names(history) == ["one_class_predicted"] and is_suspicious(history)


def test_classes_that_are_never_right_or_never_predicted_are_named_apart() -> None:
    rows = [[0] * 10 for _ in range(10)]
    for number in range(10):
        rows[number][number] = 100
    rows[6] = [100] + [0] * 9  # shirt: never predicted
    rows[2] = [0, 0, 0, 0, 100] + [0] * 5  # pullover: predicted, for a coat
    rows[4][2], rows[4][4] = 5, 95
    history = ended(point(180, 0.795), **matrix(rows))
    assert sorted(names(history)) == ["classes_never_predicted", "classes_never_right"]
    assert "'shirt' (100 images) is" in finding(history, "classes_never_predicted").evidence
    assert "'pullover' (100 images) is" in finding(history, "classes_never_right").evidence


def test_many_classes_that_are_never_right_are_counted_beyond_five() -> None:
    rows = [[0] * 20 for _ in range(20)]
    for number in range(20):
        rows[number][number if number < 12 else 0] = 50
    assert (
        " and 3 more are never predicted"
        in finding(ended(point(180, 0.6), **matrix(rows)), "classes_never_predicted").evidence
    )


def test_a_class_without_a_correct_image_is_not_reported_if_chance_explains_it() -> None:
    rows = [[0] * 10 for _ in range(10)]
    for number in range(10):
        rows[number][number], rows[number][0] = 60, 40
    rows[0][0] = 100
    rows[9] = [3] + [0] * 9  # three images, at an accuracy of 64 %: one time in twenty
    assert names(ended(point(180, 0.64), **matrix(rows))) == []


BEST = {"best": EvalResult(images=10_000, top1=0.75, top5=0.9, loss=1.0), "best_step": 60}


@pytest.mark.parametrize(
    ("is_kept", "evidence", "advice"),
    [
        (True, "was kept", "--checkpoint best"),
        (False, "not saved", "checkpoint.keep_best=on"),
        (None, "", "--checkpoint best"),
    ],
)
def test_a_best_far_above_the_last_reports_whether_its_checkpoint_was_kept(is_kept, evidence: str, advice: str) -> None:
    found = finding(ended(point(60, 0.75), point(120, 0.4), best_kept=is_kept, **BEST), "best_above_last")
    assert found.severity == "warning" and evidence in found.evidence and advice in found.advice
    assert "75.00 %" in found.evidence and "step 60" in found.evidence and "40.00 %" in found.evidence


def test_an_unfinished_run_is_advised_to_resume_first() -> None:
    history = ended(point(60, 0.75), point(120, 0.4), status="preempted", best_kept=True)
    assert finding(history, "best_above_last").advice.startswith("The run has not ended: resume it")


@pytest.mark.parametrize(
    ("best", "last", "images"),
    [
        (0.9300, 0.9290, 10_000),  # noise
        (0.8931, 0.8434, 10_000),  # a point or five, as at a high learning rate
        (0.9, 0.7, 20),  # few images
        (0.12, 0.10, 10_000),  # hardly learned
        (0.5, 0.5, 10_000),
    ],
)
def test_a_best_slightly_above_the_last_is_not_reported(best: float, last: float, images: int) -> None:
    assert names(ended(point(60, best, images=images), point(120, last, images=images))) == []


def test_the_averaged_weights_are_those_that_count() -> None:
    points = [point(60, 0.8, raw_top1=0.3, ema_top1=0.8), point(120, 0.81, raw_top1=0.81, ema_top1=0.81)]
    assert names(ended(*points)) == []


LOSSES = [(step, 2.2 * math.exp(-step / 400)) for step in range(10, 1201, 10)]


def run_of(val_losses: list[float], top1: list[float], **fields: object) -> RunHistory:
    points = [
        point(100 * number, right, loss) for number, (loss, right) in enumerate(zip(val_losses, top1, strict=True), 1)
    ]
    return ended(*points, **{"losses": LOSSES, **fields})


def test_a_validation_loss_that_rises_evaluation_by_evaluation_is_overfitting() -> None:
    top1 = [0.6, 0.7, 0.72, 0.71, 0.7, 0.68, 0.67]
    found = finding(run_of([1.2, 0.9, 0.85, 0.95, 1.1, 1.3, 1.5], top1), "overfitting")
    assert found.severity == "note" and "0.85 after step 300 to 1.5 after step 700" in found.evidence
    assert "while training loss fell" in found.evidence and "too confident" in found.evidence


def test_overfitting_that_costs_accuracy_is_a_warning() -> None:
    top1 = [0.8, 0.9, 0.9, 0.88, 0.86, 0.84, 0.8]
    assert finding(run_of([1.2, 0.9, 0.85, 0.95, 1.1, 1.3, 1.5], top1), "overfitting").severity == "warning"


def test_a_sudden_rise_is_a_collapse_and_no_overfitting() -> None:
    history = run_of([1.3, 1.1, 1.0, 4.5], [0.6, 0.7, 0.75, 0.10])
    assert names(history) == ["validation_collapsed", "best_above_last"]
    found = finding(history, "validation_collapsed")
    assert "from 1 after step 300 to 4.5 after step 400" in found.evidence and "no overfitting" in found.evidence
    assert "paceline eval" in found.advice


def test_a_collapse_reports_the_accuracy_on_training_images() -> None:
    points = [point(100, 0.7, 1.0), point(200, 0.1, 4.5, train_top1=0.101)]
    assert "10.10 %" in finding(ended(*points, losses=LOSSES), "validation_collapsed").evidence


@pytest.mark.parametrize(
    ("losses", "why"),
    [
        ([1.2, 1.0, 0.9, 0.8, 0.75], "it falls"),
        ([1.2, 0.8, 0.9, 0.95], "two evaluations after the lowest"),
        ([1.0, 0.8, 0.82, 0.81, 0.83, 0.84], "less than a tenth"),
        ([1.0, 0.8, 1.1, 0.9, 1.0, 0.85, 0.9], "up and down"),
        ([1.0, math.nan, math.inf], "not finite"),
    ],
)
def test_a_rising_validation_loss_is_not_reported_if(losses: list[float], why: str) -> None:
    assert names(run_of(losses, [0.7] * len(losses))) == [], why


def test_a_validation_loss_that_rises_with_the_training_loss_is_neither() -> None:
    rising = [(step, 0.5 + step / 400) for step in range(10, 1201, 10)]
    assert names(run_of([1.2, 0.9, 0.85, 0.95, 1.1, 1.3, 1.5], [0.7] * 7, losses=rising)) == []
    assert names(run_of([1.2, 0.9, 0.85, 0.95, 1.1, 1.3, 1.5], [0.7] * 7, losses=[])) == []


def test_nothing_is_overfitted_within_an_epoch() -> None:
    points = [point(8 * each, 0.5, loss) for each, loss in enumerate([1.2, 0.9, 0.95, 1.1, 1.3, 1.5, 1.7], 1)]
    assert points[-1].epoch < 1
    assert names(ended(*points, losses=[(step, 3 - step / 30) for step in range(1, 60)])) == []


def test_lagging_batch_norm_is_measured_and_reported_instead_of_a_collapse() -> None:
    history = run_of([1.3, 1.1, 1.0, 2.3], [0.6, 0.7, 0.75, 0.16], **constant(0.94))
    assert is_suspicious(history)
    check = BatchNormCheck(images=512, running=75, batch=446)
    checked = run_of([1.3, 1.1, 1.0, 2.3], [0.6, 0.7, 0.75, 0.16], batch_norm=check, **constant(0.94))
    assert names(checked) == ["one_class_predicted", "batch_norm_lags", "best_above_last"]
    found = finding(checked, "batch_norm_lags")
    assert "512 training images" in found.evidence and "87.11 %" in found.evidence and "14.65 %" in found.evidence
    assert "batch norm lags" in finding(checked, "one_class_predicted").advice


def test_batch_norm_is_excluded_as_a_cause_if_its_statistics_make_no_difference() -> None:
    check = BatchNormCheck(images=512, running=52, batch=60)
    history = run_of([1.3, 1.1, 1.0, 2.3], [0.6, 0.7, 0.75, 0.16], batch_norm=check, **constant(0.94))
    assert "batch_norm_lags" not in names(history)
    assert "not the cause" in finding(history, "validation_collapsed").evidence


def test_averaged_weights_far_below_the_raw_ones_are_a_warning() -> None:
    found = finding(ended(point(180, 0.3, raw_top1=0.9, ema_top1=0.3)), "averaged_below_raw")
    assert "30.00 %" in found.evidence and "90.00 %" in found.evidence and "train.ema.decay" in found.advice


def test_raw_weights_far_below_the_averaged_ones_are_a_note() -> None:
    assert finding(ended(point(180, 0.9, raw_top1=0.5, ema_top1=0.9)), "raw_below_averaged").severity == "note"


@pytest.mark.parametrize("status", ["preempted", None])
def test_averaged_weights_of_an_unfinished_run_are_not_reported(status) -> None:
    assert names(ended(point(180, 0.3, raw_top1=0.9, ema_top1=0.3), status=status)) == []


def test_averaged_weights_that_are_about_as_good_are_not_reported() -> None:
    assert names(ended(point(180, 0.93, raw_top1=0.91, ema_top1=0.93))) == []
    assert names(ended(point(180, 0.95, raw_top1=0.92, ema_top1=0.95))) == []  # what averaging is for


@pytest.mark.parametrize(("skipped", "severity"), [(1, "note"), (2, "warning")])
def test_skipped_steps_are_reported_with_their_share(skipped: int, severity: str) -> None:
    found = finding(ended(point(180, 0.9), skipped=skipped), "steps_skipped")
    assert found.severity == severity and "of 180" in found.evidence


@pytest.mark.parametrize(
    ("skipped", "steps", "expected"), [(16, 180, []), (80, 200_000, []), (60, 180, ["steps_skipped"])]
)
def test_steps_that_a_loss_scale_skips_are_usual(skipped: int, steps: int, expected: list[str]) -> None:
    history = ended(point(180, 0.9), skipped=skipped, steps=steps, scales_loss=True)
    assert names(history) == expected


def test_the_most_severe_come_first() -> None:
    history = ended(point(60, 0.75), point(120, 0.1), skipped=1, steps=120, **constant(1.0), **BEST)
    assert [each.severity for each in find_problems(history)] == ["error", "warning", "note"]


def test_a_healthy_run_has_none() -> None:
    top1 = [0.48, 0.79, 0.73, 0.87, 0.89, 0.84, 0.90, 0.916, 0.92]
    losses = [1.63, 1.0, 0.98, 0.56, 0.5, 0.65, 0.45, 0.42, 0.4]
    history = run_of(losses, top1, **even(0.92))
    assert find_problems(history) == () and not is_suspicious(history)


def test_invalid_records_are_skipped() -> None:
    good = {"step": 60, "epoch": 1.0, "images": 100, "top1": 0.5, "loss": 1.0}
    bad = [{}, {**good, "top1": 7}, {**good, "images": 0}, {**good, "images": 10**400}, {**good, "step": None}]
    assert [each.step for each in eval_points([*bad, good, {**good, "loss": "nan"}])] == [60, 60]
    assert training_losses([{"step": 1, "loss": "inf"}, {"loss": 1.0}, {"step": 2, "loss": 0.5}]) == ((2, 0.5),)
    assert (
        training_losses(
            [{"step": 10**400, "loss": 1.0}, {"step": math.nan, "loss": 1.0}, {"step": 1, "loss": math.inf}]
        )
        == ()
    )
