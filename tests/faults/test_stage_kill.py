"""A process that is killed while it stages leaves nothing that is taken for a copy, and the next one finishes."""

import os
import signal
import sys
from pathlib import Path

import pytest

from paceline.data.staging.stage import stage_for_run, stage_permanently, unstage
from paceline.recipe.schema.source import Folder

CHANGES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.utime"}
"""Events of Python's audit before which a process is killed: all that stage does to the disk begins with one."""


@pytest.fixture(autouse=True)
def one_thread_and_no_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    """With more threads, what comes before what is not the same twice; and a busy disk takes seconds to flush."""
    monkeypatch.setattr("paceline.data.staging.copy._NUM_THREADS", 1)
    monkeypatch.setattr("paceline.data.staging.stage.sync_filesystem", lambda folder: None)


@pytest.fixture
def source(tmp_path: Path) -> Folder:
    for name, num_bytes in (("a/0.jpg", 10), ("a/1.jpg", 3_000_000), ("b/0.jpg", 5000), ("b/1.jpg", 7)):
        path = tmp_path / "source" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(num_bytes))
    return Folder(root=str(tmp_path / "source"))


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def killed_before(change: int, source: Folder, top: Path, *, keeps: bool) -> bool:
    """Stage and leave in a process that kills itself before its `change`-th change; whether it came that far."""
    child = os.fork()
    if not child:
        left = change

        def watch(event: str, args: tuple) -> None:
            nonlocal left
            if event in CHANGES and str(top) in str(args[0]):
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        try:
            sys.addaudithook(watch)
            if keeps:
                stage_permanently(source, top)
            else:
                with stage_for_run(source, str(top), is_first=True):
                    pass
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL)
    return bool(status)


@pytest.mark.parametrize("keeps", [False, True], ids=["and leaves", "for keeps"])
def test_a_kill_at_any_time_keeps_a_whole_copy_or_none(source: Folder, tmp_path: Path, keeps: bool) -> None:
    top = tmp_path / "top"
    top.mkdir()
    expected = contents(Path(source.root))
    change = wholes = 0
    while killed_before(change, source, top, keeps=keeps):
        copies = [path for path in top.glob("paceline-stage-*") if path.is_dir() and path.suffix != ".tmp"]
        wholes += len(copies)
        for copy in copies:
            assert contents(copy / "train" / "source") == expected
        with stage_for_run(source, str(top), is_first=True) as section:
            assert contents(Path(section.train_root)) == expected
        unstage(top)
        assert list(top.iterdir()) == []
        change += 1
    assert change > 15
    assert wholes  # there was something to be taken for one


def test_staging_continues_after_many_kills(source: Folder, tmp_path: Path) -> None:
    """Each process comes further than the one before, as it need not copy again what was copied whole."""
    top = tmp_path / "top"
    top.mkdir()
    (tmp_path / "whole").mkdir()
    changes = 0
    while killed_before(changes, source, tmp_path / "whole", keeps=True):
        unstage(tmp_path / "whole")
        changes += 1
    kills = 0
    while killed_before(2 * changes // 3, source, top, keeps=True):
        kills += 1
        assert kills < 10
    assert kills
    copy = stage_permanently(source, top, lambda done, total: pytest.fail("copied again"))
    assert contents(copy / "train" / "source") == contents(Path(source.root))


def test_the_copy_of_a_killed_run_is_used_by_the_next_that_wants_the_same(source: Folder, tmp_path: Path) -> None:
    child = os.fork()
    if not child:
        with stage_for_run(source, str(tmp_path / "top"), is_first=True):
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    with stage_for_run(
        source, str(tmp_path / "top"), is_first=True, progress=lambda *done: pytest.fail("copied")
    ) as section:
        assert contents(Path(section.train_root)) == contents(Path(source.root))
    assert list((tmp_path / "top").iterdir()) == []


def test_the_copy_of_a_killed_run_is_removed_by_the_next_that_wants_another(source: Folder, tmp_path: Path) -> None:
    child = os.fork()
    if not child:
        with stage_for_run(source, str(tmp_path / "top"), is_first=True):
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    Path(source.root, "a", "0.jpg").write_bytes(b"another")
    with stage_for_run(source, str(tmp_path / "top"), is_first=True):
        assert len([path for path in (tmp_path / "top").iterdir() if path.is_dir()]) == 1
    assert list((tmp_path / "top").iterdir()) == []
