"""Metrics in the names that experiment trackers use: slashes for curves, dots for settings and results."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from paceline.core.results import RunResult
from paceline.recipe.plan import Plan
from paceline.recipe.schema.recipe import Recipe
from paceline.train.logsink import EvalRecord, StepRecord

PlainValue = str | int | float | bool | None


def step_metrics(record: StepRecord) -> dict[str, float]:
    """Return the metrics of a logged step, without unmeasured ones."""
    return step_curves(record) | {
        "train/epoch": record.epoch,
        "train/images_seen": record.images_seen,
        "train/trained_s": record.trained_s,
    }


def step_curves(record: StepRecord) -> dict[str, float]:
    """Return the metrics of a logged step that TensorBoard gets too."""
    curves = {"train/loss": record.loss, "train/lr": record.lr, "images_per_s": record.images_per_s}
    measured = {"train/top1": record.top1, "train/top5": record.top5}
    return curves | {name: value for name, value in measured.items() if value is not None}


def eval_metrics(record: EvalRecord) -> dict[str, float]:
    """Return the metrics of an evaluation, without unmeasured ones."""
    report = record.report
    values: dict[str, float | None] = {
        "eval/epoch": record.epoch,
        "eval/images_seen": record.images_seen,
        "eval/trained_s": record.trained_s,
        "eval/train_s": record.train_s,
        "eval/epoch_s": record.epoch_s,
        "eval/images_per_s": record.images_per_s,
        "eval/batch_top1": record.batch_top1,
        "eval/batch_top5": record.batch_top5,
        **{f"val/{name}": value for name, value in report.val.model_dump().items()},
    }
    if report.ema is not None:
        values |= {f"ema/{name}": value for name, value in report.ema.model_dump(exclude={"images"}).items()}
    if report.train is not None:
        values |= {"train_eval/top1": report.train.top1, "train_eval/loss": report.train.loss, "gap": report.gap}
    return {name: value for name, value in values.items() if value is not None}


def run_config(recipe: Recipe, plan: Plan) -> dict[str, Any]:
    """Return the recipe as nested plain values, with its hash and the world size."""
    return {**recipe.to_dict(), "recipe_hash": recipe.hash, "world_size": plan.world_size}


def flatten_result(result: RunResult) -> dict[str, PlainValue]:
    """Return the result as flat plain values, `throughput.images_per_s` and so on. Lists become JSON text."""
    return dict(flatten(result.model_dump(mode="json")))


def result_metrics(result: RunResult) -> dict[str, float]:
    """Return the numbers of a result as metrics, `result/throughput.images_per_s` and so on."""
    values = flatten_result(result).items()
    numbers = {name: value for name, value in values if isinstance(value, int | float) and not isinstance(value, bool)}
    return {f"result/{name}": float(value) for name, value in numbers.items()}


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, PlainValue]]:
    """Yield (dotted path, value) of each value in nested sections. A list is one value, as JSON."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        elif isinstance(value, list | tuple):
            yield f"{prefix}{key}", json.dumps(value)
        else:
            yield f"{prefix}{key}", value
