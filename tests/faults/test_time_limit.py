"""A run saves and exits before its job's time limit, and the next job resumes it to the same weights."""

import itertools
from functools import partial
from pathlib import Path

import pytest

from paceline.core.run_dir import RunDir
from paceline.core.world import BatchJob, World
from paceline.recipe.load import Patch, load
from paceline.training.goodput import read_attempts
from paceline.training.preemption import build_deadline
from paceline.training.process import Invocation
from paceline.training.run import run

ARGS = (
    *("data.source.num_images=96", "data.source.num_val_images=37", "data.source.image_size=8", "model.width=0.1"),
    *("data.batch_size=12", "optim.lr=0.01", "train.steps=40", "train.eval_every=7st", "checkpoint.every=50st"),
    *("log.every=1st", "log.tensorboard=off", "log.report=off", "parallel.threads=1"),
)


def train(rundir: RunDir, job: BatchJob, *, resume: bool = False) -> None:
    recipe = load("synthetic", Patch.parse(ARGS)).recipe
    run(recipe, World.single(), rundir, resume=resume, invocation=Invocation(batch_job=job))


# matrix: 22
def test_a_run_stops_before_its_time_limit_and_resumes_to_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state_digest
) -> None:
    uninterrupted, left = RunDir(tmp_path / "whole"), RunDir(tmp_path / "left")
    train(uninterrupted, BatchJob())
    ticks = itertools.count()  # the clock advances by a second with each check of the time limit
    monkeypatch.setattr(
        "paceline.training.components.build_deadline",
        partial(build_deadline, unix=lambda: 0.0, now=lambda: float(next(ticks))),
    )
    jobs = [BatchJob("4711", restarts, end_s=50.0) for restarts in range(5)]
    for job in jobs:
        train(left, job, resume=job.restarts > 0)
        if left.read_result().status == "completed":
            break
    starts = [attempt.start for attempt in read_attempts(left.attempts)]
    restarts = [start.job_restarts for start in starts]
    assert restarts == list(range(len(starts))) and {start.job_id for start in starts} == {"4711"}
    begun = [start.from_step for start in starts]
    assert len(begun) > 1 and begun[1] > 10 and begun == sorted(set(begun))
    result = left.read_result()
    assert (result.status, result.steps) == ("completed", 40)
    assert (result.provenance["job_id"], result.provenance["job_restarts"]) == ("4711", len(starts) - 1)
    assert result.weights_sha256 == uninterrupted.read_result().weights_sha256
    assert state_digest(left.path) == state_digest(uninterrupted.path)
