"""A cross-validation plans its runs, pools their predictions, and says what its intervals cover."""

import json
from pathlib import Path

import pytest

from paceline.core.errors import PacelineError
from paceline.core.experiments.results import FoldRun
from paceline.core.run_dir import RunDir
from paceline.lab.cross_validation import (
    check_folds,
    compute_accuracy,
    compute_interval,
    describe_result,
    describe_selection,
    plan_folds,
    pool_predictions,
)
from paceline.lab.trial import apply_patch
from paceline.recipe.load import Patch, load

RECIPE = load("digits", Patch.parse(["data.split.folds=2", "seed=7"])).recipe
HEADER = "image,true,predicted,probability\n"


def runs(*values: float, repeats: int = 1) -> list[FoldRun]:
    return [
        FoldRun(fold=number % (len(values) // repeats), repeat=number // (len(values) // repeats), seed=number,
                train_images=80, val_images=20, value=value, curve=((1.0, value),), run="trials/x", wall_s=1.0)
        for number, value in enumerate(values)
    ]  # fmt: skip


def test_each_run_has_its_own_fold_and_seed() -> None:
    planned = plan_folds(RECIPE, 2, 2, ranks=1)
    recipes = [apply_patch(RECIPE, each.trial.patch) for each in planned]
    splits = [each.data.split for each in recipes]
    assert [(each.fold, each.repeat) for each in splits if each != "off"] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert [each.seed for each in recipes] == [7, 8, 9, 10]
    assert len({each.trial.name for each in planned}) == len({each.hash for each in recipes}) == 4


@pytest.fixture
def predicted(tmp_path: Path):
    """Return a function that writes runs of those predictions, and returns them with their folds."""

    def write(*tables: str):
        planned = plan_folds(RECIPE, len(tables), 1, ranks=1)
        made = []
        for each, table in zip(planned, tables, strict=True):
            folder = tmp_path / str(each.fold)
            folder.mkdir()
            (folder / "dataset.json").write_text(json.dumps({"class_names": ["cat", "=dog"]}))
            (folder / "predictions.csv").write_text(HEADER + table)
            made.append((each, RunDir(folder)))
        return made

    return write


def test_predictions_of_all_folds_are_pooled(predicted) -> None:
    pooled = pool_predictions(predicted("a.jpg,cat,cat,0.9\nb.jpg,'=dog,cat,0.6\n", "c.jpg,'=dog,'=dog,1\n"))
    assert pooled is not None
    assert pooled.text.splitlines() == [
        "image,true,predicted,probability,fold,repeat",
        "a.jpg,cat,cat,0.9,0,0",
        "b.jpg,'=dog,cat,0.6,0,0",
        "c.jpg,'=dog,'=dog,1,1,0",
    ]
    assert pooled.table.confusion == ((1, 0), (1, 1)) and (pooled.num_correct, pooled.num_images) == (2, 3)
    assert [(each.name, each.images, each.correct, each.predicted) for each in pooled.table.classes] == [
        ("cat", 1, 1, 2),
        ("=dog", 2, 1, 1),
    ]
    accuracy = compute_accuracy(pooled, "", 1)
    assert accuracy.value == 2 / 3 and accuracy.low is not None
    assert compute_accuracy(pooled, "patient", 1).low is compute_accuracy(pooled, "", 2).low is None


def test_a_damaged_file_of_predictions_is_named(predicted, tmp_path: Path) -> None:
    made = predicted("a.jpg,cat,cat,1\n", "b.jpg,cat,cat,1\n")
    for damaged in ('"', "", HEADER + "b.jpg,cat\n"):
        (tmp_path / "1" / "predictions.csv").write_text(damaged)
        with pytest.raises(PacelineError, match=r"1/predictions.csv: cannot be read: .* \(remove it"):
            pool_predictions(made)


def test_runs_of_changed_data_are_refused(tmp_path: Path) -> None:
    check_folds(runs(*[0.5] * 10, repeats=2), 2, tmp_path)
    for changed in ({"train_images": 81}, {"train_images": 79, "val_images": 21}):
        first, *rest = runs(*[0.5] * 5)
        with pytest.raises(PacelineError, match=r"as the data were changed \(name a new folder by --run-dir\)$"):
            check_folds([first.model_copy(update=changed), *rest], 1, tmp_path)


def test_the_sentences_say_what_the_intervals_cover() -> None:
    made = runs(0.9, 0.92, 0.88, 0.9, 0.95)
    value = compute_interval(made, "top1")
    assert value.high is not None and value.high < 1 < compute_interval(runs(0.8, 1.2), "loss").high  # type: ignore[operator]
    assert compute_interval(runs(0.2, 0.9), "top1").low == 0.0
    mean, scope, *_ = describe_result(made, "top1", value, None, "")
    assert mean.startswith("top-1 is 91.00 % on average over 5 runs with 5 folds (")
    assert "trains on 80 images like these" in scope and "groups" not in scope
    assert "for new groups" in describe_result(made, "top1", value, None, "patient")[1]


def test_settings_that_look_at_the_validation_images_are_named() -> None:
    assert describe_selection(RECIPE) == ""
    patient = apply_patch(RECIPE, Patch((("train.patience", 3),)))
    assert "train.patience" in describe_selection(patient)
