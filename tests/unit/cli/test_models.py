"""`paceline models` lists models, and downloads the weights of one."""

import json

import pytest

from paceline.cli.models import models
from paceline.cli.options import ModelsOptions
from paceline.core.errors import RecipeError


def test_without_a_pattern_the_models_of_each_library_are_counted(capsys) -> None:
    assert models(ModelsOptions()) == 0
    said = capsys.readouterr().out
    assert "paceline: 8 models" in said and "torchvision: " in said and "timm: 1," in said


def test_matches_are_listed_with_their_cost_and_weights(capsys) -> None:
    models(ModelsOptions(pattern="timm:test_resnet", as_json=True))
    (row,) = json.loads(capsys.readouterr().out)
    assert row["name"] == "timm:test_resnet" and row["weights"] == ["r160_in1k"] and row["image_size"] == 160
    assert row["params"] > 100_000 and row["flops"] > 1_000_000
    models(ModelsOptions(pattern="timm:*"))
    said = capsys.readouterr().out
    assert "timm:resnet18" in said and "GFLOP" not in said and "narrow the pattern" in said
    models(ModelsOptions(pattern="timm:resnet18.a"))
    said = capsys.readouterr().out
    assert "a1_in1k" in said and "tv_in1k" not in said and "GFLOP" in said


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("resnet18", r"--download: 2 models match, torchvision:resnet18, timm:resnet18 \(name one\)"),
        ("speednet94", "--download: no weights are published for speednet94"),
        ("hf-hub:a/b/c", "model.weights: hf-hub:a/b/c: 'a/b/c' is not the name of a repository"),
        ("no_such_model", r"'no_such_model': no model has such a name \(see paceline models\)"),
    ],
)
def test_what_cannot_be_downloaded_is_one_line(pattern: str, message: str) -> None:
    with pytest.raises(RecipeError, match=f"^{message}"):
        models(ModelsOptions(pattern=pattern, download=True))


def test_a_repository_is_only_downloaded() -> None:
    with pytest.raises(RecipeError, match=r"^hf-hub:me/mine: a repository is not listed, .* \(add --download\)$"):
        models(ModelsOptions(pattern="hf-hub:me/mine"))
