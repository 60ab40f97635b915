"""What `paceline submit` checks, writes and hands over, with stand-ins for the programs of schedulers."""

import json
import os
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.cli.options import SubmitOptions
from paceline.cli.submit import submit
from paceline.cli.submit_jobs import JobShape, PreparedJob, SubmitRequest, refuse_local_run
from paceline.core.errors import PacelineError
from paceline.lab.ladder_file import load_ladder
from paceline.recipe.load import Patch, load

SCONTROL = """
printf 'JobId=%s JobName=x\\n   JobState=%s Reason=None Dependency=(null)\\n' "$3" "$STATE"
printf '   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=%s:0\\n' "$CODE"
"""
SBATCH = 'n=40; [ -e number ] && read -r n < number; n=$((n + 1)); echo $n > number; echo "$*" >> queued; echo $n'


@pytest.fixture
def here(tmp_path: Path, monkeypatch) -> Path:
    """Be in an empty folder, with a Slurm on the PATH and no site of anybody's."""
    folder, programs = tmp_path / "here", tmp_path / "programs"
    folder.mkdir()
    programs.mkdir()
    for name, does in {"sbatch": SBATCH, "scontrol": SCONTROL, "scancel": 'echo "$*" >> cancelled'}.items():
        (programs / name).write_text(f"#!/bin/bash\n{does}\n")
        (programs / name).chmod(0o755)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("STATE", "COMPLETED")
    monkeypatch.setenv("CODE", "0")
    monkeypatch.delenv("PACELINE_SITE", raising=False)
    monkeypatch.setattr("sys.argv", ["paceline", "submit", "a b", "$(touch canary)"])
    monkeypatch.setattr("paceline.cli.submit._FIRST_PAUSE_S", 0)
    return folder


def frozen(run: Path) -> Path:
    """Return the only recipe that is kept for the jobs of a run directory."""
    (path,) = (run / "job").glob("recipe-*.yaml")
    return path


def run_verb(*words: str, **options: Any) -> int:
    return submit(SubmitOptions(args=list(words), **options))


def complaint(*words: str, **options: Any) -> str:
    with pytest.raises(PacelineError) as refused:
        run_verb(*words, **options)
    return str(refused.value)


def script_of(here: Path, capsys, *words: str, **options: Any) -> str:
    assert run_verb(*words, dry_run=True, **options) == 0
    assert list(here.iterdir()) == []
    return capsys.readouterr().out.replace(" \\\n    ", " ")


def test_a_small_batch_per_gpu_is_a_warning_before_queueing(here: Path, capsys):
    shape = {"nodes": 4, "gpus_per_node": 4, "dry_run": True}
    assert run_verb("digits", "data.batch_size=256", **shape) == 0
    reported = (
        "warning: data.batch_size: 256 over 16 ranks is 16 images per GPU and step (set data.rank_batch_size=256 "
    )
    assert capsys.readouterr().err.startswith(reported)
    assert run_verb("digits", "data.rank_batch_size=16", **shape) == 0
    assert capsys.readouterr().err == ""


def test_a_batch_per_rank_is_queued_as_the_batch_of_all_ranks(here: Path):
    assert run_verb("digits", "data.rank_batch_size=32", nodes=2, gpus_per_node=4, run_dir=Path("run")) == 0
    assert load(str(frozen(Path("run")))).recipe == load("digits", Patch((("data.batch_size", 256),))).recipe


def test_a_dry_run_prints_the_script_and_writes_nothing(here: Path, capsys):
    printed = script_of(here, capsys, "course/wideresnet-fashion", "slurm.time=2h", nodes=2, gpus_per_node=4)
    assert printed.startswith("#!/bin/bash\n# paceline submit 'a b' '$(touch canary)'\n# recipe ")
    for option in ("--job-name=course-wideresnet-fashion", "--nodes=2", "--ntasks-per-node=4", "--time=02:00:00"):
        assert f"\n#SBATCH {option}\n" in printed
    run = f"{here}/runs/course-wideresnet-fashion-"
    assert f" -P -m paceline train {run}" in printed
    assert re.search(r"\n# recipe (\w+), as submitted, in job/recipe-\1\.yaml\n(.*\n)*.*/job/recipe-\1\.yaml ", printed)
    assert " --resume --ranks 8\n" in printed


def test_a_training_is_frozen_when_it_is_queued(here: Path, capsys):
    (here / "mine.yaml").write_text("extends: digits\noptim: {lr: 0.3}\n")
    assert run_verb("mine.yaml", "train.epochs=2", as_json=True) == 0
    (here / "mine.yaml").write_text("extends: digits\noptim: {lr: 9}\n")
    reported = json.loads(capsys.readouterr().out)
    run = Path(reported["run_dir"])
    assert (reported["job_id"], reported["job_ids"], reported["script"]) == ("41", ["41"], str(run / "job" / "job.sh"))
    assert reported["output"] == str(run / "job" / "41.out") and run.parent == here / "runs"
    recipe = load(str(frozen(run))).recipe
    assert (recipe.optim.lr, recipe.train.epochs) == (0.3, 2)
    assert f"# recipe {recipe.hash}" in (run / "job" / "job.sh").read_text()
    assert (here / "queued").read_text() == f"--parsable {run}/job/job.sh\n"
    assert frozen(run).name == f"recipe-{recipe.hash}.yaml"
    assert load(str(frozen(run))).recipe == load("digits", None).recipe.model_copy(
        update={"optim": recipe.optim, "train": recipe.train}
    )


def test_the_queued_job_is_printed_with_how_to_follow_it(here: Path, capsys):
    run_verb("digits", run_dir=Path("a b"))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "job 41 is queued: digits on 1 node, 1 rank"
    assert f"follow         tail -F '{here}/a b/job/41.out'" in lines


def test_a_job_is_followed_to_its_end_and_its_code_is_ours(here: Path, capsys, monkeypatch):
    (here / "run" / "job").mkdir(parents=True)
    (here / "run" / "job" / "41.out").write_text("epoch 1\nend")
    assert run_verb("digits", wait=True, run_dir=Path("run")) == 0
    assert capsys.readouterr().out.splitlines()[-3:] == ["job 41: completed", "epoch 1", "end"]
    monkeypatch.setenv("STATE", "FAILED")
    monkeypatch.setenv("CODE", "3")
    assert run_verb("digits", wait=True, as_json=True) == 3
    reported = json.loads(capsys.readouterr().out)
    assert (reported["job_id"], reported["state"], reported["exit_code"]) == ("42", "FAILED", 3)


def test_the_job_continues_after_following_stops(here: Path, capsys, monkeypatch):
    def interrupt(pause_s: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setenv("STATE", "RUNNING")
    monkeypatch.setattr("paceline.cli.submit.time", SimpleNamespace(sleep=interrupt))
    with pytest.raises(KeyboardInterrupt):
        run_verb("digits", wait=True)
    assert "stopped following: job 41 keeps running (scancel 41 ends it)" in capsys.readouterr().err
    assert not (here / "cancelled").exists()


def test_a_job_that_slurm_rejects_leaves_no_files(here: Path, tmp_path: Path):
    (tmp_path / "programs" / "sbatch").write_text("#!/bin/bash\necho 'sbatch: error: no such partition' >&2; exit 1\n")
    assert complaint("digits") == "sbatch: no such partition"
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "options", "message"),
    [
        (["digits"], {"ranks_per_node": 7}, "data.batch_size: "),
        (["digits", "optim.lrr=1"], {}, "optim.lrr: no such field"),
        (["nothing"], {}, "'nothing': is neither a preset"),
        (["digits", "slurm.tme=2h"], {}, "slurm.tme: no such field (did you mean 'slurm.time'?)"),
        (["digits", "kubernetes.image=a"], {}, "kubernetes.image: has no effect with --engine slurm"),
        (["digits"], {"engine": "pbs"}, "--engine: 'pbs' is not a scheduler"),
        (["digits"], {"wait": True, "dry_run": True}, "--wait: there is nothing to wait for"),
        (["digits"], {"engine": "kubernetes", "wait": True}, "--wait: follows Slurm jobs"),
        (["digits"], {"engine": "kubernetes", "array": True}, "--array: is for Slurm"),
        (["digits"], {"ranks_per_node": 2, "gpus_per_node": 1}, "--ranks-per-node: 2 on 1 GPU per node (write 1"),
        (["digits", "parallel.strategy=dataparallel"], {"nodes": 2}, "parallel.strategy: dataparallel is one process"),
        (["tune", "digits"], {"nodes": 2}, "--nodes: 2, but tune measures on one node"),
        (["digits"], {"array": True}, "--array: train has no independent tasks"),
        (["ladder", "cpu", "recipe=nothing"], {}, "'nothing': is neither a preset"),
        (["ladder", "cpu", "--ranks", "two"], {}, "--ranks: 'two' is not a number of processes"),
        (["ladder", "cpu", "train.epochs=3"], {}, "train.epochs: 3 has no effect on a ladder"),
        (["eval"], {}, "eval: needs a run directory"),
        (["eval", "nowhere"], {}, "nowhere: is not a run directory"),
        (["ladder", "nowhere"], {}, "'nowhere': is not a ladder"),
        (["scale", "digits", "train.epochs"], {}, "'train.epochs': is not an override"),
    ],
)
def test_a_job_that_would_fail_is_refused_before_queueing(here: Path, words: list[str], options: dict, message: str):
    assert complaint(*words, **options).startswith(message)
    assert list(here.iterdir()) == []


def test_a_job_is_for_slurm_unless_told_otherwise(here: Path, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert complaint("digits") == "sbatch: is not on the PATH (submit where Slurm is)"
    assert list(here.iterdir()) == []


def test_a_site_comes_from_the_option_the_variable_or_the_users_own_file(here: Path, tmp_path, capsys, monkeypatch):
    own = tmp_path / "config" / "paceline" / "site.yaml"
    own.parent.mkdir(parents=True)
    own.write_text("slurm: {account: own}")
    assert "--account=own" in script_of(here, capsys, "digits")
    monkeypatch.setenv("PACELINE_SITE", "perlmutter")
    assert "--constraint=gpu" in script_of(here, capsys, "digits")
    assert "--partition=booster" in script_of(here, capsys, "digits", site="juwels-booster")


def test_the_sites_staging_folder_is_the_default_of_the_recipe(here: Path):
    run_verb("digits", "slurm.stage=/dev/shm", run_dir=Path("a"))
    run_verb("digits", "slurm.stage=/dev/shm", "data.stage=off", run_dir=Path("b"))
    (here / "mine.yaml").write_text("extends: digits\ndata: {stage: off}\n")
    run_verb("mine.yaml", "slurm.stage=/dev/shm", run_dir=Path("c"))
    stages = [load(str(frozen(Path(name)))).recipe.data.stage for name in "abc"]
    assert stages == ["/dev/shm", "off", "off"]


def test_a_run_resumes_in_its_folder_and_another_is_refused(here: Path):
    (here / "run").mkdir()
    recipe = load("digits").recipe
    (here / "run" / "plan.json").touch()
    (here / "run" / "recipe.yaml").write_text("extends: digits\noptim: {lr: 0.3}\n")
    run_verb(run_dir=Path("run"))
    assert load(str(frozen(Path("run")))).recipe.optim.lr == 0.3 != recipe.optim.lr
    assert complaint("digits", "optim.lr=0.7", run_dir=Path("run")).startswith("--resume: ")
    assert load(str(frozen(Path("run")))).recipe.optim.lr == 0.3


def test_a_job_that_has_not_begun_keeps_the_recipe_that_it_was_queued_with(here: Path):
    run_verb("digits", "optim.lr=0.1", run_dir=Path("run"))
    queued = frozen(Path("run"))
    printed = complaint("digits", "optim.lr=0.2", run_dir=Path("run"))
    assert printed.startswith(
        f"--run-dir: {here}/{queued} is queued with optim.lr=0.1 (now 0.2) (name another, or remove"
    )
    assert frozen(Path("run")) == queued and load(str(queued)).recipe.optim.lr == 0.1
    text = queued.read_bytes()
    run_verb("digits", "optim.lr=0.1", "data.workers=1", run_dir=Path("run"))
    assert queued.read_bytes() == text  # which is free to change, and has a file of its own
    assert len(list((here / "run" / "job").glob("recipe-*.yaml"))) == 2


def test_a_recipe_that_nothing_was_queued_with_is_not_kept(here: Path, tmp_path: Path):
    sbatch = tmp_path / "programs" / "sbatch"
    works = sbatch.read_text()
    sbatch.write_text("#!/bin/bash\necho 'sbatch: error: no' >&2; exit 1\n")
    assert complaint("digits", "optim.lr=0.1", run_dir=Path("run")) == "sbatch: no"
    sbatch.write_text(works)
    run_verb("digits", "optim.lr=0.2", run_dir=Path("run"))
    assert load(str(frozen(Path("run")))).recipe.optim.lr == 0.2


LADDER = "# Mine.\nrecipe: mine.yaml\nrepeats: 2\nrungs: [{name: a, set: {data.workers: 0}}]\n"


@pytest.mark.parametrize("array", [False, True])
def test_a_ladder_file_and_its_recipe_are_kept(here: Path, array: bool):
    """What is edited while the job waits changes nothing; the ladder goes by its name."""
    (here / "mine.yaml").write_text("extends: digits\noptim: {lr: 0.3}\n")
    (here / "own.yaml").write_text(LADDER)
    before = load_ladder("own.yaml")
    run_verb("ladder", "own.yaml", "seed=1", "--steps", "3", run_dir=Path("run"), array=array)
    (here / "mine.yaml").write_text("extends: digits\noptim: {lr: 9}\n")
    (here / "own.yaml").write_text(LADDER.replace("data.workers: 0", "data.workers: 2"))
    (ladder,) = (here / "run" / "job").glob("ladder-*/own.yaml")
    recipe = here / frozen(Path("run"))
    for name in ["job", *(["tasks-1n"] if array else [])]:
        text = (here / "run" / "job" / f"{name}.sh").read_text().replace(" \\\n    ", " ")
        assert f" -P -m paceline ladder {ladder} {recipe} seed=1 --steps 3 --ranks 1 --run-dir {here}/run" in text
        assert f"\n# ladder own, as submitted, in {ladder.relative_to(here / 'run')}\n" in text
    assert (load(str(recipe)).recipe.optim.lr, load(str(recipe)).recipe.seed) == (0.3, 1)
    assert load_ladder(str(ladder)) == before.model_copy(update={"recipe": str(here / "mine.yaml")})


@pytest.mark.parametrize(
    ("words", "started"),
    [
        (["own.yaml", "--recipe", "digits"], r"\S+/own\.yaml digits --ranks 1"),
        (["cpu", "--recipe=mine.yaml", "--steps", "2"], r"cpu \S+/recipe-\w+\.yaml --steps 2 --ranks 1"),
        (["--recipe", "mine.yaml", "--ranks", "2"], r"auto \S+/recipe-\w+\.yaml --ranks 2"),
        (["cpu", "digits"], r"cpu digits --ranks 1"),
    ],
)
def test_frozen_ladders_and_recipes_keep_their_names(here: Path, words: list[str], started: str):
    (here / "mine.yaml").write_text("extends: digits\n")
    (here / "own.yaml").write_text(LADDER)
    run_verb("ladder", *words, run_dir=Path("run"))
    text = (here / "run" / "job" / "job.sh").read_text().replace(" \\\n    ", " ")
    assert re.search(rf" -P -m paceline ladder {started} --run-dir ", text)


def test_a_ladder_that_nothing_was_queued_with_is_not_kept(here: Path, tmp_path: Path):
    (here / "own.yaml").write_text(LADDER.replace("mine.yaml", "digits"))
    (tmp_path / "programs" / "sbatch").write_text("#!/bin/bash\necho 'sbatch: error: no' >&2; exit 1\n")
    assert complaint("ladder", "own.yaml", run_dir=Path("run")) == "sbatch: no"
    assert [path.name for path in (here / "run" / "job").iterdir()] == ["job.sh"]


@pytest.mark.parametrize("verb", ["tune", "scale", "profile"])
def test_a_recipe_file_that_is_measured_is_kept_too(here: Path, verb: str):
    (here / "mine.yaml").write_text("extends: digits\noptim: {lr: 0.3}\n")
    run_verb(verb, "mine.yaml", "train.eval_every=1ep", run_dir=Path("run"))
    (here / "mine.yaml").write_text("extends: digits\noptim: {lr: 9}\n")
    kept = here / frozen(Path("run"))
    text = (here / "run" / "job" / "job.sh").read_text().replace(" \\\n    ", " ")
    assert f" -P -m paceline {verb} {kept} train.eval_every=1ep --ranks " in text
    assert load(str(kept)).recipe.optim.lr == 0.3


def test_an_array_runs_the_recipe_that_was_kept(here: Path, capsys):
    (here / "mine.yaml").write_text("extends: digits\n")
    run_verb("scale", "mine.yaml", "--ranks", "1", "--repeats", "1", array=True, run_dir=Path("run"))
    kept = here / frozen(Path("run"))
    for name in ("job", "tasks-1n"):
        text = (here / "run" / "job" / f"{name}.sh").read_text().replace(" \\\n    ", " ")
        assert f"paceline scale {kept} --ranks 1 --repeats 1 --run-dir {here}/run" in text
    assert "squeue --job 41,42   (scancel 41 42 ends them)" in capsys.readouterr().out


def test_a_study_has_as_many_nodes_as_it_goes_to(here: Path, capsys):
    words = ("scale", "digits", "--nodes", "1,2,4")
    printed = script_of(here, capsys, *words)
    assert "#SBATCH --nodes=4\n" in printed and "--nodes 1,2,4" in printed
    assert complaint(*words, nodes=2) == ("--nodes: 2, but the study goes to 4 (write --nodes 4 before `--`)")
    assert "#SBATCH --nodes=8\n" in script_of(here, capsys, *words, nodes=8)


def test_warnings_of_sbatch_are_printed(here: Path, tmp_path: Path, capsys):
    (tmp_path / "programs" / "sbatch").write_text("#!/bin/bash\necho 'sbatch: low on credits' >&2; echo 41\n")
    run_verb("digits", as_json=True)
    reported = capsys.readouterr()
    assert reported.err == "sbatch: low on credits\n" and json.loads(reported.out)["job_id"] == "41"


def test_the_sites_output_pattern_is_printed_as_the_file(here: Path, tmp_path: Path, capsys):
    shows = (
        "printf '   JobState=PENDING Reason=None\\n   Requeue=1 Restarts=0 ExitCode=0:0\\n   StdOut=/logs/41.out\\n'"
    )
    (tmp_path / "programs" / "scontrol").write_text(f"#!/bin/bash\n{shows}\n")
    run_verb("digits", "slurm.output=/logs/%j.out")
    assert "output         /logs/41.out\n" in capsys.readouterr().out
    (tmp_path / "programs" / "scontrol").write_text("#!/bin/bash\nexit 1\n")
    run_verb("digits", "slurm.output=/logs/%j.out")
    assert "output         /logs/%j.out\n" in capsys.readouterr().out


def test_an_error_names_the_site_variable(here: Path, monkeypatch):
    monkeypatch.setenv("PACELINE_SITE", "nowhere")
    assert complaint("digits").startswith("PACELINE_SITE: 'nowhere' is not a site")
    assert complaint("digits", site="here").startswith("--site: 'here' is not a site")


@pytest.mark.parametrize(
    ("words", "options", "expected"),
    [
        (
            ["tune", "digits", "optim.lr=1", "--budget", "3"],
            {},
            "tune digits optim.lr=1 --budget 3 --ranks 1 --run-dir",
        ),
        (["profile", "digits"], {"ranks_per_node": 2}, "profile digits --ranks 2 --run-dir"),
        (["lr-find", "digits", "--to", "1"], {"ranks_per_node": 2}, "lr-find digits --to 1 --ranks 2 --run-dir"),
        (["ladder", "cpu", "--ranks", "3"], {}, "ladder cpu --ranks 3 --run-dir"),
        (["scale", "digits"], {"nodes": 3, "gpus_per_node": 4}, "scale digits --ranks 1,2,4 --nodes 1,2,3 --run-dir"),
        (
            ["batch-study", "digits", "--batch-sizes", "32"],
            {"nodes": 2, "ranks_per_node": 2},
            "batch-study digits --batch-sizes 32 --ranks 2 --nodes 2 --run-dir",
        ),
    ],
)
def test_measuring_verbs_start_their_ranks_in_the_job(here, capsys, words, options: dict, expected: str):
    printed = script_of(here, capsys, *words, **options)
    assert f" -P -m paceline {expected} {here}/runs/" in printed
    assert "srun" not in printed.partition("\n\n")[2].replace("# ", "")


def test_a_profile_is_not_started_again(here: Path, capsys):
    assert "--no-requeue" in script_of(here, capsys, "profile", "digits")


def test_an_evaluation_keeps_the_script_of_its_training(here: Path):
    run_verb("digits", run_dir=Path("run"))
    (here / "run" / "plan.json").touch()
    (here / "run" / "recipe.yaml").write_text("extends: digits\n")
    before = (here / "run" / "job" / "job.sh").read_text()
    run_verb("eval", "run", "data.workers=0", ranks_per_node=2, nodes=2)
    assert (here / "run" / "job" / "job.sh").read_text() == before
    text = (here / "run" / "job" / "eval.sh").read_text().replace(" \\\n    ", " ")
    assert f" -P -m paceline eval {here}/run data.workers=0 --ranks 4\n" in text


def test_an_array_has_a_script_for_each_number_of_nodes_and_a_last_one_that_judges(here: Path, capsys):
    words = ("scale", "digits", "--repeats", "2", "--ranks", "1", "--nodes", "1,2")
    run_verb(*words, array=True, nodes=2, run_dir=Path("s"), as_json=True)
    reported = json.loads(capsys.readouterr().out)
    assert [(each["job_id"], each["nodes"], each.get("tasks")) for each in reported["jobs"]] == [
        ("41", 1, [1, 3]),
        ("42", 2, [2, 4]),
        ("43", 2, None),
    ]
    job = here / "s" / "job"
    assert (here / "queued").read_text().splitlines() == [
        f"--parsable {job}/tasks-1n.sh",
        f"--parsable {job}/tasks-2n.sh",
        f"--parsable --dependency=afterany:41:42 {job}/job.sh",
    ]
    for name, array in (("tasks-1n", "1,3"), ("tasks-2n", "2,4")):
        text = (job / f"{name}.sh").read_text()
        assert f"#SBATCH --array={array}\n" in text and '--task "$SLURM_ARRAY_TASK_ID"' in text
    assert "--task" not in (job / "job.sh").read_text()


def test_all_jobs_of_an_array_have_the_cores_of_the_largest(here: Path):
    """The last one makes what is missing, and counts nothing that ran on another number of cores."""
    run_verb("scale", "digits", "--repeats", "1", "--ranks", "1,2", array=True, run_dir=Path("s"))
    scripts = sorted((here / "s" / "job").glob("*.sh"))
    assert [path.name for path in scripts] == ["job.sh", "tasks-1n.sh"]
    assert all("#SBATCH --ntasks-per-node=2\n" in path.read_text() for path in scripts)


def test_tasks_without_a_concluding_job_are_cancelled(here: Path, tmp_path: Path):
    program = tmp_path / "programs" / "sbatch"
    program.write_text("#!/bin/bash\ncase $* in *afterany*) echo 'sbatch: error: no' >&2; exit 1;; esac; echo 41\n")
    assert complaint("ladder", "cpu", array=True) == "sbatch: no"
    assert (here / "cancelled").read_text() == "41\n"


def test_the_typed_command_is_only_a_comment_in_a_script(here: Path, capsys):
    words = ("folder", "data.source.root=$(touch canary) `touch canary`; 'a'")
    evil = "a $(touch canary) 'b'"
    (here / evil).mkdir()
    os.chdir(here / evil)
    assert run_verb(*words, dry_run=True, run_dir=Path("r $(touch canary)")) == 0
    printed = capsys.readouterr().out
    (here / "job.sh").write_text(printed)
    ended = subprocess.run(["/bin/bash", "job.sh"], cwd=here, capture_output=True, text=True, timeout=10)
    assert ended.returncode == 127  # there is no srun
    assert sorted(path.name for path in here.rglob("*")) == sorted([evil, "job.sh"])


def test_kubectl_creates_the_manifests_if_installed(here: Path, tmp_path: Path, capsys):
    words = ("digits", "kubernetes.image=registry/p:1", "kubernetes.claim=work")
    assert run_verb(*words, engine="kubernetes", run_dir=Path("run"), as_json=True) == 0
    reported = json.loads(capsys.readouterr().out)
    assert reported["is_created"] is False and reported["next"][0].startswith("kubectl create")
    assert "kind: TrainJob" in (here / "run" / "job" / "job.yaml").read_text()
    kubectl = tmp_path / "programs" / "kubectl"
    kubectl.write_text('#!/bin/bash\necho "$*" >> told; [ $1 = get ] || echo trainjob created\n')
    kubectl.chmod(0o755)
    assert run_verb(*words, engine="kubernetes", run_dir=Path("run")) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"trainjob created\nrun directory  {reported['run_dir_in_pods']}, as pods see it\n")
    there = f"-f {here}/run/job/job.yaml\n"
    assert (here / "told").read_text() == f"get --ignore-not-found --output=name {there}create {there}"
    kubectl.write_text("#!/bin/bash\n[ $1 = get ] || exit 1; echo trainjob/a; echo configmap/a\n")
    printed = complaint(*words, engine="kubernetes", run_dir=Path("run"))
    assert printed.startswith("kubectl: trainjob/a, configmap/a exists already (delete it first: kubectl delete -f ")
    kubectl.write_text("#!/bin/bash\necho 'error: no cluster' >&2; exit 1\n")
    assert complaint(*words, engine="kubernetes", run_dir=Path("run")).startswith("kubectl: error: no cluster")


def test_kubernetes_is_given_nothing_that_only_this_machine_has(here: Path, capsys):
    words = ("kubernetes.image=registry/p:1", "kubernetes.claim=work")
    (here / "mine.yaml").write_text("extends: digits\noptim: {lr: 0.3}\n")
    (here / "mine-ladder.yaml").write_text("recipe: digits\nrungs: [{name: a, set: {data.workers: 0}}]\n")
    kubernetes: dict[str, Any] = {"engine": "kubernetes", "dry_run": True}
    assert run_verb("tune", "mine.yaml", *words, **kubernetes) == 0
    printed = capsys.readouterr().out
    assert (
        "kind: ConfigMap" in printed
        and "lr: 0.3" in printed
        and "mine.yaml\n" not in printed.replace("tune-mine.yaml", "")
    )
    assert run_verb("ladder", "mine-ladder.yaml", "recipe=mine.yaml", *words, **kubernetes) == 0
    printed = capsys.readouterr().out
    assert re.findall(r"^  ([\w-]+\.yaml): \|", printed, re.MULTILINE) == [
        "mine-ladder.yaml",
        "ladder-mine-ladder.yaml",
    ]
    places = ["/etc/paceline/mine-ladder.yaml", "/etc/paceline/ladder-mine-ladder.yaml"]
    assert re.findall(r'- "(/etc/\S+\.yaml)"$', printed, re.MULTILINE) == places and "lr: 0.3" in printed
    (here / "run").mkdir()
    (here / "run" / "plan.json").touch()
    (here / "run" / "recipe.yaml").write_text("extends: digits\n")
    on_the_claim = PreparedJob(
        SubmitRequest("eval"), JobShape(1, 1, 0), "eval-a", load().recipe, run=Path("/claim/runs/a")
    )
    refuse_local_run(on_the_claim, "/claim")
    assert complaint("eval", "run", *words, **kubernetes).startswith(
        f"{here}/run: is not on the claim, which pods mount"
    )
