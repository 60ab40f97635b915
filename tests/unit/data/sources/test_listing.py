"""Listings of unchanged folders are kept and taken again, and nothing else is."""

import os
import time
from dataclasses import astuple

import numpy as np
import pytest

from paceline.data.sources import listing
from paceline.data.sources.folder import scan_class_folders

DAY_S = 86400
TREE = {"cat": 3, "cat/young": 2, "dog": 4, "dog/old/grey": 1}


class Calls:
    """Counts the folders that are listed, and what is asked for a status."""

    def __init__(self, monkeypatch):
        self.scanned, self.asked = [], []
        scandir, stat = os.scandir, os.stat
        monkeypatch.setattr(os, "scandir", lambda path: self.scanned.append(os.fspath(path)) or scandir(path))
        monkeypatch.setattr(os, "stat", lambda path, **how: self.asked.append(path) or stat(path, **how))


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """Return the folder of kept listings; every listing is kept whose folder has not changed for ten seconds."""
    monkeypatch.setattr(listing, "CACHE", str(tmp_path / "home" / "kept"))
    monkeypatch.setattr(listing, "MIN_IMAGES", 1)
    return tmp_path / "home" / "kept"


@pytest.fixture
def at(monkeypatch):
    """Return a function that sets the clock to some seconds from now; it starts at a minute from now."""
    real = time.time
    monkeypatch.setattr(listing.time, "time", lambda: real() + 60)
    return lambda seconds: monkeypatch.setattr(listing.time, "time", lambda: real() + seconds)


@pytest.fixture
def root(make_images, tmp_path, kept, at):
    """Return a tree of images, text files, hidden files and names that are not text."""
    root = make_images(TREE, top=tmp_path / "tree")
    (root / "cat" / "notes.txt").write_text("a")
    (root / "cat" / ".hidden.png").write_text("a")
    (root / "dog" / os.fsdecode(b"\xff\xe9.jpg")).write_bytes(b"a")
    return root


def scan(root, **options):
    tree = scan_class_folders(root, setting="root", **options)
    return tree.class_names, tree.paths, tree.labels.tolist(), tree.notes


def scan_anew(root, monkeypatch, **options):
    with monkeypatch.context() as patch:
        patch.setattr(listing, "CACHE", "/dev/null/none")
        return scan(root, **options)


def test_an_unchanged_tree_is_listed_from_what_was_kept_with_a_status_per_folder(root, kept, monkeypatch):
    first = scan(root)
    assert len(first[1]) == 11
    (file,) = kept.iterdir()
    before = file.stat().st_mtime_ns
    with monkeypatch.context() as patch:
        calls = Calls(patch)
        assert scan(root) == first
    assert calls.scanned == [str(root)]
    of_folders = [path for path in calls.asked if str(path).startswith(f"{root}/")]
    assert sorted(of_folders) == [f"{root}/{name}" for name in ("cat", "cat/young", "dog", "dog/old", "dog/old/grey")]
    assert file.stat().st_mtime_ns == before
    assert first == scan_anew(root, monkeypatch)


def change_nothing(root):
    pass


def add(root):
    (root / "cat" / "new.png").write_bytes(b"a")


def add_deep(root):
    (root / "dog" / "old" / "grey" / "new.png").write_bytes(b"a")


def remove(root):
    (root / "dog" / "0.png").unlink()


def rename(root):
    (root / "dog" / "0.png").rename(root / "dog" / "z.png")


def replace_folder(root):
    """Replace a folder by another with the same times of modification and other names."""
    status = (root / "cat").stat()
    (root / "cat").rename(root.parent / "away")
    (root / "cat").mkdir()
    (root / "cat" / "other.png").write_bytes(b"a")
    os.utime(root / "cat", ns=(status.st_atime_ns, status.st_mtime_ns))


def rename_and_set_the_time_back(root):
    status = (root / "dog").stat()
    rename(root)
    os.utime(root / "dog", ns=(status.st_atime_ns, status.st_mtime_ns))


def add_class(root):
    (root / "bird").mkdir()
    (root / "bird" / "0.png").write_bytes(b"a")


def add_folder(root):
    (root / "cat" / "more").mkdir()
    (root / "cat" / "more" / "0.png").write_bytes(b"a")


def turn_image_into_folder(root):
    (root / "cat" / "young" / "0.png").unlink()
    (root / "cat" / "young" / "x").mkdir()
    (root / "cat" / "young" / "x" / "0.png").write_bytes(b"a")


CHANGES = (
    *(change_nothing, add, add_deep, remove, rename, replace_folder, rename_and_set_the_time_back),
    *(add_class, add_folder, turn_image_into_folder),
)


@pytest.mark.parametrize("change", CHANGES)
def test_after_a_change_the_listing_is_that_of_the_tree(root, change, monkeypatch):
    before = scan(root)
    change(root)
    after = scan(root)
    assert after == scan_anew(root, monkeypatch)
    assert (after == before) == (change is change_nothing)
    assert scan(root) == after


def test_only_a_changed_folder_is_listed_again(root, monkeypatch):
    scan(root)
    add(root)
    with monkeypatch.context() as patch:
        calls = Calls(patch)
        scan(root)
        assert calls.scanned == [str(root), f"{root}/cat"]
        scan(root)
    assert calls.scanned == [str(root), f"{root}/cat", str(root)]


def test_a_folder_that_has_just_changed_is_not_kept(root, kept, at):
    at(0)
    scan(root)
    assert not kept.exists()
    at(11)
    scan(root)
    assert kept.exists()


def test_a_folder_that_changes_while_it_is_listed_is_not_kept(root, kept, monkeypatch):
    find_fault = listing.find_fault

    def and_change(entry):
        if entry.name == "0.png" and entry.path.endswith("cat/0.png"):
            (root / "cat" / "more.png").write_bytes(b"a")
        return find_fault(entry)

    with monkeypatch.context() as patch:
        patch.setattr(listing, "find_fault", and_change)
        scan(root)
    assert "cat/more.png" in [path.decode(errors="replace") for path in scan(root)[1]]


def test_files_with_faults_are_looked_at_each_time(root, overwrite, error_message):
    (root / "cat" / "0.png").write_bytes(b"")
    for _ in range(2):
        assert "cat/0.png (empty)" in error_message(scan, root)
    overwrite(root / "cat" / "0.png", b"a")  # which does not change the folder
    assert b"cat/0.png" in scan(root)[1]


def test_a_file_that_was_emptied_is_reported_after_a_day_at_the_latest(root, at, overwrite, error_message):
    scan(root)
    overwrite(root / "dog" / "1.png", b"")
    at(60 + DAY_S)
    assert "dog/1.png (empty)" in error_message(scan, root)


def test_a_time_in_the_future_is_not_trusted(root, at, overwrite, error_message):
    at(10 * DAY_S)
    scan(root)
    overwrite(root / "dog" / "1.png", b"")
    at(60)
    assert "dog/1.png (empty)" in error_message(scan, root)


def test_links_are_looked_at_each_time(root, tmp_path, error_message):
    (tmp_path / "real.png").write_bytes(b"a")
    (root / "cat" / "link.png").symlink_to(tmp_path / "real.png")
    assert b"cat/link.png" in scan(root)[1]
    (tmp_path / "real.png").unlink()
    assert "cat/link.png (a dangling link)" in error_message(scan, root)


def test_arrays_are_kept_apart(root, monkeypatch):
    np.save(root / "cat" / "a.npy", np.zeros(2))
    assert b"cat/a.npy" not in scan(root)[1]
    assert b"cat/a.npy" in scan(root, arrays=True)[1]
    assert scan(root) == scan_anew(root, monkeypatch)


def test_a_file_under_the_name_of_another_is_not_taken(root, kept, monkeypatch):
    np.save(root / "cat" / "a.npy", np.zeros(2))
    scan(root)
    (of_images,) = kept.iterdir()
    scan(root, arrays=True)
    (of_arrays,) = set(kept.iterdir()) - {of_images}
    of_images.replace(of_arrays)
    assert scan(root, arrays=True) == scan_anew(root, monkeypatch, arrays=True)


def cut(file):
    file.write_bytes(file.read_bytes()[:-20])


def flip(file):
    content = bytearray(file.read_bytes())
    content[-20] ^= 1
    file.write_bytes(content)


def replace_by_pipe(file):
    file.unlink()
    os.mkfifo(file)


def replace_by_link(file):
    file.rename(file.with_name("other"))
    file.symlink_to(file.with_name("other"))


def write_older_version(file):
    import zlib

    content = b'{"folders": 1, "key": []}\n'
    file.write_bytes(zlib.crc32(content).to_bytes(4, "little") + content)


@pytest.mark.parametrize("damage", [cut, flip, replace_by_pipe, replace_by_link, write_older_version])
def test_a_damaged_file_is_as_good_as_none(root, kept, damage, monkeypatch):
    first = scan(root)
    (file,) = kept.iterdir()
    damage(file)
    with monkeypatch.context() as patch:
        calls = Calls(patch)
        assert scan(root) == first
    assert len(calls.scanned) == 6


def test_without_a_folder_to_keep_them_in_listings_are_made_anew(root, kept):
    kept.parent.mkdir()
    kept.write_text("a file")
    assert scan(root) == scan(root)


def test_without_a_home_folder_nothing_is_kept_in_the_current_one(root, tmp_path, monkeypatch):
    monkeypatch.setattr(listing, "CACHE", "~no-such-user/kept")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    scan(root)
    assert list((tmp_path / "here").iterdir()) == []


def test_file_systems_whose_times_are_not_known_to_be_good_are_listed_anew(root, kept, tmp_path, monkeypatch):
    mounts = tmp_path / "mounts"
    device = root.stat().st_dev
    mounts.write_text(f"1 1 {os.major(device)}:{os.minor(device)} / / rw - fuse.bucket bucket rw\n")
    monkeypatch.setattr(listing, "_MOUNTS", mounts)
    scan(root)
    assert not kept.exists()


def test_small_trees_are_not_kept(root, kept, monkeypatch):
    monkeypatch.setattr(listing, "MIN_IMAGES", 12)
    scan(root)
    assert not kept.exists()


def test_the_newest_eight_files_stay_and_those_of_others(make_images, tmp_path, kept, at):
    kept.mkdir(parents=True)
    (kept / "notes.txt").write_text("a")
    os.utime(kept / "notes.txt", (0, 0))
    for number in range(10):
        scan(make_images({"cat": 1}, top=tmp_path / str(number)))
    assert len(list(kept.iterdir())) == 9 and (kept / "notes.txt").exists()


def test_names_are_kept_joined_by_null_bytes():
    kept = listing._Kept.from_listing(listing.FolderListing([b"a", b"b"], [], [b"c"]), (1, 2, 3, 4), 5.0)
    assert astuple(kept) == ((1, 2, 3, 4), 5.0, (b"a\0b", b"", b"c"))
    assert kept.listing == listing.FolderListing([b"a", b"b"], [], [b"c"])
