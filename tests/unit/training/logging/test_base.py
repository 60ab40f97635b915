"""What a run tells of an evaluation: flat rows whose keys are known before the first."""

import json
from dataclasses import replace

import pytest

from paceline.core.results import EvalReport, EvalResult
from paceline.recipe.load import Patch, load
from paceline.recipe.schema import Recipe
from paceline.training.logging.base import (
    EvalRecord,
    StepRecord,
    eval_columns,
    from_eval_row,
    from_step_row,
    to_eval_row,
    to_step_row,
)

PLAIN = ["step", "epoch", "images_seen", "trained_s", "images", "top1", "top5", "loss", "ece", "mean_class_accuracy"]
AVERAGED = ["ema_top1", "ema_top5", "ema_loss", "ema_ece", "ema_mean_class_accuracy"]
TRAINED = ["train_top1", "train_loss", "gap"]
SPEED = ["train_s", "epoch_s", "images_per_s"]


def recipe(*words: str) -> Recipe:
    return load("digits", Patch.parse(["log.tensorboard=off", *words])).recipe


def judged(top1: float) -> EvalResult:
    return EvalResult(images=8, top1=top1, top5=1.0, loss=2.0, ece=0.125, mean_class_accuracy=top1)


def record(step: int, report: EvalReport) -> EvalRecord:
    return EvalRecord(step, step / 8, 8 * step, 1.5, report, train_s=1.25, epoch_s=2.5, images_per_s=25.6)


REPORTS = {
    (): EvalReport(val=judged(0.5)),
    ("train.ema.decay=0.9",): EvalReport(val=judged(0.5), ema=judged(0.625)),
    ("optim.name=schedule_free", "schedule.name=constant"): EvalReport(val=judged(0.5), ema=judged(0.625)),
    ("train.eval_train=on",): EvalReport(val=judged(0.5), train=judged(0.75)),
    ("train.ema.decay=0.9", "train.eval_train=on"): EvalReport(val=judged(0.5), ema=judged(0.625), train=judged(0.75)),
}


@pytest.mark.parametrize("words", REPORTS, ids=lambda words: " ".join(words) or "plain")
def test_the_columns_are_known_from_the_recipe(words: tuple[str, ...]) -> None:
    assert tuple(to_eval_row(record(4, REPORTS[words]))) == eval_columns(recipe(*words).train, recipe(*words).optim)


def test_a_row_has_the_raw_weights_the_averaged_ones_and_the_gap() -> None:
    row = to_eval_row(record(4, EvalReport(val=judged(0.5), ema=judged(0.625), train=judged(0.75))))
    assert list(row) == [*PLAIN, *AVERAGED, *TRAINED, *SPEED]
    assert row == {
        "step": 4, "epoch": 0.5, "images_seen": 32, "trained_s": 1.5,
        "images": 8, "top1": 0.5, "top5": 1.0, "loss": 2.0, "ece": 0.125, "mean_class_accuracy": 0.5,
        "ema_top1": 0.625, "ema_top5": 1.0, "ema_loss": 2.0, "ema_ece": 0.125, "ema_mean_class_accuracy": 0.625,
        "train_top1": 0.75, "train_loss": 2.0, "gap": 0.25,
        "train_s": 1.25, "epoch_s": 2.5, "images_per_s": 25.6,
    }  # fmt: skip


def test_accuracy_of_the_training_batches_has_columns_where_it_is_measured() -> None:
    made = replace(record(4, EvalReport(val=judged(0.5))), batch_top1=0.25, batch_top5=0.75)
    assert tuple(to_eval_row(made)) == eval_columns(
        recipe("train.accuracy=on").train, recipe("train.accuracy=on").optim
    )
    assert from_eval_row(to_eval_row(made)) == made
    step = StepRecord(4, 0.5, 32, 1.0, 0.1, 100.0, 1.5)
    assert set(to_step_row(replace(step, top1=0.25, top5=0.75))) - set(to_step_row(step)) == {"top1", "top5"}


def test_shares_of_stages_are_flat_keys_of_a_step_and_come_back() -> None:
    made = StepRecord(4, 0.5, 32, 1.0, 0.1, 100.0, 1.5, stage_shares={"data_wait": 0.25, "forward": 0.5})
    row = to_step_row(made)
    assert (row["data_wait_share"], row["forward_share"]) == (0.25, 0.5) and "stage_shares" not in row
    assert from_step_row(json.loads(json.dumps(row))) == made
    assert from_step_row({name: row[name] for name in row if not name.endswith("_share")}).stage_shares == {}


def test_what_was_not_asked_for_has_no_column() -> None:
    assert list(to_eval_row(record(4, EvalReport(val=judged(0.5))))) == [*PLAIN, *SPEED]


def test_a_row_comes_back_as_the_record_it_was_made_of_and_one_of_before_has_no_speed() -> None:
    made = record(4, EvalReport(val=judged(0.5)))
    assert from_eval_row(to_eval_row(made)) == made
    before = {name: value for name, value in to_eval_row(made).items() if name not in SPEED}
    assert from_eval_row(before) == replace(made, train_s=None, epoch_s=None, images_per_s=None)
