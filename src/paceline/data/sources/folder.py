"""Load class folders of image files as training, validation or test set."""

import os
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from paceline.core.dataset import Datasets, Split
from paceline.core.errors import DataError, suggest_similar
from paceline.core.units import count, join_few
from paceline.data.files import (
    IMAGE_EXTENSIONS,
    expand_path,
    has_image_extension,
    is_folder,
    printable,
    summarize_extensions,
)
from paceline.data.sources.image_files import (
    ImageFileSource,
    build_files_info,
    raise_for_faults,
    select_validation,
)
from paceline.data.sources.listing import FolderId, FolderLister, entry_kind, list_entries
from paceline.recipe.schema.source import Folder

# Purpose of the images below a folder, for error messages.
ImagePurpose = Literal["training", "validation", "evaluation"]
_PURPOSE_TEXT: Final[dict[ImagePurpose, str]] = {
    "training": "to train on",
    "validation": "to validate on",
    "evaluation": "to evaluate on",
}
_CONVERT_HINT: Final = "convert images to .jpg or .png"
VAL_FOLDERS = ("val", "valid", "validation", "test")


@dataclass(frozen=True, eq=False)
class ClassTree:
    """The N images below `root`, ordered by class and then by name."""

    root: Path
    class_names: tuple[str, ...]  # undecodable bytes as surrogates
    paths: list[bytes]  # relative to `root`, in file system encoding
    labels: NDArray[np.int32]  # [N]
    notes: tuple[str, ...]  # about files that were left out


@dataclass
class _WalkResult:
    images: list[bytes] = field(default_factory=list)  # relative to the root
    faults: dict[str, str] = field(default_factory=dict)  # image path relative to the root: why it cannot be read
    others: list[str] = field(default_factory=list)  # absolute paths of other files


def scan_class_folders(
    root: Path, *, setting: str, purpose: ImagePurpose = "training", skip_bad: bool = False, arrays: bool = False
) -> ClassTree:
    """List the class folders of `root` and the images below them at any depth, without hidden files.

    Raise `DataError`, naming `setting` or the path, if `root` or a class has no images, if two class names look the
    same, or if an entry named like an image cannot be one (`find_fault`). With `skip_bad` such entries count as images,
    and with `arrays` .npy files do.
    """
    identity, top = list_entries(root, setting)
    folders = sorted((entry.name for entry in top if entry_kind(entry) == "folder"), key=os.fsencode)
    is_image = partial(has_image_extension, arrays=arrays)
    unclassified = [entry.path for entry in top if is_image(entry.name) and entry_kind(entry) != "folder"]
    kind = " ".join(sorted(IMAGE_EXTENSIONS)) + (" with arrays" if arrays else "")
    paths: list[bytes] = []
    sizes = []
    faults: dict[str, str] = {}
    others: list[str] = []
    empty: dict[str, list[str]] = {}
    with FolderLister(root, is_image, kind) as lister, ThreadPoolExecutor(lister.num_threads) as pool:
        walk = partial(_walk_class, lister, root, parents=(identity,))
        for name, walked in zip(folders, pool.map(walk, folders), strict=True):
            paths += walked.images
            sizes.append(len(walked.images))
            faults |= walked.faults
            others += walked.others
            if not walked.images:
                empty[name] = walked.others
    if not skip_bad:
        raise_for_faults(printable(root), faults)
    _check_distinct_names(root, folders)
    if not any(sizes):
        raise DataError(
            f"{setting}: {printable(root)} has no images {_PURPOSE_TEXT[purpose]}: "
            f"{_describe_missing_images(empty, unclassified, purpose)}"
        )
    _check_no_empty_class(root, empty)
    labels = np.repeat(np.arange(len(folders), dtype=np.int32), sizes)
    return ClassTree(root, tuple(folders), paths, labels, _build_notes(root, folders, unclassified, others))


def has_subfolders(root: Path) -> bool:
    """Return whether `root` has visible subfolders. Raise `DataError` if it cannot be listed."""
    return any(entry_kind(entry) == "folder" for entry in list_entries(root)[1])


def _walk_class(lister: FolderLister, root: Path, name: str, parents: tuple[FolderId, ...]) -> _WalkResult:
    result = _WalkResult()
    _walk_folder(lister, f"{root}/{name}", f"{name}/", result, parents)
    result.images.sort()
    return result


def _walk_folder(
    lister: FolderLister, folder: str, relative: str, result: _WalkResult, parents: tuple[FolderId, ...]
) -> None:
    identity, listing = lister.list_folder(folder, relative, parents)
    prefix = os.fsencode(relative)
    result.images += [prefix + name for name in listing.images]
    result.faults |= {os.fsdecode(prefix + name): fault for name, fault in listing.faults.items()}
    result.others += [f"{folder}/{os.fsdecode(name)}" for name in listing.others]
    for name in map(os.fsdecode, listing.folders):
        _walk_folder(lister, f"{folder}/{name}", f"{relative}{name}/", result, (*parents, identity))


def _check_distinct_names(root: Path, folders: list[str]) -> None:
    # macOS and Linux encode an accented letter differently (NFD and NFC).
    seen: dict[str, str] = {}
    for name in folders:
        other = seen.setdefault(unicodedata.normalize("NFC", printable(name)), name)
        if other != name:
            raise DataError(
                f"{printable(f'{root}/{name}')}: differs from another class name only in its Unicode encoding "
                f"({other!a} and {name!a}); move the images of both into one folder"
            )


def _describe_missing_images(empty: dict[str, list[str]], unclassified: list[str], purpose: ImagePurpose) -> str:
    if unclassified:
        state = f"{count(len(unclassified), 'image')} in it, in no class folder; make one folder for each class"
        return f"{state}, or use `paceline predict`, which needs none" if purpose == "evaluation" else state
    if not empty:
        return "no class folders in it; expected ROOT/CLASS/*.jpg"
    kinds = _summarize_kinds([path for others in empty.values() for path in others])
    state = f"{count(len(empty), 'folder')} in it, all without images"
    return f"{state}, with {kinds}; {_CONVERT_HINT}" if kinds else f"{state}; expected ROOT/CLASS/*.jpg"


def _check_no_empty_class(root: Path, empty: dict[str, list[str]]) -> None:
    for name, others in empty.items():
        folder, kinds = printable(f"{root}/{name}"), _summarize_kinds(others)
        if not kinds:
            raise DataError(f"{folder}: is a class folder without images; remove it or put images in it")
        raise DataError(f"{folder}: is a class folder without images, with {kinds}; remove it, or {_CONVERT_HINT}")


def _summarize_kinds(paths: list[str]) -> str:
    return summarize_extensions(path.rpartition("/")[2] for path in paths)


def _build_notes(root: Path, folders: list[str], unclassified: list[str], others: list[str]) -> tuple[str, ...]:
    notes = []
    if len(folders) == 1:
        notes.append(f"{printable(root)} has one class only ({printable(folders[0])}); is it one level too high?")
    for paths, why in (
        (unclassified, "lying in no class folder"),
        (others, f"not named like an image ({_summarize_kinds(others)})"),
    ):
        if paths:
            first = printable(min(paths, key=os.fsencode))
            notes.append(f"left out {count(len(paths), 'file')} {why}, such as {first}")
    return tuple(notes)


def load_folder(section: Folder, *, skip_bad: bool = False) -> Datasets:
    """Load the images of `section`; the class folders of the training split define the classes.

    Without a validation folder, `select_validation` selects by the paths. Raise `DataError` if folders are missing,
    empty or contradictory or, without `skip_bad`, have unreadable image files.
    """
    train_root, val_root = resolve_folder_roots(section)
    train = _scan_train_root(train_root, section, skip_bad=skip_bad)
    if val_root is None:
        train, val = _split_tree(train, section)
    else:
        val = _remap_labels(_scan_val_root(val_root, section, skip_bad=skip_bad), train)
        val = replace(val, notes=(*val.notes, *_note_missing_classes(val), *_note_unused_folders(section, val_root)))
        if section.val_fraction != Folder.model_fields["val_fraction"].default:
            note = f"data.source.val_fraction has no effect: the validation images are in {printable(val_root)}"
            val = replace(val, notes=(*val.notes, note))
        if train_root.samefile(val_root):
            note = "validation reads the training images, so its accuracy does not measure generalization"
            val = replace(val, notes=(*val.notes, note))
    return Datasets(_build_folder_source(train, "train", section), _build_folder_source(val, "val", section))


def load_folder_validation(section: Folder, *, skip_bad: bool = False) -> ImageFileSource:
    """Load only the validation split, without scanning training images if it has its own folder.

    Its class numbers then differ from training if it lacks a class. Raise `DataError` as `load_folder`.
    """
    train_root, val_root = resolve_folder_roots(section)
    if val_root is None:
        _, val = _split_tree(_scan_train_root(train_root, section, skip_bad=skip_bad), section)
    else:
        val = _scan_val_root(val_root, section, skip_bad=skip_bad)
    return _build_folder_source(val, "val", section)


def _scan_train_root(root: Path, section: Folder, *, skip_bad: bool) -> ClassTree:
    setting = "data.source.root" if section.train_root == "auto" else "data.source.train_root"
    return scan_class_folders(root, setting=setting, skip_bad=skip_bad, arrays=_has_arrays(section))


def _scan_val_root(root: Path, section: Folder, *, skip_bad: bool) -> ClassTree:
    setting, arrays = "data.source.val_root", _has_arrays(section)
    return scan_class_folders(root, setting=setting, purpose="validation", skip_bad=skip_bad, arrays=arrays)


def _has_arrays(section: Folder) -> bool:
    return not section.pixel_format.is_photo


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
    info = build_files_info("folder", split, len(tree.paths), class_names, section.pixel_format, tree.notes)
    return ImageFileSource.from_paths(info, root, tree.paths, tree.labels)


def load_test_folder(section: Folder, *, skip_bad: bool = False) -> ImageFileSource:
    """Load all images of `val_root`, of the first of `VAL_FOLDERS` in `root`, or of `root` itself.

    The classes are the folder's own. Raise `DataError` as `load_folder`.
    """
    root = _resolve_test_root(section)
    setting = "data.source.root" if section.val_root == "auto" else "data.source.val_root"
    arrays = _has_arrays(section)
    tree = scan_class_folders(root, setting=setting, purpose="evaluation", skip_bad=skip_bad, arrays=arrays)
    class_names = tuple(printable(name) for name in tree.class_names)
    info = build_files_info("folder", "val", len(tree.paths), class_names, section.pixel_format, tree.notes)
    return ImageFileSource.from_paths(info, os.fspath(root.absolute()), tree.paths, tree.labels)


def is_trained_on(section: Folder, trained: Folder) -> bool:
    """Return whether `load_test_folder(section)` reads the training folder of a run on `trained`."""
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
