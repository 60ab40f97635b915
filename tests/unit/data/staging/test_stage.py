"""A staged copy is complete or absent, is shared by a node, and is removed by its last process."""

import contextlib
import csv
import math
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from paceline.core.dataset import Datasets
from paceline.core.errors import DataError
from paceline.data.convert.pack_writer import PackOptions, write_pack
from paceline.data.file_lock import acquire_file_lock
from paceline.data.sources.build import build_datasets
from paceline.data.sources.fingerprint import digest_datasets
from paceline.data.staging.copy import sync_filesystem
from paceline.data.staging.inventory import CopySize
from paceline.data.staging.stage import (
    FreeSpace,
    build_staged_section,
    check_free_space,
    is_in_memory,
    measure_free_space,
    stage_for_run,
    stage_permanently,
    unstage,
)
from paceline.recipe.schema.source import Digits, Folder, Lmdb, Manifest, Pack, SourceSection, WebDataset


def write_images(root: Path, classes: str = "ab", num: int = 4) -> Path:
    for number in range(num):
        for name in classes:
            path = root / name / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = np.full((8, 8, 3), 20 * number + 90 * (name == "b"), np.uint8)
            Image.fromarray(pixels).save(path)
    return root


@pytest.fixture(autouse=True)
def no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the sync, which takes seconds on a busy disk; a power failure cannot be tested."""
    monkeypatch.setattr("paceline.data.staging.stage.sync_filesystem", lambda folder: None)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(root=str(write_images(tmp_path / "source")))


@pytest.fixture
def stage_folder(tmp_path: Path) -> Path:
    (tmp_path / "fast").mkdir()
    return tmp_path / "fast"


def samples(section: SourceSection) -> tuple[str, list]:
    datasets = build_datasets(section, may_download=False)
    return digest_datasets(datasets), [split.read(index) for split in both(datasets) for index in range(len(split))]


def both(datasets: Datasets):
    return datasets.train, datasets.val


def manifest_of(root: Path, lists: Path, start: str = "") -> Manifest:
    lists.mkdir(exist_ok=True)
    for split, numbers in (("train", (0, 1, 2)), ("val", (2, 3))):
        with (lists / f"{split}.csv").open("w", newline="") as file:
            csv.writer(file).writerows(
                [("path", "label"), *((f"{start}{c}/{n}.jpg", c) for c in "ab" for n in numbers)]
            )
    list_files = {"train": str(lists / "train.csv"), "val": str(lists / "val.csv")}
    return Manifest(**list_files) if lists == root else Manifest(**list_files, root=str(root))


def made(kind: str, tmp_path: Path) -> SourceSection:
    root = write_images(tmp_path / "source")
    out = tmp_path / "made"
    match kind:
        case "folder, split by hash":
            return Folder(root=str(root), split_seed=3)
        case "folder with val":
            write_images(root / "train"), write_images(root / "val", num=2)
            shutil.rmtree(root / "a"), shutil.rmtree(root / "b")
            return Folder(root=str(root))
        case "two folders":
            return Folder(train_root=str(root), val_root=str(write_images(tmp_path / "other")))
        case "manifest with its images":
            return manifest_of(root, root)
        case "manifest elsewhere":
            return manifest_of(root, tmp_path / "lists")
        case "manifest, training alone":
            return manifest_of(root, root).model_copy(update={"val": "off"})
        case "folder of one image per class":
            return alone(root)
    kind, _, few = kind.partition(" of one")
    section = alone(root) if few else Folder(root=str(root))
    return packed(kind, build_datasets(section, may_download=False), out)


def alone(root: Path) -> Folder:
    """Return `root` with one image per class."""
    shutil.rmtree(root)
    return Folder(root=str(write_images(root, num=1)))


def packed(kind: str, datasets: Datasets, out: Path) -> SourceSection:
    match kind:
        case "pack":
            write_pack(datasets, out.with_suffix(".pack"), PackOptions(), lambda done, total: None, 1)
            return Pack(root=str(out.with_suffix(".pack")))
        case "pack of shards" | "index of a pack of shards":
            write_pack(datasets, out, PackOptions(shard_bytes=1 << 20), lambda done, total: None, 1)
            return Pack(root=str(out) if kind == "pack of shards" else str(out / "index.pack"))
        case "lmdb":
            write_lmdb = pytest.importorskip("paceline.data.convert.lmdb_writer").write_lmdb
            write_lmdb(datasets, out, lambda done, total: None)
            return Lmdb(root=str(out))
    return tars_of(datasets, out)


def tars_of(datasets: Datasets, out: Path) -> WebDataset:
    import io
    import tarfile

    for split, source in zip(("train", "val"), both(datasets), strict=True):
        for part in range(2):
            folder = out / f"part{part}"
            folder.mkdir(parents=True, exist_ok=True)
            with tarfile.open(folder / f"{split}-0{part}.tar", "w") as tar:
                for index in range(part, len(source), 2):
                    data, label = source.read(index)
                    for name, content in ((f"{index}.jpg", data), (f"{index}.cls", str(label).encode())):
                        member = tarfile.TarInfo(name)
                        member.size = len(content)
                        tar.addfile(member, io.BytesIO(content))
    (out / "names.txt").write_text("a\nb\n")
    return WebDataset(
        train=f"{out}/part{{0..1}}/train-*.tar", val=f"{out}/part*/val-{{00..00}}.tar", classes=str(out / "names.txt")
    )


KINDS = (
    "folder, split by hash",
    "folder with val",
    "two folders",
    "manifest with its images",
    "manifest elsewhere",
    "pack",
    "pack of shards",
    "index of a pack of shards",
    "lmdb",
    "webdataset",
)
WITHOUT_VALIDATION = (
    "manifest, training alone",
    "folder of one image per class",
    "pack of one image per class",
    "lmdb of one image per class",
)


@pytest.mark.parametrize("kind", WITHOUT_VALIDATION)
def test_a_source_without_validation_images_has_an_empty_split_with_a_note(kind: str, tmp_path: Path) -> None:
    val = build_datasets(made(kind, tmp_path), may_download=False).val
    note = "data.source.val names no list"
    if kind != WITHOUT_VALIDATION[0]:
        note = f"{tmp_path / 'source'} has one image per class, so none is held out"
    assert len(val) == val.info.num_images == 0
    assert val.info.notes == (note,)


@pytest.mark.parametrize("kind", (*KINDS, *WITHOUT_VALIDATION))
def test_every_kind_of_source_reads_the_same_samples_from_its_copy(
    kind: str, tmp_path: Path, stage_folder: Path
) -> None:
    section = made(kind, tmp_path)
    before = samples(section)
    shutil.move(tmp_path / "source", tmp_path / "source.real")  # the copy must not refer to it
    (tmp_path / "source").symlink_to(tmp_path / "source.real")
    with stage_for_run(section, str(stage_folder), is_first=True) as copy:
        shutil.move(tmp_path / "source.real", tmp_path / "gone")
        assert str(stage_folder) in copy.model_dump_json() and str(tmp_path / "source") not in copy.model_dump_json()
        assert samples(copy) == before
    assert list(stage_folder.iterdir()) == []


def test_off_stages_nothing(folder: Folder) -> None:
    with stage_for_run(folder, "off", is_first=True) as section:
        assert section is folder


def test_names_of_samples_still_end_with_the_folder_and_the_file(folder: Folder, stage_folder: Path) -> None:
    with stage_for_run(folder, str(stage_folder), is_first=True) as section:
        name = build_datasets(section, may_download=False).train.name_of(0)
    assert "/source/a/" in name and name.startswith(str(stage_folder))


def test_later_processes_use_the_copy_and_the_last_one_removes_it(folder: Folder, stage_folder: Path) -> None:
    with contextlib.ExitStack() as second:
        with stage_for_run(folder, str(stage_folder), is_first=True) as ours:
            theirs = second.enter_context(stage_for_run(folder, str(stage_folder), is_first=False))
            assert theirs == ours
        assert samples(theirs) == samples(folder)
    assert list(stage_folder.iterdir()) == []


def test_another_run_uses_the_existing_copy(folder: Folder, stage_folder: Path) -> None:
    calls = []
    with (
        stage_for_run(folder, str(stage_folder), is_first=True),
        stage_for_run(folder, str(stage_folder), is_first=True, progress=lambda *done: calls.append(done)) as section,
    ):
        assert samples(section) == samples(folder)
    assert calls == []
    assert list(stage_folder.iterdir()) == []


def test_progress_reaches_the_total_and_may_cancel(folder: Folder, stage_folder: Path) -> None:
    calls: list[tuple[int, int]] = []
    with stage_for_run(folder, str(stage_folder), is_first=True, progress=lambda *done: calls.append(done)):
        num_bytes = sum(path.stat().st_size for path in Path(folder.root).rglob("*.jpg"))
        assert calls[-1] == (num_bytes, num_bytes)

    def refuse(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), stage_for_run(folder, str(stage_folder), is_first=True, progress=refuse):
        pytest.fail("was staged")
    assert list(stage_folder.iterdir()) == []


def test_a_changed_source_is_staged_again(folder: Folder, stage_folder: Path) -> None:
    with stage_for_run(folder, str(stage_folder), is_first=True) as before:
        path = Path(folder.root, "a", "0.jpg")
        path.write_bytes(path.read_bytes() + b"more")
        with stage_for_run(folder, str(stage_folder), is_first=True) as after:
            assert after != before
            assert samples(after) == samples(folder) != samples(before)
    assert list(stage_folder.iterdir()) == []


def test_a_source_that_changes_between_two_ranks_is_an_error(folder: Folder, stage_folder: Path) -> None:
    with stage_for_run(folder, str(stage_folder), is_first=True):
        Path(folder.root, "a", "0.jpg").unlink()
        with (
            pytest.raises(DataError, match="changed while it was staged"),
            stage_for_run(folder, str(stage_folder), is_first=False),
        ):
            pytest.fail("was found")


def test_copies_of_dead_runs_are_removed_by_the_next_run(folder: Folder, stage_folder: Path) -> None:
    for name in ("paceline-stage-0123456789abcdef", "paceline-stage-fedcba9876543210.tmp"):
        (stage_folder / name).mkdir()
        (stage_folder / name / "data").write_text("old")
        (stage_folder / f"{name.removesuffix('.tmp')}.lock").touch()
    (stage_folder / "mine").touch()
    with stage_for_run(folder, str(stage_folder), is_first=True):
        assert len(list(stage_folder.iterdir())) == 3  # a copy, its lock, and the other file
    assert [path.name for path in stage_folder.iterdir()] == ["mine"]


def test_a_copy_that_is_in_use_is_not_stale(folder: Folder, tmp_path: Path, stage_folder: Path) -> None:
    other = Folder(root=str(write_images(tmp_path / "other")))
    with stage_for_run(other, str(stage_folder), is_first=True) as section:
        with stage_for_run(folder, str(stage_folder), is_first=True):
            pass
        assert samples(section) == samples(other)


def test_a_partial_copy_is_completed_without_copying_finished_files_again(folder: Folder, stage_folder: Path) -> None:
    with stage_for_run(folder, str(stage_folder), is_first=True) as section:
        copy = next(path for path in stage_folder.iterdir() if path.is_dir())
        whole = copy / "train" / "source" / "a" / "0.jpg"
        shutil.copytree(copy, stage_folder / "saved")
    partial = copy.with_name(f"{copy.name}.tmp")
    shutil.move(stage_folder / "saved", partial)
    (partial / whole.relative_to(copy)).chmod(0o640)  # by which it is known again
    half = partial / "train" / "source" / "b" / "1.jpg"
    half.write_bytes(half.read_bytes()[:10])
    (partial / ".copying-123").write_bytes(b"half")
    with stage_for_run(folder, str(stage_folder), is_first=True) as again:
        assert again == section
        assert samples(again) == samples(folder)
        assert whole.stat().st_mode & 0o777 == 0o640
        assert not list(copy.glob(".copying-*"))


def test_a_copy_that_lacks_a_file_is_completed_unless_in_use(folder: Folder, stage_folder: Path) -> None:
    with stage_for_run(folder, str(stage_folder), is_first=True):
        copy = next(path for path in stage_folder.iterdir() if path.is_dir())
        lost = next(copy.rglob("*.jpg"))
        lost.unlink()
        with (
            pytest.raises(DataError, match="lacks files and is in use"),
            stage_for_run(folder, str(stage_folder), is_first=True),
        ):
            pytest.fail("was staged")
        lost.write_bytes(b"")  # of another size
    stage_permanently(folder, stage_folder)
    next(copy.rglob("*.jpg")).unlink()
    with stage_for_run(folder, str(stage_folder), is_first=True) as section:
        assert samples(section) == samples(folder)


def test_a_permanent_copy_is_used_by_runs_and_removed_by_unstage(folder: Folder, stage_folder: Path) -> None:
    copy = stage_permanently(folder, stage_folder)
    assert samples(build_staged_section(folder, copy)) == samples(folder)
    with stage_for_run(
        folder, str(stage_folder), is_first=True, progress=lambda done, total: pytest.fail("copied")
    ) as section:
        assert section == build_staged_section(folder, copy)
        with pytest.raises(DataError, match="is in use by a run"):
            unstage(stage_folder)
    assert copy.is_dir()
    assert unstage(stage_folder) == (copy,)
    assert list(stage_folder.iterdir()) == []
    assert unstage(stage_folder) == ()


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (Digits(), "has no effect on digits, which is held in memory"),
        (Pack(root="https://host/a.pack"), "has no effect on a pack behind a URL"),
        (Pack(root="/nowhere/a.pack"), "data.source.root: /nowhere/a.pack: No such file"),
    ],
)
def test_sources_without_files_cannot_be_staged(section: SourceSection, message: str, stage_folder: Path) -> None:
    with pytest.raises(DataError, match=message), stage_for_run(section, str(stage_folder), is_first=True):
        pytest.fail("was staged")


def test_a_list_of_files_elsewhere_cannot_be_staged(tmp_path: Path, stage_folder: Path) -> None:
    root = write_images(tmp_path / "source")
    section = manifest_of(root, tmp_path / "lists", start=f"{root}/")
    with (
        pytest.raises(DataError, match="lies outside its folder"),
        stage_for_run(section, str(stage_folder), is_first=True),
    ):
        pytest.fail("was staged")


def test_a_folder_that_cannot_be_created_is_an_error(folder: Folder, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(DataError, match="name a folder that can be written to"),
        stage_for_run(folder, str(tmp_path / "file" / "below"), is_first=True),
    ):
        pytest.fail("was staged")


def test_a_link_or_folder_of_another_user_is_not_written_to(folder: Folder, tmp_path: Path, stage_folder: Path) -> None:
    copy = stage_permanently(folder, stage_folder)
    shutil.rmtree(copy)
    (tmp_path / "elsewhere").mkdir()
    copy.symlink_to(tmp_path / "elsewhere")
    with (
        pytest.raises(DataError, match="was made by another user"),
        stage_for_run(folder, str(stage_folder), is_first=True),
    ):
        pytest.fail("was staged")


def test_without_enough_space_nothing_is_copied(
    folder: Folder, stage_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = FreeSpace(4096 * 3, "free there", math.inf)
    monkeypatch.setattr("paceline.data.staging.stage.measure_free_space", lambda folder, memory_left: free)
    with (
        pytest.raises(DataError, match=r"does not have enough space for .*: 32.8 kB are needed, 12.3 kB free there"),
        stage_for_run(folder, str(stage_folder), is_first=True),
    ):
        pytest.fail("was staged")
    assert list(stage_folder.iterdir()) == []


def test_more_files_than_can_be_created_do_not_fit() -> None:
    needed = CopySize("", 1000, 1000, 4096 * 1000)
    check_free_space(needed, FreeSpace(1e9, "", 1000), Path("/here"), "it")
    with pytest.raises(DataError, match="1,000 files, 999 more can be created"):
        check_free_space(needed, FreeSpace(1e9, "", 999), Path("/here"), "it")


def proc_of(folder: Path, kind: str, available_kb: int, tmp_path: Path) -> Path:
    device = folder.stat().st_dev
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    line = f"25 24 {os.major(device)}:{os.minor(device)} / /mnt rw,relatime shared:1 - {kind} {kind} rw\n"
    (proc / "self" / "mountinfo").write_text(f"1 0 0:0 / / rw - ext4 /dev/sda rw\n{line}")
    (proc / "meminfo").write_text(f"MemTotal: 100 kB\nMemAvailable:   {available_kb} kB\n")
    return proc


def test_a_folder_in_memory_is_limited_by_the_memory_of_machine_and_job(tmp_path: Path) -> None:
    proc = proc_of(tmp_path, "tmpfs", 2000, tmp_path)
    assert is_in_memory(tmp_path, proc)
    assert measure_free_space(tmp_path, lambda: math.inf, proc).num_bytes == 2000 * 1024 * 0.9
    limited = measure_free_space(tmp_path, lambda: 1000.0, proc)
    assert (limited.num_bytes, limited.limit) == (900, "of memory are left to this job, less a tenth")


def test_a_folder_on_a_disk_is_not_limited_by_memory(tmp_path: Path) -> None:
    proc = proc_of(tmp_path, "xfs", 1, tmp_path)
    assert not is_in_memory(tmp_path, proc)
    status = os.statvfs(tmp_path)
    # Others write to the disk at the same time.
    free = measure_free_space(tmp_path, lambda: 1.0, proc).num_bytes
    assert free == pytest.approx(status.f_bavail * status.f_frsize, rel=0.1)


def test_a_lock_is_shared_or_exclusive_and_its_file_can_be_removed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first, second = (
        acquire_file_lock(path, is_exclusive=False, should_wait=False),
        acquire_file_lock(path, is_exclusive=False, should_wait=False),
    )
    assert first and second and acquire_file_lock(path, is_exclusive=True, should_wait=False) is None
    second.close()
    assert first.try_make_exclusive() and acquire_file_lock(path, is_exclusive=False, should_wait=False) is None
    first.make_shared()
    third = acquire_file_lock(path, is_exclusive=False, should_wait=False)
    assert third
    third.close()
    assert first.try_make_exclusive()
    first.remove()
    assert not path.exists()


def test_a_forked_process_does_not_relock_its_parents_lock(tmp_path: Path) -> None:
    lock = acquire_file_lock(tmp_path / "lock", is_exclusive=True, should_wait=False)
    assert lock
    child = os.fork()
    if not child:
        lock.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert acquire_file_lock(tmp_path / "lock", is_exclusive=False, should_wait=False) is None
    lock.close()


def test_a_file_system_is_flushed(tmp_path: Path) -> None:
    sync_filesystem(tmp_path)
    with pytest.raises(NotADirectoryError):
        (tmp_path / "file").touch()
        sync_filesystem(tmp_path / "file")


def test_waiting_for_another_runs_copy_can_be_cancelled(folder: Folder, stage_folder: Path) -> None:
    copy = stage_permanently(folder, stage_folder)
    lock = acquire_file_lock(copy.with_name(f"{copy.name}.lock"), is_exclusive=True, should_wait=False)
    assert lock

    def refuse(done: int, total: int) -> None:
        raise KeyboardInterrupt

    for is_first in (True, False):
        with (
            pytest.raises(KeyboardInterrupt),
            stage_for_run(folder, str(stage_folder), is_first=is_first, progress=refuse),
        ):
            pytest.fail("was staged")
    lock.close()
