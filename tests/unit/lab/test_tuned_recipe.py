"""A tuned recipe extends the original with the best settings, wherever its file lies."""

from pathlib import Path

import pytest

from paceline.core.errors import PacelineError
from paceline.lab.trial import apply_patch
from paceline.lab.tune import format_tuned_recipe, write_tuned_recipe
from paceline.recipe.load import Patch, load

PATCH = Patch.parse(
    [
        "train.precision=bf16",
        "data.workers=2",
        "data.augment=[{name: flip}]",
        "optim.lr_scaling=sqrt",
        "optim.base_batch_size=64",
    ]
)


def test_it_loads_to_the_recipe_with_the_patch_over_it(tmp_path: Path) -> None:
    path = tmp_path / "tuned.yaml"
    write_tuned_recipe(
        path, format_tuned_recipe("digits", PATCH, {"train.precision": "precision-bf16: 1.6x in one pair"}, "A header.")
    )
    assert load(str(path)).recipe == apply_patch(load("digits").recipe, PATCH)
    text = path.read_text(encoding="utf-8")
    assert text.startswith('# A header.\nextends: "digits"\n')
    assert 'precision: "bf16"  # precision-bf16: 1.6x in one pair\n' in text


def test_it_finds_a_recipe_file_and_a_run_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "mine.yaml").write_text("extends: digits\nseed: 7\n", encoding="utf-8")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "plan.json").touch()
    (tmp_path / "run" / "recipe.yaml").write_text("extends: digits\nseed: 8\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for name, seed in (("here/mine.yaml", 7), ("run", 8)):
        path = tmp_path / "tuned.yaml"
        write_tuned_recipe(path, format_tuned_recipe(name, Patch.parse(["train.precision=bf16"]), {}, "A header."))
        monkeypatch.chdir(tmp_path / "here")
        assert load(str(path)).recipe.seed == seed
        monkeypatch.chdir(tmp_path)


def test_without_a_change_it_is_the_recipe_itself(tmp_path: Path) -> None:
    write_tuned_recipe(tmp_path / "tuned.yaml", format_tuned_recipe("digits", Patch(), {}, "A header."))
    assert load(str(tmp_path / "tuned.yaml")).recipe == load("digits").recipe


def test_a_missing_folder_is_reported(tmp_path: Path) -> None:
    with pytest.raises(PacelineError, match="cannot be written"):
        write_tuned_recipe(tmp_path / "none" / "tuned.yaml", "seed: 1\n")
