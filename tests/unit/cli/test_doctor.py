"""`paceline doctor` for a run, a recipe, and the machine alone."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.cli.doctor import doctor
from paceline.cli.options import DoctorOptions
from paceline.core.errors import RecipeError, WorldError
from paceline.core.results import CheckpointResult, RunResult
from paceline.core.run_dir import RunDir, write_atomic
from paceline.core.world import World
from paceline.data.sources.build import build_datasets
from paceline.lab.doctor.check import DoctorFinding
from paceline.recipe.load import load
from paceline.recipe.yaml import to_yaml_text
from paceline.training.checkpoint import CheckpointStorage, KeepPolicy, Snapshot
from paceline.training.goodput import Attempt, AttemptStart

WAITS = "TORCH_NCCL_BLOCKING_WAIT"
SAVING = CheckpointResult(saved=12, failed=0, stall_s=0.4, write_s=5.0, bytes=307_000_000)


@pytest.fixture
def run_doctor(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Return a function from arguments to the JSON of doctor, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*words: str, mtbf: str | None = None) -> dict:
        code = doctor(DoctorOptions(args=list(words), mtbf=mtbf, as_json=True))
        run_doctor = json.loads(capsys.readouterr().out)
        assert code == (run_doctor["state"] == "error")
        return run_doctor

    return run


@pytest.fixture
def a_run(tmp_path: Path) -> RunDir:
    """Return a run that was killed 30 s of training after its checkpoint, and whose second process is killed too."""
    run = RunDir(tmp_path / "run")
    run.create()
    write_atomic(run.recipe, to_yaml_text(load("digits").recipe.to_dict()))
    run.write_json("plan.json", {"batch_size": 100, "checkpoint_every": 200})
    rows = [{"step": 10 * n, "trained_s": 5.0 * n, "images_per_s": 200.0 if n < 12 else 100.0} for n in range(1, 13)]
    run.steps.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tensors = {"model": {"weight": torch.zeros(3)}, "optimizer": {"0.momentum": torch.zeros(3)}}
    state = {"step": 60, "trained_s": 30.0, "spent": {"eval_s": 4.0, "checkpoint_s": 1.0, "data_wait_s": 0.0}}
    CheckpointStorage(run.checkpoints, KeepPolicy(num_newest=3)).save(60, -1, Snapshot(tensors, {"train": state}))
    first = Attempt(_start(1, 1e9, 0, 0.0, pid=os.getpid())).with_end(1e9 + 45.0, 70, 35.0, "killed")
    second = _start(2, 1e9 + 65.0, 60, 30.0, pid=2**22 + 1)  # above the largest number that Linux gives
    lines = [first.start, first.end, second]
    run.attempts.write_text("".join(line.model_dump_json() + "\n" for line in lines if line))
    return run


def _start(number: int, started_s: float, from_step: int, trained_s: float, pid: int) -> AttemptStart:
    return AttemptStart(
        number=number,
        started_s=started_s,
        startup_s=10.0,
        from_step=from_step,
        trained_s=trained_s,
        world_size=1,
        host=os.uname().nodename,
        pid=pid,
    )


def test_without_arguments_only_the_machine_is_checked(run_doctor) -> None:
    found = run_doctor()
    assert set(found) == {"state", "machine"} and found["state"] != "error"
    assert {"versions", "disk", "gloo", "launcher"} < {check["name"] for check in found["machine"]}
    assert {check["state"] for check in found["machine"]} <= {"ok", "warning"}


def test_a_problem_ends_with_1_with_and_without_json(run_doctor, capsys, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    assert run_doctor()["state"] == "error"
    assert doctor(DoctorOptions()) == 1
    printed = capsys.readouterr().out
    assert (
        "ERROR" in printed
        and "there is no nowhere0" in printed
        and printed.splitlines()[-1].startswith("a run would fail: 1")
    )


def test_a_named_folder_is_the_one_that_is_looked_at(capsys, tmp_path: Path) -> None:
    assert doctor(DoctorOptions(as_json=True, run_dir=Path("/proc/self/run"))) == 1
    machine = json.loads(capsys.readouterr().out)["machine"]
    assert [check["name"] for check in machine if check["state"] == "error"] == ["disk"]


def test_ranks_of_a_launcher_are_checked_together_and_rank_0_prints(capsys, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("paceline.cli.doctor.enter_world", lambda: World(world_size=2, local_world_size=2))
    monkeypatch.setenv(WAITS, "0")
    monkeypatch.delenv(WAITS)  # now it is as it was when the test is over
    slow = DoctorFinding("all-reduce", "warning", "slow", "mend the cable")
    monkeypatch.setattr("paceline.lab.doctor.ranks.check_ranks", lambda world, own, environ, section: (slow,))
    assert doctor(DoctorOptions(as_json=True)) == 0
    assert os.environ[WAITS] == "1", "else NCCL ends the process where a rank does not answer"
    found = json.loads(capsys.readouterr().out)
    assert found["state"] == "warning" and found["ranks"] == [slow.to_dict()] and found["machine"]
    monkeypatch.setattr("paceline.lab.doctor.ranks.check_ranks", lambda world, own, environ, section: None)
    assert doctor(DoctorOptions(as_json=True)) == 0 and capsys.readouterr().out == ""


def test_ranks_are_started_without_a_launcher(monkeypatch) -> None:
    monkeypatch.setattr("paceline.cli.doctor.start_ranks", lambda ranks, port, extra: 100 * ranks + port)
    assert doctor(DoctorOptions(as_json=True, ranks="2", port=7)) == 207
    monkeypatch.setattr("paceline.cli.doctor.enter_world", lambda: World(world_size=2, launcher="slurm"))
    with pytest.raises(WorldError, match="--ranks: 3, but 2 ranks were started by slurm"):
        doctor(DoctorOptions(as_json=True, ranks="3"))


def test_steps_failures_restarts_and_training_at_risk_are_printed(run_doctor, a_run: RunDir) -> None:
    found = run_doctor(str(a_run.path), mtbf="2h")["run"]
    assert found["step_s"] == [0.5, 1.0]
    # Both are dead: 45 s up, then 10 s of start and 30 s of training.
    assert (found["failures"], found["up_s"]) == (2, 85.0)
    assert found["mtbf_s"]["mean"] == 42.5 and found["mtbf_s"]["low"] < 42.5 < found["mtbf_s"]["high"]
    assert (found["restarts"], found["restart_s"]) == (1, 30.0) and found["at_risk_s"] == 30.0
    good = found["goodput"]
    assert (good["startup_s"], good["down_s"], good["rework_s"], good["eval_s"]) == (20.0, 20.0, 5.0, 4.0)
    assert (good["useful_s"], good["wall_s"], good["starts"]) == (55.0, 105.0, 2)


def test_a_process_that_still_runs_has_not_failed(run_doctor, a_run: RunDir) -> None:
    text = a_run.attempts.read_text().replace(str(2**22 + 1), str(os.getpid()))
    a_run.attempts.write_text(text)
    assert run_doctor(str(a_run.path))["run"]["failures"] == 1
    elsewhere = text.replace(f'"host":"{os.uname().nodename}"', '"host":"far-away"')
    a_run.attempts.write_text(elsewhere.replace(str(os.getpid()), str(2**22 + 1)))
    assert run_doctor(str(a_run.path))["run"]["failures"] == 1


def test_advice_uses_the_runs_own_checkpoint_costs(run_doctor, a_run: RunDir, finished) -> None:
    a_run.write_result(finished)
    found = run_doctor(str(a_run.path), mtbf="2h")
    assert found["saving"] == SAVING.model_dump() and found["run"]["at_risk_s"] == 0
    advice = found["advice"]
    # 200 steps of half a second, at 2 h between failures: √(2 · 0.4 · 7200) is 75.9 s, and Daly's 75.6.
    assert (advice["now_s"], advice["best_steps"], advice["best_s"]) == (100.0, 151, 75.5)
    assert run_doctor(str(a_run.path), "checkpoint.every=10min", mtbf="2h")["advice"]["now_s"] == 600.0


def test_failures_that_were_seen_stand_in_for_a_given_time(run_doctor, a_run: RunDir, finished) -> None:
    a_run.write_result(finished)
    assert run_doctor(str(a_run.path))["advice"]["mtbf_s"] == 42.5


def test_saving_a_recipe_is_measured_without_leaving_files(run_doctor, monkeypatch, tmp_path: Path) -> None:
    opened: list[object] = []

    def looked_for(section: Any, **options: bool) -> Any:
        opened.append(section)
        return build_datasets(section, **options)

    monkeypatch.setattr("paceline.data.sources.folds.build_datasets", looked_for)
    found = run_doctor("digits", "model.width=0.1", mtbf="2h")
    assert len(opened) == 1, "data on a network disk takes long to look for"
    assert found["saving"]["saved"] == 3 and 0 < found["saving"]["stall_s"] <= found["saving"]["write_s"]
    assert found["saving"]["bytes"] > 10_000 and found["saving"]["restart_s"] > 0
    assert found["advice"]["setting"].startswith("checkpoint.every=")
    assert not list(tmp_path.iterdir())


def test_missing_data_does_not_hide_other_findings(run_doctor, tmp_path: Path) -> None:
    found = run_doctor("folder", f"data.source.root={tmp_path}/gone", mtbf="2h")
    assert "gone" in found["saving"]["error"] and "advice" not in found
    assert found["machine"][-1]["name"] == "recipe" and found["machine"][-1]["state"] == "warning"


def test_a_recipe_is_checked_with_the_preprocessing_of_its_weights(run_doctor, monkeypatch) -> None:
    checked: list[Any] = []

    def check(recipe: Any, *args: object) -> DoctorFinding:
        checked.append(recipe)
        return DoctorFinding("recipe", "ok", "fits")

    monkeypatch.setattr("paceline.lab.doctor.recipe.check_recipe", check)
    run_doctor("folder", "model.name=timm:vit_small_patch16_384", "model.weights=default")
    assert [(each.data.interpolation, each.data.auto_image_size) for each in checked] == [("bicubic", 384)]


def test_a_run_without_steps_is_reported(run_doctor, a_run: RunDir) -> None:
    for path in (a_run.steps, a_run.attempts):
        path.unlink()
    (a_run.path / "plan.json").write_text("{}")
    found = run_doctor(str(a_run.path), mtbf="2h")
    assert found["run"]["step_s"] is None and found["run"]["goodput"] is None and found["run"]["failures"] == 0
    assert found["run"]["mtbf_s"] == {"mean": None, "low": 0.0, "high": None} and found["saving"]["saved"] == 3


def test_a_terminal_gets_tables(a_run: RunDir, finished, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    a_run.write_result(finished.model_copy(update={"status": "preempted"}))
    doctor(DoctorOptions(args=[str(a_run.path)], mtbf="2h"))
    printed = capsys.readouterr().out
    for words in (
        "this machine", "shared memory", "500 ms, the 99th percentile 1,000 ms", "2 in 85 s: one in 42 s",
        "30.0 s from a failure to the first new step", "30 s of training since the newest checkpoint",
        "307 MB each", "every 76 s, 151 steps: loses 1.53%", "you save every 1.7 min", "a kill loses up to 1.8 min",
    ):  # fmt: skip
        assert words in printed, words


@pytest.mark.parametrize("text", ["8", "2st", "0h", "soon"])
def test_a_time_between_failures_that_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(RecipeError, match=r"^--mtbf: ") as caught:
        doctor(DoctorOptions(mtbf=text, as_json=True))
    assert len(str(caught.value).splitlines()) == 1


@pytest.fixture
def finished() -> RunResult:
    """Return a result with the checkpoint costs `SAVING`."""
    values = {
        "status": "completed",
        "recipe_hash": "0123456789ab",
        "world_size": 1,
        "epochs": 1.0,
        "steps": 120,
        "images_seen": 12000,
        "eval": None,
        "best": None,
        "throughput": {"images_per_s": 200.0, "spread": (200.0, 200.0), "n": 12, "excluded_s": 0.0},
        "time": {"wall_s": 60.0, "startup_s": 1, "train_s": 59, "eval_s": 0, "checkpoint_s": 0, "to_target_s": None},
        "checkpoints": SAVING,
        "stages": {},
        "verdict": {"bottleneck": "unknown", "evidence": "", "try": ""},
        "lr": "",
        "weights_sha256": "",
        "provenance": {},
    }
    return RunResult.model_validate(values)
