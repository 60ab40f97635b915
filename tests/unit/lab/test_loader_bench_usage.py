"""Usage of a process tree, read from a made-up /proc and from the real one; and the kernel's page cache."""

import os

import numpy as np
import pytest

from paceline.core.process import descendants
from paceline.data.sources.build import build_datasets
from paceline.data.sources.subset import select_samples
from paceline.lab.loader_bench import read_cpu_s, read_disk_bytes, read_memory_bytes
from paceline.lab.page_cache import evict_files, list_source_files, read_into_cache
from paceline.recipe.schema.source import Folder, Synthetic


@pytest.fixture
def proc(tmp_path):
    """Return a table of process 10 with child 11 in one of its threads, and 12 below that."""
    tick = os.sysconf("SC_CLK_TCK")
    for pid, children in ((10, "11 "), (11, "12 "), (12, "")):
        thread = tmp_path / str(pid) / "task" / str(pid)
        thread.mkdir(parents=True)
        (thread / "children").write_text(children)
        numbers = " ".join(["0"] * 10)
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (a) name (b) S {numbers} {pid * tick} {tick} 0 0")
        (tmp_path / str(pid) / "io").write_text(f"rchar: 5\nread_bytes: {pid}\nwrite_bytes: 9\n")
        (tmp_path / str(pid) / "smaps_rollup").write_text(
            "55d0-7ffd ---p 00000000 00:00 0 [rollup]\nRss: 99 kB\nPss_Anon: 2 kB\nPss_File: 50 kB\nPss_Shmem: 1 kB\n"
        )
    return tmp_path


def test_processes_are_summed_over_the_tree(proc):
    assert descendants(10, proc) == [11, 12]
    assert (read_cpu_s(10, proc), read_disk_bytes(10, proc)) == (10 + 11 + 12 + 3, 33)
    assert read_memory_bytes(10, proc) == 3 * 3 * 1024


def test_what_has_gone_takes_nothing(proc):
    assert (read_cpu_s(99, proc), read_disk_bytes(99, proc)) == (0, 0)
    assert read_memory_bytes(99, proc) == 0


def test_this_process_takes_something():
    assert read_cpu_s(os.getpid()) > 0
    assert read_memory_bytes(os.getpid()) > 1_000_000


def test_files_of_a_source_are_found_read_and_dropped(tmp_path):
    for name in ("train/a/1", "train/a/2", "train/b/3", "val/a/4", "val/b/5"):
        path = tmp_path / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    train = build_datasets(Folder(root=str(tmp_path)), may_download=False).train
    files = [tmp_path / "train" / name for name in ("a/1.png", "a/2.png", "b/3.png")]
    assert list_source_files(train) == files
    assert list_source_files(select_samples(train, np.array([2]))) == files[2:]
    read_into_cache(train, 3)
    evict_files([*files, tmp_path / "gone"])
    assert [path.read_bytes() for path in files] == [b"x"] * 3
    assert list_source_files(build_datasets(Synthetic(num_images=4), may_download=False).train) == []
