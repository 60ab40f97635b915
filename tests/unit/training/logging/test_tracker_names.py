"""The names that trackers show."""

import json
from dataclasses import replace

from paceline.training.logging.base import to_eval_row
from paceline.training.logging.trackers import eval_metrics, flatten_result, result_metrics, step_metrics


def test_a_step_has_all_that_its_line_has(step) -> None:
    assert step_metrics(step(4)) == {
        "train/loss": 0.5, "train/lr": 0.1, "images_per_s": 1000.0,
        "train/epoch": 0.4, "train/images_seen": 256, "train/trained_s": 2.0,
        "train/top1": 0.375, "train/top5": 0.875,
    }  # fmt: skip


def test_an_evaluation_has_every_column_and_no_value_twice(evaluation) -> None:
    record = evaluation(4)
    values = eval_metrics(record)
    assert sorted(values.values()) == sorted(list(to_eval_row(record).values())[1:])  # but for the step
    assert (values["val/top1"], values["ema/top1"], values["train_eval/top1"], values["gap"]) == (
        0.5,
        0.625,
        0.75,
        0.25,
    )


def test_what_was_not_measured_is_left_out(step, evaluation) -> None:
    shares = step_metrics(replace(step(4), stage_shares={"data_wait": 0.25}))
    assert shares.keys() - step_metrics(step(4)).keys() == {"stages/data_wait_share"}
    assert "train/top1" not in step_metrics(replace(step(4), top1=None, top5=None))
    record = evaluation(4)
    bare = record.report.model_copy(update={"ema": None, "train": None})
    object.__setattr__(record, "report", bare)
    assert not [name for name in eval_metrics(record) if name.startswith(("ema/", "train_eval/", "gap"))]


def test_a_result_is_flat_and_its_numbers_are_curves_of_one_point(result) -> None:
    values = flatten_result(result("completed"))
    assert values["status"] == "completed" and values["eval.top1"] == 0.5 and values["best"] is None
    assert json.loads(str(values["throughput.spread"])) == [900.0, 1100.0]
    numbers = result_metrics(result("completed"))
    assert numbers["result/throughput.images_per_s"] == 1000.0
    assert {type(value) for value in numbers.values()} == {float}
    assert "result/status" not in numbers
