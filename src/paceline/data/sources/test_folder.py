"""Class folders that are all to be judged by: a test set, which has no training images and is not split."""

import os
from pathlib import Path

from paceline.core.errors import DataError
from paceline.data.sources.class_tree import has_folders, scan_classes
from paceline.data.sources.encoded import EncodedSource, files_info
from paceline.data.sources.folder import VAL_FOLDERS, folder_roots
from paceline.data.sources.places import expanded, is_folder, printable
from paceline.recipe.schema.source import Folder


def load_test_folder(section: Folder, *, skip_bad: bool = False) -> EncodedSource:
    """Return all images that `section` would have for validation, were they no part of its training images.

    They are those of `val_root`, or of `val/`, `valid/`, `validation/` or `test/` in `root`, or of the class folders in
    `root` itself. The classes are their own, by name. Raise `DataError` as `load_folder` does.
    """
    root = _root(section)
    setting = "data.source.root" if section.val_root == "auto" else "data.source.val_root"
    tree = scan_classes(root, setting=setting, use="evaluation", skip_bad=skip_bad)
    class_names = tuple(printable(name) for name in tree.class_names)
    info = files_info("folder", "val", len(tree.paths), class_names, section.channels, tree.notes)
    return EncodedSource.pack(info, os.fspath(root.absolute()), tree.paths, tree.labels)


def is_trained_on(section: Folder, own: Folder) -> bool:
    """Whether `load_test_folder(section)` takes images from the folder that a run of `own` was trained on images of."""
    try:
        train_root, _ = folder_roots(own)
    except DataError:  # what it was trained on is not there any more
        return False
    return os.path.realpath(_root(section)) == os.path.realpath(train_root)


def _root(section: Folder) -> Path:
    if section.val_root != "auto":
        return expanded(section.val_root)
    named = section.root if section.root != "auto" else section.train_root
    if named == "auto":
        raise DataError("data.source.root: is not set; set data.source.root to the folder that holds the images")
    root = expanded(named)
    beside = (root / name for name in VAL_FOLDERS)
    # A class may be called `test` too: it has images in it, and no folders.
    return next((folder for folder in beside if is_folder(folder) and has_folders(folder)), root)
