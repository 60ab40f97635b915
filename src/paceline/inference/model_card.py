"""Write a model card from the records of a run: accuracy, training, hardware and energy."""

import csv
import math
import re
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from io import TextIOWrapper
from itertools import pairwise
from pathlib import Path
from typing import Any

from paceline.core.csv_cells import from_cell
from paceline.core.errors import PacelineError
from paceline.core.files import open_to_read
from paceline.core.json_file import read_json
from paceline.core.results import ClassCount, RunResult, printable_class_name, worst_classes
from paceline.core.run_dir import RunDir, read_lines
from paceline.core.statistics import Interval, wilson_interval
from paceline.core.units import accuracy, count, number, seconds
from paceline.data.files import printable
from paceline.inference.classifier import Classifier, Preprocessing
from paceline.recipe.schema import Recipe

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

    `classes` and `confused`, most frequent first, are known for the run's last evaluation only.
    """

    description: str
    num_images: int
    top1: Interval
    top5: Interval
    classes: tuple[ClassCount, ...] = ()
    confused: tuple[ConfusedPair, ...] = ()


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
    prefix = "ema_" if row.get("ema_top1") is not None else ""
    num_images = row["images"]
    top1, top5 = (wilson_interval(round(row[f"{prefix}{name}"] * num_images), num_images) for name in ("top1", "top5"))
    return CheckpointEval("the averaged weights" if prefix else "the weights", num_images, top1, top5)


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
) -> str:
    """Return the model card of the file or folder `name`: Markdown with the Hugging Face Hub's header.

    `input_description` describes the model's input, `usage_code` is code that runs it with `library`. The sections
    follow Mitchell et al. 2019, Model Cards for Model Reporting (arXiv 1810.03993).
    """
    # A card is published, so it must hold no path, host name or user name.
    usage = f"```python\n{usage_code.rstrip()}\n```"
    sections = [
        _card_header(library),
        f"# {_escape_markdown(name)}\n\n{_describe_model(classifier)}",
        f"## Use\n\n`images` are {input_description}: {_describe_preprocessing(classifier.preprocessing)}\n\n{usage}",
        f"## Intended use\n\n- Purpose: {FILL_IN}\n- Users and images: {FILL_IN}\n- Out of scope: {FILL_IN}",
        f"## Data\n\n{_markdown_table(_data_rows(classifier, record))}",
        f"## Accuracy\n\n{_accuracy_text(classifier, record.evaluation)}",
        f"## Training\n\n{_markdown_table(_training_rows(classifier.recipe, record))}",
        f"## Limits\n\n- The model knows only the classes above: it assigns one of them to any image.\n"
        f"- Images it was not evaluated on, groups of people or places with low accuracy: {FILL_IN}",
        f"## Licence\n\n- Of the weights: {FILL_IN}\n- Of the training data: {FILL_IN}\n- Contact: {FILL_IN}",
    ]
    return printable_class_name("\n\n".join(sections) + "\n")


def _card_header(library: str) -> str:
    tags = "\n".join(f"- {each}" for each in dict.fromkeys(("image-classification", library, "paceline")))
    return (
        f"---\nlibrary_name: {library}\npipeline_tag: image-classification\ntags:\n{tags}\n"
        "license: unknown # fill in: an identifier of https://huggingface.co/docs/hub/repositories-licenses\n---"
    )


def _describe_model(classifier: Classifier) -> str:
    classes = ", ".join(map(_escape_markdown, classifier.classes[:10])) + (
        ", ..." if len(classifier.classes) > 10 else ""
    )
    number = len(classifier.classes)
    return (
        f"An image classifier: `{classifier.recipe.model.name}`, {number:,} {'class' if number == 1 else 'classes'} "
        f"({classes}), trained with paceline."
    )


def _describe_preprocessing(preprocessing: Preprocessing) -> str:
    size = preprocessing.image_size
    colour = "RGB" if preprocessing.channels == 3 else "grayscale"
    how = (
        f"the whole image, resized to {size} x {size} pixels"
        if preprocessing.resize is None
        else f"the short side scaled to {preprocessing.resize} pixels and the center cropped to {size} x {size}"
    )
    mean, std = (", ".join(f"{each:.4g}" for each in values) for values in (preprocessing.mean, preprocessing.std))
    return f"{colour}, {how}, bilinear with antialiasing; mean {mean} and std {std} of pixels / 255."


def _data_rows(classifier: Classifier, record: CheckpointRecord) -> list[tuple[str, str]]:
    plan = record.plan
    rows = [("data set", f"`{classifier.recipe.data.source.name}`; origin: {FILL_IN}")]
    if "train_images" in plan:
        rows.append(("training images", f"{plan['train_images']:,}"))
        rows.append(("validation images", f"{plan['val_images']:,}"))
    rows.append(("classes", f"{len(classifier.classes):,}"))
    return rows


def _accuracy_text(classifier: Classifier, evaluation: CheckpointEval | None) -> str:
    if evaluation is None:
        return "Not measured: the run was not evaluated after this step."
    views = classifier.recipe.data.eval_views
    note = f", averaged over {views} views per image, which the exported model does not do" if views > 1 else ""
    table = _markdown_table(
        [("top-1", _format_interval(evaluation.top1)), ("top-5", _format_interval(evaluation.top5))]
    )
    text = (
        f"Of {evaluation.description} on {count(evaluation.num_images, 'validation image')}{note}. "
        "Intervals are Wilson's, 95 % ([doi](https://doi.org/10.1080/01621459.1927.10502953)). "
        f"They cover the choice of images, not that of the training seed.\n\n{table}"
    )
    weakest = worst_classes(evaluation.classes, _NUM_WORST_CLASSES)
    if not weakest:
        return text
    rows = [(_escape_markdown(each.name), f"{accuracy(each.accuracy)} of {each.images:,}") for each in weakest]
    text = f"{text}\n\nThe classes with the lowest accuracy:\n\n{_markdown_table(rows, ('class', 'top-1'))}"
    confused = [
        (f"{_escape_markdown(each.name)} as {_escape_markdown(each.predicted)}", f"{each.images:,}")
        for each in evaluation.confused
    ]
    if not confused:
        return text
    table = _markdown_table(confused[:_NUM_WORST_CLASSES], ("class", "images"))
    return f"{text}\n\nThe most frequent confusions:\n\n{table}"


def _format_interval(interval: Interval) -> str:
    assert interval.low is not None and interval.high is not None, "Wilson's interval has bounds"
    return f"{accuracy(interval.value)} ({accuracy(interval.low)} to {accuracy(interval.high)})"


def _training_rows(recipe: Recipe, record: CheckpointRecord) -> list[tuple[str, str]]:
    weights = "" if recipe.model.weights == "off" else ", from pretrained weights"
    return [
        ("recipe", f"`{recipe.hash}` (`recipe.yaml` of the run)"),
        ("model", f"`{recipe.model.name}`{weights}"),
        ("optimizer", recipe.optim.name),
        ("schedule", recipe.schedule.name),
        ("batch", count(recipe.data.global_batch_size, "image")),
        ("augmentation", ", ".join(each.name for each in recipe.data.augment) or "none"),
        ("precision", recipe.train.precision),
        ("step", f"{record.step:,}"),
        *(_result_rows(record, record.result) if record.result else []),
        *(
            [("energy", _format_energy(record.energy_wh) + _whole_run_suffix(record))]
            if record.energy_wh is not None
            else []
        ),
        *(_machine_rows(record.machine) if record.machine else []),
    ]


def _result_rows(record: CheckpointRecord, result: RunResult) -> list[tuple[str, str]]:
    run = f"{count(round(result.epochs, 2), 'epoch')}, {count(result.images_seen, 'image')}, {result.status}"
    wall_s = result.goodput.wall_s if result.goodput else result.time.wall_s
    return [
        ("learning rate", _escape_markdown(result.lr)),
        ("trained", f"{_describe_progress(record)}; the run: {run}" if _whole_run_suffix(record) else run),
        ("time", f"{seconds(wall_s)} of wall clock{_whole_run_suffix(record)}"),
        ("ranks", str(result.world_size)),
    ]


def _describe_progress(record: CheckpointRecord) -> str:
    steps_per_epoch, images = record.plan.get("steps_per_epoch"), record.images_seen
    epochs = [count(round(record.step / steps_per_epoch, 2), "epoch")] if steps_per_epoch else []
    return ", ".join([*epochs, *([] if images is None else [count(images, "image")])]) or count(record.step, "step")


def _whole_run_suffix(record: CheckpointRecord) -> str:
    # Numbers of the whole run need a note unless the checkpoint is its last step.
    is_before = record.result is not None and record.step != record.result.steps
    return " (of the whole run)" if is_before else ""


def _format_energy(energy_wh: float) -> str:
    return f"{number(energy_wh / 1000)} kWh, all GPUs of its nodes, from their mean power (no other components)"


def _machine_rows(machine: Mapping[str, Any]) -> list[tuple[str, str]]:
    gpus = machine.get("cuda_devices") or []
    counted = ", ".join(f"{gpus.count(each)} x {_escape_markdown(str(each))}" for each in dict.fromkeys(gpus))
    processor = _escape_markdown(f"{machine.get('cpu', 'unknown')}, {machine.get('logical_cores', '?')} cores")
    known = (f"{each} {_escape_markdown(str(machine[each]))}" for each in _VERSIONS if machine.get(each))
    return [("hardware", f"{counted} per node" if gpus else processor), ("versions", ", ".join(known))]


def _markdown_table(rows: Iterable[tuple[str, str]], headings: tuple[str, str] = ("", "")) -> str:
    lines = [f"| {' | '.join(headings)} |", "|---|---|", *(f"| {name} | {text} |" for name, text in rows)]
    return "\n".join(lines)


def _escape_markdown(text: str) -> str:
    text = printable(text).replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([\\`*_\[\]|#~])", r"\\\1", text)
