"""Report section on learning: accuracy, loss, learning rate and throughput."""

from dataclasses import replace
from typing import Any, Final

from paceline.core.metric import ALWAYS, MULTI_LABEL, format_metric, metric_label, top_k
from paceline.core.units import number
from paceline.report import cells
from paceline.report.cells import choose_time_unit
from paceline.report.document import (
    Block,
    Chart,
    ChartLine,
    ChartRow,
    PageSection,
    Paragraph,
    Table,
    TableCell,
    TableColumn,
)
from paceline.report.read_run import RunData
from paceline.report.series import Point, Series, downsample
from paceline.report.text import clean_text, finite_or_none

# Lines of an evaluated metric by the prefix of its key.
_EVALUATED: Final = {"": "validation", "ema_": "averaged", "train_": "train split"}
_EVALUATION_COLUMNS: Final = {
    "epoch": "epoch",
    "step": "step",
    "top1": "top-1",
    "top5": "top-5",
    "loss": "loss",
    "ece": "ECE",
    "ema_top1": "averaged top-1",
    "ema_loss": "averaged loss",
    "train_top1": "training top-1",
    "train_loss": "training loss",
    "batch_top1": "batches' top-1",
    "batch_top5": "batches' top-5",
    "trained_s": "trained",
    "train_s": "in steps",
    "epoch_s": "per epoch",
    "images_per_s": "images/s",
}
_MAX_EVAL_ROWS = 500
_MAX_EXTRA_COLUMNS = 20
_NUM_UNIT_POINTS: Final = 40  # with which one axis is drawn in the unit of another


def learning_section(run: RunData) -> PageSection:
    """Return the curves and the table of evaluations."""
    evals, steps = downsample(run.evals), run.steps
    charts = [*_accuracy_charts(run, evals), *_loss_charts(run, evals), *_lr_charts(run), *_throughput_charts(run)]
    units = _x_units(evals, steps)
    charts = [replace(each, x_units=units) if each.x_label == "epoch" else each for each in charts]
    blocks: list[Block] = [ChartRow(charts)] if charts else []
    blocks += [Paragraph(text) for text in _explain_loss_order(run, evals)]
    if not steps.num_records:
        blocks.append(
            cells.missing_paragraph("No step was logged: the run was shorter than log.every, or ended before that.")
        )
    elif steps.per_point > 1:
        blocks.append(cells.missing_paragraph(_downsampling_note(steps)))
    if run.evals:
        blocks.append(_evaluation_table(run))
    else:
        blocks.append(
            cells.missing_paragraph("Nothing was evaluated: train.eval_every is off, or the run ended before that.")
        )
    return PageSection("learning", "Accuracy and loss", blocks)


def _x_units(evals: Series, steps: Series) -> dict[str, list[Point]]:
    """Return the steps and the seconds of training at some epochs; nothing if too few were recorded."""
    rows = [row for row in downsample([*steps.points, *evals.points], _NUM_UNIT_POINTS).points if "epoch" in row]
    units = {}
    longest_s = max((row["trained_s"] for row in rows if "trained_s" in row), default=0.0)
    clock = choose_time_unit(longest_s)
    for name, key, scale in (("step", "step", 1.0), (f"time, {clock.unit}", "trained_s", clock.seconds)):
        points = sorted({(row["epoch"], row[key] / scale) for row in rows if key in row})
        if points and points[-1][0] > 0:
            units[name] = [(0.0, 0.0), *points]
    return units


def _explain_loss_order(run: RunData, evals: Series) -> list[str]:
    if not (run.steps.has_key("loss") and evals.has_key("loss")):
        return []
    training, validation = run.steps.extents["loss"].last, evals.extents["loss"].last
    settings, reasons = run.settings, []
    loss = settings.get("train.loss.name", "cross_entropy")
    if "train.distill.teacher" in settings:
        return ["The training loss has the teacher's part, the validation loss has not: do not compare their values."]
    if loss != "cross_entropy" and not (loss == "bce" and run.is_multi_label and _is_mean_of_classes(settings)):
        name = clean_text(loss, 80)
        return [f"The training loss is {name}, and the validation loss {_eval_loss(run)}: do not compare their values."]
    if settings.get("train.label_smoothing", "0.0") not in ("0", "0.0"):
        reasons.append(f"with label smoothing of {clean_text(settings['train.label_smoothing'])}")
    if settings.get("data.augment", "[]") != "[]":
        reasons.append("on augmented images")
    if settings.get("train.class_weights", "off") != "off":
        reasons.append("with weighted classes")
    if settings.get("data.sampler.name", "shuffle") not in ("shuffle", "repeated"):
        reasons.append("on other shares of the images")
    if training <= validation or not reasons:
        return []
    measured = " and ".join(filter(None, [", ".join(reasons[:-1]), reasons[-1]]))
    return [
        f"The training loss ({number(training)}) is above the validation loss ({number(validation)}) because it is "
        f"measured {measured}, and validation is not. Train with train.eval_train=on to measure both in the same way."
    ]


def _is_mean_of_classes(settings: dict[str, str]) -> bool:
    """Return whether the loss `bce` is that of evaluation."""
    return settings.get("train.loss.sum_classes") == "false" and settings.get("train.loss.target_threshold") == "off"


def _eval_loss(run: RunData) -> str:
    return "binary cross-entropy" if run.is_multi_label else "cross-entropy"


def _downsampling_note(steps: Series) -> str:
    if not steps.is_sample:
        return f"{steps.num_records:,} logged steps are drawn as means of {steps.per_point} each."
    read = f"paceline read {steps.num_records:,} of the logged steps, spread evenly from the first to the last"
    return f"steps.jsonl is long: {read}, and draws them as means of {steps.per_point} each."


def _x_key(series: Series) -> str:
    return "epoch" if series.has_key("epoch") else "step"


def _accuracy_charts(run: RunData, evals: Series) -> list[Chart]:
    name, title, unit, scale = ("top1", "Top-1 accuracy", "%", 100.0)
    if run.is_multi_label:
        name, title, unit, scale = ("ap", "Average precision", "mean over classes", 1.0)
    steps = run.steps
    lines = _learning_lines(evals, steps, name, "training batches", scale)
    key = f"ema_{name}" if evals.has_key(f"ema_{name}") else name
    extent = evals.extents[key] if evals.has_key(key) else None
    note = f"last {format_metric(name, extent.last)}, best {format_metric(name, extent.highest)}" if extent else ""
    x_key = _x_key(evals if evals.num_records else steps)
    evaluated = evals.xy_points(x_key, key)
    best = max(evaluated, key=lambda point: point[1], default=None)
    mark = ((best[0], scale * best[1]), "best") if best is not None and len(evaluated) > 1 else None
    return [Chart(title, x_key, unit, lines, low=None, note=note, best=mark)] if lines else []


def _loss_charts(run: RunData, evals: Series) -> list[Chart]:
    steps = run.steps
    lines = _learning_lines(evals, steps, "loss", "training", 1)
    note = f"last step {number(steps.extents['loss'].last)}" if steps.has_key("loss") else ""
    x_key = _x_key(steps if steps.has_key("loss") else evals)
    return [Chart("Loss", x_key, _eval_loss(run), lines, note=note)] if lines else []


def _learning_lines(evals: Series, steps: Series, key: str, training: str, scale: float) -> list[ChartLine]:
    curves = [(training, steps, key)]
    curves += [(name, evals, f"{prefix}{key}") for prefix, name in _EVALUATED.items()]
    lines = [
        ChartLine(
            name, [(x, scale * y) for x, y in series.xy_points(_x_key(series), each)], has_markers=series is evals
        )
        for name, series, each in curves
    ]
    return [line for line in lines if line.points]


def _lr_charts(run: RunData) -> list[Chart]:
    # Logged steps alone would miss the first step and usually the peak. Steps not reached are a line of their own.
    planned = _planned_lr(run.plan)
    if not planned:
        return []
    per_epoch = max(1.0, finite_or_none(run.plan.get("steps_per_epoch")) or 1.0)
    ended = _steps_done(run)
    done = [point for point in planned if point[0] < ended]
    left = [*done[-1:], *planned[len(done) :]] if len(done) < len(planned) else []
    lines = [ChartLine("lr", [(step / per_epoch, lr) for step, lr in done])] if done else []
    lines += [ChartLine("planned", [(step / per_epoch, lr) for step, lr in left])] if left else []
    note = f"peak {max(lr for _, lr in planned):.4g}"
    if left:
        where = "at" if run.result is None else "ended at"
        note += f", {where} step {ended:,.0f} of {planned[-1][0] + 1:,.0f}"
    return [Chart("Learning rate", "epoch", "", lines, note=note)]


def _planned_lr(plan: dict[str, Any]) -> list[tuple[float, float]]:
    # As (step, learning rate).
    recorded = plan.get("lr_schedule")
    pairs = (
        [each for each in recorded if isinstance(each, list) and len(each) == 2] if isinstance(recorded, list) else []
    )
    points = [(finite_or_none(step), finite_or_none(lr)) for step, lr in pairs[:2000]]
    return [(step, lr) for step, lr in points if step is not None and lr is not None and step >= 0]


def _steps_done(run: RunData) -> float:
    if run.result is not None:
        return float(run.result.steps)
    return run.steps.extents["step"].last if run.steps.has_key("step") else 0.0


def _throughput_charts(run: RunData) -> list[Chart]:
    steps = run.steps
    x_key = _x_key(steps)
    points = steps.xy_points(x_key, "images_per_s")
    if len(points) < 2:
        return []
    note = f"mean of the log {number(steps.extents['images_per_s'].mean)}"
    rates = run.result.throughput if run.result is not None and run.result.throughput.n else None
    if rates is None:
        return [Chart("Throughput", x_key, "images/s", [ChartLine("throughput", points)], note=note)]
    note = f"dotted: {number(rates.images_per_s)}, the mean of the measured windows"
    rule = (rates.images_per_s, "")
    return [Chart("Throughput", x_key, "images/s", [ChartLine("throughput", points)], note=note, rule=rule)]


def _evaluation_table(run: RunData) -> Table:
    keys = [key for key in _EVALUATION_COLUMNS if any(key in each for each in run.evals)]
    titles = {key: title for each in run.evals[-1:] for key in each if (title := _title_of_extra(key))}
    keys += [*titles][:_MAX_EXTRA_COLUMNS]
    titles |= _EVALUATION_COLUMNS
    rows = [[_evaluation_cell(key, each.get(key)) for key in keys] for each in run.evals[-_MAX_EVAL_ROWS:]]
    num = len(run.evals)
    title = f"Evaluations ({num:,})" if num <= _MAX_EVAL_ROWS else f"The last {_MAX_EVAL_ROWS} of {num:,} evaluations"
    return Table(title, [TableColumn(titles[key]) for key in keys], rows, is_folded=True)


def _title_of_extra(key: str) -> str:
    """Return the title of a metric that only some recipes name, else ""."""
    name = key.removeprefix("ema_")
    if not (name in MULTI_LABEL or ":" in name or top_k(name)) or name in ALWAYS:
        return ""
    return f"{'averaged ' if name != key else ''}{clean_text(metric_label(name), 40)}"


def _evaluation_cell(key: str, value: object) -> TableCell:
    amount = finite_or_none(value)
    if amount is None:
        return cells.text_cell("" if value is None else value)
    match key:
        case "step":
            return cells.count_cell(amount)
        case "epoch":
            return TableCell(f"{amount:.2f}".removesuffix(".00"), amount)
        case "trained_s" | "train_s" | "epoch_s":
            return cells.seconds_cell(amount)
        case "images_per_s":
            return TableCell(number(amount), amount)
        case _ if top_k(key.rpartition("_")[2]):
            return cells.accuracy_cell(amount)
        case _:
            return cells.loss_cell(amount)
