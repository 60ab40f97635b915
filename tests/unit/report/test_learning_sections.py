"""The curves of a run: accuracy on the training batches beside that of evaluations, on the same epochs."""

from pathlib import Path

from paceline.report.document import ChartRow
from paceline.report.learning_sections import learning_section
from paceline.report.read_run import RunData
from paceline.report.series import downsample


def test_accuracy_on_the_training_batches_is_drawn_beside_validation() -> None:
    steps = downsample([{"step": 4 * number, "epoch": number / 2, "top1": number / 10} for number in range(1, 5)])
    evals = ({"step": 8, "epoch": 1.0, "top1": 0.3}, {"step": 16, "epoch": 2.0, "top1": 0.5, "batch_top1": 0.35})
    section = learning_section(RunData(Path("run"), steps=steps, evals=evals))
    charts = next(block for block in section.blocks if isinstance(block, ChartRow))
    accuracy = next(chart for chart in charts.charts if chart.title == "Top-1 accuracy")
    batches, validation = accuracy.lines
    assert (batches.name, list(batches.points)) == ("training batches", [(0.5, 10), (1, 20), (1.5, 30), (2, 40)])
    assert (validation.name, list(validation.points)) == ("validation", [(1, 30), (2, 50)])
