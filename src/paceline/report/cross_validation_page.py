"""Build the page of a cross-validation."""

from typing import Final

from paceline.core.experiments.results import CrossValidationResult
from paceline.core.metric import format_metric, metric_label, top_k
from paceline.core.units import count
from paceline.report import cells
from paceline.report.document import (
    Block,
    Chart,
    ChartRow,
    HeatMap,
    KeyFigure,
    PageSection,
    Paragraph,
    ReportPage,
    TableCell,
    Tone,
)
from paceline.report.experiment_common import (
    Column,
    ExperimentReport,
    ResultRows,
    build_record,
    caution_paragraphs,
    chart_line,
    metric_texts,
    to_percent,
)
from paceline.report.mistake_sections import class_table
from paceline.report.text import clean_text

_COLUMNS: Final = (
    Column("name", "fold"),
    Column("fold"),
    Column("repeat"),
    Column("seed", "seed", lambda seed: TableCell(str(seed))),
    Column("train_images", "training images", cells.count_cell),
    Column("val_images", "validation images", cells.count_cell),
    Column("shown", "score", in_csv=False),
    Column("value"),
    Column("wall_s", "time", cells.seconds_cell),
    Column("run"),
)


def cross_validation_rows(result: CrossValidationResult) -> ResultRows:
    """Return a row per run."""
    records = [
        build_record(
            each,
            name=f"{each.fold}, repeat {each.repeat}" if result.repeats > 1 else str(each.fold),
            shown=format_metric(result.metric, each.value),
        )
        for each in result.runs
    ]
    return ResultRows(_COLUMNS, records, "Folds", "name train_images val_images shown seed wall_s", "more folds")


def build_cross_validation_page(report: ExperimentReport, result: CrossValidationResult) -> ReportPage:
    """Return the report of a cross-validation."""
    rows, label = cross_validation_rows(result), metric_label(result.metric)
    sentences: list[Block] = [Paragraph(clean_text(each, 500)) for each in result.sentences]
    sentences += caution_paragraphs(result.caution)
    status: tuple[str, Tone] = (
        f"{label} {format_metric(result.metric, result.value.value)}",
        "warning" if result.caution else "good",
    )
    facts = [
        ("folds", cells.count_cell(result.folds)),
        ("repeats", cells.count_cell(result.repeats)),
        *([("groups", TableCell(clean_text(result.groups)))] if result.groups else []),
        ("total time of runs", cells.seconds_cell(result.wall_s)),
    ]
    names = [f"fold {record['name']}" for record in rows.records]
    sections = [
        PageSection("result", "Result", sentences),
        PageSection("folds", "Folds", [ChartRow([_curves(result, names)]), rows.main_table()]),
        _classes_section(result),
        report.build_provenance(
            result.command,
            facts,
            result.provenance,
            [(name, (each.run,)) for name, each in zip(names, result.runs, strict=True)],
        ),
    ]
    return report.build_page(
        "Cross-validation",
        status,
        [f"recipe {result.recipe} {result.recipe_hash}", count(result.ranks, "rank")],
        _figures(result),
        sections,
        summary=[rows.main_table(), *sentences],
    )


def _curves(result: CrossValidationResult, names: list[str]) -> Chart:
    is_share = top_k(result.metric) is not None or result.metric == "mean_class_accuracy"
    lines = [
        chart_line(name, [(x, to_percent(y) if is_share else y) for x, y in each.curve], group="folds", marked=False)
        for name, each in zip(names, result.runs, strict=True)
    ]
    unit = f"{metric_label(result.metric)}, %" if is_share else metric_label(result.metric)
    return Chart("Validation by epoch", "epoch", unit, lines, low=None, note="one line per run")


def _classes_section(result: CrossValidationResult) -> PageSection | None:
    if not result.classes:
        return None
    names = [each.name for each in result.classes]
    matrix: list[Block] = [HeatMap("Confusion matrix", names, result.confusion)] if result.confusion else []
    what = "Predictions for images that the model was not trained on, of all folds (predictions.csv)."
    table = class_table(result.classes, result.confusion)
    return PageSection("classes", "All predictions", [Paragraph(what), *matrix, table])


def _figures(result: CrossValidationResult) -> list[KeyFigure]:
    label = metric_label(result.metric)
    mean_of = f"{label}, mean of {count(len(result.runs), 'run')}"
    figures = [KeyFigure(mean_of, *metric_texts(result.metric, result.value))]
    if result.accuracy is not None:
        right_of = f"right of {count(result.accuracy.n, 'prediction')}"
        figures.append(KeyFigure(right_of, *metric_texts("top1", result.accuracy)))
    values = [each.value for each in result.runs]
    low, high = (format_metric(result.metric, each) for each in (min(values), max(values)))
    figures.append(KeyFigure("lowest and highest fold", TableCell(f"{low} and {high}"), count(result.folds, "fold")))
    return figures
