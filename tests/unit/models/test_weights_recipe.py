"""Published weights bring their preprocessing, as defaults that a recipe may change, with their name as the origin."""

import pytest

from paceline.core.errors import RecipeError
from paceline.models.weights_recipe import with_weights_defaults
from paceline.recipe.load import LoadedRecipe, Patch, load, load_values

FIELDS = ("mean", "std", "interpolation", "eval_crop", "image_size")


def loaded(recipe: str, *words: str) -> LoadedRecipe:
    return with_weights_defaults(load(recipe, Patch.parse([*words])))


def test_fields_that_nothing_sets_are_those_of_the_weights() -> None:
    made = loaded("folder", "model.name=timm:vit_small_patch16_384", "model.weights=default", "data.std=[1, 1, 1]")
    data = made.recipe.data
    assert (data.mean, data.std, data.interpolation) == ((0.5, 0.5, 0.5), (1, 1, 1), "bicubic")
    assert (data.eval_crop, data.image_size) == (1.0, 384)
    name = "timm:vit_small_patch16_384.augreg_in21k_ft_in1k"
    assert {field: made.stack.origin(f"data.{field}") for field in FIELDS} == {
        **dict.fromkeys(FIELDS, name), "std": "command line"
    }  # fmt: skip
    assert {row["field"] for row in made.changes() if row["typed"]} == {"model.name", "model.weights", "data.std"}


def test_torchvisions_transforms_are_read_and_squashed_images_are_stretched() -> None:
    made = loaded("folder", "model.name=torchvision:resnet50", "model.weights=torchvision:IMAGENET1K_V2").recipe.data
    assert made.mean == (0.485, 0.456, 0.406) and made.eval_crop == pytest.approx(224 / 232) and made.image_size == 224
    squashed = loaded("folder", "model.name=timm:vit_base_patch16_clip_384", "model.weights=default").recipe.data
    assert squashed.eval_resize == "stretch" and squashed.eval_crop == 0.875


def test_images_of_one_size_are_not_enlarged_and_grey_ones_keep_their_mean() -> None:
    made = loaded("synthetic", "model.width=1", "model.name=timm:test_vit", "model.weights=default").recipe.data
    assert (made.image_size, made.eval_crop, made.interpolation) == ("auto", 0.875, "bicubic")
    grey = loaded("folder", "data.source.channels=1", "model.name=timm:test_vit", "model.weights=default").recipe.data
    assert (grey.mean, grey.std, grey.image_size) == ("auto", "auto", 160)


def test_the_recipe_of_a_run_is_left_as_it_is_without_a_look_at_the_weights() -> None:
    whole = loaded("folder", "model.name=timm:test_vit", "model.weights=default").recipe.to_dict()
    whole["model"]["weights"] = "hf-hub:nobody/there"
    again = load_values(whole)
    assert with_weights_defaults(again) is again
    plain = load("folder")
    assert with_weights_defaults(plain) is plain


def test_the_hash_of_a_recipe_does_not_count_fields_that_it_does_not_set() -> None:
    """These fields are newer than recipes whose hashes are on record."""
    assert load("digits").recipe.hash != load("digits", Patch.parse(["data.interpolation=bicubic"])).recipe.hash


@pytest.mark.parametrize("name", ["timm:vit_smal_patch16_224", "torchvision:resnet51"])
def test_an_unknown_model_is_one_line_with_the_nearest_name(name: str) -> None:
    with pytest.raises(RecipeError, match=rf"^model.name: '{name}' is not a model \(did you mean "):
        loaded("folder", f"model.name={name}", "model.weights=default")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["model.weights=default"],
            "model.weights: default is not for resnet18_cifar (set model.name=torchvision:NAME or",
        ),
        (["model.weights=hf-hub:a/b", "model.name=torchvision:resnet18"], "(set model.name=timm:NAME)"),
        (["model.weights_sha256=abcdef12"], "model.weights_sha256: has no effect with model.weights off"),
        (["model.weights=a.pth", "model.weights_sha256=abc"], "'abc' is not a SHA-256"),
        (["model.weights=a.pth", "model.weights_sha256=12345678"], "12345678 is a number in YAML"),
        (["model.name=timm:resnet18", "model.args={num_classes: 3}"], "num_classes is what data.source sets"),
        (["model.name=timm:resnet18", "model.args={checkpoint_path: x}"], "checkpoint_path could load weights"),
        (["model.name=timm:resnet18", "model.args={pretrained_cfg: {file: x}}"], "pretrained_cfg could load weights"),
    ],
)
def test_settings_that_do_not_fit_are_one_line(words: list[str], message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load("folder", Patch.parse(["model.name=resnet18_cifar", *words]))
    assert message in str(caught.value) and "\n" not in str(caught.value)
