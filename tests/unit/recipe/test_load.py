"""`recipe.load`: what a name means, what a recipe extends, and who set each value."""

import re

import pytest

from paceline.core.errors import RecipeError
from paceline.core.urls import public_url
from paceline.recipe import load as load_module
from paceline.recipe.load import Patch, find_recipe, load
from paceline.recipe.schema.source import Pack


@pytest.fixture
def presets(tmp_path, monkeypatch):
    """Put two presets of our own in the place of the shipped ones."""
    folder = tmp_path / "presets"
    (folder / "course").mkdir(parents=True)
    (folder / "base.yaml").write_text("# A base.\ntrain:\n  epochs: 3\noptim: {lr: 0.5}\n")
    (folder / "course" / "one.yaml").write_text("# The first.\nextends: base\nmodel:\n  width: 0.5\n")
    monkeypatch.setattr(load_module, "PRESETS", folder)
    return folder


def test_a_name_is_a_preset_a_file_a_run_directory_or_its_recipe(presets, write):
    file = write("train: {epochs: 1}\n", "mine.yml")
    write("train: {epochs: 1}\n", "runs/a-run/recipe.yaml")
    write("{}", "runs/a-run/plan.json")
    names = ["base", "course/one", file, "runs/a-run", "runs/a-run/", "runs/a-run/recipe.yaml"]
    assert [load(name).name for name in names] == ["base", "course-one", "mine", "a-run", "a-run", "a-run"]


def test_a_run_directory_wins_over_a_preset_of_its_name(presets, write):
    write("train: {epochs: 7}\n", "base/recipe.yaml")
    assert load("base").recipe.train.epochs == 3  # a folder with a recipe in it is no run yet
    write("{}", "base/plan.json")
    assert load("base").recipe.train.epochs == 7


def test_a_folder_of_images_with_a_recipe_in_it_is_refused_naming_both_ways_out(write, refusal):
    write("train: {epochs: 7}\n", "my photos/recipe.yaml")
    for name in ("my photos", "my photos/"):
        message = refusal(load, name)
        assert message.startswith("my photos: has a recipe.yaml, but not the plan.json of a run")
        assert (
            "recipe: name 'my photos/recipe.yaml'; images: paceline train folder data.source.root='my photos" in message
        )
    assert refusal(load, write("extends: my photos\n")).startswith("r.yaml:1: extends: my photos: has a recipe.yaml")


def test_the_folder_of_an_experiment_is_trained_by_its_name(write):
    write("train: {epochs: 6}\n", "ladder-1/recipe.yaml")
    write("{}", "ladder-1/asked.json")
    assert load("ladder-1").recipe.train.epochs == 6


def test_a_tilde_is_the_home_folder(write, tmp_path, monkeypatch):
    write("train: {epochs: 7}\n", "home/mine.yaml")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert load("~/mine.yaml").recipe.train.epochs == 7


SEE = "(see `paceline recipes`)"
NEITHER = "is neither a preset, a recipe file nor a run directory"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bas", f"'bas': {NEITHER} (did you mean 'base'?)"),
        ("course", f"'course': {NEITHER} (did you mean 'course/one'?)"),
        ("nothing", f"'nothing': {NEITHER} {SEE}"),
        ("a\nb", f"'a\\nb': {NEITHER} {SEE}"),
        ("a\0b", f"'a\\x00b': {NEITHER} {SEE}"),
        ("../presets/base", f"'../presets/base': {NEITHER} {SEE}"),
        ("none.yaml", "none.yaml: no such recipe file (see `paceline recipes` for the presets)"),
        ("~no-such-user/r.yml", "~no-such-user/r.yml: no such recipe file (see `paceline recipes` for the presets)"),
        (
            "my photos.pack",
            "my photos.pack: is a pack, not a recipe (write: paceline train folder data.source.name=pack "
            "data.source.root='my photos.pack')",
        ),
        (".", ".: is a folder without recipe.yaml, not a run (images: paceline train folder data.source.root=...)"),
        ("x" * 300, f"'{'x' * 300}': cannot be read: File name too long {SEE}"),
    ],
)
def test_an_unknown_name_is_refused_with_a_suggestion(presets, refusal, name, message):
    assert refusal(load, name) == message


def test_a_folder_of_shards_is_called_a_pack_and_the_suggested_command_reads_it(write, refusal):
    write("", "shards/index.pack")
    _, _, words = refusal(load, "shards").partition("paceline train folder ")
    assert load("folder", Patch.parse(words.rstrip(")").split())).recipe.data.source == Pack(root="shards")


def test_a_recipe_extends_a_preset_which_may_extend_another(presets, write):
    recipe = load(write("extends: course/one\nseed: 5\n")).recipe
    assert (recipe.train.epochs, recipe.optim.lr, recipe.model.width, recipe.seed) == (3, 0.5, 0.5, 5)


def test_a_recipe_extends_a_file_beside_it_wherever_it_is_loaded_from(write):
    write("train: {epochs: 4}\n", "a/base.yaml")
    write("train: {epochs: 5}\n", "base.yaml")
    assert load(write("extends: base.yaml\nseed: 2\n", "a/r.yaml")).recipe.train.epochs == 4


def test_a_recipe_extends_a_file_elsewhere(write, tmp_path, monkeypatch):
    write("train: {epochs: 4}\n", "home/base.yaml")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert load(write("extends: ~/base.yaml\n", "r.yaml")).recipe.train.epochs == 4
    assert load(write(f"extends: {tmp_path}/home/base.yaml\n", "a/r.yaml")).recipe.train.epochs == 4
    assert load(write("extends: ../home/base.yaml\n", "a/r.yaml")).recipe.train.epochs == 4


def test_a_recipe_extends_a_run(write):
    write("train: {epochs: 4}\n", "runs/first/recipe.yaml")
    write("{}", "runs/first/plan.json")
    assert load(write("extends: runs/first\nseed: 1\n")).recipe.train.epochs == 4


def test_a_recipe_that_extends_itself_is_refused(write, refusal):
    assert refusal(load, write("extends: r.yaml\n")) == "r.yaml: extends itself (fix the chain of `extends`)"


def test_a_circle_of_recipes_is_refused(write, refusal):
    for name, base in (("a", "b"), ("b", "c"), ("c", "a")):
        write(f"extends: {base}.yaml\n", f"{name}.yaml")
    assert refusal(load, "a.yaml") == "a.yaml: extends itself (fix the chain of `extends`)"


@pytest.mark.parametrize(
    ("base", "message"),
    [
        ("bass", "'bass': is neither a preset, a recipe file nor a run directory (did you mean 'base'?)"),
        ("base.yaml", "base.yaml: no such recipe file (see `paceline recipes` for the presets)"),
        ("[base]", "['base'] is not a name (write a preset or a file)"),
        ("3", "3 is not a name (write a preset or a file)"),
        ("''", ".: is a folder without recipe.yaml, not a run (images: paceline train folder data.source.root=...)"),
    ],
)
def test_a_base_that_is_missing_is_refused_at_the_line_that_names_it(presets, write, refusal, base, message):
    assert refusal(load, write(f"seed: 1\nextends: {base}\n")) == f"r.yaml:2: extends: {message}"


def test_extends_is_no_override(resolve, refusal):
    assert refusal(resolve, "extends=digits").startswith("extends: no such field (one of seed, data, ")


def test_every_value_knows_who_set_it_last(presets, write):
    name = write("extends: course/one\ndata:\n  # ours\n  batch_size: 32\ntrain: {epochs: 9}\n")
    stack = load(name, Patch.parse(["optim.lr=0.1", "data.source.name=synthetic"])).stack
    origins = {
        path: stack.origin(path)
        for path in ("train.epochs", "model.width", "data.batch_size", "optim.lr", "data.source.name", "seed")
    }
    assert origins == {
        "train.epochs": "r.yaml:5",
        "model.width": "course/one.yaml:4",
        "data.batch_size": "r.yaml:4",
        "optim.lr": "command line",
        "data.source.name": "command line",
        "seed": "default",
    }


def test_an_item_of_a_list_comes_from_where_the_list_does(write):
    stack = load(write("train: {epochs: 1}\ndata:\n  augment:\n    - flip\n    - {name: rotate}\n")).stack
    assert stack.origin("data.augment[1].degrees") == "r.yaml:3"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("optim:\n  lr: x\n", "r.yaml:2: optim.lr: 'x' should be a number"),
        ("data:\n  std:\n  - 1\n  - -1\n", "r.yaml:2: data.std[1]: -1 should be greater than 0"),
        ("optim:\n\n  momentun: 1\n", "r.yaml:3: optim.momentun: no such field (did you mean 'optim.momentum'?)"),
        ("optim:\n", "r.yaml:1: optim: None is a value where a section is needed (set a field below it)"),
        ("", "train: is needed (set train=...)"),
    ],
)
def test_a_bad_value_in_a_file_is_refused_with_its_file_and_line(write, refusal, text, message):
    ending = "" if message.startswith("train") else "train: {epochs: 1}\n"
    assert refusal(load, write(text + ending)) == message


def test_a_bad_value_in_a_base_names_the_base(presets, write, refusal):
    (presets / "base.yaml").write_text("train:\n  epochs: -1\n")
    assert refusal(load, write("extends: course/one\n")) == (
        "base.yaml:2: train.epochs: -1 should be greater than 0, or 'auto'"
    )


def test_a_bad_override_names_the_field(write, refusal):
    name = write("train: {epochs: 1}\noptim: {lr: 1}\n")
    assert refusal(load, name, Patch.parse(["optim.lr=x"])) == "optim.lr: 'x' should be a number"


def test_finding_a_recipe_does_not_read_it(write):
    assert str(find_recipe(write("not: [yaml"))) == "r.yaml"
    with pytest.raises(RecipeError):
        load("r.yaml")


@pytest.mark.parametrize(
    ("words", "place"),
    [
        (["data.source={name: pack, root: 'https://me:S3CRET@host/a.pack'}"], "data.source.root"),
        (["data.source={name: pack, root: 'https://S3CRET@host/a.pack'}"], "data.source.root"),
        (["data.source={name: pack, root: 'https://host/a.pack?any=S3CRET'}"], "data.source.root"),
        (["data.source={name: pack, root: 's3://key:S3CRET@bucket/a.pack'}"], "data.source.root"),
        (["data.source={name: pack, root: 's3://bucket/a.pack?any=S3CRET'}"], "data.source.root"),
        (["data.source={name: pack, rot: 'https://me:S3CRET@host/a.pack'}"], "data.source.rot"),
        (["log.sinks=[{name: 'mine:Sink', args: {url: 'http://me:S3CRET@host'}}]"], "log.sinks[0].args.url"),
        (
            ["log.sinks=[{name: 'mine:Sink', args: {to: ['http://host/?access_token=S3CRET']}}]"],
            "log.sinks[0].args.to[0]",
        ),
    ],
)
def test_a_url_with_a_secret_is_refused_wherever_it_stands_and_the_secret_is_not_shown(resolve, refusal, words, place):
    message = refusal(resolve, *words)
    assert message.startswith(f"{place}: ") and "PACELINE_URL_CREDENTIALS" in message and "S3CRET" not in message


def test_a_secret_given_as_a_recipe_is_not_shown(refusal):
    message = refusal(load, "https://me:S3CRET@host/a.pack?sig=S3CRET")
    assert message.startswith("https://host/a.pack: the URL holds a user name") and "S3CRET" not in message


def test_urls_without_a_secret_are_kept_as_they_are(resolve):
    for root in ("https://host:8443/packs/a.pack", "abfs://container@account.dfs.core.windows.net/set", "s3://b/a@c/d"):
        recipe = resolve("data.source.name=pack", f"data.source.root={root}").recipe
        assert recipe.data.source.root == root and public_url(root) == root


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("optim.lr", "'optim.lr': is a field, not a recipe (write optim.lr=VALUE)"),
        ("cifar10", "did you mean one of cifar10-94, cifar10-95, cifar10-96, cifar10-cpu, cifar10-resnet18?"),
    ],
)
def test_a_name_that_is_almost_a_recipe_is_refused_with_a_suggestion(name, fix) -> None:
    with pytest.raises(RecipeError, match=re.escape(fix)):
        load(name)


def test_a_field_by_the_name_that_other_trainers_have_for_it_is_refused_with_ours() -> None:
    with pytest.raises(RecipeError, match=r"^optim.learning_rate: no such field \(did you mean 'optim.lr'\?\)"):
        load("digits", Patch.parse(["optim.learning_rate=0.1"]))


def test_changes_are_those_to_the_named_recipe_with_the_command_line_first(presets) -> None:
    assert load("base").changes() == []
    changes = load("base", Patch.parse(["optim.name=adamw", "train.epochs=5", "optim.lr=0.5"])).changes()
    assert [(row["field"], row["base"], row["value"]) for row in changes if row["typed"]] == [
        ("optim.name", "sgd", "adamw"),
        ("train.epochs", 3.0, 5.0),
    ]
    followed = {row["field"]: (row["base"], row["value"]) for row in changes if not row["typed"]}
    assert followed["optim.momentum"] == (0.9, None) and followed["optim.eps"][0] is None
    assert load("base", Patch.parse(["train.steps=7"])).changes()[0]["field"] == "train.steps"
