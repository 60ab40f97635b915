"""What SRC means to the data verbs, and how amounts and workers are read."""

import pytest

from paceline.cli.data_source import count_workers, parse_bytes, read_source, recipe_overrides
from paceline.core.errors import RecipeError, WorldError
from paceline.recipe.schema.source import Folder, Pack


@pytest.mark.parametrize(
    ("made", "name"),
    [
        ("cat/", "folder"),
        ("data.mdb", "lmdb"),
        ("index.pack", "pack"),
        ("cifar-10-batches-py/", "cifar10"),
        ("cifar-100-python/", "cifar100"),
        ("train-images-idx3-ubyte.gz", "fashion_mnist"),
        ("dataset_dict.json", "huggingface"),
    ],
)
def test_a_folder_is_read_by_its_content(tmp_path, made, name):
    (tmp_path / made).mkdir() if made.endswith("/") else (tmp_path / made).touch()
    request = read_source(str(tmp_path), [])
    assert (request.source.name, request.source.root, request.name) == (name, str(tmp_path), str(tmp_path))
    assert not request.is_recipe


def test_data_that_is_named_by_its_place_is_never_fetched(tmp_path):
    (tmp_path / "cifar-10-batches-py").mkdir()
    assert read_source(str(tmp_path), []).source.download is False


@pytest.mark.parametrize("src", ["photos.pack", "https://example.org/photos.pack", "s3://bucket/shards"])
def test_a_pack_is_known_by_its_name_or_url(src):
    assert read_source(src, []).source == Pack(root=src)


def test_overrides_lie_on_top(tmp_path):
    request = read_source(str(tmp_path), ["data.source.val_fraction=0.5", "data.image_size=64"])
    assert request.source == Folder(root=str(tmp_path), val_fraction=0.5)
    assert request.data.image_size == 64


def test_without_a_source_it_is_the_default_recipe_s():
    assert read_source(None, []).source.name == "digits"
    request = read_source("data.source.name=synthetic", ["data.source.num_images=7"])
    assert (request.source.name, request.source.num_images, request.is_recipe) == ("synthetic", 7, True)


@pytest.mark.parametrize(
    ("src", "words", "name"),
    [
        ("data.source.name=fashion_mnist", ["data.source.root=~/fashion"], "~/fashion"),
        ("data.source.name=fashion_mnist", [], "fashion_mnist"),
        ("folder", ["data.source.name=manifest", "data.source.train=t.csv", "data.source.val=v.csv"], "t.csv"),
        ("folder", ["data.source.root=photos"], "folder"),
        (None, [], "digits"),
    ],
)
def test_a_source_in_the_place_of_a_recipe_s_is_not_called_like_the_recipe(src, words, name):
    assert read_source(src, words).name == name


def test_a_preset_comes_before_a_folder_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits").mkdir()
    assert read_source("digits", []).is_recipe
    assert read_source("./digits", []).source.name == "folder"


def test_a_folder_whose_name_has_an_equals_sign_is_a_folder(tmp_path):
    (tmp_path / "size=large").mkdir()
    assert read_source(str(tmp_path / "size=large"), []).source.name == "folder"


@pytest.mark.parametrize("name", ["photos #2", "a: b", "[x]", "null", "'q", "1e3"])
def test_a_name_of_a_folder_is_no_yaml(tmp_path, monkeypatch, name):
    for each in ("photos", name):
        (tmp_path / each / "train").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert read_source(name, []).source.root == name


@pytest.mark.parametrize("beside", ["val.csv", "test.csv"])
def test_a_list_of_training_images_finds_that_of_validation_beside_it(tmp_path, beside):
    (tmp_path / beside).touch()
    request = read_source(str(tmp_path / "train.csv"), [])
    assert (request.source.train, request.source.val) == (str(tmp_path / "train.csv"), str(tmp_path / beside))


def test_a_list_without_a_validation_list_is_refused(tmp_path):
    (tmp_path / "train.csv").touch()
    with pytest.raises(RecipeError, match=r"add data\.source\.val=FILE\.csv"):
        read_source(str(tmp_path / "train.csv"), [])
    request = read_source(str(tmp_path / "all.csv"), ["data.source.val=other.csv"])
    assert request.source.val == "other.csv"


def test_an_unknown_source_is_refused(tmp_path):
    with pytest.raises(RecipeError, match=r"/gone: does not exist \(name a folder of images, a \.csv list"):
        read_source(str(tmp_path / "gone"), [])
    with pytest.raises(RecipeError, match=r"/gone\.csv: is not a file \(name a \.csv list of training images\)"):
        read_source(str(tmp_path / "gone.csv"), [])
    with pytest.raises(RecipeError, match=r"'digit': is neither a preset, .*did you mean 'digits'"):
        read_source("digit", [])
    with pytest.raises(RecipeError, match=r"^'nothere': is neither a preset, .* nor data \(name a folder .*\.pack"):
        read_source("nothere", [])
    with pytest.raises(RecipeError, match=r"^'x+': is neither a preset"):
        read_source("x" * 300, [])
    with pytest.raises(RecipeError, match=r"'extra': is not an override \(write KEY=VALUE"):
        read_source(str(tmp_path), ["extra"])


def test_sizes_for_a_model_are_those_of_its_published_weights():
    words = ["model.name=timm:vit_small_patch16_384", "model.weights=default"]
    assert read_source("folder", words, for_model=True).data.auto_image_size == 384
    assert read_source("folder", words).data.auto_image_size == 224


def test_a_source_is_printed_as_overrides_of_a_recipe():
    assert recipe_overrides(Pack(root="/a/b.pack")) == "data.source.name=pack data.source.root=/a/b.pack"


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("1GB", 10**9), ("1.5 gb", 1_500_000_000), ("20MB", 20_000_000), ("512", 512)]
)
def test_amounts_are_decimal(text, num_bytes):
    assert parse_bytes(text, "--shard-size") == num_bytes


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1GiB", "one"])
def test_an_invalid_amount_is_refused(text):
    with pytest.raises(RecipeError, match=r"^--shard-size: .* is not an amount of bytes \(write 500MB or 1GB\)"):
        parse_bytes(text, "--shard-size")


def test_workers_are_counted():
    assert count_workers("3") == 3
    assert count_workers("auto") >= 1
    with pytest.raises(WorldError, match="--workers: 'x' is not a number of processes"):
        count_workers("x")
