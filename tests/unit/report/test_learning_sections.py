"""The curves of a run: accuracy on the training batches beside that of evaluations, on the same epochs."""

import re
from pathlib import Path

import pytest

from paceline.report.document import ChartRow, Paragraph, Table
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


def test_average_precision_is_drawn_for_several_labels() -> None:
    evals = (
        {"step": 8, "epoch": 1.0, "ap": 0.3},
        {"step": 16, "epoch": 2.0, "ap": 0.5, "ema_ap": 0.6, "hamming_loss": 1},
    )
    section = learning_section(RunData(Path("run"), evals=evals))
    (chart,) = next(block for block in section.blocks if isinstance(block, ChartRow)).charts
    assert (chart.title, chart.note) == ("Average precision", "last 0.6000, best 0.6000")
    table = next(block for block in section.blocks if isinstance(block, Table))
    assert "Hamming loss" in [column.title for column in table.columns]
    assert [(line.name, list(line.points)) for line in chart.lines] == [
        ("validation", [(1, 0.3), (2, 0.5)]),
        ("averaged", [(2, 0.6)]),
    ]


BCE = "{name: bce, sum_classes: false, target_threshold: off}"


@pytest.mark.parametrize(
    ("metric", "train", "said"),
    [
        ("ap", f"loss: {BCE}", ""),
        ("ap", f"loss: {BCE.replace('false', 'true')}", "loss is bce.* loss binary cross-entropy:"),
        ("ap", "loss: {name: focal}", "loss is focal.* loss binary cross-entropy:"),
        ("top1", f"loss: {BCE}", "loss is bce.* loss cross-entropy:"),
        ("top1", "distill: {teacher: run}", "has the teacher's part"),
        ("top1", "distill: off", ""),
    ],
)
def test_losses_that_cannot_be_compared_are_named(metric: str, train: str, said: str) -> None:
    steps, evals = downsample([{"step": 8, "epoch": 1.0, "loss": 0.4}]), ({"step": 8, metric: 0.3, "loss": 0.5},)
    run = RunData(Path("run"), steps=steps, evals=evals, recipe=f"train: {{{train}}}")
    found = [block.text for block in learning_section(run).blocks if isinstance(block, Paragraph)]
    found = [text for text in found if "do not compare" in text]
    assert len(found) == bool(said) and all(re.search(said, text) for text in found)
