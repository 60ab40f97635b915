"""`core.results`: result.json holds what the design lists, and reads back to the same values."""

import json
import math
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel, ValidationError

from paceline.core.results import (
    FINISHED,
    ClassCount,
    ClassTable,
    EvalReport,
    EvalResult,
    RunResult,
    StageResult,
    Status,
    ThroughputResult,
    TimeResult,
)

# The keys of result.json as the design lists them (DESIGN.md, section 4).
DESIGNED = {
    RunResult: (
        "schema_version status recipe_hash world_size epochs steps images_seen eval throughput time stages verdict "
        "weights_sha256 provenance"
    ),
    EvalResult: "images top1 top5 loss",
    ThroughputResult: "images_per_s spread n excluded_s",
    TimeResult: "wall_s startup_s train_s eval_s checkpoint_s to_target_s",
    StageResult: "host_s device_s share",
}


@pytest.mark.parametrize("kind", DESIGNED, ids=lambda kind: kind.__name__)
def test_every_designed_key_is_a_field(kind):
    assert set(DESIGNED[kind].split()) - set(kind.model_fields) == set()


def test_the_statuses_are_the_designed_ones():
    ended = ("completed", "target_reached", "patience_reached", "time_reached", "diverged")
    assert get_args(Status) == (*ended, "preempted", "failed") and set(ended) == FINISHED


def test_a_result_survives_json(result):
    assert RunResult.model_validate_json(result.model_dump_json()) == result
    assert RunResult.model_validate(json.loads(result.model_dump_json())) == result


def test_the_run_directory_is_not_part_of_the_json(result):
    placed = result.of(Path("runs/a"))
    assert placed.run_dir == Path("runs/a") and result.run_dir is None
    assert placed.model_dump_json() == result.model_dump_json()


def test_a_result_without_the_step_of_the_best_is_read(result):
    values = json.loads(result.model_dump_json())
    for name in ("best_step", "best_epoch", "parameters"):
        del values[name]
    assert RunResult.model_validate(values) == result


def test_images_a_second_are_none_where_no_step_was_counted(result):
    nothing = ThroughputResult(images_per_s=0.0, spread=(0.0, 0.0), n=0, excluded_s=0.5)
    assert result.model_copy(update={"throughput": nothing}).images_per_s is None
    assert result.images_per_s == result.throughput.images_per_s == 1000.5


def test_a_run_that_evaluated_nothing_survives_json(result):
    bare = result.model_copy(update={"eval": None, "best": None, "stages": {}, "verdict": {}})
    assert RunResult.model_validate_json(bare.model_dump_json()) == bare


@pytest.mark.parametrize("loss", [math.inf, -math.inf, math.nan])
def test_a_loss_that_is_no_number_survives_strict_json(loss):
    """Weights can be finite and their validation loss not; the file must still be JSON, and readable."""

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    written = EvalResult(images=1, top1=0.0, top5=0.0, loss=loss).model_dump_json()
    json.loads(written, parse_constant=refuse)
    read = EvalResult.model_validate_json(written).loss
    assert read == loss or (math.isnan(read) and math.isnan(loss))


@pytest.mark.parametrize("ece", [None, 0.25, math.inf])
def test_a_calibration_error_survives_json_measured_or_not(ece):
    result = EvalResult(images=1, top1=0.0, top5=0.0, loss=1.0, ece=ece)
    assert EvalResult.model_validate_json(result.model_dump_json()) == result


def test_a_result_of_before_calibration_was_measured_is_read():
    read = EvalResult.model_validate({"images": 1, "top1": 0.5, "top5": 1.0, "loss": 0.25})
    assert (read.ece, read.mean_class_accuracy) == (None, None)


def test_a_result_of_before_there_were_averages_is_read(result):
    values = json.loads(result.model_dump_json())
    for name in ("ema", "train_eval", "gap", "skipped_steps"):
        del values[name]
    assert RunResult.model_validate(values) == result


def result_of(top1: float) -> EvalResult:
    return EvalResult(images=8, top1=top1, top5=1.0, loss=1.0)


def test_the_averaged_weights_are_primary_if_there_are_any():
    assert EvalReport(val=result_of(0.5)).primary == result_of(0.5)
    assert EvalReport(val=result_of(0.5), ema=result_of(0.25)).primary == result_of(0.25)


def test_the_gap_is_between_training_and_validation_images_of_the_same_weights():
    assert EvalReport(val=result_of(0.5)).gap is None
    assert EvalReport(val=result_of(0.5), ema=result_of(0.625), train=result_of(0.75)).gap == 0.25


def test_a_report_is_equal_after_json_except_for_its_classes():
    bare = EvalReport(val=result_of(0.5), ema=result_of(0.625), train=result_of(0.75))
    full = bare.model_copy(update={"classes": ClassTable((ClassCount("a", 8, 4),))})
    assert EvalReport.model_validate_json(full.model_dump_json()) == bare


@pytest.mark.parametrize("part", ["", "eval", "throughput", "time", "stages.forward"])
def test_a_key_that_no_version_knows_is_refused_at_every_level(result, part):
    values = json.loads(result.model_dump_json())
    section = values
    for key in filter(None, part.split(".")):
        section = section[key]
    section["extra"] = 1
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        RunResult.model_validate(values)


def test_every_level_is_frozen(result):
    parts = [result, result.eval, result.throughput, result.time, result.stages["forward"]]
    assert all(isinstance(part, BaseModel) for part in parts)
    for part in parts:
        with pytest.raises(ValidationError, match="frozen"):
            setattr(part, next(iter(type(part).model_fields)), None)
