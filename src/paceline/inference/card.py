"""Write a model card from the records of a run."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from paceline.core.class_table import printable_class_name, worst_classes
from paceline.core.interval import Interval
from paceline.core.results import RunResult
from paceline.core.units import accuracy, count, number, seconds
from paceline.data.sources.places import printable as one_line
from paceline.inference.classifier import Classifier, Preprocessing
from paceline.inference.record import CheckpointEval, CheckpointRecord
from paceline.recipe.schema import Recipe

FILL_IN = "**[fill in]**"  # for what no run can know
_NUM_WORST_CLASSES = 5
_VERSIONS = ("paceline", "torch", "torchvision", "python", "cuda")


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

    It follows Mitchell et al. 2019, Model Cards for Model Reporting (arXiv 1810.03993), and holds no path, host name or
    user name. `input_description` describes the model's input, `usage_code` is code that runs it with `library`.
    """
    sections = [
        _card_header(library),
        f"# {_escape_markdown(name)}\n\n{_describe_model(classifier)}",
        f"## Use\n\n`images` are {input_description}: {_describe_preprocessing(classifier.preprocessing)}\n\n```python\n{usage_code.rstrip()}\n```",
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
        f"Of {evaluation.of} on {count(evaluation.num_images, 'validation image')}{note}. Intervals are Wilson's, "
        f"95 % ([doi](https://doi.org/10.1080/01621459.1927.10502953)). They cover the choice of images, not "
        f"that of the training seed.\n\n{table}"
    )
    weakest = worst_classes(evaluation.classes, _NUM_WORST_CLASSES)
    if not weakest:
        return text
    rows = [(_escape_markdown(each.name), f"{accuracy(each.accuracy)} of {each.images:,}") for each in weakest]
    text = f"{text}\n\nThe classes with the lowest accuracy:\n\n{_markdown_table(rows, ('class', 'top-1'))}"
    confused = [
        (f"{_escape_markdown(each.name)} as {_escape_markdown(each.taken_for)}", f"{each.images:,}")
        for each in evaluation.confused
    ]
    if not confused:
        return text
    return f"{text}\n\nThe most frequent confusions:\n\n{_markdown_table(confused[:_NUM_WORST_CLASSES], ('class', 'images'))}"


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
    text = one_line(text).replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([\\`*_\[\]|#~])", r"\\\1", text)
