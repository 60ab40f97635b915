"""A process killed while staging leaves no incomplete copy that could be mistaken for a complete one."""

import os
import signal
import sys
from pathlib import Path

import pytest

from paceline.data.staging.stage import stage_for_run, stage_permanently, unstage
from paceline.recipe.schema.source import Folder

CHANGES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.utime"}
"""Python audit events before which a process is killed: every change that staging makes on disk begins with one."""
FAILED = 255


@pytest.fixture(autouse=True)
def one_thread_and_no_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several threads would make the order of changes vary, and flushing a busy disk takes seconds."""
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


def staged_until_change(change: int, source: Folder, top: Path, *, keeps: bool) -> int:
    """Stage and release in a process that kills itself before its `change`-th change.

    Return the number of changes of a process that got to the end, and 0 for one that was killed.
    """
    child = os.fork()
    if not child:
        done = 0

        def watch(event: str, args: tuple) -> None:
            nonlocal done
            if event in CHANGES and str(top) in str(args[0]):
                if done == change:
                    os.kill(os.getpid(), signal.SIGKILL)
                done += 1

        try:
            sys.addaudithook(watch)
            if keeps:
                stage_permanently(source, top)
            else:
                with stage_for_run(source, str(top), is_first=True):
                    pass
            os._exit(done)
        finally:
            os._exit(FAILED)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code == -signal.SIGKILL or 0 < code < FAILED
    return max(code, 0)


@pytest.mark.parametrize("keeps", [False, True], ids=["and leaves", "for keeps"])
def test_a_kill_at_any_change_leaves_a_complete_copy_or_none(source: Folder, tmp_path: Path, keeps: bool) -> None:
    top = tmp_path / "top"
    top.mkdir()
    expected = contents(Path(source.root))
    change = wholes = 0
    while not staged_until_change(change, source, top, keeps=keeps):
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
    assert wholes  # some kills left an incomplete copy


def test_staging_continues_after_many_kills(source: Folder, tmp_path: Path) -> None:
    """Each process gets further than the one before, as it does not repeat files that were copied completely."""
    top = tmp_path / "top"
    top.mkdir()
    (tmp_path / "whole").mkdir()
    changes = staged_until_change(sys.maxsize, source, tmp_path / "whole", keeps=True)
    kills = 0
    while not staged_until_change(2 * changes // 3, source, top, keeps=True):
        kills += 1
        assert kills < 10
    assert kills
    copy = stage_permanently(source, top, lambda done, total: pytest.fail("copied again"))
    assert contents(copy / "train" / "source") == contents(Path(source.root))


def test_the_copy_of_a_killed_run_is_reused_for_the_same_data(source: Folder, tmp_path: Path) -> None:
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


def test_the_copy_of_a_killed_run_is_removed_for_other_data(source: Folder, tmp_path: Path) -> None:
    child = os.fork()
    if not child:
        with stage_for_run(source, str(tmp_path / "top"), is_first=True):
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    Path(source.root, "a", "0.jpg").write_bytes(b"another")
    with stage_for_run(source, str(tmp_path / "top"), is_first=True):
        assert len([path for path in (tmp_path / "top").iterdir() if path.is_dir()]) == 1
    assert list((tmp_path / "top").iterdir()) == []
