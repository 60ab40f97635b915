"""Load class folders of image files as a training and a validation split."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.core.dataset import Datasets, Split
from paceline.core.errors import DataError, suggest_similar
from paceline.core.units import count, join_few
from paceline.data.sources.class_tree import ClassTree, has_subfolders, scan_class_folders
from paceline.data.sources.encoded import ImageFileSource, build_files_info
from paceline.data.sources.places import expand_path, is_folder, printable
from paceline.data.sources.split import select_validation
from paceline.recipe.schema.source import Folder

VAL_FOLDERS = ("val", "valid", "validation", "test")


def load_folder(section: Folder, *, skip_bad: bool = False) -> Datasets:
    """Load the images of `section`; the class folders of the training split define the classes.

    Without a validation folder, validation images are selected by a hash of their paths; with one image per class that
    split is empty. Raise `DataError` if folders are missing, empty or contradictory, or hold unreadable image files;
    `skip_bad` keeps such files.
    """
    train_root, val_root = resolve_folder_roots(section)
    train = _scan_train_root(train_root, section, skip_bad=skip_bad)
    if val_root is None:
        train, val = _split_tree(train, section)
    else:
        val = _remap_labels(_scan_val_root(val_root, skip_bad=skip_bad), train)
        val = replace(val, notes=(*val.notes, *_note_missing_classes(val), *_note_unused_folders(section, val_root)))
        if train_root.samefile(val_root):
            note = "validation reads the training images, so its accuracy does not measure generalization"
            val = replace(val, notes=(*val.notes, note))
    return Datasets(_build_folder_source(train, "train", section), _build_folder_source(val, "val", section))


def load_folder_validation(section: Folder, *, skip_bad: bool = False) -> ImageFileSource:
    """Load only the validation split of `load_folder`, without scanning training images if it has its own folder.

    Class numbers follow the validation folder, and differ from training if it lacks a class.
    """
    train_root, val_root = resolve_folder_roots(section)
    if val_root is None:
        _, val = _split_tree(_scan_train_root(train_root, section, skip_bad=skip_bad), section)
    else:
        val = _scan_val_root(val_root, skip_bad=skip_bad)
    return _build_folder_source(val, "val", section)


def _scan_train_root(root: Path, section: Folder, *, skip_bad: bool) -> ClassTree:
    setting = "data.source.root" if section.train_root == "auto" else "data.source.train_root"
    return scan_class_folders(root, setting=setting, skip_bad=skip_bad)


def _scan_val_root(root: Path, *, skip_bad: bool) -> ClassTree:
    return scan_class_folders(root, setting="data.source.val_root", purpose="validation", skip_bad=skip_bad)


def resolve_folder_roots(section: Folder) -> tuple[Path, Path | None]:
    """Return the training folder, and the validation folder or None.

    Raise `DataError` if `section` names no training folder or two.
    """
    val_root = None if section.val_root == "auto" else expand_path(section.val_root)
    if section.root == "auto" and section.train_root == "auto":
        raise DataError("data.source.root: is not set; set data.source.root to the folder that holds the images")
    if section.root != "auto" and section.train_root != "auto":
        raise DataError(
            f"data.source.train_root: {printable(section.train_root)} is set, and so is data.source.root "
            f"({printable(section.root)}); set one of them"
        )
    if section.train_root != "auto":
        return expand_path(section.train_root), val_root
    root = expand_path(section.root)
    train, val_names = root / "train", [name for name in VAL_FOLDERS if is_folder(root / name)]
    if is_folder(train) and (val_names or has_subfolders(train)):
        return train, val_root or (root / val_names[0] if val_names else None)
    if val_names:
        raise DataError(
            f"data.source.root: {printable(root)} has {val_names[0]}/ but no train/ with class folders; "
            f"add it, or set data.source.train_root (to the same folder if {val_names[0]} is a class)"
        )
    return root, val_root


def _split_tree(tree: ClassTree, section: Folder) -> tuple[ClassTree, ClassTree]:
    mask = select_validation(tree.labels, tree.paths, fraction=section.val_fraction, seed=section.split_seed)
    notes = () if mask.any() else (f"{printable(tree.root)} has one image per class, so none is held out",)
    return _select_images(tree, ~mask), replace(_select_images(tree, mask), notes=notes)


def _select_images(tree: ClassTree, mask: NDArray[np.bool_]) -> ClassTree:
    paths = [path for path, is_kept in zip(tree.paths, mask.tolist(), strict=True) if is_kept]
    return replace(tree, paths=paths, labels=tree.labels[mask])


def _remap_labels(val: ClassTree, train: ClassTree) -> ClassTree:
    numbers = {name: number for number, name in enumerate(train.class_names)}
    for name in val.class_names:
        if name not in numbers:
            raise DataError(
                f"{printable(f'{val.root}/{name}')}: is a class that {printable(train.root)} lacks"
                f"{suggest_similar(name, numbers)}; rename it, or add its training images"
            )
    table = np.array([numbers[name] for name in val.class_names], dtype=np.int32)
    return replace(val, class_names=train.class_names, labels=table[val.labels])


def _note_missing_classes(val: ClassTree) -> list[str]:
    present = set(val.labels.tolist())
    missing = [printable(name) for number, name in enumerate(val.class_names) if number not in present]
    if not missing:
        return []
    return [f"{len(missing)} of {count(len(val.class_names), 'class', 'classes')} have no images: {join_few(missing)}"]


def _note_unused_folders(section: Folder, val_root: Path) -> list[str]:
    if section.root == "auto" or section.val_root != "auto":
        return []
    others = [name for name in VAL_FOLDERS if name != val_root.name and is_folder(val_root.parent / name)]
    if not others:
        return []
    return [f"{', '.join(f'{name}/' for name in others)} is not used: validation reads {val_root.name}/"]


def _build_folder_source(tree: ClassTree, split: Split, section: Folder) -> ImageFileSource:
    class_names = tuple(printable(name) for name in tree.class_names)
    root = os.fspath(tree.root.absolute())  # worker processes may have another working directory
    info = build_files_info("folder", split, len(tree.paths), class_names, section.channels, tree.notes)
    return ImageFileSource.from_paths(info, root, tree.paths, tree.labels)
