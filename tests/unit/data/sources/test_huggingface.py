"""Datasets that the `datasets` library reads: the same samples from each of its layouts, without a network."""

import gc
import io
import pickle
import socket
import sys
from multiprocessing import get_context

import pytest
from PIL import Image

from paceline.data.sources.fingerprint import digest_datasets
from paceline.data.sources.huggingface import HuggingFaceSource, load_huggingface
from paceline.data.sources.image_files import ImageFileSource
from paceline.recipe.schema.source import HuggingFace

hf = pytest.importorskip("datasets", reason="the package datasets is not installed: pip install datasets")
NAMES = ["cat", "dog"]


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    """Put the library's cache in a folder of the test, and refuse connections."""

    def refuse(*arguments, **options):
        raise AssertionError("a test of datasets on this machine asked for the network")

    monkeypatch.setattr(hf.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def png(number):
    file = io.BytesIO()
    Image.new("RGB", (4, 4), (number, 0, 0)).save(file, "PNG")
    return file.getvalue()


def made(number, labels=None, feature=None, start=0):
    """Return a split of `number` images; by default their labels cycle through the classes."""
    rows = {
        "image": [{"bytes": png(start + index), "path": f"{index}.png"} for index in range(number)],
        "label": [index % 2 for index in range(number)] if labels is None else labels,
    }
    features = {"image": hf.Image(), "label": feature or hf.ClassLabel(names=NAMES)}
    return hf.Dataset.from_dict(rows, features=hf.Features(features))


@pytest.fixture
def save(tmp_path, capfd):
    """Return a function that saves splits in a layout, and returns the folder."""

    def to(layout, **splits):
        root = tmp_path / layout
        if layout == "saved":
            hf.DatasetDict(splits).save_to_disk(str(root))
        else:
            (root / "data").mkdir(parents=True)
            for name, split in splits.items():
                split.to_parquet(str(root / "data" / f"{name}-00000-of-00001.parquet"))
        capfd.readouterr()  # progress bars of the library's
        return root

    return to


def load(root, **options):
    return load_huggingface(HuggingFace(root=str(root), **options))


def read_all(source):
    return [source.read(index) for index in range(len(source))]


@pytest.mark.parametrize("layout", ["saved", "parquet"])
def test_samples_come_encoded_with_their_labels_and_nothing_is_printed(layout, save, capfd):
    data = load(save(layout, train=made(5), validation=made(2, start=9)))
    assert read_all(data.train) == [(png(index), index % 2) for index in range(5)]
    assert read_all(data.val) == [(png(9), 0), (png(10), 1)]
    assert data.train.info.class_names == data.val.info.class_names == ("cat", "dog")
    assert capfd.readouterr() == ("", "")
    assert isinstance(data.train, HuggingFaceSource) and data.train.name_of(3).endswith(f"/{layout}/train[3]")


def test_the_same_samples_in_another_layout_are_the_same_data(save):
    digests = [digest_datasets(load(save(layout, train=made(4), test=made(2)))) for layout in ("saved", "parquet")]
    assert digests[0] == digests[1]
    other = load(save("other", train=made(4, labels=[1, 1, 0, 1]), test=made(2)))
    assert digest_datasets(other) != digests[0]


def test_an_image_folder_is_read_as_files(make_images):
    root = make_images({"train/cat": 2, "train/dog": 1, "test/cat": 1, "test/dog": 1})
    data = load(root)
    assert isinstance(data.train, ImageFileSource)
    assert [data.train.name_of(index) for index in range(3)] == [
        f"{root}/train/{name}" for name in ("cat/0.png", "cat/1.png", "dog/0.png")
    ]
    assert data.train.labels.tolist() == [0, 0, 1] and data.val.labels.tolist() == [0, 1]
    assert data.train.read(1) == ((root / "train/cat/1.png").read_bytes(), 0)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the library leaves the lists open
def test_metadata_beside_images_give_the_labels(make_images):
    root = make_images({"train": 3, "test": 1})
    (root / "train/metadata.csv").write_text("file_name,label\n0.png,b\n1.png,a\n2.png,b\n")
    (root / "test/metadata.csv").write_text("file_name,label\n0.png,a\n")
    data = load(root)
    assert data.train.info.class_names == ("a", "b")
    assert data.train.labels.tolist() == [1, 0, 1] and data.val.labels.tolist() == [0]
    del data
    gc.collect()  # so that the lists are closed here, and warn in no other test


def test_strings_and_integers_are_sorted_classes(save):
    texts = load(
        save("saved", train=made(3, ["b", "a", "b"], hf.Value("string")), val=made(1, ["a"], hf.Value("string")))
    )
    assert texts.train.info.class_names == ("a", "b") and texts.train.labels.tolist() == [1, 0, 1]
    numbers = {"train": made(3, [10, 7, 10], hf.Value("int16")), "val": made(1, [7], hf.Value("int16"))}
    data = load(save("parquet", **numbers))
    assert data.train.info.class_names == ("7", "10") and data.train.labels.tolist() == [1, 0, 1]


def test_the_first_validation_split_that_exists_is_used(save):
    assert len(load(save("saved", train=made(2), test=made(3), valid=made(4))).val) == 4


def test_splits_and_columns_are_chosen_by_name(save):
    train = made(4).add_column("coarse", [0, 0, 1, 1]).rename_column("image", "picture")
    root = save("saved", fit=train, judge=train.select([3]))
    data = load(root, train="fit", val="judge", image="picture", label="coarse")
    assert data.train.labels.tolist() == [0, 0, 1, 1] and data.val.labels.tolist() == [1]
    assert data.val.read(0) == (png(3), 1)


def test_forked_processes_and_pickles_read_the_same(save):
    source = load(save("saved", train=made(20), val=made(1))).train
    with get_context("fork").Pool(1) as pool:
        assert pool.map(source.read, range(20)) == read_all(source)
    assert read_all(pickle.loads(pickle.dumps(source))) == read_all(source)


def test_a_hub_name_is_not_downloaded(error_message, tmp_path):
    for root in ("ILSVRC/imagenet-1k", "https://huggingface.co/datasets/mnist", str(tmp_path / "gone")):
        assert error_message(load, root).startswith(f"data.source.root: {root} is not a local folder, and nothing is ")


def test_without_the_library_the_install_command_is_named(tmp_path, error_message, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install 'paceline[huggingface]'" in error_message(load, tmp_path)


def test_no_script_of_a_data_set_is_run(tmp_path, error_message):
    root = tmp_path / "evil"
    root.mkdir()
    for name in ("evil.py", "imagefolder.py", "parquet.py", "setup.py"):
        (root / name).write_text(f"open({str(tmp_path / 'canary')!r}, 'w')\n")
    assert "cannot be read by the datasets library" in error_message(load, root)
    assert not (tmp_path / "canary").exists()


WRONG = {
    "no such split": ({"train": "trian"}, "data.source.train: ", "has no split 'trian' (did you mean 'train'?)"),
    "no split to validate": ({"val": "auto"}, "data.source.val: ", "has no split 'validation'"),
    "no such label": ({"label": "class", "val": "train"}, "data.source.label: ", "has no column 'class'"),
    "images for labels": ({"label": "image", "val": "train"}, "data.source.label: ", "not labels (choose another"),
    "no such image": ({"image": "img", "val": "train"}, "data.source.image: ", "img does not name one image column of"),
    "labels for images": ({"image": "label", "val": "train"}, "data.source.image: ", "int64 holds no images"),
}


@pytest.mark.parametrize(("options", "start", "problem"), WRONG.values(), ids=WRONG)
def test_a_missing_split_or_column_is_named(options, start, problem, save, error_message):
    message = error_message(load, save("saved", train=made(2)), **options)
    assert message.startswith(start) and problem in message


def test_labels_that_are_missing_or_unknown_are_named(save, error_message, tmp_path):
    text = hf.Value("string")
    unlabelled = save("saved", train=made(2), test=made(2, labels=[0, -1]))
    assert "saved/test[1]: has the label -1, which is not a class" in error_message(load, unlabelled)
    gaps = save("parquet", train=made(2, ["a", None], text), test=made(1, ["a"], text))
    assert "parquet/train: 1 images have no label in 'label'" in error_message(load, gaps)
    strange = tmp_path / "strange"
    hf.DatasetDict(train=made(2, ["a", "b"], text), test=made(1, ["c"], text)).save_to_disk(str(strange))
    assert "strange/test[0]: has the label c, which is not a class of the training split" in error_message(
        load, strange
    )


def test_images_without_bytes_among_others_are_named_when_read(tmp_path, error_message):
    rows = {"image": [{"bytes": png(1), "path": None}, {"bytes": b"", "path": "1.png"}], "label": [0, 1]}
    features = hf.Features({"image": hf.Image(), "label": hf.ClassLabel(names=NAMES)})
    split = hf.Dataset.from_dict(rows, features=features)
    hf.DatasetDict(train=split, test=split).save_to_disk(str(tmp_path / "mixed"))
    source = load(tmp_path / "mixed").train
    assert source.read(0) == (png(1), 0)
    assert error_message(source.read, 1) == f"{tmp_path}/mixed/train[1]: has no bytes; remove it from the dataset"


@pytest.mark.parametrize("name", ["data/train-0.parquet", "dataset_dict.json", "state.json", "train/cat/x.txt"])
def test_broken_files_are_a_one_line_error(name, tmp_path, error_message):
    path = tmp_path / "broken" / name
    path.parent.mkdir(parents=True)
    path.write_bytes(b"PAR1\0\0\n{]")
    message = error_message(load, tmp_path / "broken")
    assert message.startswith("data.source.") and len(message) < 600
