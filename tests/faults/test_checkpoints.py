"""Checkpoints survive kills at any moment, full disks, and folders that become unwritable or disappear."""

import contextlib
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn
from unittest import mock

import pytest
import torch

from paceline.core.errors import CheckpointError
from paceline.training.checkpoint import (
    CheckpointStorage,
    CheckpointWriter,
    KeepPolicy,
    Snapshot,
    format,
    load_tensor_group,
    verify_checkpoint,
)
from paceline.training.checkpoint.format import is_weights_only

BOTH = pytest.mark.parametrize("background", [True, False], ids=["background", "at once"])
MIB = 1 << 20


def snapshot(step: int, num_bytes: int = MIB) -> Snapshot:
    """Return a state of about `num_bytes` in which every number is `step`."""
    tensors = {str(number): torch.full((num_bytes // 16,), float(step)) for number in range(2)}
    return Snapshot({"model": tensors, "optimizer": dict(tensors)}, {"train": {"step": step}})


def leftovers(folder: Path) -> list[Path]:
    return list(folder.glob(".*"))


def save_until_killed(folder: Path, acknowledged: int, *, background: bool) -> NoReturn:
    """Save repeatedly after the newest checkpoint, and write a line for each step reported as saved."""
    torch.set_num_threads(1)  # the threads of the forking process do not exist here
    checkpoints = CheckpointStorage(folder, KeepPolicy(2))
    checkpoints.clean_up()
    newest = checkpoints.newest()
    step = int(newest.name.removeprefix("step-")) if newest else 0
    writer = CheckpointWriter(checkpoints, background=background, on_failure="stop", warn=lambda line: None)
    output = -1
    while True:
        step += 1
        writer.save(step, -1, snapshot(step))
        if writer.saved_step > output:
            output = writer.saved_step
            os.write(acknowledged, f"{output}\n".encode())


def kill_while_saving(folder: Path, wait, *, background: bool) -> int:
    """Return the newest step that a process reported as saved before it was killed, -1 for none.

    `wait` gets the file descriptor of its lines; the process is killed when `wait` returns.
    """
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            save_until_killed(folder, write, background=background)
        finally:
            os._exit(1)
    os.close(write)
    output = wait(read)
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), "the process ended before it was killed"
    with os.fdopen(read) as pipe:
        lines = (output + pipe.read()).split()
    return int(lines[-1]) if lines else -1


def three_lines(pipe: int) -> str:
    output = ""
    while output.count("\n") < 3:
        more = os.read(pipe, 1000).decode()
        assert more, "the process ended before it had saved"
        output += more
    return output


def sleep(seconds: float) -> str:
    time.sleep(seconds)
    return ""


# matrix: 26
@BOTH
def test_the_newest_checkpoint_is_intact_after_a_kill_at_any_moment(tmp_path: Path, background: bool) -> None:
    checkpoints = CheckpointStorage(tmp_path, KeepPolicy(2))
    draw = random.Random(0)
    started_s = time.monotonic()
    kill_while_saving(tmp_path / "paced", three_lines, background=background)
    three_saves_s = time.monotonic() - started_s
    shutil.rmtree(tmp_path / "paced")
    newest_reported, num_reported, num_left = -1, 0, 0
    for _ in range(50):
        after_s = draw.uniform(0.0, three_saves_s)
        output = kill_while_saving(tmp_path, lambda pipe, after_s=after_s: sleep(after_s), background=background)
        newest_reported, num_reported = max(newest_reported, output), num_reported + (output >= 0)
        num_left += bool(leftovers(tmp_path))
        checkpoints.clean_up()
        assert leftovers(tmp_path) == []
        newest = checkpoints.newest_intact(pytest.fail)
        if newest is None:
            assert newest_reported == -1
            continue
        step = format.read_state(newest)["train"]["step"]
        assert step >= newest_reported and newest == checkpoints.path_of(step)
        assert all(
            (each == step).all() for part in ("model", "optimizer") for each in load_tensor_group(newest, part).values()
        )
    assert num_reported > 10 and num_left > 10, "too few kills occurred during a save"
    # After kills between writing a checkpoint and deleting an old one, too many are left until the next save.
    checkpoints.save(10_000, -1, snapshot(10_000))
    assert len(list(tmp_path.iterdir())) == 2


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Return a tmpfs of 4 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", disk], capture_output=True, timeout=30)
    if mounted.returncode != 0:
        pytest.skip(f"mounting a small disk is not allowed: {mounted.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True, timeout=30)


def try_save(folder: Path, step: int, *, background: bool, num_bytes: int = MIB) -> list[str]:
    """Save a checkpoint of `step` and return the warnings."""
    warnings: list[str] = []
    writer = CheckpointWriter(
        CheckpointStorage(folder, KeepPolicy(9)), background=background, on_failure="warn", warn=warnings.append
    )
    with contextlib.closing(writer):
        writer.save(step, -1, snapshot(step, num_bytes))
        writer.flush()
    result = writer.result()
    assert (result.saved, result.failed) == ((0, 1) if warnings else (1, 0))
    assert writer.saved_step == (-1 if warnings else step)
    return warnings


def assert_only(folder: Path, *steps: int) -> None:
    """Assert that `folder` contains the checkpoints of `steps`, intact, and nothing else."""
    checkpoints = CheckpointStorage(folder, KeepPolicy(9))
    assert sorted(folder.iterdir()) == [checkpoints.path_of(step) for step in steps]
    for step in steps:
        verify_checkpoint(checkpoints.path_of(step))


def assert_reports_full_disk(warning: str, folder: Path, reason: str, more: str = ", or set checkpoint.keep=1") -> None:
    start = re.escape(f"{folder}/step-00000002: was not saved: {reason}: needs 3.0 MiB, has ")
    assert re.fullmatch(rf"{start}[\d,.]+ MiB \(free some space{more}\)", warning)


# matrix: 30
@BOTH
@pytest.mark.parametrize("is_known", [True, False], ids=["known before", "met while writing"])
def test_a_full_disk_loses_only_the_checkpoint_being_saved(small_disk: Path, background: bool, is_known: bool) -> None:
    folder = small_disk / "checkpoints"
    assert try_save(folder, 1, background=background) == []
    with contextlib.nullcontext() if is_known else without_free_space_check():
        (warning,) = try_save(folder, 2, background=background, num_bytes=3 * MIB)
    assert_reports_full_disk(warning, folder, "No space left on device")
    assert_only(folder, 1)
    shutil.rmtree(folder / "step-00000001")
    assert try_save(folder, 3, background=background, num_bytes=3 * MIB) == []
    assert_only(folder, 3)


@contextlib.contextmanager
def without_free_space_check() -> Iterator[None]:
    """Disable the check of free space, as if a quota or another process took the space after it."""
    plenty = SimpleNamespace(total=1 << 40, free=1 << 40)
    with mock.patch("paceline.training.checkpoint.storage.shutil.disk_usage", lambda folder: plenty):
        yield


# matrix: 30
@BOTH
def test_a_file_size_limit_is_reported_as_a_full_disk(tmp_path: Path, background: bool) -> None:
    assert try_save(tmp_path, 1, background=background) == []
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, before[1]))  # Python ignores SIGXFSZ
    try:
        (warning,) = try_save(tmp_path, 2, background=background, num_bytes=3 * MIB)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert_reports_full_disk(warning, tmp_path, "File too large")
    assert_only(tmp_path, 1)


def writer_on(folder: Path, warnings: list[str], keep: KeepPolicy, *, background: bool) -> CheckpointWriter:
    return CheckpointWriter(
        CheckpointStorage(folder, keep), background=background, on_failure="warn", warn=warnings.append
    )


# matrix: 30
@BOTH
def test_older_checkpoints_are_deleted_to_make_room_for_the_last(small_disk: Path, background: bool) -> None:
    """Permanent checkpoints are not deleted: here that of step 2, the best."""
    warnings: list[str] = []
    with contextlib.closing(writer_on(small_disk, warnings, KeepPolicy(9), background=background)) as writer:
        for step in (1, 2, 3):
            writer.save(step, 2, snapshot(step))
        writer.save(4, 2, snapshot(4), "preempted")
        writer.flush()
        assert writer.saved_step == 4
    assert_only(small_disk, 2, 3, 4)
    assert {"model", "optimizer"} == {path.stem for path in (small_disk / "step-00000004").glob("*.safetensors")}
    (warning,) = warnings
    assert "step-00000004: the disk is full: older checkpoints were removed" in warning


# matrix: 30
@BOTH
def test_a_completed_run_saves_only_weights_if_nothing_else_fits(small_disk: Path, background: bool) -> None:
    warnings: list[str] = []
    big = 2 * MIB + MIB // 2
    with contextlib.closing(writer_on(small_disk, warnings, KeepPolicy(1), background=background)) as writer:
        writer.save(1, -1, snapshot(1, big))
        writer.save(2, -1, snapshot(2, big), "ended")
        writer.flush()
        assert (writer.saved_step, writer.result().saved, writer.result().failed) == (2, 2, 0)
    checkpoint = CheckpointStorage(small_disk, KeepPolicy(1)).newest_intact(pytest.fail)
    assert checkpoint == small_disk / "step-00000002" and is_weights_only(checkpoint)
    assert all((each == 2).all() for each in load_tensor_group(checkpoint, "model").values())
    assert load_tensor_group(checkpoint, "optimizer") == {}
    (warning,) = warnings
    assert "step-00000002: the disk is full: only its weights were saved, in 1.2 MiB" in warning


# matrix: 30
@BOTH
def test_an_interrupted_run_never_saves_only_weights(small_disk: Path, background: bool) -> None:
    warnings: list[str] = []
    big = 2 * MIB + MIB // 2
    with contextlib.closing(writer_on(small_disk, warnings, KeepPolicy(1), background=background)) as writer:
        writer.save(1, -1, snapshot(1, big))
        writer.save(2, -1, snapshot(2, big), "preempted")
        writer.flush()
        assert (writer.saved_step, writer.result().failed) == (1, 1)
    assert_only(small_disk, 1)
    warning = warnings[0].replace("2.5 MiB", "3.0 MiB")
    assert_reports_full_disk(warning, small_disk, "No space left on device", more="")


# matrix: 30
@BOTH
def test_repeated_save_errors_are_counted_in_one_warning(small_disk: Path, background: bool) -> None:
    warnings: list[str] = []
    with contextlib.closing(writer_on(small_disk, warnings, KeepPolicy(9), background=background)) as writer:
        for step in range(1, 8):
            writer.save(step, -1, snapshot(step, 5 * MIB))
        writer.save(8, -1, snapshot(8))
        writer.save(9, -1, snapshot(9, 5 * MIB))
    first, likewise, again = warnings
    assert "step-00000001: was not saved: No space left on device" in first
    assert "6 more checkpoints, of steps 2 to 7, failed for the same reason: No space left on device" in likewise
    assert "step-00000009: was not saved" in again


# matrix: 31
@BOTH
def test_a_disk_that_became_read_only_is_reported(small_disk: Path, background: bool) -> None:
    assert try_save(small_disk, 1, background=background) == []
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True, timeout=30)
    (warning,) = try_save(small_disk, 2, background=background)
    assert warning == (f"{small_disk}/step-00000002: was not saved: Read-only file system (make {small_disk} writable)")
    subprocess.run(["mount", "-o", "remount,rw", small_disk], check=True, timeout=30)
    assert_only(small_disk, 1)
    assert try_save(small_disk, 3, background=background) == []


# matrix: 31
@BOTH
def test_an_unwritable_folder_is_reported(tmp_path: Path, background: bool) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write to a folder that is closed")
    folder = tmp_path / "checkpoints"
    assert try_save(folder, 1, background=background) == []
    folder.chmod(0o500)
    (warning,) = try_save(folder, 2, background=background)
    folder.chmod(0o700)
    assert warning == f"{folder}/step-00000002: was not saved: Permission denied (make {folder} writable)"
    assert_only(folder, 1)


# matrix: 31
@BOTH
def test_a_deleted_checkpoint_folder_is_recreated_but_not_a_deleted_run(tmp_path: Path, background: bool) -> None:
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    assert try_save(folder, 1, background=background) == []
    shutil.rmtree(folder)
    assert try_save(folder, 2, background=background) == []
    assert_only(folder, 2)
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(CheckpointError, match="run: was removed while"):  # even if a failed save is only a warning
        try_save(folder, 3, background=background)
    assert not list(tmp_path.iterdir())


# matrix: 31
@BOTH
def test_removing_the_folder_during_a_save_loses_one_checkpoint(tmp_path: Path, background: bool) -> None:
    folder = tmp_path / "checkpoints"

    def remove_folder(path: Path, written: Snapshot) -> None:
        format.write_checkpoint(path, written)
        shutil.rmtree(folder)

    with mock.patch("paceline.training.checkpoint.storage.write_checkpoint", remove_folder):
        (warning,) = try_save(folder, 1, background=background)
    assert str(folder / "step-00000001") in warning and "No such file or directory" in warning
    assert try_save(folder, 2, background=background) == []
    assert_only(folder, 2)


# matrix: 32
def test_a_save_succeeds_if_old_checkpoints_cannot_be_deleted(tmp_path: Path) -> None:
    checkpoints = CheckpointStorage(tmp_path, KeepPolicy(1))
    checkpoints.save(1, -1, snapshot(1))
    with mock.patch("shutil.rmtree", side_effect=PermissionError):
        checkpoints.save(2, -1, snapshot(2))
    assert checkpoints.newest_intact(pytest.fail) == checkpoints.path_of(2)
    checkpoints.clean_up()
    assert_only(tmp_path, 2)
