"""A comparison as HTML and Markdown."""

import re

import pytest

from paceline.report.blocks import Charts
from paceline.report.compare import build_page, compare_runs, read_trained
from paceline.report.html import to_html
from paceline.report.markdown import to_markdown
from paceline.report.plot import MAX_LINES

EVIL = '<script>alert(1)</script>"|`*'


@pytest.fixture
def page_of():
    def work(*paths, **options):
        runs = [read_trained(path, "top1") for path in paths]
        return build_page(compare_runs(runs, **options), runs)

    return work


def charts(page):
    return [chart for section in page.sections for block in section.blocks if isinstance(block, Charts)
            for chart in block.charts]  # fmt: skip


def test_curves_of_all_runs_are_laid_over_one_another(made, page_of, tmp_path):
    paths = [*made.seeds(tmp_path, made.Made(), [0.8, 0.7]), made.write(tmp_path / "c", made.Made(batch=64))]
    found = charts(page_of(*paths, target=0.6))
    assert [chart.title for chart in found] == [
        "Top-1 accuracy over time",
        "Top-1 accuracy over epochs",
        "Training loss",
    ]
    assert [line.name for line in found[0].lines] == ["1: batch 128, seed 0", "1: batch 128, seed 1", "2: batch 64"]
    assert found[0].lines[0].points[-1] == (160.0, 80.0) and found[1].lines[0].points[-1] == (8.0, 80.0)
    assert found[0].rule == (60.0, "60 %")


def test_accuracy_of_classes_is_called_that(made, tmp_path):
    path = made.write(tmp_path / "a", made.Made())
    made.lines(path / "evals.jsonl", [{"epoch": 1.0, "trained_s": 3.0, "mean_class_accuracy": 0.5}])
    runs = [read_trained(path, "mean_class_accuracy")]
    page = build_page(compare_runs(runs, metric="mean_class_accuracy"), runs)
    assert [chart.title for chart in charts(page)][:2] == [
        "Mean accuracy of classes over time",
        "Mean accuracy of classes over epochs",
    ]


def test_of_more_runs_than_can_be_drawn_each_group_has_as_many(made, page_of, tmp_path):
    many = [0.8] * (MAX_LINES + 4)
    paths = [*made.seeds(tmp_path, made.Made(), many), *made.seeds(tmp_path, made.Made(batch=64), [0.8, 0.7])]
    page = page_of(*paths)
    groups = [line.group for line in charts(page)[0].lines]
    assert groups == ["1: batch 128"] * (MAX_LINES - 2) + ["2: batch 64"] * 2
    assert f"{MAX_LINES} of the {len(paths)} runs are drawn" in to_markdown(page)


def test_the_page_asks_for_nothing_and_escapes_what_runs_are_called(made, page_of, tmp_path):
    recipe = made.RECIPE.replace("resnet50_nersc", "'" + EVIL + "'")
    paths = [
        made.write(tmp_path / "a", made.Made(recipe=recipe)),
        made.write(tmp_path / "b<i>", made.Made(batch=64)),
    ]
    text = to_html(page_of(*paths))
    assert "<script" not in text and "alert(1)" in text and "b<i>" not in text
    assert re.findall(r'(?:src|href)="(?!#|data:)', text) == []
    assert "Comparison" in text and "from the runs&#39; directories" in text


def test_markdown_has_the_sentence_the_tables_and_the_notes(made, page_of, tmp_path):
    paths = [made.write(tmp_path / "a", made.Made()), made.write(tmp_path / "b", made.Made(64, status="unfinished"))]
    text = to_markdown(page_of(*paths))
    assert "Batch 64 reaches 80 % in 1 times the time of batch 128" in text
    assert "| 1: batch 128 | 1 of 1 | 2:40 min | 8 | 1.00x | 1.00x | 1.00x |" in text
    assert "| data.batch_size | 128 | 64 |" in text
    assert "b was not finished" in text and "GPU-hours" in text


def test_where_not_all_reach_the_target_tables_have_the_most_accurate_first(made, page_of, tmp_path):
    """Their numbers, and the curves, stay in the order in which the runs were named."""
    paths = [made.write(tmp_path / f"b{batch}", made.Made(batch, best=best, num_classes=10))
             for batch, best in ((1, 0.1), (2, 0.5), (3, 0.7))]  # fmt: skip
    page = page_of(*paths)
    text = to_markdown(page)
    assert "Reaching 50 % (the highest that all runs reach that have learnt)" in text
    assert "**Top-1 at the end, the highest first**" in text
    assert re.findall(r"^\| (\d: batch \d) \|", text, re.MULTILINE) == ["3: batch 3", "2: batch 2", "1: batch 1"] * 2
    assert "| 3: batch 3 | 70.00 % | 70.00 % | 0.3000 | +60.00 points |" in text
    assert [line.group for line in charts(page)[0].lines] == ["1: batch 1", "2: batch 2", "3: batch 3"]
    assert re.findall(r"/b(\d) \| (\d) \|", text) == [("3", "3"), ("2", "2"), ("1", "1")]


def test_runs_that_have_all_learnt_nothing_have_a_page(made, page_of, tmp_path):
    paths = [made.write(tmp_path / f"b{batch}", made.Made(batch, best=0.01)) for batch in (1, 2)]
    assert "No run has learnt: there is no target to reach." in to_markdown(page_of(*paths))


def test_runs_that_nobody_evaluated_have_a_page(made, page_of, tmp_path):
    paths = [made.write(tmp_path / "a", made.Made()), made.write(tmp_path / "b", made.Made(batch=64))]
    for path in paths:
        (path / "evals.jsonl").unlink()
        (path / "steps.jsonl").unlink()
    text = to_markdown(page_of(*paths))
    assert "No run was evaluated" in text and "There is nothing to draw" in text
