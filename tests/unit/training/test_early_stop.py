"""What is monitored decides the best, the plateau schedule and patience; patience and time end a resumable run."""

import errno
import json
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest

from paceline.core.errors import CheckpointError
from paceline.core.results import RunResult
from paceline.core.run_dir import RunDir, read_lines
from paceline.core.world import World
from paceline.recipe.load import Patch, load
from paceline.training.checkpoint import CheckpointStorage, KeepPolicy, Snapshot, is_weights_only, load_tensor_group
from paceline.training.checkpoint.format import read_state
from paceline.training.process import Invocation
from paceline.training.run import run

SMALL = (
    *("data.source.num_images=96", "data.source.num_val_images=37", "data.source.image_size=8", "model.width=0.1"),
    *("data.batch_size=12", "optim.lr=0.01", "train.steps=10", "log.every=1st", "log.tensorboard=off"),
    *("parallel.threads=1", "train.eval_every=2st", "checkpoint.every=2st", "checkpoint.keep=9", "log.report=off"),
    "log.explain=off",
)
TIMES = ("trained_s", "train_s", "epoch_s", "images_per_s")


def trained(folder: Path, *overrides: str, resume: bool = False) -> tuple[RunResult, list[dict]]:
    recipe = load("synthetic", Patch.parse([*SMALL, *overrides])).recipe
    rundir = RunDir(folder)
    result = run(recipe, World.single(), rundir, resume=resume, invocation=Invocation())
    rows = [{key: each for key, each in row.items() if key not in TIMES} for row in read_lines(rundir.evals)]
    return result, rows


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunResult]:
    """Return the folder of the run without overrides, to read and copy, and its result."""
    folder = tmp_path_factory.mktemp("complete") / "whole"
    return folder, trained(folder)[0]


@pytest.fixture(autouse=True)
def own_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("own_metric")
    module.constant = lambda scores, labels: 0.5  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "own_metric", module)


CONSTANT = "train.monitor=own_metric:constant"


@pytest.mark.parametrize(("patience", "steps"), [("2", 6), ("3", 8), ("3st", 6), ("1st", 4), ("0.5ep", 6)])
def test_a_run_without_improvement_stops(tmp_path: Path, patience: str, steps: int) -> None:
    """The first of the evaluations, one per two steps of eight per epoch, is the best."""
    result, rows = trained(tmp_path / "run", CONSTANT, f"train.patience={patience}")
    assert (result.status, result.steps, result.best_step) == ("patience_reached", steps, 2)
    assert [row["own_metric:constant"] for row in rows] == [0.5] * (steps // 2)
    assert (tmp_path / "run" / "checkpoints" / f"step-{steps:08}").is_dir()
    again, _ = trained(tmp_path / "run", CONSTANT, f"train.patience={patience}", resume=True)
    assert again.model_dump_json() == result.model_dump_json()


def test_patience_at_the_last_step_is_a_completed_run(tmp_path: Path) -> None:
    assert trained(tmp_path / "run", CONSTANT, "train.patience=4")[0].status == "completed"


@pytest.mark.parametrize("loss", ["bce", "focal"])
def test_a_resumed_run_counts_on(tmp_path: Path, cut, loss: str) -> None:
    overrides = (f"train.loss={loss}", CONSTANT, "train.patience=3", "train.metrics=[auroc,f1]", "train.ema=on")
    whole, rows = trained(tmp_path / "whole", *overrides)
    assert (whole.status, whole.steps) == ("patience_reached", 8)
    cut(tmp_path / "whole", tmp_path / "cut", 4)
    resumed, resumed_rows = trained(tmp_path / "cut", *overrides, resume=True)
    assert (resumed.status, resumed.steps) == (whole.status, whole.steps)
    assert resumed.weights_sha256 == whole.weights_sha256
    assert resumed_rows == rows and {"auroc", "f1", "ema_auroc", "ema_own_metric:constant"} <= rows[0].keys()
    assert (resumed.best, resumed.best_step, resumed.eval) == (whole.best, whole.best_step, whole.eval)


@pytest.mark.parametrize(("name", "choose"), [("loss", min), ("ece", min), ("f1", max), ("top1", max), ("auto", max)])
def test_the_best_evaluation_is_the_one_of_the_monitored_metric(tmp_path: Path, name: str, choose) -> None:
    result, rows = trained(tmp_path / "run", f"train.monitor={name}", "optim.lr=0.1", "train.ema=on")
    key = "ema_top1" if name == "auto" else f"ema_{name}"
    values = [row[key] for row in rows]
    assert result.best_step == rows[values.index(choose(values))]["step"]
    assert result.monitor == ("top1" if name == "auto" else name)
    assert result.is_monitor_minimized is (choose is min)
    state = json.loads((tmp_path / "run" / "checkpoints" / "step-00000010" / "state.json").read_text())
    assert state["train"]["best_step"] == result.best_step


def test_a_plateau_schedule_sees_what_is_monitored(tmp_path: Path) -> None:
    trained(tmp_path / "run", CONSTANT, "schedule.name=plateau", "schedule.patience=1")
    rates = [row["lr"] for row in read_lines(RunDir(tmp_path / "run").steps)]
    assert rates == pytest.approx([0.01] * 6 + [0.002] * 4)


def test_a_run_whose_time_is_up_is_saved_and_evaluated_and_resumes_with_the_same_bits(tmp_path: Path) -> None:
    overrides = ("schedule.name=plateau", "schedule.patience=0", "train.patience=4", "train.loss=focal")
    whole, rows = trained(tmp_path / "whole", *overrides)
    limited, limited_rows = trained(tmp_path / "run", *overrides, "train.max_time=0.001s")
    assert (limited.status, limited.steps) == ("time_reached", 1) and limited.eval is not None
    assert [row["step"] for row in limited_rows] == [1] and limited.eval.images == 37
    assert limited.best is None, "the schedule of evaluations decides what is best, so that a resumed run is the same"
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000001"]
    again, _ = trained(tmp_path / "run", *overrides, "train.max_time=0.001s", resume=True)
    assert again.model_dump_json() == limited.model_dump_json()
    resumed, resumed_rows = trained(tmp_path / "run", *overrides, "train.max_time=off", resume=True)
    assert (resumed.status, resumed.steps) == (whole.status, whole.steps)
    assert resumed.weights_sha256 == whole.weights_sha256 and resumed_rows == rows


def fill_disk_for_complete_checkpoints(monkeypatch: pytest.MonkeyPatch, first_step: int) -> None:
    """From `first_step` on, let the disk have room for weights alone."""
    save = CheckpointStorage.save

    def full(self: CheckpointStorage, step: int, best_step: int, snapshot: Snapshot, *, reserve: int = 0) -> Path:
        if step >= first_step and not snapshot.values.get("weights_alone"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return save(self, step, best_step, snapshot, reserve=reserve)

    monkeypatch.setattr(CheckpointStorage, "save", full)


def test_a_run_whose_time_is_up_never_saves_weights_alone(
    complete: tuple[Path, RunResult], tmp_path: Path, cut, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, whole = complete
    cut(folder, tmp_path / "run", 4)
    fill_disk_for_complete_checkpoints(monkeypatch, 5)
    monkeypatch.setattr("paceline.training.coordinator.StepCoordinator.was_time_up", lambda self: False)
    limited, _ = trained(tmp_path / "run", "train.max_time=0.001s", resume=True)
    assert (limited.status, limited.steps) == ("failed", 5), "its last step is lost"
    monkeypatch.undo()
    resumed, _ = trained(tmp_path / "run", resume=True)
    assert (resumed.status, resumed.weights_sha256) == ("completed", whole.weights_sha256)


def save_weights_alone(checkpoint: Path) -> None:
    """Replace a checkpoint with its weights."""
    groups = {name: load_tensor_group(checkpoint, name) for name in ("model", "optimizer", "precision")}
    snapshot = Snapshot({name: group for name, group in groups.items() if group}, read_state(checkpoint))
    storage = CheckpointStorage(checkpoint.parent, KeepPolicy(9))
    storage.save(int(checkpoint.name[-2:]), -1, snapshot.weights_only())
    assert is_weights_only(checkpoint)


@pytest.mark.parametrize("precision", ["fp32", "bf16_master"])
def test_weights_alone_complete_a_run_at_its_end_and_continue_no_other(
    complete: tuple[Path, RunResult], tmp_path: Path, precision: str
) -> None:
    folder, whole = complete
    if precision != "fp32":
        folder = tmp_path / "whole"
        whole, _ = trained(folder, f"train.precision={precision}")
    for last_step in (4, 10):
        run_dir = shutil.copytree(folder, tmp_path / f"cut{last_step}")
        (run_dir / "result.json").unlink()
        for path in (run_dir / "checkpoints").iterdir():
            if int(path.name[-2:]) != last_step:
                shutil.rmtree(path)
        save_weights_alone(run_dir / "checkpoints" / f"step-{last_step:08}")
    ended, _ = trained(tmp_path / "cut10", f"train.precision={precision}", resume=True)
    assert (ended.status, ended.weights_sha256) == ("completed", whole.weights_sha256)
    with pytest.raises(CheckpointError, match=r"step-00000004: has only the weights.*model\.weights=.*cut4\)"):
        trained(tmp_path / "cut4", f"train.precision={precision}", resume=True)


def test_a_time_that_is_up_at_an_evaluation_needs_no_other(tmp_path: Path) -> None:
    result, rows = trained(tmp_path / "run", "train.eval_every=1st", "train.max_time=0.001s")
    assert (result.status, result.best_step) == ("time_reached", 1) and len(rows) == 1


def test_without_evaluations_a_run_stops_in_time_too(tmp_path: Path) -> None:
    result, rows = trained(tmp_path / "run", "train.eval_every=off", "train.max_time=0.001s")
    assert (result.status, result.eval, rows) == ("time_reached", None, [])


def test_the_time_of_earlier_processes_counts(complete: tuple[Path, RunResult], tmp_path: Path, cut) -> None:
    """A resumed run whose time is up takes no step."""
    cut(complete[0], tmp_path / "cut", 4)
    rows = [json.loads(line) for line in (tmp_path / "cut" / "attempts.jsonl").read_text().splitlines()]
    ran_s = rows[-1]["ended_s"] - rows[0]["started_s"]
    result, _ = trained(tmp_path / "cut", f"train.max_time={ran_s:.3f}s", resume=True)
    assert (result.status, result.steps) == ("time_reached", 4)


def test_a_run_whose_time_is_up_is_saved_without_checkpoints_too(
    complete: tuple[Path, RunResult], tmp_path: Path
) -> None:
    _, whole = complete
    limited, _ = trained(tmp_path / "run", "checkpoint.every=off", "checkpoint.keep=3", "train.max_time=0.001s")
    assert (limited.status, limited.steps) == ("time_reached", 1)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000001"]
    resumed, _ = trained(tmp_path / "run", "checkpoint.every=off", "checkpoint.keep=3", resume=True)
    assert (resumed.status, resumed.weights_sha256) == ("completed", whole.weights_sha256)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000001"]
