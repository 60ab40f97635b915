"""What `paceline scale` refuses, runs and shows, with runs that were never trained."""

import json
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from paceline.cli import scale as verb
from paceline.cli.experiment import show_experiment
from paceline.cli.options import BatchStudyOptions, ScaleOptions
from paceline.cli.ranks import refuse_more_nodes, srun_starter
from paceline.cli.scale_options import read_ranks
from paceline.core.errors import PacelineError
from paceline.core.experiments.experiment_dir import ExperimentDir
from paceline.core.experiments.results import ScalePoint, ScaleResult
from paceline.core.results import EvalResult, RunResult, ThroughputResult, TimeResult
from paceline.core.run_dir import RunDir
from paceline.core.statistics import mean_interval
from paceline.core.world import World
from paceline.lab.predict.points import read_points
from paceline.lab.runner import TrialError
from paceline.lab.trial import apply_patch
from paceline.parallel.environ import world_from_environ
from paceline.recipe.load import Patch, load

STEPS = ("train.epochs=auto", "train.steps=40")


class Child:
    """A training that ends at once, with an error if its arguments contain `fails`."""

    def __init__(self, command: Sequence[str], fails: str) -> None:
        self._words = list(command[command.index("train") + 1 :])
        self.returncode = 1 if fails and fails in self._words else 0

    def communicate(self, *, timeout: float | None = None) -> tuple[str | None, str | None]:
        if self.returncode:
            return None, "error: no room"
        options = dict(zip(self._words, self._words[1:], strict=False))
        assignments = [word for word in self._words[1:] if "=" in word]
        recipe = load(self._words[0], Patch.parse(assignments)).recipe
        folder, ranks = Path(options["--run-dir"]), int(options.get("--ranks", 2))
        folder.mkdir(parents=True)
        judged = EvalResult(images=100, top1=0.75, top5=1.0, loss=0.5)
        line = {"epoch": 2.0, "trained_s": 3.0 + recipe.data.batch_size / 128, "top1": 0.75}
        RunDir(folder).evals.write_text(json.dumps(line) + "\n")
        rate = 90.0 * ranks + 10 if recipe.measure.warmup_steps < 50 else 0.0
        result = RunResult(
            status="completed",
            recipe_hash=recipe.hash,
            world_size=ranks,
            epochs=1.0,
            steps=50,
            images_seen=3200,
            eval=judged,
            best=judged,
            throughput=ThroughputResult(images_per_s=rate, spread=(90, 110), n=4, excluded_s=0),
            time=TimeResult(wall_s=4.0, startup_s=1.0, train_s=2.0, eval_s=0, checkpoint_s=0, to_target_s=None),
            stages={},
            verdict={"bottleneck": "input-bound", "evidence": "none", "try": ""},
            lr="0.1 at 64",
            weights_sha256="ab",
            provenance={"device": "cpu", "logical_cores": 2},
        )
        RunDir(folder).write_result(result)
        return None, ""

    def poll(self) -> int | None:
        return self.returncode


class Here:
    """A process that reports a machine with so many cores."""

    def __init__(self, cores: int) -> None:
        self.cores = cores
        self.returncode = 0

    def communicate(self, *, timeout: float | None = None) -> tuple[str | None, str | None]:
        return json.dumps({"logical_cores": self.cores}), ""

    def poll(self) -> int | None:
        return self.returncode


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """Return the commands that were started, in a folder of the test's own; nothing is."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(verb, "enter_world", World.single)
    monkeypatch.setattr("paceline.cli.report.try_write_report", lambda rundir: None)
    for name in ("SLURM_JOB_ID", "SLURM_JOB_NUM_NODES", "SLURM_GPUS_ON_NODE", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    return []


@pytest.fixture
def scale(monkeypatch: pytest.MonkeyPatch, started: list[list[str]]) -> Callable[..., int]:
    """Return the verb; what is not told is as on the command line. `fails` is a word that no run survives.

    A run is made on two cores, whatever the machine is said to have.
    """

    def work(*words: str, fails: str = "", cores: int = 2, **options: Any) -> int:
        def start(command: Sequence[str]) -> Child | Here:
            if "paceline.measure.machine" in command:
                return Here(cores)
            started.append(list(command))
            return Child(command, fails)

        monkeypatch.setattr(verb, "start_process", start)
        if {"batch_sizes", "warmups", "lr_rules"} & options.keys():
            return verb.scale(BatchStudyOptions(args=list(words), **{"ranks": "1", **options}))
        return verb.scale(ScaleOptions(args=list(words), **{"ranks": "1,2", **options}))

    return work


def only_result() -> tuple[ExperimentDir, ScaleResult]:
    (path,) = Path("runs").iterdir()
    folder = ExperimentDir(path)
    found = folder.read()
    assert isinstance(found, ScaleResult)
    return folder, found


@pytest.mark.parametrize(
    ("words", "options", "complaint"),
    [
        ([], {"ranks": "1,x"}, r"^--ranks: 'x' is not a number of ranks \(write 1,2,4\)$"),
        ([], {"ranks": "0"}, "^--ranks: '0' is not a number"),
        ([], {"mode": "odd"}, r"^--mode: 'odd' is not a scaling mode \(write weak or strong\)$"),
        ([], {"seeds": 2}, "^--seeds: 2 has no effect on short runs"),
        ([], {"accuracy": True, "steps": 5}, "^--steps: 5 has no effect beside --accuracy"),
        ([], {"batch_sizes": "64", "ranks": "1,2"}, "^--ranks: '1,2' is not a number"),
        ([], {"batch_sizes": "64,many", "ranks": "1"}, "^--batch-sizes: 'many' is not a batch size"),
        ([], {"warmups": "5", "ranks": "1"}, "^--warmups: '5' is not a duration"),
        ([], {"lr_rules": "cubic", "ranks": "1"}, r"^--lr-rules: 'cubic' is not a rule \(write none, sqrt, linear"),
        ([], {"batch_sizes": "64", "ranks": "1", "target": 75.0}, r"^--target: 75 is not an accuracy \(write 0\.75"),
        ([], {"nodes": "1,2"}, "^--nodes: 1,2, but this is not a Slurm allocation"),
        (["train.epochs=3"], {}, r"^train\.epochs: 3 has no effect on short runs"),
        (["measure.clock=off"], {}, r"^measure\.clock: off leaves nothing to measure"),
        (["parallel.strategy=dataparallel"], {}, r"^parallel\.strategy: dataparallel is one process"),
        (["train.eval_every=off"], {"accuracy": True}, r"^train\.eval_every: off leaves no accuracy to report"),
        ([*STEPS], {"accuracy": True}, r"^train\.steps: 40 trains larger batches on more .* \(set train\.epochs\)$"),
        ([*STEPS], {"batch_sizes": "64,128", "ranks": "1"}, r"^train\.steps: 40 trains larger batches on more images"),
    ],
)
def test_options_without_effect_are_refused_before_writing(
    scale, started, words: list[str], options: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(PacelineError, match=complaint):
        scale(*words, **options)
    assert started == [] and not Path("runs").exists()


def test_a_rank_of_somebody_elses_starts_nothing(scale, started, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verb, "enter_world", lambda: World(rank=1, world_size=2, launcher="torchrun"))
    with pytest.raises(PacelineError, match=r"^scale: starts its own ranks, but 2 ranks were started by torchrun"):
        scale()
    assert started == []


def test_ranks_are_measured_alternating_and_printed(scale, started, capsys: pytest.CaptureFixture[str]) -> None:
    assert scale(repeats=2, steps=7) == 0
    assert [command[command.index("--ranks") + 1] for command in started] == ["1", "2", "2", "1"]
    assert all("train.steps=17" in command for command in started)
    assert ["data.batch_size=256" in command for command in started] == [False, True, True, False]
    folder, found = only_result()
    assert (found.mode, found.steps, found.repeats, found.recipe, found.wall_s) == ("weak", 7, 2, "digits", 16.0)
    assert found.recipe_hash == load("digits").recipe.hash
    assert [point.ranks for point in found.points] == [1, 2] and found.batches == ()
    assert found.points[1].efficiency is not None and found.points[1].efficiency.value == pytest.approx(0.95)
    assert found.points[1].speedup is not None and found.points[1].speedup.value == pytest.approx(1.9)
    assert [point.steps_s for point in found.points] == [7 * (point.step_s or 0) for point in found.points]
    assert found.caution.startswith("Up to 2 ranks share the 2 cores")
    assert load(str(folder.path)).recipe == load("digits").recipe
    assert [point.ranks for point in read_points(folder.path / "points.csv")] == [1, 2]
    assert folder.table.is_file() and folder.markdown.is_file()
    printed = capsys.readouterr().out
    assert "2 cases with 2 repeats: 4 runs of 7 measured steps" in printed
    assert "2 ranks, repeat 1: 190 images/s" in printed and "95.0 %" in printed
    assert f"Caution: {found.caution}" in printed and f"folder: {folder.path}" in printed


@pytest.mark.parametrize(("mode", "batches"), [("weak", [64, 128, 256]), ("strong", [64, 64, 64])])
def test_a_batch_per_rank_is_scaled_from_the_smallest_number_of_ranks(mode: str, batches: list[int]) -> None:
    options = ScaleOptions(args=["digits", "data.rank_batch_size=32"], ranks="2,4,8", mode=mode)
    study = verb._load_study(options)
    assert study.loaded.recipe == load("digits", Patch((("data.batch_size", 64),))).recipe
    assert [apply_patch(study.loaded.recipe, case.patch).data.batch_size for case in study.cases] == batches


def test_with_json_nothing_else_is_on_stdout(scale, capsys: pytest.CaptureFixture[str]) -> None:
    scale(repeats=1, as_json=True)
    out, err = capsys.readouterr()
    assert ScaleResult.model_validate_json(out) == only_result()[1]
    assert "1 rank: 100 images/s" in err


def test_an_experiment_that_was_cut_off_repeats_no_run(
    scale, started, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def cut(folder: ExperimentDir, result: ScaleResult) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("paceline.report.experiment_tables.write_tables", cut)
        with pytest.raises(KeyboardInterrupt):
            scale(repeats=1)
    assert len(started) == 2
    scale(repeats=1)
    assert len(started) == 2
    assert "2 ranks: 190 images/s (from an earlier start)" in capsys.readouterr().out
    assert len(only_result()[1].points) == 2


def test_an_experiment_resumed_on_another_machine_mixes_no_runs(scale, started, capsys) -> None:
    """A study that began on two cores and resumes on four has no run of two in its table."""
    folder = Path("found")
    scale(repeats=1, run_dir=folder, task=2)
    scale(repeats=1, run_dir=folder, cores=4)
    assert [command[command.index("--ranks") + 1] for command in started] == ["2", "1", "2"]
    (kept,) = (folder / "replaced").iterdir()
    line = f"2 ranks, run 1: is run again: the existing run had logical cores 2 (here 4); it is kept in {kept}"
    assert line in capsys.readouterr().out.splitlines()
    assert RunDir(kept).read_result().throughput.images_per_s == 190
    assert [run for point in ExperimentDir(folder).read().points for run in point.runs if "replaced" in run] == []


def test_an_experiment_over_nodes_concludes_outside_of_an_allocation(
    scale, started, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """Nothing can be run again there: runs that differ stay, with a caution."""
    study = {"repeats": 1, "run_dir": Path("found"), "nodes": "1,2", "ranks": "1"}
    monkeypatch.setattr(verb, "srun_starter", lambda environ: verb.start_process)
    with monkeypatch.context() as allocation:
        allocation.setenv("SLURM_JOB_ID", "7")
        allocation.setenv("SLURM_JOB_NUM_NODES", "2")
        for task in (1, 2):
            scale(**study, task=task)
    assert scale(**study, cores=4) == 0
    assert len(started) == 2 and not Path("found/replaced").exists()
    assert len(ExperimentDir(Path("found")).read().points) == 2
    assert ExperimentDir(Path("found")).read().caution == ""


@pytest.mark.parametrize("shape", [{"ranks": "1"}, {"ranks": "1", "batch_sizes": "64,128", "seeds": 1}])
def test_runs_over_nodes_of_two_clusters_are_put_together_with_a_caution(
    scale, started, monkeypatch: pytest.MonkeyPatch, capsys, shape: dict[str, Any]
) -> None:
    study = {"run_dir": Path("found"), "nodes": 2 if "seeds" in shape else "2", "task": None, **shape}
    study = study if "seeds" in shape else {**study, "repeats": 2}
    monkeypatch.setattr(verb, "srun_starter", lambda environ: verb.start_process)
    with monkeypatch.context() as allocation:
        allocation.setenv("SLURM_JOB_ID", "7")
        allocation.setenv("SLURM_JOB_NUM_NODES", "2")
        for task in (1, 2):
            scale(**{**study, "task": task})
    for number, path in enumerate(sorted(Path("found/trials").glob("*/result.json"))):
        made = json.loads(path.read_text())
        path.write_text(json.dumps({**made, "provenance": {**made["provenance"], "torch": f"2.1{number}"}}))
    capsys.readouterr()
    assert scale(**study) == 0
    caution = ExperimentDir(Path("found")).read().caution
    assert "torch 2.1" in caution and "Not all runs were made under the same conditions" in caution
    assert f"Caution: {caution}\n" in capsys.readouterr().out and len(started) == 2


def test_a_failed_number_of_ranks_does_not_stop_the_others(scale, started, capsys) -> None:
    assert scale(repeats=2, fails="data.batch_size=256", ranks="1,2,4") == 0
    assert len(started) == 5
    found = only_result()[1]
    assert [point.error for point in found.points] == ["", "no room", ""]
    assert "2 ranks, repeat 1: failed: no room" in capsys.readouterr().out


def test_the_study_fails_if_every_run_fails(scale) -> None:
    with pytest.raises(TrialError, match=r"^no room$"):
        scale(fails="train.steps=50")
    assert not list(Path("runs").glob("*/experiment.json"))


@pytest.mark.parametrize("options", [{"accuracy": True, "mode": "strong"}, {"lr_rules": "sqrt", "ranks": "1"}])
def test_a_length_in_steps_is_allowed_if_the_batch_is_fixed(scale, started, options: dict[str, Any]) -> None:
    scale(*STEPS, seeds=1, **options)
    assert started


def test_whole_runs_have_a_seed_a_turn(scale, started) -> None:
    scale(accuracy=True, seeds=2, mode="strong", ranks="1")
    assert [[word for word in command if word.startswith("seed=")] for command in started] == [["seed=0"], ["seed=1"]]
    assert not any(word.startswith("train.steps=") for command in started for word in command)
    (point,) = only_result()[1].points
    assert point.top1 is not None and (point.top1.value, point.top1.n) == (0.75, 2)


def test_a_study_of_batches_trains_whole_runs_to_a_target(scale, started, capsys) -> None:
    scale(batch_sizes="128,256", warmups="0,4ep", lr_rules="none,sqrt", target=0.7, seeds=2, ranks="1")
    assert len(started) == 2 * (2 + 4)
    found = only_result()[1]
    assert (found.mode, found.target, found.points, found.steps) == ("batch", 0.7, (), 0)
    assert [point.reached for point in found.batches] == [2] * 6
    printed = capsys.readouterr().out
    sentence = "batch 256 (rule none, warm-up 0ep) reaches the target in 1.25 (1.25 to 1.25) of the time of batch 128"
    assert found.sentences == (sentence,) and sentence in printed
    assert "soonest to 70.00 %" in printed
    folder, _ = only_result()
    assert f"  paceline compare {folder.path}/trials/* --target 0.7 --out {folder.path}/curves.html\n" in printed


@pytest.mark.parametrize(
    ("words", "target", "complaint"),
    [
        ([], 0.7, r"^--target: 0\.7 .*several labels \(leave it out\)$"),
        (["train.stop={top1: 0.7}"], None, r"^train\.stop: .*several labels \(set train\.stop=off\)$"),
    ],
)
def test_a_target_accuracy_of_images_with_several_labels_is_refused(
    scale, started, words: list[str], target: float | None, complaint: str
) -> None:
    for index in range(2):
        Image.new("RGB", (8, 8)).save(f"{index}.png")
    Path("labels.csv").write_text("path,label\n0.png,a;b\n1.png,a\n")
    source = "data.source={name: manifest, train: labels.csv, val: labels.csv, separator: ';'}"
    study = {"batch_sizes": "64", "seeds": 1, "ranks": "1"}
    with pytest.raises(PacelineError, match=complaint):
        scale(source, "train.loss=bce", *words, **study, target=target)
    assert started == [] and not Path("runs").exists()
    assert scale("train.loss=bce", *words, **study, target=target) == 0  # one label per image


@pytest.mark.parametrize("study", [{"accuracy": True}, {"batch_sizes": "64,128", "target": 0.7}])
def test_whole_runs_that_end_within_the_warm_up_have_their_accuracy(scale, started, capsys, monkeypatch, study) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    scale("measure.warmup_steps=60", **{"ranks": "1", "seeds": 1, "run_dir": Path("found"), **study})
    found = ExperimentDir(Path("found")).read()
    points = found.points or found.batches
    assert {(point.images_per_s, point.top1.value, point.error) for point in points} == {(None, 0.75, "")}
    note = "no speed: no run had more steps than the 60 of measure.warmup_steps (set fewer)"
    printed = capsys.readouterr().out
    assert printed.count(note) == len(points) == len(started)
    assert printed.count("no step was counted after measure.warmup_steps, top-1 75.00 %") == len(points)
    assert note in Path("found/table.md").read_text() and not Path("found/points.csv").exists()


def shown(capsys: pytest.CaptureFixture[str], tmp_path: Path, mode: str, *points: ScalePoint) -> str:
    """Return the printed tables of points in one line."""
    values = {"mode": mode, "recipe": "digits", "recipe_hash": "ab", "steps": 5, "warmup_steps": 1, "repeats": 2}
    rest = {"points": points, "epoch_images": 1500.0, "wall_s": 1.0, "command": (), "provenance": {}}
    show_experiment(ScaleResult.model_validate({**values, **rest}), ExperimentDir(tmp_path), as_json=False)
    return " ".join(capsys.readouterr().out.replace("│", " ").split())


def point(ranks: int, images_per_s: float, **more: Any) -> ScalePoint:
    values = {"ranks": ranks, "nodes": 1, "batch_size": 128, "rank_batch": 128 // ranks}
    return ScalePoint.model_validate(
        {**values, "images_per_s": mean_interval([images_per_s]), "bottleneck": "none", **more}
    )


def test_only_the_smallest_number_of_ranks_is_as_efficient_as_itself(capsys, tmp_path: Path) -> None:
    """One that was never measured in the same turn has no efficiency, rather than a perfect one."""
    four = point(4, 380, efficiency=mean_interval([0.95]), speedup=mean_interval([3.8]))
    printed = shown(capsys, tmp_path, "weak", point(1, 100), point(2, 150), four)
    assert "1 128 100 1.00x 100.0 % none 2 128 150 none 4 128 380 3.80x 95.0 % none" in printed


def test_the_time_of_an_epoch_is_printed(capsys, tmp_path: Path) -> None:
    printed = shown(capsys, tmp_path, "weak", point(1, 100, step_s=0.128, epoch_s=78.5, steps_s=0.64))
    assert "images/s per epoch" in printed and "1 128 100 1 min 18 s" in printed
    assert "per epoch" not in shown(capsys, tmp_path, "weak", point(1, 100))  # results of before it was recorded


def test_the_prediction_command_is_for_an_epoch_of_the_study(capsys, tmp_path: Path) -> None:
    points = (point(1, 100), point(4, 380))
    path = f"paceline predict-scaling --points {tmp_path}/points.csv --at 16 --ranks-per-node 4"
    assert f"{path} --images 1500 " in shown(capsys, tmp_path, "weak", *points) + " "
    assert f"{path} --rank-batch 8 --images 1500 " in shown(capsys, tmp_path, "strong", *points) + " "


def test_auto_is_powers_of_two_up_to_all() -> None:
    assert [read_ranks("auto", gpus) for gpus in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]
    assert read_ranks(" 4, 1,4", 8) == [1, 4]


SALLOC = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "4", "SLURM_NNODES": "4", "SLURM_NTASKS": "16",
          "SLURM_NPROCS": "16", "SLURM_NTASKS_PER_NODE": "4", "SLURM_TASKS_PER_NODE": "4(x4)"}  # fmt: skip
"""What `salloc --nodes 4 --ntasks-per-node 4` gives a command (https://slurm.schedmd.com/salloc.html)."""


def test_the_documented_way_into_an_allocation_is_one_that_works() -> None:
    text = (Path(__file__).parents[3] / "docs" / "how-to" / "lab.md").read_text(encoding="utf-8")
    assert "salloc --nodes 4 --ntasks-per-node 4 paceline scale folder --nodes 1,2,4 --ranks 4" in text
    assert "srun --nodes" not in text
    assert world_from_environ(SALLOC).launcher == "single"
    refuse_more_nodes([1, 2, 4], SALLOC)
    started = {**SALLOC, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4"}  # by `srun --nodes 4`: four of us
    assert world_from_environ(started).launcher == "slurm"


def test_more_nodes_than_allocated_are_refused() -> None:
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"}
    refuse_more_nodes([1, 2], environ)
    refuse_more_nodes([], {})
    with pytest.raises(PacelineError, match=r"^--nodes: 4 is more than the 2 nodes of the allocation"):
        refuse_more_nodes([1, 4], environ)


def test_a_step_knows_nothing_of_the_batch_script_that_starts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[tuple[Sequence[str], int]] = []
    monkeypatch.setattr("paceline.cli.ranks.start_process", lambda *request: commands.append(request))
    environ = dict.fromkeys(
        ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS_PER_NODE", "SLURM_JOB_ID", "MASTER_ADDR", "HOME"), "1"
    )
    srun_starter({**environ, "SLURM_CPUS_PER_TASK": "8"})(["srun", "hostname"])
    dropped = [word for name in ("NTASKS_PER_NODE", "PROCID", "STEP_NUM_TASKS") for word in ("-u", f"SLURM_{name}")]
    command = ["env", *dropped, "SLURM_OVERLAP=1", "SRUN_CPUS_PER_TASK=8", "srun", "hostname"]
    assert commands == [(command, signal.SIGTERM)]  # a step ends on its nodes only when srun is asked to end it


def test_tasks_in_any_order_give_the_result_of_the_study_alone(
    scale, started, capsys: pytest.CaptureFixture[str]
) -> None:
    study = {"repeats": 2, "ranks": "1,2"}
    scale(**study, run_dir=Path("alone"))
    alone = sorted(Path(command[command.index("--run-dir") + 1]).name for command in started)
    started.clear()
    capsys.readouterr()
    for number in (4, 1, 3, 2, 3):
        assert scale(**study, run_dir=Path("found"), task=number) == 0
    assert capsys.readouterr().out.splitlines() == [
        "2 ranks, repeat 2: 190 images/s",
        "1 rank, repeat 1: 100 images/s",
        "1 rank, repeat 2: 100 images/s",
        "2 ranks, repeat 1: 190 images/s",
        "1 rank, repeat 2: 100 images/s (from an earlier start)",
    ]
    assert sorted(Path(command[command.index("--run-dir") + 1]).name for command in started) == alone
    assert not Path("found/experiment.json").exists()
    started.clear()
    scale(**study, run_dir=Path("found"))
    assert started == []
    found, by_itself = (json.loads(Path(name, "experiment.json").read_text()) for name in ("found", "alone"))
    assert found == by_itself


def test_a_study_of_batches_has_a_task_a_run(scale, started) -> None:
    study = {"batch_sizes": "128,256", "seeds": 2, "ranks": "1", "target": 0.7}
    for number in range(1, 5):
        scale(**study, run_dir=Path("found"), task=number)
    assert [[word for word in command if word.startswith("seed=")] for command in started] == [
        *(["seed=0"], ["seed=0"], ["seed=1"], ["seed=1"])
    ]
    started.clear()
    scale(**study, run_dir=Path("found"))
    assert started == [] and Path("found/experiment.json").is_file()
    with pytest.raises(PacelineError, match=r"^--task: 5 is not one of the 4 tasks"):
        scale(**study, run_dir=Path("found"), task=5)


def test_a_failed_task_has_the_exit_code_of_its_run(scale, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(TrialError, match=r"^no room$") as raised:
        scale(run_dir=Path("found"), task=2, fails="data.batch_size=256")
    assert raised.value.exit_code == 1
    assert capsys.readouterr().out == "2 ranks, repeat 1: failed: no room\n"


def test_a_task_needs_its_own_nodes_only_and_measured_runs_need_none(
    scale, started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last job of an array may have fewer nodes than its tasks had, or be on no allocation at all."""

    def begin(environ: Mapping[str, str]) -> Callable[[Sequence[str]], Child]:
        def start(command: Sequence[str]) -> Child:
            started.append(list(command))
            return Child(command, "")

        return start

    monkeypatch.setattr(verb, "srun_starter", begin)
    study = {"repeats": 1, "ranks": "2", "nodes": "1,2", "run_dir": Path("found")}
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "1")
    scale(**study, task=1)
    with pytest.raises(PacelineError, match=r"^--nodes: 2 is more than the 1 node of the allocation"):
        scale(**study, task=2)
    with pytest.raises(PacelineError, match=r"^--nodes: 2 is more than the 1 node of the allocation"):
        scale(**study)
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    scale(**study, task=2)
    monkeypatch.delenv("SLURM_JOB_ID")
    assert scale(**study) == 0
    assert [command[1] for command in started] == ["--nodes=1", "--nodes=2"]
    assert len(json.loads(Path("found/experiment.json").read_text())["points"]) == 2
