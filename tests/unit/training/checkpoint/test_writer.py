"""Saving while training goes on: a copy of its own, one at a time, and failures that are said and counted."""

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from unittest import mock

import pytest
import torch

from paceline.core.errors import CheckpointError
from paceline.core.results import CheckpointResult
from paceline.training.checkpoint import (
    CheckpointStorage,
    CheckpointWriter,
    KeepPolicy,
    Snapshot,
    format,
    load_tensor_group,
    verify_checkpoint,
)
from paceline.training.checkpoint.writer import HostMemoryStaging

BOTH = pytest.mark.parametrize("background", [True, False], ids=["background", "at once"])


def snapshot(value: float = 1.0) -> Snapshot:
    values = {"train": {"losses": [value]}}
    return Snapshot({"model": {"a": torch.full((1000,), value)}, "optimizer": {"0.m": torch.zeros(10)}}, values)


def writer(
    folder: Path, *, background: bool = True, on_failure: str = "warn", warnings: list[str] | None = None
) -> CheckpointWriter:
    warn = pytest.fail if warnings is None else warnings.append
    return CheckpointWriter(
        CheckpointStorage(folder, KeepPolicy(2)), background=background, on_failure=on_failure, warn=warn
    )


class Gate:
    """Hold every write until it may go on, and know how many are under way."""

    def __init__(self) -> None:
        self.may_go_on = threading.Event()
        self.has_begun = threading.Event()
        self.most = self._now = 0
        self._write = format.write_checkpoint

    def __call__(self, folder: Path, snapshot: Snapshot) -> None:
        self._now += 1
        self.most = max(self.most, self._now)
        self.has_begun.set()
        assert self.may_go_on.wait(timeout=60)
        self._write(folder, snapshot)
        self._now -= 1


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    with mock.patch("paceline.training.checkpoint.storage.write_checkpoint", made):
        yield made
    made.may_go_on.set()


def test_training_changes_nothing_that_is_being_written(tmp_path: Path, gate: Gate) -> None:
    live = snapshot(1.0)
    with closing(writer(tmp_path)) as each:
        each.save(1, 1, live)
        live.tensors["model"]["a"].fill_(2.0)
        live.values["train"]["losses"].append(2.0)
        gate.may_go_on.set()
        each.flush()
    path = CheckpointStorage(tmp_path, KeepPolicy(2)).at_step(1)
    assert torch.equal(load_tensor_group(path, "model")["a"], torch.ones(1000))
    assert format.read_state(path)["train"] == {"losses": [1.0]}


def test_saving_returns_before_it_is_written_and_flushing_after(tmp_path: Path, gate: Gate) -> None:
    with closing(writer(tmp_path)) as each:
        each.save(4, 4, snapshot())
        assert gate.has_begun.wait(timeout=60)
        assert each.saved_step == -1 and CheckpointStorage(tmp_path, KeepPolicy(2)).newest() is None
        gate.may_go_on.set()
        each.flush()
        assert each.saved_step == 4
        verify_checkpoint(CheckpointStorage(tmp_path, KeepPolicy(2)).at_step(4))


# matrix: 32
def test_one_is_written_at_a_time_and_the_newest_is_always_whole(tmp_path: Path, gate: Gate) -> None:
    checkpoints = CheckpointStorage(tmp_path, KeepPolicy(1))
    with closing(CheckpointWriter(checkpoints, background=True, on_failure="stop", warn=pytest.fail)) as each:
        for step in range(1, 13):
            gate.may_go_on.clear()
            gate.has_begun.clear()
            each.save(step, 3, snapshot(step))
            assert gate.has_begun.wait(timeout=60)
            # While one is being written, all that was said to be on disk is there and whole.
            assert each.saved_step == (step - 1 or -1)
            if step > 1:
                assert checkpoints.newest_intact(pytest.fail) == checkpoints.path_of(each.saved_step)
            gate.may_go_on.set()
            if step % 2:
                each.flush()
                assert checkpoints.newest_intact(pytest.fail) == checkpoints.path_of(step)
            else:
                threading.Event().wait(0.01)  # and in between, whatever the writer is at by now
                assert checkpoints.newest_intact(pytest.fail) in map(checkpoints.path_of, (step - 1, step))
    assert gate.most == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000012"]


def test_closing_waits_for_what_is_being_written(tmp_path: Path, gate: Gate) -> None:
    each = writer(tmp_path)
    each.save(1, 1, snapshot())
    threading.Timer(0.05, gate.may_go_on.set).start()
    each.close()
    verify_checkpoint(CheckpointStorage(tmp_path, KeepPolicy(2)).at_step(1))


@BOTH
def test_what_saving_came_to_is_counted(tmp_path: Path, background: bool) -> None:
    with closing(writer(tmp_path, background=background)) as each:
        assert each.result() == CheckpointResult(saved=0, failed=0, stall_s=0, write_s=0, bytes=0)
        for step in (1, 2):
            each.save(step, -1, snapshot())
        each.flush()
        result = each.result()
    assert (result.saved, result.failed, result.bytes) == (2, 0, 4040)
    assert result.write_s > 0 and result.stall_s > 0


@BOTH
def test_a_failure_is_one_warning_and_the_next_one_may_succeed(tmp_path: Path, background: bool) -> None:
    warnings: list[str] = []
    folder = tmp_path / "checkpoints"
    with closing(writer(folder, background=background, warnings=warnings)) as each:
        folder.write_text("in the way")
        each.save(1, -1, snapshot())
        each.flush()
        assert each.saved_step == -1
        folder.unlink()
        each.save(2, -1, snapshot())
        each.flush()
        assert each.saved_step == 2
        result = each.result()
    assert (result.saved, result.failed) == (1, 1)
    (warning,) = warnings
    assert str(folder / "step-00000001") in warning and "\n" not in warning and warning.endswith(")")


@BOTH
def test_a_failure_ends_the_run_once_where_it_is_to(tmp_path: Path, background: bool) -> None:
    warnings: list[str] = []
    folder = tmp_path / "checkpoints"
    folder.write_text("in the way")
    with closing(writer(folder, background=background, on_failure="stop", warnings=warnings)) as each:
        with pytest.raises(CheckpointError) as caught:
            each.save(1, -1, snapshot())
            each.flush()
        assert [str(caught.value)] == warnings and caught.value.exit_code == 4
        each.flush()


@BOTH
def test_a_bug_is_no_failed_disk(tmp_path: Path, background: bool) -> None:
    bad = Snapshot(snapshot().tensors, {"train": {"losses": [float("nan")]}})
    with closing(writer(tmp_path, background=background)) as each:
        with pytest.raises(ValueError, match="not JSON compliant"):
            each.save(1, -1, bad)
            each.flush()
        assert list(tmp_path.iterdir()) == []
        each.save(2, -1, snapshot())
        each.flush()
    assert each.saved_step == 2


def test_memory_for_copies_is_used_again(tmp_path: Path) -> None:
    staging = HostMemoryStaging()
    first = staging.stage(snapshot(1.0))
    place = first.tensors["model"]["a"].data_ptr()
    second = staging.stage(snapshot(2.0))
    assert second.tensors["model"]["a"].data_ptr() == place
    assert torch.equal(second.tensors["model"]["a"], torch.full((1000,), 2.0))


def test_memory_for_copies_follows_shapes_types_and_parts() -> None:
    staging = HostMemoryStaging()
    staging.stage(snapshot())
    grown = {"model": {"a": torch.ones(5, dtype=torch.float64)}, "average": {"b": torch.ones(2, 2).t()}}
    copy = staging.stage(Snapshot(grown, {}))
    assert copy.tensors.keys() == grown.keys()
    assert (
        torch.equal(copy.tensors["model"]["a"], grown["model"]["a"])
        and copy.tensors["model"]["a"].dtype == torch.double
    )
    assert staging.stage(snapshot(3.0)).tensors["model"]["a"].shape == (1000,)


def test_a_copy_keeps_its_layout_and_nothing_of_training() -> None:
    weight = torch.nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
    copy = HostMemoryStaging().stage(Snapshot({"model": {"w": weight}, "optimizer": {}}, {})).tensors["model"]["w"]
    assert torch.equal(copy, weight) and copy.stride() == weight.stride() and not copy.requires_grad
    assert copy.data_ptr() != weight.data_ptr()


def test_the_thread_that_saves_computes_on_one_core(tmp_path: Path) -> None:
    """Otherwise its OpenMP threads would slow those of the training down, for the rest of the run."""
    used, before = [], torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with (
            closing(writer(tmp_path)) as own,
            mock.patch(
                "paceline.training.checkpoint.storage.write_checkpoint", lambda *_: used.append(torch.get_num_threads())
            ),
        ):
            own.save(1, -1, snapshot())
            own.flush()
        assert (used, torch.get_num_threads()) == ([1], 2)
    finally:
        torch.set_num_threads(before)
