"""Class sub-folders of image files, split by folder or, where there is no validation folder, by a keyed hash."""

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
    """Return the images that `section` names. The training split's folders are the classes of both.

    Where there is no validation folder and one image per class, the validation split is empty. Raise `DataError` for
    folders that are missing, empty or in contradiction, and for files that can be seen to be no
    images, before any is opened. With `skip_bad` such files are kept, for whoever reads them to skip.
    """
    train_root, val_root = folder_roots(section)
    train = _train_tree(train_root, section, skip_bad=skip_bad)
    if val_root is None:
        train, val = _split(train, section)
    else:
        val = _renumber(_val_tree(val_root, skip_bad=skip_bad), train)
        val = replace(val, notes=(*val.notes, *_lacking(val), *_unused(section, val_root)))
        if train_root.samefile(val_root):
            note = "validation reads the training images: its accuracy says nothing about new ones"
            val = replace(val, notes=(*val.notes, note))
    return Datasets(_source(train, "train", section), _source(val, "val", section))


def load_validation_folder(section: Folder, *, skip_bad: bool = False) -> EncodedSource:
    """Return the images that `load_folder` would validate by, without looking at others where they have a folder.

    Classes are numbered as that folder has them, which is not as in training where it lacks some.
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
    """Return where the training classes are, and the validation classes when they have a folder.

    Raise `DataError` for a section that names none, or two.
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
    train, beside = root / "train", [name for name in VAL_FOLDERS if is_folder(root / name)]
    if is_folder(train) and (beside or has_folders(train)):
        return train, val_root or (root / beside[0] if beside else None)
    if beside:
        raise DataError(
            f"data.source.root: {printable(root)} has {beside[0]}/ but no train/ with class folders; "
            f"add it, or set data.source.train_root (to the same folder if {beside[0]} is a class)"
        )
    return root, val_root


def _split(tree: ClassTree, section: Folder) -> tuple[ClassTree, ClassTree]:
    mask = held_out(tree.labels, tree.paths, fraction=section.val_fraction, seed=section.split_seed)
    notes = () if mask.any() else (f"{printable(tree.root)} has one image per class, so none is held out",)
    return _part(tree, ~mask), replace(_part(tree, mask), notes=notes)


def _part(tree: ClassTree, mask: NDArray[np.bool_]) -> ClassTree:
    paths = [path for path, kept in zip(tree.paths, mask.tolist(), strict=True) if kept]
    return replace(tree, paths=paths, labels=tree.labels[mask])


def _renumber(val: ClassTree, train: ClassTree) -> ClassTree:
    """Return `val` with the class numbers of `train`."""
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
    """Return a sentence on the classes that have no validation images, whose accuracy is therefore not known."""
    present = set(val.labels.tolist())
    lacking = [printable(name) for number, name in enumerate(val.class_names) if number not in present]
    if not lacking:
        return []
    return [f"{len(lacking)} of {count(len(val.class_names), 'class', 'classes')} have no images: {few(lacking)}"]


def _unused(section: Folder, val_root: Path) -> list[str]:
    """Return a sentence on further splits beside the one that is validated by."""
    if section.root == "auto" or section.val_root != "auto":
        return []
    others = [name for name in VAL_FOLDERS if name != val_root.name and is_folder(val_root.parent / name)]
    if not others:
        return []
    return [f"{', '.join(f'{name}/' for name in others)} is not used: validation reads {val_root.name}/"]


def _source(tree: ClassTree, split: Split, section: Folder) -> EncodedSource:
    class_names = tuple(printable(name) for name in tree.class_names)
    root = os.fspath(tree.root.absolute())  # a worker process may have another working directory
    info = files_info("folder", split, len(tree.paths), class_names, section.channels, tree.notes)
    return EncodedSource.pack(info, root, tree.paths, tree.labels)
