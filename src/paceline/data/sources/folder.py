"""Load class folders of image files as a training and a validation split."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.core.dataset import Datasets, Split
from paceline.core.errors import DataError, near_miss
from paceline.core.units import count, few
from paceline.data.sources.class_tree import ClassTree, has_folders, scan_classes
from paceline.data.sources.encoded import EncodedSource, files_info
from paceline.data.sources.places import expanded, is_folder, printable
from paceline.data.sources.split import held_out
from paceline.recipe.schema.source import Folder

VAL_FOLDERS = ("val", "valid", "validation", "test")


def load_folder(section: Folder, *, skip_bad: bool = False) -> Datasets:
    """Load the images of `section`; the class folders of the training split define the classes.

    Without a validation folder, validation images are selected by a hash of their paths; with one image per class that
    split is empty. Raise `DataError` if folders are missing, empty or contradictory, or hold unreadable image files;
    `skip_bad` keeps such files.
    """
    train_root, val_root = folder_roots(section)
    train = _train_tree(train_root, section, skip_bad=skip_bad)
    if val_root is None:
        train, val = _split(train, section)
    else:
        val = _renumber(_val_tree(val_root, skip_bad=skip_bad), train)
        val = replace(val, notes=(*val.notes, *_lacking(val), *_unused(section, val_root)))
        if train_root.samefile(val_root):
            note = "validation reads the training images, so its accuracy does not measure generalization"
            val = replace(val, notes=(*val.notes, note))
    return Datasets(_source(train, "train", section), _source(val, "val", section))


def load_validation_folder(section: Folder, *, skip_bad: bool = False) -> EncodedSource:
    """Load only the validation split of `load_folder`, without scanning training images if it has its own folder.

    Class numbers follow the validation folder, and differ from training if it lacks a class.
    """
    train_root, val_root = folder_roots(section)
    if val_root is None:
        _, val = _split(_train_tree(train_root, section, skip_bad=skip_bad), section)
    else:
        val = _val_tree(val_root, skip_bad=skip_bad)
    return _source(val, "val", section)


def _train_tree(root: Path, section: Folder, *, skip_bad: bool) -> ClassTree:
    setting = "data.source.root" if section.train_root == "auto" else "data.source.train_root"
    return scan_classes(root, setting=setting, skip_bad=skip_bad)


def _val_tree(root: Path, *, skip_bad: bool) -> ClassTree:
    return scan_classes(root, setting="data.source.val_root", use="validation", skip_bad=skip_bad)


def folder_roots(section: Folder) -> tuple[Path, Path | None]:
    """Return the training folder, and the validation folder or None.

    Raise `DataError` if `section` names no training folder or two.
    """
    val_root = None if section.val_root == "auto" else expanded(section.val_root)
    if section.root == "auto" and section.train_root == "auto":
        raise DataError("data.source.root: is not set; set data.source.root to the folder that holds the images")
    if section.root != "auto" and section.train_root != "auto":
        raise DataError(
            f"data.source.train_root: {printable(section.train_root)} is set, and so is data.source.root "
            f"({printable(section.root)}); set one of them"
        )
    if section.train_root != "auto":
        return expanded(section.train_root), val_root
    root = expanded(section.root)
    train, val_names = root / "train", [name for name in VAL_FOLDERS if is_folder(root / name)]
    if is_folder(train) and (val_names or has_folders(train)):
        return train, val_root or (root / val_names[0] if val_names else None)
    if val_names:
        raise DataError(
            f"data.source.root: {printable(root)} has {val_names[0]}/ but no train/ with class folders; "
            f"add it, or set data.source.train_root (to the same folder if {val_names[0]} is a class)"
        )
    return root, val_root


def _split(tree: ClassTree, section: Folder) -> tuple[ClassTree, ClassTree]:
    mask = held_out(tree.labels, tree.paths, fraction=section.val_fraction, seed=section.split_seed)
    notes = () if mask.any() else (f"{printable(tree.root)} has one image per class, so none is held out",)
    return _part(tree, ~mask), replace(_part(tree, mask), notes=notes)


def _part(tree: ClassTree, mask: NDArray[np.bool_]) -> ClassTree:
    paths = [path for path, is_kept in zip(tree.paths, mask.tolist(), strict=True) if is_kept]
    return replace(tree, paths=paths, labels=tree.labels[mask])


def _renumber(val: ClassTree, train: ClassTree) -> ClassTree:
    numbers = {name: number for number, name in enumerate(train.class_names)}
    for name in val.class_names:
        if name not in numbers:
            raise DataError(
                f"{printable(f'{val.root}/{name}')}: is a class that {printable(train.root)} lacks"
                f"{near_miss(name, numbers)}; rename it, or add its training images"
            )
    table = np.array([numbers[name] for name in val.class_names], dtype=np.int32)
    return replace(val, class_names=train.class_names, labels=table[val.labels])


def _lacking(val: ClassTree) -> list[str]:
    present = set(val.labels.tolist())
    missing = [printable(name) for number, name in enumerate(val.class_names) if number not in present]
    if not missing:
        return []
    return [f"{len(missing)} of {count(len(val.class_names), 'class', 'classes')} have no images: {few(missing)}"]


def _unused(section: Folder, val_root: Path) -> list[str]:
    if section.root == "auto" or section.val_root != "auto":
        return []
    others = [name for name in VAL_FOLDERS if name != val_root.name and is_folder(val_root.parent / name)]
    if not others:
        return []
    return [f"{', '.join(f'{name}/' for name in others)} is not used: validation reads {val_root.name}/"]


def _source(tree: ClassTree, split: Split, section: Folder) -> EncodedSource:
    class_names = tuple(printable(name) for name in tree.class_names)
    root = os.fspath(tree.root.absolute())  # worker processes may have another working directory
    info = files_info("folder", split, len(tree.paths), class_names, section.channels, tree.notes)
    return EncodedSource.pack(info, root, tree.paths, tree.labels)
