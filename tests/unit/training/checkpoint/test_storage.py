"""Which checkpoints are there, which stay, and what killed saves leave behind."""

import json
import re
from hashlib import sha256
from pathlib import Path

import pytest
import torch

from paceline.core.errors import CheckpointError
from paceline.training.checkpoint import CheckpointStorage, KeepPolicy, Snapshot, load_tensor_group, verify_checkpoint


def save(folder: Path, step: int, best_step: int = -1, keep: KeepPolicy | None = None) -> Path:
    tensors = {"model": {"a": torch.full((64,), float(step))}, "optimizer": {}}
    snapshot = Snapshot(tensors, {"train": {"best_step": best_step}})
    return CheckpointStorage(folder, keep or KeepPolicy(99)).save(step, best_step, snapshot)


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def steps(folder: Path) -> list[int]:
    return [int(name.removeprefix("step-")) for name in names(folder)]


def break_(path: Path) -> None:
    (path / "state.json").write_text("{}")


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        (KeepPolicy(2), [2, 5, 6]),
        (KeepPolicy(2, keep_best=False), [5, 6]),
        (KeepPolicy(1, keep_best=False, every=3), [3, 6]),
        (KeepPolicy(1, every=3), [2, 3, 6]),
    ],
)
def test_the_newest_the_best_and_those_for_good_stay(tmp_path: Path, keep: KeepPolicy, kept: list[int]) -> None:
    for step in range(1, 7):
        save(tmp_path, step, best_step=2, keep=keep)
    assert steps(tmp_path) == kept


def test_a_former_best_goes_when_there_is_a_better_one(tmp_path: Path) -> None:
    for step, best in ((1, 1), (2, 1), (3, 3), (4, 3)):
        save(tmp_path, step, best, KeepPolicy(1))
    assert steps(tmp_path) == [3, 4]


def test_steps_are_ordered_as_numbers(tmp_path: Path) -> None:
    for step in (99_999_999, 100_000_000):
        save(tmp_path, step, keep=KeepPolicy(1))
    assert names(tmp_path) == ["step-100000000"]


def test_damaged_newer_ones_do_not_push_out_the_one_just_saved(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(tmp_path, step)
    for step in (20, 30):
        break_(CheckpointStorage(tmp_path, KeepPolicy(1)).path_of(step))
    save(tmp_path, 15, keep=KeepPolicy(1))
    assert steps(tmp_path) == [15, 20, 30]
    assert CheckpointStorage(tmp_path, KeepPolicy(1)).newest_intact(lambda line: None) == tmp_path / "step-00000015"
    save(tmp_path, 20, keep=KeepPolicy(1))
    assert CheckpointStorage(tmp_path, KeepPolicy(1)).newest_intact(lambda line: None) == tmp_path / "step-00000020"


# matrix: 27
@pytest.mark.parametrize("name", ["model.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("left", ["nothing", "one byte", "half", "all but one byte"])
def test_a_truncated_checkpoint_is_stepped_over_with_one_warning(tmp_path: Path, name: str, left: str) -> None:
    save(tmp_path, 1)
    newest = save(tmp_path, 2)
    content = (newest / name).read_bytes()
    # The last byte of the manifest is the end of its line: without it all is still known.
    size = len(content) - (name == "manifest.json")
    cut = {"nothing": 0, "one byte": 1, "half": size // 2, "all but one byte": size - 1}[left]
    (newest / name).write_bytes(content[:cut])
    warnings: list[str] = []
    assert CheckpointStorage(tmp_path, KeepPolicy(1)).newest_intact(warnings.append) == tmp_path / "step-00000001"
    (warning,) = warnings
    assert str(newest) in warning and name in warning and "skipped" in warning and "\n" not in warning


def test_several_damaged_ones_are_a_warning_each_from_the_newest(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    for step in (2, 3):
        break_(CheckpointStorage(tmp_path, KeepPolicy(1)).path_of(step))
    warnings: list[str] = []
    assert CheckpointStorage(tmp_path, KeepPolicy(1)).newest_intact(warnings.append) == tmp_path / "step-00000001"
    assert [re.findall(r"step-\d+", line)[0] for line in warnings] == ["step-00000003", "step-00000002"]


def test_one_of_weights_alone_is_skipped_if_an_older_one_is_complete(tmp_path: Path) -> None:
    checkpoints = CheckpointStorage(tmp_path, KeepPolicy(9))
    tensors = {"model": {"a": torch.ones(64)}, "optimizer": {"0.m": torch.ones(64)}}
    alone = checkpoints.save(2, -1, Snapshot(tensors, {}).weights_only())
    assert checkpoints.newest_intact(pytest.fail) == alone, "without another, it is better than none"
    complete = checkpoints.save(1, -1, Snapshot(tensors, {}))
    warnings: list[str] = []
    assert checkpoints.newest_intact(warnings.append) == complete
    (warning,) = warnings
    assert warning.startswith(f"{alone}: has only the weights") and "step-00000001" in warning
    break_(complete)
    assert checkpoints.newest_intact(warnings.append) == alone


# matrix: 29
def test_where_all_are_damaged_no_run_starts_over_by_itself(tmp_path: Path) -> None:
    for step in (1, 2):
        break_(save(tmp_path, step))
    warnings: list[str] = []
    with pytest.raises(CheckpointError, match=r"none of its checkpoints is intact \(remove the folder") as caught:
        CheckpointStorage(tmp_path, KeepPolicy(1)).newest_intact(warnings.append)
    assert caught.value.exit_code == 4 and str(tmp_path) in str(caught.value) and len(warnings) == 2


def test_where_there_are_none_there_is_none(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        checkpoints = CheckpointStorage(folder, KeepPolicy(1))
        checkpoints.clean_up()
        assert checkpoints.newest() is None
        assert checkpoints.newest_intact(pytest.fail) is None
        with pytest.raises(CheckpointError, match="holds no checkpoint"):
            checkpoints.last()


def test_a_newer_format_is_said_and_not_stepped_over(tmp_path: Path) -> None:
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    text = json.dumps({"format_version": 99})
    (path / "state.json").write_text(text)
    digests = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**digests, "state.json": sha256(text.encode()).hexdigest()}))
    with pytest.raises(CheckpointError, match=r"has format 99, this paceline reads 2 \(update paceline\)"):
        CheckpointStorage(tmp_path, KeepPolicy(1)).newest_intact(pytest.fail)


def test_what_killed_saves_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    whole = save(tmp_path, 7)
    for name in (".step-00000005.tmp", ".step-00000007.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text("half")
    foreign = [".hidden", ".step-abc.tmp", "step-00000005.tmp", "notes.tmp"]
    for name in foreign:
        (tmp_path / name).mkdir()
    checkpoints = CheckpointStorage(tmp_path, KeepPolicy(1))
    assert checkpoints.newest() == whole
    checkpoints.clean_up()
    assert names(tmp_path) == sorted([*foreign, "step-00000007"])


def test_one_that_was_moved_away_for_another_comes_back(tmp_path: Path) -> None:
    save(tmp_path, 3).replace(tmp_path / ".step-00000003.old")
    checkpoints = CheckpointStorage(tmp_path, KeepPolicy(1))
    checkpoints.clean_up()
    assert checkpoints.newest_intact(pytest.fail) == tmp_path / "step-00000003"


def test_a_step_that_is_saved_again_is_the_newer_one(tmp_path: Path) -> None:
    checkpoints = CheckpointStorage(tmp_path, KeepPolicy(1))
    for value in (1.0, 2.0):
        tensors = {"model": {"a": torch.full((4,), value)}, "optimizer": {}}
        path = checkpoints.save(1, 1, Snapshot(tensors, {}))
    assert names(tmp_path) == ["step-00000001"] and load_tensor_group(path, "model")["a"][0] == 2
    verify_checkpoint(path)


def test_links_are_removed_themselves_and_never_what_they_point_to(tmp_path: Path) -> None:
    folder, victim = tmp_path / "run", tmp_path / "victim"
    folder.mkdir()
    victim.mkdir()
    (victim / "thesis.tex").write_text("mine")
    for name in (".step-00000002.tmp", ".step-00000002.old", "step-00000001", "step-00000002"):
        (folder / name).symlink_to(victim)
    path = save(folder, 2, keep=KeepPolicy(1))
    verify_checkpoint(path)
    assert names(folder) == ["step-00000002"]
    (folder / ".step-00000009.tmp").symlink_to(victim)
    CheckpointStorage(folder, KeepPolicy(1)).clean_up()
    assert names(folder) == ["step-00000002"] and names(victim) == ["thesis.tex"]


def test_a_link_in_place_of_a_checkpoint_is_stepped_over_with_a_warning(tmp_path: Path) -> None:
    whole = save(tmp_path, 1)
    (tmp_path / "step-00000002").symlink_to(whole)
    warnings: list[str] = []
    assert CheckpointStorage(tmp_path, KeepPolicy(1)).newest_intact(warnings.append) == whole
    assert len(warnings) == 1 and "is a link" in warnings[0]


def test_the_best_is_what_the_newest_one_knows(tmp_path: Path) -> None:
    save(tmp_path, 1, 1)
    save(tmp_path, 2, 1)
    assert CheckpointStorage(tmp_path, KeepPolicy(1)).best() == tmp_path / "step-00000001"
    save(tmp_path, 3, 9)
    with pytest.raises(CheckpointError, match=r"the best was at step 9, which was not saved"):
        CheckpointStorage(tmp_path, KeepPolicy(1)).best()
    save(tmp_path, 4, -1)
    with pytest.raises(CheckpointError, match="nothing was evaluated"):
        CheckpointStorage(tmp_path, KeepPolicy(1)).best()


def test_a_step_that_was_not_saved_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"step-00000005: no such checkpoint"):
        CheckpointStorage(tmp_path, KeepPolicy(1)).at_step(5)
