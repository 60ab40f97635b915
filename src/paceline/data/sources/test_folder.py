"""Load class folders as a test set, all images of which are evaluated."""

import os
from pathlib import Path

from paceline.core.errors import DataError
from paceline.data.sources.class_tree import has_subfolders, scan_class_folders
from paceline.data.sources.encoded import ImageFileSource, build_files_info
from paceline.data.sources.folder import VAL_FOLDERS, resolve_folder_roots
from paceline.data.sources.places import expand_path, is_folder, printable
from paceline.recipe.schema.source import Folder


def load_test_folder(section: Folder, *, skip_bad: bool = False) -> ImageFileSource:
    """Load all images of `val_root`, or of `val/`, `valid/`, `validation/` or `test/` in `root`, or of `root` itself.

    The classes are the folder's own. Raise `DataError` as `load_folder` does.
    """
    root = _resolve_test_root(section)
    setting = "data.source.root" if section.val_root == "auto" else "data.source.val_root"
    tree = scan_class_folders(root, setting=setting, purpose="evaluation", skip_bad=skip_bad)
    class_names = tuple(printable(name) for name in tree.class_names)
    info = build_files_info("folder", "val", len(tree.paths), class_names, section.channels, tree.notes)
    return ImageFileSource.from_paths(info, os.fspath(root.absolute()), tree.paths, tree.labels)


def is_trained_on(section: Folder, trained: Folder) -> bool:
    """Return whether `load_test_folder(section)` reads the folder that a run on `trained` used for training."""
    try:
        train_root, _ = resolve_folder_roots(trained)
    except DataError:  # the training folder no longer exists
        return False
    return os.path.realpath(_resolve_test_root(section)) == os.path.realpath(train_root)


def _resolve_test_root(section: Folder) -> Path:
    if section.val_root != "auto":
        return expand_path(section.val_root)
    text = section.root if section.root != "auto" else section.train_root
    if text == "auto":
        raise DataError("data.source.root: is not set; set data.source.root to the folder that holds the images")
    root = expand_path(text)
    candidates = (root / name for name in VAL_FOLDERS)
    # A class may also be called `test`; it contains images and no folders.
    return next((folder for folder in candidates if is_folder(folder) and has_subfolders(folder)), root)
