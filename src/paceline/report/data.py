"""Render a run report as data: everything that the page shows, at full precision, for programs."""

from typing import Any

from paceline.core.class_table import ClassCount
from paceline.report.heat import MAX_CELLS
from paceline.report.run import Node, Rows, Run
from paceline.report.thin import Series
from paceline.report.words import jsonable

FORMAT_VERSION = 1


def to_data(run: Run) -> dict[str, Any]:
    """Return a run as plain values for JSON; NaN and infinity are strings, and long series are downsampled."""
    result = run.result.model_dump(mode="json") if run.result is not None else None
    return jsonable(  # type: ignore[no-any-return]
        {
            "format_version": FORMAT_VERSION,
            "name": run.name,
            "result": result,
            "recipe": run.recipe,
            "plan": run.plan,
            "machine": run.machine,
            "profile": run.profile or None,
            "evals": run.evals,
            "steps": _series(run.steps),
            "telemetry": [_node(node) for node in run.nodes],
            "classes": [_class(each) for each in run.classes],
            "confusion": run.confusion if len(run.classes) <= MAX_CELLS else None,
            "mistakes": [mistake.record for mistake in run.mistakes],
            "warnings": _rows(run.warnings),
            "bad_images": _rows(run.bad_images),
            "attempts": _rows(run.attempts),
            "problems": run.problems,
        }
    )


def _series(series: Series) -> dict[str, Any]:
    return {
        "records": series.num_records,
        "records_per_point": series.per_point,
        "is_sample": series.is_sample,
        "points": list(series.points),
    }


def _node(node: Node) -> dict[str, Any]:
    return {"node": node.number, "gpus": node.gpus, **_series(node.series)}


def _class(counted: ClassCount) -> dict[str, Any]:
    accuracy = counted.accuracy if counted.images else None
    return {"class": counted.name, "images": counted.images, "correct": counted.correct, "accuracy": accuracy}


def _rows(records: Rows) -> dict[str, Any]:
    return {"total": records.total, "rows": list(records.rows)}
