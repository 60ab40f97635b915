"""Experiments in a real Slurm: as steps of one allocation, and as a job array with a final evaluation job."""

import json
import sys
from pathlib import Path

import pytest

SHORT = ("measure.warmup_steps=1", "data.workers=0")


@pytest.fixture
def train_args(recipe: tuple[str, ...]) -> tuple[str, ...]:
    return (*(word for word in recipe if not word.startswith("checkpoint")), *SHORT)


def test_scaling_trials_run_as_steps_of_an_allocation(slurm, train_args: tuple[str, ...], tmp_path: Path) -> None:
    """The batch script's own rank and total resources are not those of the steps."""
    folder = tmp_path / "scaling"
    options = ("--nodes=1", "--ranks=2", "--steps=2", "--repeats=1", "--json", "--run-dir", str(folder))
    program = " ".join([sys.executable, "-P", "-m", "paceline", "scale", *train_args, *options])
    job = slurm("sbatch", "--parsable", "--ntasks=2", "--ntasks-per-node=2", f"--wrap={program}")
    slurm.wait_for_state(job, "COMPLETED")
    (point,) = json.loads((folder / "experiment.json").read_text())["points"]
    assert (point["ranks"], point["nodes"], point["error"]) == (2, 1, "")
    (run,) = point["runs"]
    result = json.loads((folder / run / "result.json").read_text())
    assert (result["world_size"], result["provenance"]["launcher"]) == (2, "slurm")


@pytest.mark.long
def test_the_last_job_of_a_scaling_array_evaluates_it(slurm, train_args: tuple[str, ...], tmp_path: Path) -> None:
    folder = tmp_path / "scaling"
    options = ("--nodes", "2", "--run-dir", str(folder), "--array", "--", "--ranks", "1", "--nodes", "1,2")
    submitted = slurm.submit("scale", *train_args, *options, "--steps", "2", "--repeats", "1")
    last = submitted["jobs"][-1]["job_id"]
    slurm.wait_for_state(last, "COMPLETED")
    points = json.loads((folder / "experiment.json").read_text())["points"]
    assert [(point["ranks"], point["nodes"], point["error"]) for point in points] == [(1, 1, ""), (2, 2, "")]
    results = [json.loads((folder / run / "result.json").read_text()) for point in points for run in point["runs"]]
    assert [result["world_size"] for result in results] == [1, 2]
    assert "from an earlier start" in slurm.output(last)  # and not measured again
