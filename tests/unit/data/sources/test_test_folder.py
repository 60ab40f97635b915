"""The folder that `eval` reads: a validation folder, or all of it."""

import pytest

from paceline.data.sources.folder import VAL_FOLDERS, is_trained_on, load_test_folder
from paceline.recipe.schema.source import Folder


def names(source, root):
    return [source.name_of(index).removeprefix(f"{root}/") for index in range(len(source))]


def test_all_images_of_class_folders_are_loaded_with_their_own_classes(make_images):
    root = make_images({"dog": 1, "cat": 2})
    source = load_test_folder(Folder(root=str(root)))
    assert names(source, root) == ["cat/0.png", "cat/1.png", "dog/0.png"]
    assert (source.info.class_names, source.labels.tolist()) == (("cat", "dog"), [0, 0, 1])
    assert (source.info.split, source.info.num_images) == ("val", 3)


@pytest.mark.parametrize("val", VAL_FOLDERS)
@pytest.mark.parametrize("train", [{}, {"train/cat": 1}])
def test_a_validation_folder_is_used_with_and_without_training_images(val, train, make_images):
    root = make_images({f"{val}/cat": 2, **train})
    assert names(load_test_folder(Folder(root=str(root))), root) == [f"{val}/cat/0.png", f"{val}/cat/1.png"]


def test_a_class_may_be_called_test(make_images):
    root = make_images({"test": 1, "exam": 1})
    assert names(load_test_folder(Folder(root=str(root))), root) == ["exam/0.png", "test/0.png"]


def test_val_root_comes_first(make_images):
    root = make_images({"mine/val/cat": 1, "other/cat": 1})
    section = Folder(root=f"{root}/mine", val_root=f"{root}/other")
    assert names(load_test_folder(section), root) == ["other/cat/0.png"]


def test_a_folder_without_images_is_refused(make_images, error_message, tmp_path):
    (tmp_path / "cat").mkdir()
    assert "data.source.root" in error_message(load_test_folder, Folder(root=str(tmp_path)))
    assert "data.source.root: is not set" in error_message(load_test_folder, Folder())


def test_images_without_class_folders_are_refused_with_a_hint_to_predict(make_images, error_message):
    root = make_images({".": 3})
    assert error_message(load_test_folder, Folder(root=str(root))) == (
        f"data.source.root: {root} has no images to evaluate on: 3 images in it, in no class folder; make one folder "
        f"for each class, or use `paceline predict`, which needs none"
    )


def test_the_training_folder_is_recognized_by_any_path_to_it(make_images, tmp_path, monkeypatch):
    root = make_images({"photos/cat": 1, "whole/train/cat": 1, "whole/val/cat": 1})
    (tmp_path / "link").symlink_to("photos")
    monkeypatch.chdir(tmp_path)
    split, whole = Folder(root=f"{root}/photos"), Folder(root="whole")
    for other in (Folder(root="link", val_fraction=0.5), Folder(val_root="photos", root="whole")):
        assert is_trained_on(other, split)
    assert is_trained_on(Folder(root="whole/train"), whole)
    assert not is_trained_on(Folder(root=f"{root}/whole"), whole)
    assert not is_trained_on(Folder(root="photos"), Folder(root="gone"))
    (root / "whole/train/cat/0.png").rename(tmp_path / "0.png")
    (root / "whole/train/cat").rmdir()
    (root / "whole/train").rmdir()  # what it was trained on may have been removed
    assert not is_trained_on(split, whole)
