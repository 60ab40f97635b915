"""Write a model card from the records of a run: accuracy, training, hardware and energy."""

import csv
import math
import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from io import TextIOWrapper
from itertools import pairwise
from pathlib import Path
from typing import Any

from paceline.core.csv_cells import from_cell
from paceline.core.errors import PacelineError
from paceline.core.files import open_to_read
from paceline.core.json_file import read_json
from paceline.core.metric import MULTI_LABEL, format_metric, metric_label
from paceline.core.results import ClassCount, RunResult, printable_class_name, worst_classes
from paceline.core.run_dir import RunDir, read_lines
from paceline.core.statistics import Interval, wilson_interval
from paceline.core.templates import text_environment
from paceline.core.units import accuracy, count, number, seconds
from paceline.data.files import printable
from paceline.inference.classifier import Classifier, Preprocessing
from paceline.inference.formats import divide_pixels

# An interval between telemetry samples that exceeds the median by this factor is downtime.
_GAP_FACTOR = 5
FILL_IN = "**[fill in]**"  # for what no run can know
_NUM_WORST_CLASSES = 5
_VERSIONS = ("paceline", "torch", "torchvision", "python", "cuda")


@dataclass(frozen=True)
class ConfusedPair:
    """A class, a class predicted for it, and the number of these images."""

    name: str
    predicted: str
    images: int


@dataclass(frozen=True)
class CheckpointEval:
    """An evaluation: a description of its weights, number of images, top-1 and top-5 with intervals, and classes.

    With several labels per image, `metrics` have values for display, by name, and top-1 and top-5 are None.
    `classes` and `confused`, most frequent first, are known for the run's last evaluation only.
    """

    description: str
    num_images: int
    top1: Interval | None
    top5: Interval | None
    classes: tuple[ClassCount, ...] = ()
    confused: tuple[ConfusedPair, ...] = ()
    metrics: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class CheckpointRecord:
    """Records of a checkpoint; a killed run has no result, and a run without evaluations no accuracy.

    `plan` and `machine` are as in their files, empty if missing. `images_seen` counts training images with repetition
    (None if the checkpoint was not evaluated). `energy_wh` is the energy of all GPUs of the run's nodes in watt-hours
    (None if not measured).
    """

    step: int
    evaluation: CheckpointEval | None
    plan: Mapping[str, Any]
    machine: Mapping[str, Any]
    result: RunResult | None
    images_seen: int | None = None
    energy_wh: float | None = None


def read_checkpoint_record(run: Path, checkpoint: Path) -> CheckpointRecord:
    """Return what run directory `run` recorded about `checkpoint`. Raise `PacelineError` for damaged files."""
    rundir = RunDir(run)
    step = int(checkpoint.name.removeprefix("step-"))
    evals = list(read_lines(rundir.evals))
    row = next((each for each in reversed(evals) if each.get("step") == step), None)
    evaluation = None if row is None else _parse_eval(row)
    if evaluation is not None and row is evals[-1]:
        evaluation = replace(evaluation, classes=rundir.read_classes(), confused=_read_confused_pairs(rundir.confusion))
    result = rundir.read_result() if (rundir.path / "result.json").is_file() else None
    return CheckpointRecord(
        step=step,
        evaluation=evaluation,
        plan=_read_json_object(rundir.path / "plan.json"),
        machine=_read_json_object(rundir.path / "machine.json"),
        result=result,
        images_seen=row.get("images_seen") if row else None,
        energy_wh=measured_energy_wh(rundir, result) if result else None,
    )


def _parse_eval(row: Mapping[str, Any]) -> CheckpointEval:
    # Averaged weights are the ones evaluated if the run has any.
    prefix = "ema_" if row.get("ema_loss", row.get("ema_top1")) is not None else ""
    num_images, whose = row["images"], "the averaged weights" if prefix else "the weights"
    if f"{prefix}top1" not in row:
        metrics = {metric_label(name): format_metric(name, float(row[f"{prefix}{name}"])) for name in MULTI_LABEL}
        return CheckpointEval(whose, num_images, None, None, metrics=metrics)
    top1, top5 = (wilson_interval(round(row[f"{prefix}{name}"] * num_images), num_images) for name in ("top1", "top5"))
    return CheckpointEval(whose, num_images, top1, top5)


def _read_confused_pairs(path: Path) -> tuple[ConfusedPair, ...]:
    # The diagonal of the confusion matrix holds the correct predictions.
    try:
        with TextIOWrapper(open_to_read(path), encoding="utf-8", newline="") as file:
            (_, *names), *rows = csv.reader(file, strict=True)
        cells = [
            ConfusedPair(from_cell(name), from_cell(names[column]), int(images))
            for row, (name, *values) in enumerate(rows)
            for column, images in enumerate(values)
            if column != row and int(images)
        ]
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, IndexError, csv.Error) as error:
        raise PacelineError(f"{path}: cannot be read: {error} (remove it)") from None
    return tuple(sorted(cells, key=lambda each: -each.images))


def measured_energy_wh(rundir: RunDir, result: RunResult) -> float | None:
    """Return the GPUs' energy in watt-hours: their time-weighted mean power times the run time of all processes."""
    ran_s = result.goodput.wall_s - result.goodput.down_s if result.goodput else result.time.wall_s
    nodes = [
        _mean_power_w(rundir.telemetry(node)) for node in range(len(list(rundir.path.glob("telemetry.node*.jsonl"))))
    ]
    total_w = math.fsum(nodes)
    return total_w * ran_s / 3600 if nodes and math.isfinite(total_w) else None


def _mean_power_w(path: Path) -> float:
    """Return the mean power of a node's GPUs in watts while a process ran; NaN if unknown."""
    samples = [(each["unix_s"], [gpu.get("power_w") for gpu in each.get("gpus", ())]) for each in read_lines(path)]
    known = [(unix_s, math.fsum(powers)) for unix_s, powers in samples if powers and None not in powers]
    spans = [(stop - start, (first + second) / 2) for (start, first), (stop, second) in pairwise(known)]
    longest_s = _GAP_FACTOR * statistics.median([span_s for span_s, _ in spans] or [0])
    spans = [span for span in spans if span[0] <= longest_s]
    length_s = math.fsum(span_s for span_s, _ in spans)
    return math.fsum(span_s * power_w for span_s, power_w in spans) / length_s if length_s > 0 else math.nan


def _read_json_object(path: Path) -> dict[str, Any]:
    try:
        values = read_json(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise PacelineError(f"{path}: cannot be read: {error} (remove it, or fix it)") from None
    return values if isinstance(values, dict) else {}


def render_model_card(
    classifier: Classifier,
    record: CheckpointRecord,
    *,
    name: str,
    library: str,
    input_description: str,
    usage_code: str,
    is_calibrated: bool = True,
) -> str:
    """Return the model card of the file or folder `name`: Markdown with the Hugging Face Hub's header.

    `input_description` describes the model's input, `usage_code` is code that runs it with `library`. `is_calibrated`
    is whether the file divides logits by the classifier's temperature, if it has one. The sections follow Mitchell et
    al. 2019, Model Cards for Model Reporting (arXiv 1810.03993).
    """
    # A card is published, so it must hold no path, host name or user name.
    recipe, evaluation, result, machine = classifier.recipe, record.evaluation, record.result, record.machine
    # Numbers of the whole run need a note unless the checkpoint is its last step.
    whole_run = " (of the whole run)" if result and record.step != result.steps else ""
    text = (
        text_environment(
            "paceline.inference",
            count=count,
            accuracy=accuracy,
            number=number,
            seconds=seconds,
            markdown=_escape_markdown,
        )
        .get_template("model_card.md.j2")
        .render(
            classifier=classifier,
            recipe=recipe,
            record=record,
            header=_card_header(classifier, evaluation, name, library),
            name=name,
            input_description=input_description,
            preprocessing=_describe_preprocessing(classifier.preprocessing),
            usage_code=usage_code,
            evaluation=evaluation,
            evaluated_size=classifier.evaluated_image_size,
            weakest=worst_classes(evaluation.classes, _NUM_WORST_CLASSES) if evaluation else [],
            num_worst=_NUM_WORST_CLASSES,
            result=result,
            trained=_describe_training(record, result, is_whole_run=not whole_run) if result else "",
            wall_s=(result.goodput or result.time).wall_s if result else 0.0,
            whole_run=whole_run,
            hardware=_describe_hardware(machine),
            versions=", ".join(f"{each} {machine[each]}" for each in _VERSIONS if machine.get(each)),
            is_calibrated=is_calibrated,
            fill_in=FILL_IN,
        )
    )
    return printable_class_name(text)


def _card_header(classifier: Classifier, evaluation: CheckpointEval | None, name: str, library: str) -> str:
    """Return the metadata that the Hugging Face Hub reads, with the accuracy if it is that of the exported model."""
    from huggingface_hub import EvalResult, ModelCardData  # slow to import

    data = classifier.recipe.data
    is_measured = evaluation is not None and classifier.evaluated_image_size is None and data.eval_views == 1
    intervals = {"top-1": evaluation.top1, "top-5": evaluation.top5} if evaluation and is_measured else {}
    shares = {metric: each.value for metric, each in intervals.items() if each}
    header = ModelCardData(
        model_name=printable_class_name(name),
        library_name=library,
        pipeline_tag="image-classification",
        tags=list(dict.fromkeys(("image-classification", library, "paceline"))),
        license="unknown",
        eval_results=[
            EvalResult(
                task_type="image-classification",
                dataset_type=data.source.name,
                dataset_name=data.source.name,
                metric_type="accuracy",
                metric_name=metric,
                metric_value=value,
            )
            for metric, value in shares.items()
        ]
        or None,
    )
    return header.to_yaml()


def _describe_preprocessing(preprocessing: Preprocessing) -> str:
    size = preprocessing.image_size
    names = {1: "grayscale", 3: "RGB"}
    form = preprocessing.pixel_format
    color = names[form.channels] if form.is_photo else str(form)
    how = (
        f"the whole image, resized to {size} x {size} pixels"
        if preprocessing.resize is None
        else f"the short side scaled to {preprocessing.resize} pixels and the center cropped to {size} x {size}"
    )
    mean, std = (", ".join(f"{each:.4g}" for each in values) for values in (preprocessing.mean, preprocessing.std))
    how = f"{how}, {preprocessing.interpolation} with antialiasing"
    return f"{color}, {how}; mean {mean} and std {std} of {divide_pixels(preprocessing)}."


def _describe_training(record: CheckpointRecord, result: RunResult, *, is_whole_run: bool) -> str:
    run = f"{count(round(result.epochs, 2), 'epoch')}, {count(result.images_seen, 'image')}, {result.status}"
    if is_whole_run:
        return run
    steps_per_epoch, images = record.plan.get("steps_per_epoch"), record.images_seen
    known = [count(round(record.step / steps_per_epoch, 2), "epoch")] if steps_per_epoch else []
    known += [] if images is None else [count(images, "image")]
    return f"{', '.join(known) or count(record.step, 'step')}; the run: {run}"


def _describe_hardware(machine: Mapping[str, Any]) -> str:
    gpus = machine.get("cuda_devices") or []
    counted = ", ".join(f"{gpus.count(each)} x {each}" for each in dict.fromkeys(gpus))
    return (
        f"{counted} per node" if gpus else f"{machine.get('cpu', 'unknown')}, {machine.get('logical_cores', '?')} cores"
    )


def _escape_markdown(text: str) -> str:
    text = printable(text).replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([\\`*_\[\]|#~])", r"\\\1", text)
