"""A writer of an LMDB that is killed, or runs out of disk, leaves none that could be taken for whole."""

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
KILLS = 30


@dataclass(frozen=True)
class Noise:
    """A split of made-up bytes, which ends the process when it is asked for sample `dies_at`."""

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


def whole(folder: Path) -> bool:
    """Return whether an LMDB is there; assert that all of it is if it is."""
    if not folder.exists():
        return False
    datasets = load_lmdb(Lmdb(root=str(folder)))
    for source in (datasets.train, datasets.val):
        assert len(source) == IMAGES
        for index in range(IMAGES):
            content, label = source.read(index)
            assert content == np.random.default_rng(index).bytes(2000) and label == index % 2
    return True


def in_a_child(work: Callable[[], None]) -> int:
    """Do `work` in a process of its own; return how that ended."""
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
def test_a_killed_writer_writes_nothing_or_all_and_the_next_one_finishes(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(lmdb_writer, "_BATCH_BYTES", 2**14)
    out = tmp_path / "set"
    draw = random.Random(0)
    for _ in range(KILLS):
        at = draw.randrange(2 * IMAGES)
        datasets = Datasets(Noise("train", at), Noise("val", at - IMAGES))
        code = in_a_child(lambda datasets=datasets: write_lmdb(datasets, out, quietly, skip_bad=True))
        assert code == -signal.SIGKILL
        assert not whole(out)
        with pytest.raises(DataError, match=r"has no data\.mdb"):
            load_lmdb(Lmdb(root=str(out)))
    assert [path.name for path in tmp_path.iterdir()] == [".set.partial"]
    write_lmdb(Datasets(Noise("train"), Noise("val")), out, quietly, skip_bad=True)
    assert whole(out)
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == ["set", "set/data.mdb"]


# matrix: 39
@pytest.mark.parametrize("call", ["fsync", "move_without_overwriting"])
def test_a_writer_killed_at_the_end_writes_nothing_or_all(tmp_path: Path, monkeypatch, call: str) -> None:
    """At each call that brings the files onto the disk or gives them their name, before it and after it."""
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
        datasets = Datasets(Noise("train"), Noise("val"))
        code = in_a_child(lambda out=out, datasets=datasets: write_lmdb(datasets, out, quietly, skip_bad=True))
        outcomes.append((code, whole(out)))
    assert {(-signal.SIGKILL, False), (-signal.SIGKILL, True)} <= set(outcomes)
    assert all(is_whole or code for code, is_whole in outcomes)


@contextmanager
def no_file_beyond(num_bytes: int) -> Iterator[None]:
    """Let no file of this process become longer, as a disk that is full would not."""
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
def test_a_disk_that_is_full_is_one_line_and_nothing_is_left(tmp_path: Path, monkeypatch, num_bytes: int) -> None:
    monkeypatch.setattr(lmdb_writer, "_BATCH_BYTES", 2**14)
    out = tmp_path / "set"
    with no_file_beyond(num_bytes), pytest.raises(DataError, match="cannot be written: ") as refused:
        write_lmdb(Datasets(Noise("train"), Noise("val")), out, quietly, skip_bad=True)
    message = str(refused.value)
    assert message.startswith(f"{out}: cannot be written: ") and "(make room, or write to another folder)" in message
    assert " bytes are free" in message or "File too large" in message
    assert len(message.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


# matrix: 39
def test_two_writers_of_one_folder_do_not_mix(tmp_path: Path) -> None:
    out = tmp_path / "set"
    datasets = Datasets(Noise("train"), Noise("val"))
    with create_folder_atomically(out, "partial", lmdb_writer._LOCK_NAME):
        with pytest.raises(DataError, match="another process is writing it"):
            write_lmdb(datasets, out, quietly, skip_bad=True)
        assert not out.exists() and (tmp_path / ".set.partial").exists()


# matrix: 39
def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be written: ") as refused:
        write_lmdb(Datasets(Noise("train"), Noise("val")), tmp_path / "file" / "set", quietly, skip_bad=True)
    assert len(str(refused.value).splitlines()) == 1
