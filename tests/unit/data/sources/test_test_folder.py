"""A folder to be judged by: all of it, or what it holds out."""

import pytest

from paceline.data.sources.folder import VAL_FOLDERS, is_trained_on, load_test_folder
from paceline.recipe.schema.source import Folder


def names(source, root):
    return [source.name_of(index).removeprefix(f"{root}/") for index in range(len(source))]


def test_class_folders_are_taken_whole_with_their_own_classes(grow):
    root = grow({"dog": 1, "cat": 2})
    source = load_test_folder(Folder(root=str(root)))
    assert names(source, root) == ["cat/0.png", "cat/1.png", "dog/0.png"]
    assert (source.info.class_names, source.labels.tolist()) == (("cat", "dog"), [0, 0, 1])
    assert (source.info.split, source.info.num_images) == ("val", 3)


@pytest.mark.parametrize("val", VAL_FOLDERS)
@pytest.mark.parametrize("train", [{}, {"train/cat": 1}])
def test_a_validation_folder_is_taken_with_and_without_training_images(val, train, grow):
    root = grow({f"{val}/cat": 2, **train})
    assert names(load_test_folder(Folder(root=str(root))), root) == [f"{val}/cat/0.png", f"{val}/cat/1.png"]


def test_a_class_may_be_called_test(grow):
    root = grow({"test": 1, "exam": 1})
    assert names(load_test_folder(Folder(root=str(root))), root) == ["exam/0.png", "test/0.png"]


def test_the_validation_folder_that_is_named_comes_first(grow):
    root = grow({"mine/val/cat": 1, "other/cat": 1})
    section = Folder(root=f"{root}/mine", val_root=f"{root}/other")
    assert names(load_test_folder(section), root) == ["other/cat/0.png"]


def test_a_folder_without_images_is_refused(grow, refusal, tmp_path):
    (tmp_path / "cat").mkdir()
    assert "data.source.root" in refusal(load_test_folder, Folder(root=str(tmp_path)))
    assert "data.source.root: is not set" in refusal(load_test_folder, Folder())


def test_images_without_class_folders_are_for_predicting_and_not_for_evaluating(grow, refusal):
    root = grow({".": 3})
    assert refusal(load_test_folder, Folder(root=str(root))) == (
        f"data.source.root: {root} has no images to evaluate on: 3 images in it, in no class folder; make one folder "
        f"for each class, or use `paceline predict`, which needs none"
    )


def test_the_folder_that_was_trained_on_is_known_by_any_path_to_it(grow, tmp_path, monkeypatch):
    root = grow({"photos/cat": 1, "whole/train/cat": 1, "whole/val/cat": 1})
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
