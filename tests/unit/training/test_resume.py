"""Which settings may change when a run is resumed, and the notes about them."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.core.errors import DataError, RecipeError
from paceline.core.run_dir import RunDir, is_run
from paceline.recipe.load import Patch, load
from paceline.recipe.plugins import code_identity
from paceline.recipe.schema import Recipe
from paceline.training.checkpoint import CheckpointStorage, KeepPolicy, Snapshot
from paceline.training.resume import (
    check_rundir,
    check_sampler,
    describe_missing_checkpoint,
    initialize_rundir,
    keep_batch,
    list_changed_plugins,
    read_final_result,
)


def recipe(*overrides: str) -> Recipe:
    return load("folder", Patch.parse(overrides)).recipe


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    opened = RunDir(tmp_path / "run")
    initialize_rundir(opened, recipe("data.source.root=photos", "optim.lr=0.1"), {"total_steps": 3})
    return opened


def test_plan_and_recipe_make_a_run_and_a_kill_between_them_leaves_none(tmp_path: Path, monkeypatch) -> None:
    def killed(path: Path, text: str) -> None:
        raise KeyboardInterrupt(path.name)

    with monkeypatch.context() as until_then, pytest.raises(KeyboardInterrupt, match=r"recipe\.yaml"):
        until_then.setattr("paceline.training.resume.write_atomic", killed)
        initialize_rundir(RunDir(tmp_path / "run"), recipe(), {"total_steps": 3})
    run = RunDir(tmp_path / "run")
    assert (run.path / "plan.json").is_file() and not is_run(run.path)
    run.refuse_another_run(resume=False)
    initialize_rundir(run, recipe(), {"total_steps": 4})
    assert is_run(run.path) and check_rundir(run, recipe(), resume=True) == []


def test_a_run_of_a_folder_resumes_from_its_pack(rundir: RunDir) -> None:
    """That it holds the same images is seen when it is read: `check_dataset`."""
    packed = recipe("data.source.name=pack", "data.source.root=photos.pack", "optim.lr=0.1", "data.loader=native")
    assert check_rundir(rundir, packed, resume=True) == [
        "resumed with data.loader=native, which was auto",
        "resumed with data.source.name=pack, which was folder",
    ]


def test_changes_of_the_experiment_are_refused_with_the_old_value(rundir: RunDir) -> None:
    with pytest.raises(
        RecipeError, match=r"was started with optim\.lr=0\.1 \(now 0\.2\) \(resume it as it was, or start "
    ):
        check_rundir(rundir, recipe("data.source.root=photos", "optim.lr=0.2"), resume=True)
    with pytest.raises(RecipeError, match=rf"or start a new run from its weights: model\.weights={rundir.path}\)$"):
        check_rundir(rundir, recipe("data.source.root=photos", "train.epochs=50"), resume=True)


def test_a_batch_per_rank_gives_way_to_the_batch_that_the_run_has(tmp_path: Path) -> None:
    opened = RunDir(tmp_path / "run")
    assert keep_batch(recipe("data.rank_batch_size=32"), opened, 4) == (recipe("data.rank_batch_size=32"), [])
    initialize_rundir(opened, recipe("data.batch_size=64"), {"total_steps": 3})
    whole = recipe("data.batch_size=64")
    assert keep_batch(recipe("data.rank_batch_size=32"), opened, 2) == (whole, [])
    note = "resumed on 4 ranks with data.batch_size=64, as the run began; data.rank_batch_size=32 has no effect"
    assert keep_batch(recipe("data.rank_batch_size=32"), opened, 4) == (whole, [note])
    other = recipe("data.batch_size=128")
    assert keep_batch(other, opened, 4) == (other, [])
    with pytest.raises(RecipeError, match=r"was started with data\.batch_size=64 \(now 128\)"):
        check_rundir(opened, other, resume=True)


def test_what_auto_has_measured_is_kept(tmp_path: Path) -> None:
    opened = RunDir(tmp_path / "run")
    both = recipe("data.batch_size=auto", "train.accumulate=auto")
    assert keep_batch(both, opened, 2) == (both, [])
    began = recipe("data.batch_size=64", "train.accumulate=4")
    initialize_rundir(opened, began, {"total_steps": 3})
    assert keep_batch(both, opened, 2)[0].train.accumulate == "auto"  # the number was set, and is measured now
    initialize_rundir(opened, began, {"total_steps": 3, "measured_batch": {"accumulate": 4}})
    assert keep_batch(both, opened, 2) == (began, [])
    assert keep_batch(recipe("data.batch_size=64", "train.accumulate=auto"), opened, 1) == (began, [])
    assert keep_batch(recipe("data.batch_size=auto", "train.accumulate=2"), opened, 1)[0].train.accumulate == 2


def test_of_another_variant_only_the_name_is_listed(rundir: RunDir) -> None:
    other = recipe("data.source.root=photos", "optim.name=adamw", "optim.lr=0.1")
    with pytest.raises(
        RecipeError, match=r"was started with optim\.name=\w+ \(now adamw\) \(resume it as it was, or start "
    ):
        check_rundir(rundir, other, resume=True)


@pytest.mark.parametrize("status", ["completed", "target_reached"])
def test_a_run_has_ended_only_with_the_checkpoint_of_its_last_step(rundir: RunDir, monkeypatch, status: str) -> None:
    result = SimpleNamespace(status=status, steps=9)
    monkeypatch.setattr(RunDir, "read_result", lambda self: result)
    assert read_final_result(rundir) is result and not describe_missing_checkpoint(
        rundir
    )  # all were removed: there is nothing to resume from
    checkpoints = CheckpointStorage(rundir.checkpoints, KeepPolicy(9))
    empty = Snapshot({"model": {}, "optimizer": {}}, {"train": {"best_step": -1}})
    checkpoints.save(3, -1, empty)
    assert read_final_result(rundir) is None and "last step, 9, is missing" in describe_missing_checkpoint(rundir)
    last = checkpoints.save(9, -1, empty)
    assert read_final_result(rundir) is result and not describe_missing_checkpoint(rundir)
    (last / "state.json").write_text("{")
    assert read_final_result(rundir) is None and "last step, 9, is damaged" in describe_missing_checkpoint(rundir)


def test_a_run_that_saves_nothing_has_ended_without_checkpoints(tmp_path: Path, monkeypatch) -> None:
    run = RunDir(tmp_path / "run")
    initialize_rundir(run, recipe("data.source.root=photos", "checkpoint.every=off"), {})
    result = SimpleNamespace(status="completed", steps=9)
    monkeypatch.setattr(RunDir, "read_result", lambda self: result)
    CheckpointStorage(run.checkpoints, KeepPolicy(1)).save(3, -1, Snapshot({"model": {}, "optimizer": {}}, {}))
    assert read_final_result(run) is result


def test_a_run_is_not_resumed_with_other_weights_of_its_sampler(tmp_path: Path) -> None:
    def saved(**values: str) -> Path:
        return CheckpointStorage(tmp_path, KeepPolicy(9)).save(1, 1, Snapshot({"model": {}, "optimizer": {}}, values))

    check_sampler(saved(), "")  # of a sampler without weights
    check_sampler(saved(sampler="0123456789abcdef"), "0123456789abcdef")
    with pytest.raises(DataError, match=r"^data\.sampler: .*step-00000001.*\(bring the column or the file back, or "):
        check_sampler(saved(sampler="0123456789abcdef"), "fedcba9876543210")


def test_the_file_of_a_samplers_weights_may_move(tmp_path: Path) -> None:
    words = ("data.source.root=photos", "data.sampler={name: weighted, column: w, file: old.csv}")
    run = RunDir(tmp_path / "run")
    initialize_rundir(run, recipe(*words), {"total_steps": 3})
    moved = check_rundir(run, recipe(*words, "data.sampler.file=new.csv"), resume=True)
    assert moved == ["resumed with data.sampler.file=new.csv, which was old.csv"]
    with pytest.raises(RecipeError, match=r"data\.sampler\.column=w \(now v\)"):
        check_rundir(run, recipe(*words, "data.sampler.column=v"), resume=True)


def test_a_plugin_with_a_changed_file_is_noted(tmp_path: Path, monkeypatch) -> None:
    file = tmp_path / "changing_part.py"
    file.write_text("def net(num_classes, in_channels): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    own = recipe("data.source.root=photos", "model.name=changing_part:net")
    values = {"own_parts": code_identity(own)}
    checkpoint = CheckpointStorage(tmp_path, KeepPolicy(1)).save(1, 1, Snapshot({"model": {}, "optimizer": {}}, values))
    assert list_changed_plugins(checkpoint, code_identity(own)) == []
    file.write_text("def net(num_classes, in_channels, deeper=True): pass\n")
    assert list_changed_plugins(checkpoint, code_identity(own)) == [
        "resumed with changed code: the file of changing_part:net has changed"
    ]
    for odd in ([], {"changing_part:net": "x"}):  # of somebody else's making
        damaged = Snapshot({"model": {}, "optimizer": {}}, {"own_parts": odd})
        assert (
            list_changed_plugins(CheckpointStorage(tmp_path, KeepPolicy(9)).save(2, 2, damaged), code_identity(own))
            == []
        )
    sys.modules.pop("changing_part")
