"""Published weights bring their preprocessing, as defaults that a recipe may change, with their name as the origin."""

from dataclasses import replace
from pathlib import Path

import pytest

from paceline.core.dataset import DatasetInfo
from paceline.core.errors import RecipeError
from paceline.core.run_dir import RunDir
from paceline.models.published import PublishedWeights
from paceline.models.weights_recipe import with_run_defaults, with_weights_defaults
from paceline.recipe.load import LoadedRecipe, Patch, load, load_any, load_values, preset_names
from paceline.recipe.plan import Plan, mean_and_std
from paceline.recipe.schema import Recipe
from paceline.recipe.schema.data import Data
from paceline.recipe.schema.model import Model
from paceline.recipe.schema.source import Pack
from paceline.recipe.schema.train import Train
from paceline.recipe.yaml import to_yaml_text

FIELDS = ("mean", "std", "interpolation", "eval_crop", "auto_image_size")
VIT = ("model.name=timm:vit_small_patch16_384", "model.weights=default")
SQUASHED = ("model.name=timm:vit_base_patch16_clip_384", "model.weights=default")


def loaded(recipe: str, *words: str) -> LoadedRecipe:
    return with_weights_defaults(load(recipe, Patch.parse([*words])))


def test_fields_that_nothing_sets_are_those_of_the_weights() -> None:
    made = loaded("folder", *VIT, "data.std=[1, 1, 1]")
    data = made.recipe.data
    assert (data.mean, data.std, data.interpolation) == ((0.5, 0.5, 0.5), (1, 1, 1), "bicubic")
    assert (data.eval_crop, data.auto_image_size, data.image_size) == (1.0, 384, "auto")
    name = "timm:vit_small_patch16_384.augreg_in21k_ft_in1k"
    assert {field: made.stack.origin(f"data.{field}") for field in FIELDS} == {
        **dict.fromkeys(FIELDS, name), "std": "command line"
    }  # fmt: skip
    assert {row["field"] for row in made.changes() if row["typed"]} == {"model.name", "model.weights", "data.std"}


def test_torchvisions_transforms_are_read_and_squashed_images_are_stretched() -> None:
    made = loaded("folder", "model.name=torchvision:resnet50", "model.weights=torchvision:IMAGENET1K_V2").recipe.data
    assert (
        made.mean == (0.485, 0.456, 0.406)
        and made.eval_crop == pytest.approx(224 / 232)
        and made.auto_image_size == 224
    )
    squashed = loaded("folder", *SQUASHED).recipe.data
    assert squashed.eval_resize == "stretch" and squashed.eval_crop == 0.875
    for word, crop in (("data.eval_crop=0.9", 0.9), ("data.eval_resize=crop", 1.0)):
        cropped = loaded("folder", *SQUASHED, word).recipe.data
        assert (cropped.eval_resize, cropped.eval_crop) == ("crop", crop)


def test_images_of_one_size_are_not_enlarged_and_grey_ones_keep_their_mean() -> None:
    made = loaded("synthetic", "model.width=1", "model.name=timm:test_vit", "model.weights=default").recipe.data
    assert (made.auto_image_size, made.eval_crop, made.interpolation) == (224, 0.875, "bicubic")
    grey = loaded("folder", "data.source.channels=1", "model.name=timm:test_vit", "model.weights=default").recipe.data
    assert (grey.mean, grey.std, grey.auto_image_size) == ("auto", "auto", 160)


@pytest.mark.parametrize("source", ["{name: pack, root: a.pack}", "{name: lmdb, root: a}", "{name: 'mine:Source'}"])
def test_sources_that_only_their_data_tell_about_are_planned_as_their_images_are(source: str) -> None:
    """A pack of CIFAR is trained as CIFAR is: not enlarged, and gray images have their own mean."""
    recipe = loaded("folder", f"data.source={source}", *VIT).recipe
    photos = DatasetInfo("toy", "train", 1000, ("a", "b"), 3, None, (0.1,) * 3, (0.2,) * 3)
    gray = replace(photos, channels=1, image_size=(28, 28), mean=(0.1,), std=(0.2,))
    for info, size, statistics in (
        (photos, 384, ((0.5,) * 3, (0.5,) * 3)),
        (replace(photos, image_size=(32, 32)), 32, ((0.5,) * 3, (0.5,) * 3)),
        (gray, 28, ((0.1,), (0.2,))),
    ):
        plan = Plan.derive(recipe, 1, info, replace(info, split="val"))
        assert (plan.image_size, plan.eval_image_size) == (size, size)
        assert mean_and_std(recipe.data, info) == statistics


def test_arguments_of_the_weights_lie_below_those_of_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    published = PublishedWeights("hub", "url", {"crop_mode": "squash"}, {"depth": 3, "class_token": False})
    monkeypatch.setattr("paceline.models.published.find_published_weights", lambda section, **_: published)
    given = [f"data.{each}" for each in ("mean=auto", "std=auto", "interpolation=bilinear", "image_size=64")]
    recipe = loaded("folder", *VIT, *given, "model.args={depth: 4}").recipe
    assert recipe.model.args == {"depth": 4, "class_token": False}
    assert recipe.data.eval_resize == "stretch"


def test_other_weights_for_a_run_bring_their_own_preprocessing(tmp_path: Path) -> None:
    """A run's recipe names all fields; those that were chosen for it stay."""
    first = loaded("folder", *VIT, "data.interpolation=bilinear", "data.std=[1, 1, 1]").recipe
    for name, recipe in {"vit": first, "scratch": load("folder").recipe}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "recipe.yaml").write_text(to_yaml_text(recipe.to_dict()))
        (tmp_path / name / "plan.json").write_text("{}")
    assert loaded(str(tmp_path / "vit"), "optim.lr=1").recipe.data == first.data
    clip = loaded(str(tmp_path / "vit"), *SQUASHED).recipe.data
    assert clip.mean[0] == pytest.approx(0.4815, abs=1e-4) and clip.std == (1, 1, 1)
    assert (clip.eval_resize, clip.eval_crop, clip.auto_image_size) == ("stretch", 0.875, 384)
    data = loaded(str(tmp_path / "scratch"), *VIT).recipe.data
    assert (data.mean, data.eval_crop, data.auto_image_size, data.interpolation) == ((0.5,) * 3, 1.0, 384, "bicubic")


def test_a_recipe_object_sets_the_fields_that_it_was_given() -> None:
    model = Model(name="timm:vit_small_patch16_384", weights="default")
    data = Data(source=Pack(root="a"), std=(1, 1, 1))
    recipe = Recipe(model=model, data=data, train=Train(epochs=1))
    made = with_weights_defaults(load_any(recipe)).recipe
    assert (made.data.mean, made.data.std, made.data.auto_image_size) == ((0.5,) * 3, (1, 1, 1), 384)


@pytest.mark.parametrize("name", preset_names())
def test_the_fields_that_a_recipe_sets_make_an_equal_recipe(name: str) -> None:
    recipe = load(name).recipe
    assert load_any(recipe).recipe == recipe


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


def test_crops_larger_than_the_image_are_whole_images() -> None:
    assert loaded("folder", "model.name=timm:volo_d4_448", "model.weights=default").recipe.data.eval_crop == 1.0


def test_a_resumed_run_keeps_its_preprocessing_whatever_its_weights_are_described_with_now(tmp_path: Path) -> None:
    words = ["model.name=timm:test_vit", "model.weights=hf-hub:nobody/there", "model.args={drop_rate: 0.1}"]
    typed = load("folder", Patch.parse(words))
    before = Patch.parse(
        [*words, "data.mean=[0.4, 0.4, 0.4]", "data.auto_image_size=96", "model.args={class_token: true}"]
    )
    whole = load("folder", before).recipe.to_dict()
    RunDir(tmp_path).recipe.write_text(to_yaml_text(whole))
    (tmp_path / "plan.json").write_text("{}")
    made = with_weights_defaults(with_run_defaults(typed, tmp_path))
    assert (made.recipe.data.mean, made.recipe.data.auto_image_size) == ((0.4, 0.4, 0.4), 96)
    assert made.recipe.model.args == {"class_token": True, "drop_rate": 0.1}
    assert made.stack.origin("data.mean") == tmp_path.name
    given = load("folder", Patch.parse([*words, "data.auto_image_size=64"]))
    assert with_run_defaults(given, tmp_path).recipe.data.auto_image_size == 64
    other = load("folder", Patch.parse([*words, "model.weights=timm:in1k"]))
    assert with_run_defaults(other, tmp_path) is other


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
