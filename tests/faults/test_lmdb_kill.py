"""A killed writer, or one on a full disk, leaves no incomplete LMDB that could be mistaken for a complete one."""

import os
import random
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from paceline.core.dataset import DatasetInfo, Datasets, Sample, Split
from paceline.core.errors import DataError
from paceline.data import file_lock
from paceline.data.convert import lmdb_writer
from paceline.data.convert.lmdb_writer import write_lmdb
from paceline.data.file_lock import create_folder_atomically
from paceline.data.sources.lmdb import load_lmdb
from paceline.recipe.schema.source import Lmdb

pytest.importorskip("lmdb", reason="an LMDB is written by the package lmdb: pip install lmdb")
IMAGES = 120
KILLS = 15


@dataclass(frozen=True)
class RandomBytes:
    """A split of random bytes that kills the process at sample `dies_at`."""

    split: Split
    dies_at: int = -1
    info: DatasetInfo = field(init=False)

    def __post_init__(self) -> None:
        info = DatasetInfo("noise", self.split, IMAGES, ("a", "b"), 3, None, (0.5,) * 3, (0.5,) * 3)
        object.__setattr__(self, "info", info)

    def __len__(self) -> int:
        return IMAGES

    def read(self, index: int) -> Sample:
        if index == self.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return np.random.default_rng(index).bytes(2000), index % 2

    def name_of(self, index: int) -> str:
        return f"{index}.jpg"


def is_complete(folder: Path) -> bool:
    """Return whether an LMDB exists; assert that it is complete if it does."""
    if not folder.exists():
        return False
    datasets = load_lmdb(Lmdb(root=str(folder)))
    for source in (datasets.train, datasets.val):
        assert len(source) == IMAGES
        for index in range(IMAGES):
            content, label = source.read(index)
            assert content == np.random.default_rng(index).bytes(2000) and label == index % 2
    return True


def run_in_child(work: Callable[[], None]) -> int:
    """Do `work` in a child process; return its exit status."""
    pid = os.fork()
    if not pid:
        try:
            work()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def quietly(done: int, total: int) -> None:
    pass


# matrix: 39
def test_a_killed_writer_leaves_nothing_or_a_complete_lmdb(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(lmdb_writer, "_BATCH_BYTES", 2**14)
    out = tmp_path / "set"
    draw = random.Random(0)
    for _ in range(KILLS):
        at = draw.randrange(2 * IMAGES)
        datasets = Datasets(RandomBytes("train", at), RandomBytes("val", at - IMAGES))
        code = run_in_child(lambda datasets=datasets: write_lmdb(datasets, out, quietly, skip_bad=True))
        assert code == -signal.SIGKILL
        assert not is_complete(out)
        with pytest.raises(DataError, match=r"has no data\.mdb"):
            load_lmdb(Lmdb(root=str(out)))
    assert [path.name for path in tmp_path.iterdir()] == [".set.partial"]
    write_lmdb(Datasets(RandomBytes("train"), RandomBytes("val")), out, quietly, skip_bad=True)
    assert is_complete(out)
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == ["set", "set/data.mdb"]


# matrix: 39
@pytest.mark.parametrize("call", ["fsync", "move_without_overwriting"])
def test_a_writer_killed_at_a_flush_leaves_nothing_or_a_complete_lmdb(tmp_path: Path, monkeypatch, call: str) -> None:
    """The writer is killed before and after each call that flushes or renames its files."""
    owner = {"fsync": os, "move_without_overwriting": file_lock, "unlink": Path}[call]
    real = getattr(owner, call)
    outcomes = []
    for number in range(6):
        out = tmp_path / f"{call}{number}"
        left = [number]

        def dying(*arguments: object, left=left) -> object:
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            result = real(*arguments)
            if left[0] == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 2
            return result

        monkeypatch.setattr(owner, call, dying)
        datasets = Datasets(RandomBytes("train"), RandomBytes("val"))
        code = run_in_child(lambda out=out, datasets=datasets: write_lmdb(datasets, out, quietly, skip_bad=True))
        outcomes.append((code, is_complete(out)))
    assert {(-signal.SIGKILL, False), (-signal.SIGKILL, True)} <= set(outcomes)
    assert all(is_whole or code for code, is_whole in outcomes)


@contextmanager
def no_file_beyond(num_bytes: int) -> Iterator[None]:
    """Prevent files of this process from growing, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


# matrix: 38
@pytest.mark.parametrize("num_bytes", [0, 10_000, 200_000, 700_000])
def test_a_full_disk_is_reported_in_one_line_and_nothing_is_left(tmp_path: Path, monkeypatch, num_bytes: int) -> None:
    monkeypatch.setattr(lmdb_writer, "_BATCH_BYTES", 2**14)
    out = tmp_path / "set"
    with no_file_beyond(num_bytes), pytest.raises(DataError, match="cannot be written: ") as refused:
        write_lmdb(Datasets(RandomBytes("train"), RandomBytes("val")), out, quietly, skip_bad=True)
    message = str(refused.value)
    assert message.startswith(f"{out}: cannot be written: ") and "(make room, or write to another folder)" in message
    assert " bytes are free" in message or "File too large" in message
    assert len(message.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


# matrix: 39
def test_a_second_writer_of_the_same_folder_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "set"
    datasets = Datasets(RandomBytes("train"), RandomBytes("val"))
    with create_folder_atomically(out, "partial", lmdb_writer._LOCK_NAME):
        with pytest.raises(DataError, match="another process is writing it"):
            write_lmdb(datasets, out, quietly, skip_bad=True)
        assert not out.exists() and (tmp_path / ".set.partial").exists()


# matrix: 39
def test_a_folder_that_cannot_be_created_is_reported_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be written: ") as refused:
        write_lmdb(
            Datasets(RandomBytes("train"), RandomBytes("val")), tmp_path / "file" / "set", quietly, skip_bad=True
        )
    assert len(str(refused.value).splitlines()) == 1
