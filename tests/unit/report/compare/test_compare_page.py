"""A comparison as HTML and Markdown."""

import math
import re

import pytest

from paceline.report.charts import MAX_LINES
from paceline.report.compare_model import read_compared_run
from paceline.report.compare_page import build_compare_page
from paceline.report.compare_runs import compare_runs
from paceline.report.document import ChartRow
from paceline.report.render import render_html, render_markdown

EVIL = '<script>alert(1)</script>"|`*'


@pytest.fixture
def page_of():
    def work(*paths, **options):
        runs = [read_compared_run(path, "top1") for path in paths]
        return build_compare_page(compare_runs(runs, **options), runs)

    return work


def charts(page):
    return [chart for section in page.sections for block in section.blocks if isinstance(block, ChartRow)
            for chart in block.charts]  # fmt: skip


def test_curves_of_all_runs_are_laid_over_one_another(made, page_of, tmp_path):
    paths = [*made.seeds(tmp_path, made.Made(), [0.8, 0.7]), made.write(tmp_path / "c", made.Made(batch=64))]
    found = charts(page_of(*paths, target=0.6))
    assert [chart.title for chart in found] == [
        "Top-1 accuracy over time",
        "Top-1 accuracy over epochs",
        "Training loss",
        "Validation loss",
        "Training and validation loss",
        "Generalization gap",
    ]
    assert [line.name for line in found[0].lines] == ["1: batch 128, seed 0", "1: batch 128, seed 1", "2: batch 64"]
    assert found[0].lines[0].points[-1] == (160.0, 80.0) and found[1].lines[0].points[-1] == (8.0, 80.0)
    assert found[0].rule == (60.0, "60 %")


def test_validation_loss_is_drawn_over_epochs_and_against_the_training_loss(made, page_of, tmp_path):
    """Made runs have a validation loss of 1 - accuracy, and steps whose loss falls as exp(-epoch)."""
    first, second = (made.write(tmp_path / f"b{batch}", made.Made(batch)) for batch in (128, 64))
    found = {chart.title: chart for chart in charts(page_of(first, second))}
    assert dict(found["Validation loss"].lines[0].points) == {n: 1 - 0.8 * n / 8 for n in range(1, 9)}
    both = found["Training and validation loss"]
    assert [(line.name, line.is_dashed) for line in both.lines] == [
        ("1: batch 128, validation", False), ("1: batch 128, training", True),
        ("2: batch 64, validation", False), ("2: batch 64, training", True),
    ]  # fmt: skip
    assert both.note == "dashed: training"
    assert dict(both.lines[1].points) == {n: math.exp(-n) for n in range(1, 9)}
    gaps = dict(found["Generalization gap"].lines[1].points)
    assert gaps == {n: 1 - 0.8 * n / 8 - math.exp(-n) for n in range(1, 9)}


def test_training_accuracy_is_drawn_beside_validation(made, page_of, tmp_path):
    found = {chart.title: chart for chart in charts(page_of(made.write(tmp_path / "a", made.Made(train_gap=0.125))))}
    both = found["Training and validation, top-1 accuracy"]
    validation, training = (dict(line.points) for line in both.lines)
    assert training == pytest.approx({epoch: percent + 12.5 for epoch, percent in validation.items()})
    assert dict(found["Generalization gap"].lines[0].points) == pytest.approx(dict.fromkeys(range(1, 9), 0.125))


def test_a_gap_is_over_the_steps_since_the_evaluation_before(made, page_of, tmp_path):
    path = made.write(tmp_path / "a", made.Made())
    steps = [{"step": n, "epoch": n / 4, "loss": 2.0 if n <= 4 else 1.0} for n in range(1, 9)]
    made.lines(path / "steps.jsonl", steps)
    made.lines(path / "evals.jsonl", [{"epoch": float(n), "trained_s": 1.0, "top1": 0.5, "loss": 3.0} for n in (1, 2)])
    found = {chart.title: chart for chart in charts(page_of(path))}
    assert dict(found["Generalization gap"].lines[0].points) == {1.0: 1.0, 2.0: 2.0}


def test_runs_without_a_training_loss_have_no_gap(made, page_of, tmp_path):
    path = made.write(tmp_path / "a", made.Made())
    (path / "steps.jsonl").unlink()
    titles = [chart.title for chart in charts(page_of(path))]
    assert "Validation loss" in titles and not {"Generalization gap", "Training and validation loss"} & {*titles}


def test_runs_whose_names_share_a_prefix_have_distinct_labels(made, page_of, tmp_path):
    paths = [made.write(tmp_path / warmup, made.Made(batch=1024, warmup=warmup)) for warmup in ("0ep", "8ep")]
    text = render_html(page_of(*paths, made.write(tmp_path / "b", made.Made())))
    (chart,) = re.findall(r"<figcaption><b>Validation loss</b>.*?</figure>", text, re.DOTALL)
    assert re.findall(r"<text x[^>]*>(\d[^<]*)</text>", chart.split('<g class="curve', 1)[1]) == [
        "1",
        "2",
        "3",
    ]
    names = [re.sub("<.*?>", "", each).strip() for each in re.findall(r"<li>(.*?)</li>", chart, re.DOTALL)]
    assert names == ["1: batch 1024 without warm-up", "2: batch 1024 with warm-up", "3: batch 128"]


def test_accuracy_of_classes_is_called_that(made, tmp_path):
    path = made.write(tmp_path / "a", made.Made())
    made.lines(path / "evals.jsonl", [{"epoch": 1.0, "trained_s": 3.0, "mean_class_accuracy": 0.5}])
    runs = [read_compared_run(path, "mean_class_accuracy")]
    page = build_compare_page(compare_runs(runs, metric="mean_class_accuracy"), runs)
    assert [chart.title for chart in charts(page)][:2] == [
        "Balanced accuracy over time",
        "Balanced accuracy over epochs",
    ]


@pytest.mark.parametrize(("metric", "title"), [("f1", "F1"), ("auroc", "AUROC"), ("top3", "Top-3 accuracy")])
def test_any_metric_of_the_runs_is_compared(made, tmp_path, metric, title):
    paths = [made.write(tmp_path / name, made.Made(batch=batch)) for name, batch in (("a", 1), ("b", 2), ("c", 3))]
    for path, best in zip(paths, (0.7, 0.9), strict=False):
        rows = [(1.0, best - 0.05), (2.0, best)]
        made.lines(path / "evals.jsonl", [{"epoch": at, "trained_s": at, metric: value} for at, value in rows])
    runs = [read_compared_run(path, metric) for path in paths]
    result = compare_runs(runs, metric=metric)
    assert [each.accuracy and each.accuracy.value for each in result.groups] == [0.7, 0.9, None]
    assert result.target == 0.7 and result.groups[1].gap.value == pytest.approx(0.2)
    assert any("c was evaluated without" in note and "train.metrics" in note for note in result.notes)
    page = build_compare_page(result, runs)
    assert [chart.title for chart in charts(page)][:2] == [f"{title} over time", f"{title} over epochs"]


def test_of_more_runs_than_can_be_drawn_each_group_has_as_many(made, page_of, tmp_path):
    many = [0.8] * (MAX_LINES + 4)
    paths = [*made.seeds(tmp_path, made.Made(), many), *made.seeds(tmp_path, made.Made(batch=64), [0.8, 0.7])]
    page = page_of(*paths)
    groups = [line.group for line in charts(page)[0].lines]
    assert groups == ["1: batch 128"] * (MAX_LINES - 2) + ["2: batch 64"] * 2
    assert f"{MAX_LINES} of the {len(paths)} runs are drawn" in render_markdown(page)


def test_the_page_fetches_nothing_and_escapes_names_of_runs(made, page_of, tmp_path, without_own_scripts):
    recipe = made.RECIPE.replace("resnet50_nersc", "'" + EVIL + "'")
    paths = [
        made.write(tmp_path / "a", made.Made(recipe=recipe)),
        made.write(tmp_path / "b<i>", made.Made(batch=64)),
    ]
    text = without_own_scripts(render_html(page_of(*paths)))
    assert "<script" not in text and "alert(1)" in text and "b<i>" not in text
    assert re.findall(r'(?:src|href)="(?!#|data:)', text) == []
    assert "Comparison" in text and "from the runs&#39; directories" in text


def test_markdown_has_the_sentence_the_tables_and_the_notes(made, page_of, tmp_path):
    paths = [made.write(tmp_path / "a", made.Made()), made.write(tmp_path / "b", made.Made(64, status="unfinished"))]
    text = render_markdown(page_of(*paths))
    assert "Batch 64 reaches 80 % in 1 times the time of batch 128" in text
    assert "| 1: batch 128 | 1 of 1 | 2 min 40 s | 8 | 1.00x | 1.00x | 1.00x |" in text
    assert "| data.batch_size | 128 | 64 |" in text
    assert "b was not finished" in text and "GPU-hours" in text


def test_tables_start_with_the_most_accurate_unless_all_reach_the_target(made, page_of, tmp_path):
    """Their numbers, and the curves, stay in the order in which the runs were named."""
    paths = [made.write(tmp_path / f"b{batch}", made.Made(batch, best=best, num_classes=10))
             for batch, best in ((1, 0.1), (2, 0.5), (3, 0.7))]  # fmt: skip
    page = page_of(*paths)
    text = render_markdown(page)
    assert "Reaching 50 % (the highest that all runs that learned reach)" in text
    assert "**Top-1 at the end, the highest first**" in text
    assert re.findall(r"^\| (\d: batch \d) \|", text, re.MULTILINE) == ["3: batch 3", "2: batch 2", "1: batch 1"] * 2
    assert "| 3: batch 3 | 70.00 % | 70.00 % | 0.3000 | +60.00 points |" in text
    assert [line.group for line in charts(page)[0].lines] == ["1: batch 1", "2: batch 2", "3: batch 3"]
    assert re.findall(r"/b(\d) \| (\d) \|", text) == [("3", "3"), ("2", "2"), ("1", "1")]


def test_runs_that_have_all_learnt_nothing_have_a_page(made, page_of, tmp_path):
    paths = [made.write(tmp_path / f"b{batch}", made.Made(batch, best=0.01)) for batch in (1, 2)]
    assert "No run has learned: there is no target to reach." in render_markdown(page_of(*paths))


def test_runs_without_evaluation_have_a_page(made, page_of, tmp_path):
    paths = [made.write(tmp_path / "a", made.Made()), made.write(tmp_path / "b", made.Made(batch=64))]
    for path in paths:
        (path / "evals.jsonl").unlink()
        (path / "steps.jsonl").unlink()
    text = render_markdown(page_of(*paths))
    assert "No run was evaluated" in text and "There are no curves" in text
