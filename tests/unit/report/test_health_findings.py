"""The health of a run on its page: from the result, from the logs where there is none, and never from nonsense."""

import json

import pytest

from paceline.core.results import ClassCount, ClassTable
from paceline.report.write import render_report, write_report

FINDING = {
    "name": "one_class_predicted",
    "severity": "error",
    "evidence": "9 of 10 images are classified as '<b>bag</b>'.",
    "advice": "Lower optim.lr.",
    "numbers": {"predicted": 9.0},
}


def collapsed(rundir, names=("cat", "dog")) -> None:
    """Leave the tables of a model that answers with the first class alone."""
    classes = tuple(ClassCount(name, 500, 0 if number else 500) for number, name in enumerate(names))
    rundir.write_classes(ClassTable(classes, tuple((500, *([0] * (len(names) - 1))) for _ in names)))


def test_the_findings_of_a_result_come_before_the_bottleneck_as_text(runs, tmp_path):
    rundir = runs.write_run(tmp_path / "run", runs.SMALL, health=[FINDING])
    page = write_report(rundir).read_text()
    assert page.index("one class predicted") < page.index("Bottleneck:")
    assert "one class predicted" in page and "&lt;b&gt;bag" in page and "<b>bag" not in page
    markdown = render_report(rundir, "md")
    assert "- **one class predicted** (health, error): 9 of 10 images" in markdown and "<b>bag" not in markdown
    assert json.loads(render_report(rundir, "json"))["result"]["health"] == [FINDING]


def test_a_run_in_which_nothing_was_found_has_no_health_finding(runs, tmp_path):
    rundir = runs.write_run(tmp_path / "run", runs.SMALL, health=[])
    collapsed(rundir)  # the result has the last word
    assert "health, " not in write_report(rundir).read_text() and "(health" not in render_report(rundir, "md")


@pytest.mark.parametrize("has_result", [False, True])
def test_findings_that_no_result_has_are_those_of_the_logs(runs, tmp_path, has_result):
    rundir = runs.write_run(tmp_path / "run", runs.SMALL)
    collapsed(rundir)
    if not has_result:
        (rundir.path / "result.json").unlink()
    assert "one class predicted" in write_report(rundir).read_text()


def test_tables_that_contradict_themselves_are_not_used(runs, tmp_path):
    rundir = runs.write_run(tmp_path / "run", runs.SMALL)
    for rows in ([["a", "-5", "3"], ["b", "3", "3"]], [["a", "900", "0"], ["b", "0", "1"]]):
        collapsed(rundir, ("a", "b"))
        rundir.confusion.write_text("\n".join(",".join(row) for row in [["true\\predicted", "a", "b"], *rows]) + "\n")
        assert "one class predicted</h3>" not in write_report(rundir).read_text()
    rundir.classes.write_text("class,images,correct,accuracy\na,3,7,2.3\nb,5,0,0\n")
    assert "health, " not in write_report(rundir).read_text()


RECIPE = "# recipe 0\ntrain:\n  label_smoothing: {}\n  class_weights: off\ndata:\n  augment: {}\n"


@pytest.mark.parametrize(
    ("smoothing", "augment", "reason"),
    [
        ("0.2", "[]", "measured with label smoothing of 0.2,"),
        ("0.0", "[{name: flip}]", "measured on augmented images,"),
        ("0.1", "[{name: flip}]", "measured with label smoothing of 0.1 and on augmented images,"),
        ("0.0", "[]", None),
    ],
)
def test_a_training_loss_above_the_validation_loss_is_explained(runs, tmp_path, smoothing, augment, reason):
    rundir = runs.write_run(tmp_path / "run", runs.SMALL)
    row = {
        "step": 5000,
        "epoch": 12.0,
        "images_seen": 1,
        "loss": 7.5,
        "lr": 0.1,
        "images_per_s": 1.0,
        "trained_s": 227.0,
    }
    for loss, is_above in ((7.5, True), (0.0001, False)):
        with rundir.steps.open("a") as file:
            file.write(json.dumps({**row, "loss": loss}) + "\n")
        rundir.recipe.write_text(RECIPE.format(smoothing, augment))
        markdown = render_report(rundir, "md")
        assert ("The training loss (7.5" in markdown) == (is_above and reason is not None)
        assert not (reason and is_above) or reason in markdown
