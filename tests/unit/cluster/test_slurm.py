"""A job as a script for Slurm: readable, and with every value as it was given. Its programs are stand-ins here."""

import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cluster.job import ClusterJob
from paceline.cluster.site import SlurmSite
from paceline.cluster.slurm import build_script, output_pattern, signal_lead_s
from paceline.core.errors import RecipeError

JOB = ClusterJob(
    name="wideresnet-fashion",
    args=("train", "/runs/a/job/recipe-0123456789ab.yaml", "--run-dir", "/runs/a", "--resume"),
    run_dir=Path("/runs/a"),
    folder=Path("/home/me"),
    nodes=2,
    ranks_per_node=4,
    gpus_per_node=4,
    comments=("paceline submit course/wideresnet-fashion", "recipe 0123456789ab"),
)
ALONE = replace(JOB, args=("ladder", "cpu", "--run-dir", "/runs/a"), nodes=1, starts_ranks=False)
EVIL = (
    "a b",
    "$(touch canary)",
    "`touch canary`",
    "; touch canary;",
    "& touch canary &",
    "| touch canary #",
    "> canary",
    "'; touch canary; '",
    '"; touch canary; "',
    "\\'; touch canary; \\'",
    "${IFS}canary",
    "two\nlines",
    "\n#SBATCH --nodes=99\n",
    "#SBATCH --nodes=99",
    "a\rreturn",
    "-rf",
    "--wrap=touch canary",
    "",
    "*",
    "~",
    "!!",
    "naïve ☃ \u202egnirts",
    "$'touch canary'",
    "back\\slash\\",
    "tab\there",
    "EOF",
    "caf\udce9",
)


@dataclass(frozen=True)
class Ended:
    """How a script has ended, the arguments of the program, and those of scontrol."""

    code: int
    words: list[str]
    requeued: str


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Ended]:
    """Return a function that runs a script with a stand-in for srun, or for Python, that ends with a code."""
    for name, does in {"srun": "", "python": "", "scontrol": 'echo "$*" >> "$REQUEUED"'}.items():
        recorded = 'printf "%s\\0" "$@" > "$WORDS"; eval "$DOES"; exit "$CODE"'
        (tmp_path / name).write_text(f"#!/bin/bash\n{does or recorded}\n")
        (tmp_path / name).chmod(0o755)

    def work(text: str, code: int = 0, does: str = ":", **slurm: str) -> Ended:
        folder = tmp_path / "work"
        folder.mkdir(exist_ok=True)
        path = tmp_path / "job.sh"
        path.write_bytes(text.encode("utf-8"))
        words, requeued = tmp_path / "words", tmp_path / "requeued"
        requeued.write_text("")
        environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3", **slurm}
        environ |= {"WORDS": str(words), "REQUEUED": str(requeued), "CODE": str(code), "DOES": does}
        subprocess.run(["bash", "-n", str(path)], check=True, timeout=10)
        ended = subprocess.run(["bash", str(path)], cwd=folder, env=environ, timeout=10, capture_output=True)
        assert list(folder.iterdir()) == []
        return Ended(
            ended.returncode, [os.fsdecode(word) for word in words.read_bytes().split(b"\0")[:-1]], requeued.read_text()
        )

    return work


def directives(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]


def test_a_script_has_directives_environment_program_and_exit_code():
    site = SlurmSite.model_validate(
        {
            "account": "me",
            "time": "2h",
            "cpus_per_rank": 12,
            "modules": ["GCC", "CUDA/12"],
            "venv": "/venv",
            "environ": {"NCCL_SOCKET_IFNAME": "ib0"},
        }
    )
    assert build_script(JOB, site) == (
        "#!/bin/bash\n"
        "# paceline submit course/wideresnet-fashion\n"
        "# recipe 0123456789ab\n"
        "\n"
        "#SBATCH --job-name=wideresnet-fashion\n"
        "#SBATCH --account=me\n"
        "#SBATCH --nodes=2\n"
        "#SBATCH --ntasks-per-node=4\n"
        "#SBATCH --cpus-per-task=12\n"
        "#SBATCH --gpus-per-node=4\n"
        "#SBATCH --time=02:00:00\n"
        "#SBATCH --chdir=/home/me\n"
        "#SBATCH --output=/runs/a/job/%j.out\n"
        "#SBATCH --open-mode=append\n"
        "#SBATCH --signal=USR1@60\n"
        "#SBATCH --requeue\n"
        "\n"
        "module load GCC CUDA/12\n"
        "source /venv/bin/activate\n"
        "export NCCL_SOCKET_IFNAME=ib0\n"
        "\n"
        "# When the job ends, so that the run stops in time. Slurm sets this for tasks itself since 23.02.\n"
        'ends=$(squeue --noheader --format=%e --job "$SLURM_JOB_ID")\n'
        'export PACELINE_END_TIME="${SLURM_JOB_END_TIME:-$(date +%s --date="$ends" 2> /dev/null)}"\n'
        "\n"
        "# Each task is a rank, and reads its rank from Slurm's variables. If one fails, srun ends the others.\n"
        "srun --kill-on-bad-exit=1 --cpus-per-task=12 /venv/bin/python -P -m paceline train \\\n"
        "    /runs/a/job/recipe-0123456789ab.yaml --run-dir /runs/a --resume --ranks 8\n"
        "code=$?\n"
        "\n"
        "# 75: stopped early, with a checkpoint; 138: signaled too early to save. Slurm counts both as failures.\n"
        'if { [ "$code" -eq 75 ] || [ "$code" -eq 138 ]; } && [ "${SLURM_RESTART_COUNT:-0}" -lt 100 ]; then\n'
        '    scontrol requeue "$SLURM_JOB_ID"\n'
        "fi\n"
        'exit "$code"\n'
    )


def test_an_empty_site_sets_no_optional_directive():
    requeued = directives(build_script(replace(JOB, gpus_per_node=0), SlurmSite(), "python"))
    assert [line.partition("=")[0] for line in requeued] == [
        "--job-name", "--nodes", "--ntasks-per-node", "--chdir", "--output", "--open-mode", "--signal", "--requeue",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, "--gpus-per-node=4"),
        ({"gpu_type": "a100"}, "--gpus-per-node=a100:4"),
        ({"gpu_option": "gres"}, "--gres=gpu:4"),
        ({"gpu_option": "gres", "gpu_type": "a100"}, "--gres=gpu:a100:4"),
        ({"exclusive": "on"}, "--exclusive"),
        ({"requeue": "off"}, "--no-requeue"),
        ({"memory": 0}, "--mem=0"),
        ({"options": ["--mail-type=END", "--contiguous"]}, "--contiguous"),
        ({"time": "100h"}, "--time=100:00:00"),
        ({"lead": "90s"}, "--signal=USR1@90"),
        ({"output": "/logs/%x.out"}, "--output=/logs/%x.out"),
    ],
)
def test_a_site_field_is_a_directive(values: dict, expected: str):
    assert expected in directives(build_script(JOB, SlurmSite.model_validate(values)))


@pytest.mark.parametrize("code", [0, 2, 137])
def test_a_job_ends_as_its_program_does(run, code: int):
    ended = run(build_script(JOB, SlurmSite()), code)
    assert (ended.code, ended.requeued) == (code, "")


def test_a_preempted_job_is_requeued(run):
    ended = run(build_script(JOB, SlurmSite()), 75)
    assert (ended.code, ended.requeued) == (75, "requeue 7\n")


def test_requeues_are_limited(run):
    text = build_script(JOB, SlurmSite.model_validate({"restarts": 2}))
    assert run(text, 75, SLURM_RESTART_COUNT="1").requeued == "requeue 7\n"
    ended = run(text, 75, SLURM_RESTART_COUNT="2")
    assert (ended.code, ended.requeued) == (75, "")


@pytest.mark.parametrize("job", [JOB, ALONE], ids=["ranks", "alone"])
def test_a_site_can_disable_requeueing(run, tmp_path: Path, job: ClusterJob):
    text = build_script(job, SlurmSite.model_validate({"requeue": "off"}), str(tmp_path / "python"))
    assert run(text, 75).requeued == ""


def test_the_batch_shell_forwards_the_signal_to_a_single_process(run, tmp_path: Path):
    text = build_script(ALONE, SlurmSite(), str(tmp_path / "python"))
    assert "--signal=B:USR1@60" in directives(text) and "srun" not in text
    ended = run(text, does='trap "exit 130" TERM; kill -USR1 "$PPID"; while kill -0 "$PPID"; do :; done')
    assert (ended.code, ended.requeued) == (130, "requeue 7\n")
    assert ended.words == ["-P", "-m", "paceline", *ALONE.args]


def test_a_program_that_completes_after_the_signal_is_not_requeued(run, tmp_path: Path):
    text = build_script(ALONE, SlurmSite(), str(tmp_path / "python"))
    ended = run(text, does='trap "exit 0" TERM; kill -USR1 "$PPID"; while kill -0 "$PPID"; do :; done')
    assert (ended.code, ended.requeued) == (0, "")
    assert run(text, 3).requeued == ""


def test_an_array_task_gets_its_number(run, tmp_path: Path):
    text = build_script(replace(ALONE, tasks=(7, 1, 2, 3)), SlurmSite(), str(tmp_path / "python"))
    assert {"--array=1-3,7", "--output=/runs/a/job/%A_%a.out"} <= set(directives(text))
    assert run(text).words[-2:] == ["--task", "3"]


def test_a_preempted_array_task_is_requeued_alone(run, tmp_path: Path):
    """One task's job number is the array's, by which all of them would be started again."""
    text = build_script(replace(ALONE, tasks=(1, 2, 3)), SlurmSite(), str(tmp_path / "python"))
    does = 'trap "exit 130" TERM; kill -USR1 "$PPID"; while kill -0 "$PPID"; do :; done'
    assert run(text, does=does, SLURM_ARRAY_JOB_ID="7").requeued == "requeue 7_3\n"


def test_a_program_that_dies_of_the_signal_itself_is_not_waited_for(run, tmp_path: Path):
    ended = run(build_script(ALONE, SlurmSite(), str(tmp_path / "python")), does="kill -USR1 $$; while :; do :; done")
    assert (ended.code, ended.requeued) == (138, "")


def test_arguments_reach_the_program_unchanged(run, tmp_path: Path):
    values = {"srun": ["--comment=a $(touch canary) 'b'"], "environ": {"EVIL": "$(touch canary) \\ 'b'"}}
    job = replace(JOB, args=("train", *EVIL), comments=EVIL)
    text = build_script(job, SlurmSite.model_validate(values), str(tmp_path / "python"))
    words = run(text).words
    assert words[1] == "--comment=a $(touch canary) 'b'"
    assert words[words.index("train") + 1 :] == [*EVIL, "--ranks", "8"]
    assert len(directives(text)) == len(directives(build_script(JOB, SlurmSite(), "python")))


@pytest.mark.parametrize("name", EVIL)
def test_a_name_is_one_directive_and_does_nothing(run, name: str):
    text = build_script(replace(JOB, name=name), SlurmSite(), "python")
    plain = directives(build_script(JOB, SlurmSite(), "python"))
    assert [line.partition("=")[0] for line in directives(text)] == [line.partition("=")[0] for line in plain]
    assert run(text).code == 0


@settings(max_examples=20)
@given(words=st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",))), max_size=20))
def test_any_arguments_reach_the_program(tmp_path_factory, words: list[str]):
    folder = tmp_path_factory.mktemp("any")
    (folder / "python").write_text('#!/bin/bash\nprintf "%s\\0" "$@"\n')
    (folder / "python").chmod(0o755)
    job = replace(ALONE, args=("ladder", *words))
    (folder / "job.sh").write_text(build_script(job, SlurmSite(), str(folder / "python")), encoding="utf-8")
    ended = subprocess.run(["bash", "job.sh"], cwd=folder, capture_output=True, timeout=10, check=True)
    assert ended.stdout.decode().split("\0")[3:-1] == ["ladder", *words]


@pytest.mark.parametrize("path", ["/a\nb", "/a\x1bb"])
def test_a_path_that_a_directive_cannot_hold_is_refused(path: str):
    with pytest.raises(RecipeError, match=r"^--chdir: '/a.+ has a character"):
        build_script(replace(JOB, folder=Path(path)), SlurmSite())
    with pytest.raises(RecipeError, match=r"^--output: '/a.+ has a character"):
        build_script(replace(JOB, run_dir=Path(path)), SlurmSite())


def test_a_run_directory_is_no_pattern_of_slurms():
    assert output_pattern(replace(JOB, run_dir=Path("/100%j")), SlurmSite()) == "/100%%j/job/%j.out"
    with pytest.raises(RecipeError, match="has a backslash"):
        output_pattern(replace(JOB, run_dir=Path("/a\\b")), SlurmSite())


@pytest.mark.parametrize(
    ("grace_s", "values", "expected_s"),
    [(60, {}, 60), (300, {}, 300), (60, {"time": "1min"}, 30), (60, {"time": "2h"}, 60), (60, {"lead": "10s"}, 10)],
)
def test_the_signal_precedes_the_time_limit_by_the_grace_period(grace_s: float, values: dict, expected_s: int):
    assert signal_lead_s(replace(JOB, grace_s=grace_s), SlurmSite.model_validate(values)) == expected_s


def test_a_container_is_started_by_its_own_program():
    apptainer = {"runtime": "apptainer", "image": "/images/p c.sif", "mounts": ["/data:/data:ro"]}
    text = build_script(JOB, SlurmSite.model_validate({"container": apptainer}))
    started = "apptainer exec --nv --bind=/home/me:/home/me --bind=/runs/a:/runs/a --bind=/data:/data:ro --pwd=/home/me"
    assert f"{started} '/images/p c.sif' python -P -m paceline" in text.replace(" \\\n    ", " ")
    pyxis = SlurmSite.model_validate({"container": {"runtime": "pyxis", "image": "org#p:1"}})
    options = "'--container-image=org#p:1' --container-workdir=/home/me"
    mounts = "--container-mounts=/home/me:/home/me,/runs/a:/runs/a"
    assert f"{options} {mounts} python -P" in build_script(JOB, pyxis).replace(" \\\n    ", " ")
    shifter = SlurmSite.model_validate({"container": {"runtime": "shifter", "image": "org/p:1", "mounts": ["/a:/b"]}})
    assert {"--image=org/p:1", "--volume=/a:/b"} <= set(directives(build_script(JOB, shifter)))
    assert "shifter python -P" in build_script(JOB, shifter).replace(" \\\n    ", " ")


def test_a_recipe_called_auto_gives_its_name_to_the_job():
    assert "--job-name=auto" in directives(build_script(replace(JOB, name="auto"), SlurmSite()))


def test_a_container_that_cannot_hold_the_job_is_refused():
    apptainer = SlurmSite.model_validate({"container": {"runtime": "apptainer", "image": "p.sif"}})
    for job in (replace(ALONE, nodes=2), replace(ALONE, args=("scale", "--nodes=1,2"))):
        with pytest.raises(
            RecipeError, match=r"apptainer has no srun in it, which .* needs to start ranks on several nodes"
        ):
            build_script(job, apptainer)
    assert "apptainer exec" in build_script(ALONE, apptainer)
    pyxis = SlurmSite.model_validate({"container": {"runtime": "pyxis", "image": "p"}})
    with pytest.raises(RecipeError, match="pyxis needs srun, but ladder is started without"):
        build_script(ALONE, pyxis)
    with pytest.raises(RecipeError, match="'/a,b' has a colon or comma"):
        build_script(replace(JOB, run_dir=Path("/a,b")), pyxis)
