"""List the files that a source reads and their paths in a copy, and build the recipe section for that copy."""

import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from paceline.core.errors import DataError
from paceline.data.files import expand_path, printable
from paceline.data.pack.format import INDEX_NAME, shard_name
from paceline.data.sources.folder import load_folder
from paceline.data.sources.image_files import ImageFileSource
from paceline.data.sources.listing import FolderId, entry_kind, list_entries
from paceline.data.sources.manifest import load_manifest
from paceline.data.sources.webdataset import expand_tar_paths
from paceline.recipe.schema.source import (
    Folder,
    HuggingFace,
    Lmdb,
    Manifest,
    OwnSource,
    Pack,
    SourceSection,
    WebDataset,
)

_PAGE_BYTES = 4096  # allocation unit of file systems, including tmpfs
_LMDB_LOCK_FILES = frozenset({"lock.mdb"})


def round_to_pages(num_bytes: int) -> int:
    """Round a file size up to whole pages, as a file system allocates them."""
    return -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES


class StagedFile(NamedTuple):
    """A file to copy."""

    source: str
    name: str  # path in the copy
    num_bytes: int
    mtime_ns: int


@dataclass(frozen=True)
class CopySize:
    """Number and size of the files of a dataset."""

    digest: str  # of path, size and modification time of every file, and of the user
    num_files: int
    num_bytes: int
    disk_bytes: int  # in whole pages

    def subtract(self, other: "CopySize") -> "CopySize":
        """Return the rest if `other` is copied already."""
        rest = (self.num_files - other.num_files, self.num_bytes - other.num_bytes, self.disk_bytes - other.disk_bytes)
        return CopySize(self.digest, *(max(0, value) for value in rest))


# No image is opened. Sources in memory or behind a URL have nothing to copy.
@dataclass(frozen=True)
class FileInventory:
    """The files of a dataset; `title` names it in messages."""

    title: str
    iter_paths: Callable[[], Iterator[tuple[str, str]]]  # (path, path in the copy), always in the same order
    section_at: Callable[[Path], SourceSection]  # the recipe section for the copy in a folder

    def iter_files(self) -> Iterator[StagedFile]:
        """Yield all files. Raise `DataError` for one that is missing or not a regular file."""
        for source, name in self.iter_paths():
            try:
                status = os.stat(source)  # noqa: PTH116 - faster, for a million files
            except OSError as error:
                raise DataError(f"{printable(source)}: cannot be copied: {error.strerror} (restore it)") from error
            if not stat.S_ISREG(status.st_mode):
                raise DataError(f"{printable(source)}: is not a regular file, so it cannot be copied (remove it)")
            yield StagedFile(source, name, status.st_size, status.st_mtime_ns)

    def measure(self) -> "CopySize":
        """Sum up all files. Raise `DataError` as `iter_files`."""
        digest = hashlib.sha256(str(os.getuid()).encode())
        num_files = num_bytes = disk_bytes = 0
        for entry in self.iter_files():
            digest.update(f"\0{entry.source}\0{entry.name}\0{entry[2:]}".encode("utf-8", "surrogateescape"))
            num_files += 1
            num_bytes += entry.num_bytes
            disk_bytes += round_to_pages(entry.num_bytes)
        return CopySize(digest.hexdigest()[:16], num_files, num_bytes, disk_bytes)


def build_inventory(section: SourceSection, *, skip_bad: bool = False) -> FileInventory:
    """List the files that `section` reads, with `skip_bad` unreadable images too. Raise `DataError` if it has none."""
    match section:
        case Pack():
            return _list_pack(section)
        case Lmdb() | HuggingFace():
            return _list_tree(section, _resolve_root(section.root), omit=_LMDB_LOCK_FILES)
        case WebDataset():
            return _list_tars(section)
        case Folder():
            return _list_class_folders(section, skip_bad=skip_bad)
        case Manifest():
            return _list_manifest(section, skip_bad=skip_bad)
        case OwnSource(name=name):
            raise DataError(
                f"data.stage: cannot copy what {name} reads, as only its code knows the files (set data.stage=off)"
            )
    raise DataError(f"data.stage: has no effect on {section.name}, which is held in memory (set data.stage=off)")


def _resolve_root(text: str) -> Path:
    path = expand_path(text).absolute()
    try:
        path.stat()
    except OSError as error:
        raise DataError(f"data.source.root: {printable(path)}: {error.strerror} (correct it)") from None
    return path


def _list_pack(section: Pack) -> FileInventory:
    if "://" in section.root:
        raise DataError(
            "data.stage: has no effect on a pack behind a URL, which is kept in data.source.cache "
            "(set data.stage=off, and data.source.cache to a folder in memory)"
        )
    root = _resolve_root(section.root)
    # The index of a folder of shards stands for the folder.
    is_index = root.name == INDEX_NAME and (root.parent / shard_name(0)).is_file()
    return _list_tree(section, root.parent if is_index else root)


def _list_tree(section: Pack | Lmdb | HuggingFace, root: Path, omit: frozenset[str] = frozenset()) -> FileInventory:
    def iter_paths() -> Iterator[tuple[str, str]]:
        if not root.is_dir():
            yield str(root), root.name
            return
        for path in _walk_files(root, ()):
            if Path(path).name not in omit:
                yield path, os.path.join(root.name, os.path.relpath(path, root))  # noqa: PTH118

    return FileInventory(
        printable(root), iter_paths, lambda copy: section.model_copy(update={"root": str(copy / root.name)})
    )


def _walk_files(folder: str | Path, parents: tuple[FolderId, ...]) -> Iterator[str]:
    """Yield the files below `folder` by name, following links."""
    identity, entries = list_entries(folder, parents=parents)
    for entry in sorted(entries, key=lambda entry: entry.name):
        if entry_kind(entry) == "folder":
            yield from _walk_files(entry.path, (*parents, identity))
        else:
            yield entry.path


def _list_class_folders(section: Folder, *, skip_bad: bool) -> FileInventory:
    datasets = load_folder(section, skip_bad=skip_bad)
    train, val = datasets.train, datasets.val
    assert isinstance(train, ImageFileSource) and isinstance(val, ImageFileSource), "folders hold files"
    # Two separate folders in the copy, even if one is inside the other in the source.
    targets = {train.root: Path("train", Path(train.root).name)}
    targets.setdefault(val.root, Path("val", Path(val.root).name))
    is_split = section.val_root == "auto" and val.root == train.root

    def section_at(copy: Path) -> SourceSection:
        roots = {"train_root": str(copy / targets[train.root]), "val_root": str(copy / targets[val.root])}
        return section.model_copy(update={"root": "auto", **roots, **({"val_root": "auto"} if is_split else {})})

    def iter_paths() -> Iterator[tuple[str, str]]:
        for source in (train, val) if is_split or val.root != train.root else (train,):
            yield from _iter_image_files(source, targets[source.root])

    return FileInventory(printable(train.root), iter_paths, section_at)


def _list_manifest(section: Manifest, *, skip_bad: bool) -> FileInventory:
    datasets = load_manifest(section, skip_bad=skip_bad)
    train, val = datasets.train, datasets.val
    assert isinstance(train, ImageFileSource) and isinstance(val, ImageFileSource), "lists hold files"
    lists = [expand_path(text).absolute() for text in (section.train, section.val) if text != "off"]
    for file, source in zip(lists, (train, val), strict=False):
        _check_paths_inside(source, file)
    roots = list(dict.fromkeys((train.root, val.root)))
    is_auto = section.root == "auto"
    # Each root of paths becomes a numbered folder of the copy. A list with paths relative to itself stays next to them.
    list_names = [
        f"{roots.index(str(file.parent)) if is_auto else f'list{n}'}/{file.name}" for n, file in enumerate(lists)
    ]

    def section_at(copy: Path) -> SourceSection:
        update = {split: str(copy / name) for split, name in zip(("train", "val"), list_names, strict=False)}
        return section.model_copy(update=update if is_auto else {**update, "root": str(copy / "0")})

    def iter_paths() -> Iterator[tuple[str, str]]:
        seen: set[str] = set()
        list_files = ((str(file), name) for file, name in zip(lists, list_names, strict=True))
        images = (_iter_image_files(source, Path(str(roots.index(source.root)))) for source in (train, val))
        for path, name in chain(list_files, *images):
            if name not in seen:
                seen.add(name)
                yield path, name

    return FileInventory(printable(lists[0]), iter_paths, section_at)


def _iter_image_files(source: ImageFileSource, target: Path) -> Iterator[tuple[str, str]]:
    for path in map(source.get_listed_path, range(len(source))):
        yield f"{source.root}/{path}", f"{target}/{path}"


def _check_paths_inside(source: ImageFileSource, file: Path) -> None:
    for path in map(source.get_listed_path, range(len(source))):
        if path.startswith("/") or ".." in path.split("/"):
            raise DataError(
                f"data.stage: {printable(file)} lists {printable(path)}, which lies outside its folder "
                f"(write relative paths, or set data.stage=off)"
            )


def _list_tars(section: WebDataset) -> FileInventory:
    splits = {"train": section.train, "val": section.val}
    classes = None if section.classes == "auto" else expand_path(section.classes).absolute()
    patterns = {split: _split_pattern(text) for split, text in splits.items()}  # (folder, pattern below it)

    def iter_paths() -> Iterator[tuple[str, str]]:
        for split, text in splits.items():
            for tar in expand_tar_paths(text, f"data.source.{split}"):
                yield tar, str(Path(split, Path(tar).relative_to(patterns[split][0])))
        if classes:
            yield str(classes), f"classes/{classes.name}"

    def section_at(copy: Path) -> SourceSection:
        update = {split: str(copy / split / patterns[split][1]) for split in splits}
        return section.model_copy(
            update={**update, **({"classes": str(copy / "classes" / classes.name)} if classes else {})}
        )

    return FileInventory(printable(section.train), iter_paths, section_at)


def _split_pattern(pattern: str) -> tuple[Path, str]:
    parts = expand_path(pattern).absolute().parts
    first_pattern = next(
        (number for number, component in enumerate(parts) if set(component) & set("*{")), len(parts) - 1
    )
    return Path(*parts[:first_pattern]), str(Path(*parts[first_pattern:]))
