"""Render a run report as data: everything that the page shows, at full precision, for programs."""

from typing import Any

from paceline.core.class_table import ClassCount
from paceline.report.heat import MAX_MATRIX_CLASSES
from paceline.report.run import FirstRecords, NodeSeries, RunData
from paceline.report.thin import Series
from paceline.report.words import to_jsonable

FORMAT_VERSION = 1


def run_to_data(run: RunData) -> dict[str, Any]:
    """Return a run as plain values for JSON; NaN and infinity are strings, and long series are downsampled."""
    result = run.result.model_dump(mode="json") if run.result is not None else None
    return to_jsonable(  # type: ignore[no-any-return]
        {
            "format_version": FORMAT_VERSION,
            "name": run.name,
            "result": result,
            "recipe": run.recipe,
            "plan": run.plan,
            "machine": run.machine,
            "profile": run.profile or None,
            "evals": run.evals,
            "steps": _series_data(run.steps),
            "telemetry": [_node_data(node) for node in run.nodes],
            "classes": [_class_data(each) for each in run.classes],
            "confusion": run.confusion if len(run.classes) <= MAX_MATRIX_CLASSES else None,
            "mistakes": [mistake.record for mistake in run.mistakes],
            "warnings": _records_data(run.warnings),
            "bad_images": _records_data(run.bad_images),
            "attempts": _records_data(run.attempts),
            "problems": run.problems,
        }
    )


def _series_data(series: Series) -> dict[str, Any]:
    return {
        "records": series.num_records,
        "records_per_point": series.per_point,
        "is_sample": series.is_sample,
        "points": list(series.points),
    }


def _node_data(node: NodeSeries) -> dict[str, Any]:
    return {"node": node.number, "gpus": node.gpus, **_series_data(node.series)}


def _class_data(counted: ClassCount) -> dict[str, Any]:
    accuracy = counted.accuracy if counted.images else None
    return {"class": counted.name, "images": counted.images, "correct": counted.correct, "accuracy": accuracy}


def _records_data(records: FirstRecords) -> dict[str, Any]:
    return {"total": records.total, "rows": list(records.rows)}
