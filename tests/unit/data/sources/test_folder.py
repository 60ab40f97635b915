"""Class folders: layouts, omitted files, and errors before training starts."""

import os
import stat
import time
from collections import Counter

import numpy as np
import pytest

from paceline.data.decode import decode
from paceline.data.sources.folder import VAL_FOLDERS, load_folder, scan_class_folders
from paceline.recipe.schema.source import Folder


def names(source):
    return [source.name_of(index) for index in range(len(source))]


def labels(source):
    return Counter(source.labels.tolist())


@pytest.mark.parametrize("val", VAL_FOLDERS)
def test_train_and_a_validation_folder_in_root(val, make_images):
    root = make_images({"train/cat": 3, "train/dog": 2, f"{val}/cat": 1, f"{val}/dog": 2})
    data = load_folder(Folder(root=str(root)))
    assert data.train.info.class_names == data.val.info.class_names == ("cat", "dog")
    assert names(data.train) == [f"{root}/train/{name}.png" for name in ("cat/0", "cat/1", "cat/2", "dog/0", "dog/1")]
    assert data.train.labels.tolist() == [0, 0, 0, 1, 1]
    assert data.val.labels.tolist() == [0, 1, 1]
    assert data.val.info.notes == ()
    content, label = data.val.read(2)
    assert (np.asarray(decode(content, channels=3, name=""))[0, 0].tolist(), label) == ([1, 0, 0], 1)


def test_val_comes_before_test(make_images):
    root = make_images({"train/cat": 2, "train/dog": 2, "test/cat": 1, "val/cat": 1, "val/dog": 1})
    val = load_folder(Folder(root=str(root))).val
    assert names(val) == [f"{root}/val/cat/0.png", f"{root}/val/dog/0.png"]
    assert val.info.notes == ("test/ is not used: validation reads val/",)


def test_a_fraction_to_hold_out_has_no_effect_beside_validation_images(make_images):
    root = make_images({"train/cat": 2, "train/dog": 2, "val/cat": 1, "val/dog": 1})
    val = load_folder(Folder(root=str(root), val_fraction=0.3)).val
    assert val.info.notes == (f"data.source.val_fraction has no effect: the validation images are in {root}/val",)


def test_classes_without_validation_images_are_named(make_images):
    root = make_images({"train/cat": 2, "train/dog": 2, "train/eel": 2, "val/dog": 1, "val/eel": 1})
    assert load_folder(Folder(root=str(root))).val.info.notes == ("1 of 3 classes have no images: cat",)


def test_separate_training_and_validation_roots(make_images):
    root = make_images({"a/cat": 2, "b/cat": 1})
    data = load_folder(Folder(train_root=f"{root}/a", val_root=f"{root}/b"))
    assert (len(data.train), len(data.val)) == (2, 1)


@pytest.mark.parametrize("place", ["", "train/"])
@pytest.mark.parametrize("setting", ["root", "train_root"])
def test_classes_without_a_validation_folder_are_split(place, setting, make_images):
    root = make_images({f"{place}cat": 20, f"{place}dog": 10, f"{place}eel": 1})
    top = root / place if setting == "train_root" else root
    data = load_folder(Folder(**{setting: str(top)}, val_fraction=0.2))
    assert (labels(data.train), labels(data.val)) == ({0: 16, 1: 8, 2: 1}, {0: 4, 1: 2})
    assert data.val.info.class_names == ("cat", "dog", "eel")
    assert not set(names(data.train)) & set(names(data.val))


def test_the_split_depends_on_the_seed_and_not_on_the_root(make_images, tmp_path):
    first = make_images({"cat": 20, "dog": 20}, top=tmp_path / "here")
    second = make_images({"dog": 20, "cat": 20}, top=tmp_path / "there")

    def val_names(root, seed=0):
        val = load_folder(Folder(root=str(root), split_seed=seed)).val
        return [name.removeprefix(f"{root}/") for name in names(val)]

    assert val_names(first) == val_names(second)
    assert val_names(first) != val_names(first, seed=1)


def test_extensions_in_any_case_nested_files_and_links_count_and_hidden_ones_do_not(make_images, tmp_path):
    root = make_images({"train/cat": 1, "train/cat/deep/er": 1, "train/cat/.cache": 1, "val/cat": 1})
    for extension in ("jpg", "JPEG", "jfif", "JPE", "jfi", "Png", "bmp", "gif", "webp", "tif", "TIFF", "ppm", "pgm"):
        (root / f"train/cat/x.{extension}").write_bytes(b"x")
    (root / "train/cat/.hidden.jpg").touch()
    (root / "train/.hidden").mkdir()
    (root / "train/cat/link.jpg").symlink_to(root / "train/cat/0.png")
    (root / "train/dog").symlink_to(root / "val/cat")
    train = load_folder(Folder(root=str(root))).train
    assert labels(train) == {0: 16, 1: 1}
    assert f"{root}/train/cat/deep/er/0.png" in names(train)


def test_omitted_files_are_noted(make_images):
    root = make_images({"train/cat": 1, "train": 2, "train/dog": 1, "val/cat": 1})
    for name in ("cat/1.raw", "cat/Thumbs.db", "dog/2.RAW", "dog/3.raw", "dog/Thumbs.db", "dog/notes.txt"):
        (root / "train" / name).touch()
    assert load_folder(Folder(root=str(root))).train.info.notes == (
        f"left out 2 files lying in no class folder, such as {root}/train/0.png",
        f"left out 6 files not named like an image (3 .raw, 2 Thumbs.db, 1 notes.txt), such as {root}/train/cat/1.raw",
    )


def test_a_root_one_level_too_high_is_noted(make_images):
    root = make_images({"photos/cat": 2, "photos/dog": 2})
    notes = load_folder(Folder(root=str(root))).train.info.notes
    assert notes == (f"{root} has one class only (photos); is it one level too high?",)


def test_validating_on_the_training_images_is_noted(make_images):
    root = make_images({"cat": 2, "dog": 2})
    val = load_folder(Folder(train_root=str(root), val_root=f"{root}/../{root.name}")).val
    assert "validation reads the training images" in val.info.notes[-1]


def test_a_class_missing_from_validation_does_not_renumber_the_rest(make_images):
    root = make_images({"train/ant": 1, "train/bee": 1, "train/cat": 1, "val/ant": 1, "val/cat": 1})
    assert load_folder(Folder(root=str(root))).val.labels.tolist() == [0, 2]


def test_a_class_called_train_is_not_a_split(make_images):
    root = make_images({"train": 5, "plane": 5})
    assert load_folder(Folder(root=str(root))).train.info.class_names == ("plane", "train")


def test_home_is_expanded(make_images, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    make_images({"photos/cat": 5, "photos/dog": 5})
    assert len(load_folder(Folder(root="~/photos")).train) == 8


def test_a_relative_root_keeps_its_meaning_in_another_working_directory(make_images, monkeypatch, tmp_path):
    make_images({"photos/cat": 5, "photos/dog": 5})
    monkeypatch.chdir(tmp_path)
    source = load_folder(Folder(root="photos")).train
    monkeypatch.chdir("/")
    assert source.read(0)[0].startswith(b"\x89PNG")


def test_undecodable_names_are_read_and_printed(make_images, tmp_path, error_message):
    strange = os.fsdecode(b"caf\xe9")
    root = make_images({strange: 3, "new\nline": 3})
    train = load_folder(Folder(root=str(root))).train
    assert train.info.class_names == ("caf\\udce9", "new\\nline")
    assert names(train)[0] == f"{root}/caf\\udce9/{names(train)[0][-5:]}"
    assert train.read(0)[0].startswith(b"\x89PNG")
    (root / strange / "x.jpg").mkdir()
    assert error_message(load_folder, Folder(root=str(root))).startswith(
        f"{root}: 1 image cannot be read: caf\\udce9/x.jpg (a folder); "
    )


def test_a_missing_root_setting_is_named(error_message):
    assert "set data.source.root" in error_message(load_folder, Folder())


def test_two_training_folders_are_refused(error_message):
    message = error_message(load_folder, Folder(root="/a", train_root="/b"))
    assert message == "data.source.train_root: /b is set, and so is data.source.root (/a); set one of them"


@pytest.mark.parametrize("setting", ["root", "train_root"])
def test_a_missing_folder_is_named(setting, tmp_path, error_message):
    message = error_message(load_folder, Folder(**{setting: f"{tmp_path}/gone"}))
    assert message.startswith(f"data.source.{setting}: {tmp_path}/gone does not exist; set data.source.{setting} to")


def test_a_file_in_place_of_a_folder_is_named(tmp_path, error_message):
    (tmp_path / "x").touch()
    assert error_message(load_folder, Folder(root=f"{tmp_path}/x")).startswith(
        f"data.source.root: {tmp_path}/x is not a folder"
    )


def test_a_missing_validation_folder_is_named(make_images, error_message):
    root = make_images({"train/cat": 1})
    message = error_message(load_folder, Folder(root=str(root), val_root=f"{root}/gone"))
    assert message.startswith(f"data.source.val_root: {root}/gone does not exist")


def test_a_validation_folder_without_training_is_not_a_class(make_images, error_message):
    message = error_message(load_folder, Folder(root=str(make_images({"training/cat": 1, "val/cat": 1}))))
    assert "has val/ but no train/" in message


@pytest.mark.parametrize(
    ("tree", "state"),
    [
        ({}, "no class folders in it"),
        ({"cat": 0, "dog": 0}, "2 folders in it, all without images"),
        ({".": 3}, "3 images in it, in no class folder"),
    ],
)
def test_the_error_for_a_folder_without_images_lists_its_files(tree, state, make_images, tmp_path, error_message):
    message = error_message(load_folder, Folder(root=str(make_images(tree))))
    assert message.startswith(f"data.source.root: {tmp_path} has no images to train on: {state}")


def test_the_error_for_unsupported_images_lists_their_extensions(make_images, tmp_path, error_message):
    make_images({"cat": 0, "dog": 0})
    for number in range(3):
        (tmp_path / f"dog/{number}.raw").touch()
    assert error_message(load_folder, Folder(root=str(tmp_path))) == (
        f"data.source.root: {tmp_path} has no images to train on: 2 folders in it, all without images, with 3 .raw; "
        f"convert images to .jpg or .png"
    )


def test_an_error_about_a_validation_folder_mentions_validation(make_images, error_message):
    root = make_images({"train/cat": 1, "other": 2})
    message = error_message(load_folder, Folder(root=str(root), val_root=f"{root}/other"))
    assert message.startswith(f"data.source.val_root: {root}/other has no images to validate on: 2 images in it, in no")


def test_the_error_for_a_class_without_images_lists_its_files(make_images, error_message):
    root = make_images({"cat": 1, "dog": 1, "eel/deep": 0})
    for name in ("1.raw", "deep/2.raw", "notes.txt"):
        (root / "eel" / name).touch()
    assert error_message(load_folder, Folder(root=str(root))) == (
        f"{root}/eel: is a class folder without images, with 2 .raw, 1 notes.txt; remove it, or convert "
        f"images to .jpg or .png"
    )


@pytest.mark.parametrize("split", ["train", "val"])
def test_an_empty_class_is_named(split, make_images, error_message):
    root = make_images({"train/cat": 1, "train/dog": 1, "val/cat": 1, f"{split}/eel": 0})
    message = error_message(load_folder, Folder(root=str(root)))
    assert message == f"{root}/{split}/eel: is a class folder without images; remove it or put images in it"


def test_an_unknown_validation_class_is_named_with_a_suggestion(make_images, error_message):
    root = make_images({"train/cat": 1, "train/giraffe": 1, "val/cat": 1, "val/girafe": 1})
    message = error_message(load_folder, Folder(root=str(root)))
    assert message.startswith(f"{root}/val/girafe: is a class that {root}/train lacks (did you mean 'giraffe'?)")


def test_with_one_image_per_class_the_validation_split_is_empty(make_images):
    root = make_images({"cat": 1, "dog": 1})
    data = load_folder(Folder(root=str(root)))
    assert (len(data.train), len(data.val)) == (2, 0)
    assert data.val.info.notes == (f"{root} has one image per class, so none is held out",)


@pytest.fixture
def faulty(make_images):
    """Return a folder of two classes with every fault that a scan finds."""
    root = make_images({"cat": 3, "dog": 3, "dog/z.JPG": 0})
    os.mkfifo(root / "cat/pipe.jpg")
    (root / "cat/link.png").symlink_to(root / "gone.png")
    (root / "cat/self.png").symlink_to(root / "cat/self.png")
    (root / "dog/empty.gif").touch()
    socket_path = root / "dog/socket.bmp"
    os.mknod(socket_path, 0o600 | stat.S_IFSOCK)
    return root


# matrix: 37
def test_entries_that_cannot_be_images_are_found_by_the_scan(faulty, error_message):
    start = time.perf_counter()
    message = error_message(load_folder, Folder(root=str(faulty)))
    assert time.perf_counter() - start < 1  # nothing is opened: a pipe would hold the scan up for ever
    assert message == (
        f"{faulty}: 6 images cannot be read: cat/link.png (a dangling link), cat/pipe.jpg (a pipe or a device), "
        f"cat/self.png (a dangling link), dog/empty.gif (empty), dog/socket.bmp (a pipe or a device), ...; "
        f"remove or replace them, or set data.on_bad_image=skip"
    )


# matrix: 37
@pytest.mark.parametrize("mode", [0o600, 0o640])
def test_an_image_without_read_permission_is_found_by_the_scan(mode, make_images, error_message, monkeypatch):
    root = make_images({"cat": 2, "dog": 2})
    (root / "cat/1.png").chmod(mode)
    # Root, who may run this test, may read every file.
    monkeypatch.setattr(os, "access", lambda path, how: how != os.R_OK)
    assert error_message(load_folder, Folder(root=str(root))) == (
        f"{root}: 1 image cannot be read: cat/1.png (no permission to read it); remove or replace them, or set "
        f"data.on_bad_image=skip"
    )


def test_skip_bad_keeps_unreadable_files(faulty, error_message):
    data = load_folder(Folder(root=str(faulty)), skip_bad=True)
    places = [(source, index) for source in (data.train, data.val) for index in range(len(source))]
    bad = [(source, index) for source, index in places if source.name_of(index)[-5:-4] not in "012"]
    assert len(places) == 12 and len(bad) == 6
    for source, index in bad:
        assert error_message(source.read, index).startswith(source.name_of(index))


# matrix: 40
def test_class_names_that_look_the_same_are_refused(make_images, error_message):
    root = make_images({"caf\u00e9": 2, "cafe\u0301": 2})
    message = error_message(load_folder, Folder(root=str(root)))
    assert "only in its Unicode encoding" in message and "'cafe\\u0301'" in message and "'caf\\xe9'" in message


def test_a_link_to_a_parent_folder_is_refused(make_images, error_message):
    root = make_images({"cat": 1, "dog": 1})
    (root / "cat/again").symlink_to(root)
    assert error_message(load_folder, Folder(root=str(root))) == (
        f"{root}/cat/again: links to one of its parent folders; remove the link"
    )


def test_a_folder_that_cannot_be_listed_is_named(make_images, monkeypatch, error_message):
    root = make_images({"cat": 1, "dog": 1})
    scandir = os.scandir

    def guarded(folder):
        if str(folder).endswith("dog"):
            raise PermissionError(13, "Permission denied")
        return scandir(folder)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", guarded)  # root, who may run this test, may list every folder
        message = error_message(load_folder, Folder(root=str(root)))
    assert message == f"{root}/dog cannot be listed: Permission denied; make it readable or remove it"


@pytest.mark.real_data
def test_imagenet_sample_has_500_images_and_all_decode(real_data):
    root = real_data("imagenet-sample")
    assert len(scan_class_folders(root / "train", setting="root").paths) == 500
    assert len(load_folder(Folder(root=str(root))).val) == 0
    train = load_folder(Folder(train_root=f"{root}/train", val_root=f"{root}/train")).train
    sizes = {}
    for index in range(len(train)):
        name = train.name_of(index)
        sizes[name.rpartition("/")[2]] = decode(train.read(index)[0], channels=3, name=name).size
    assert sizes["n02951585_can_opener.JPEG"] == (294, 392)  # stored as 392x294, orientation 6
    assert sizes["n01728572_thunder_snake.JPEG"] == (500, 333)  # orientation 0, which is none
    assert sizes["n03992509_potter's_wheel.JPEG"] == (500, 333)
