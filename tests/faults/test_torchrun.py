"""Under torchrun, lost ranks are restarted and resume by themselves, and none outlives the agent."""

import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

ARGS = (
    "train",
    "synthetic",
    "model.width=0.1",
    "data.source.num_images=240",
    "data.source.num_val_images=24",
    "data.batch_size=12",
    "data.augment=[pad_crop,flip]",
    "data.workers=1",
    "train.steps=40",
    "train.ema.decay=0.9",
    "checkpoint.every=5st",
    "log.every=1st",
    "log.samples=true",
    "log.tensorboard=off",
    "log.report=off",
    "parallel.threads=1",
    "--json",
)
PATIENCE_S = 120.0


def torchrun(ranks: int, max_restarts: int = 0) -> tuple[str, ...]:
    options = ("--standalone", f"--nproc-per-node={ranks}", f"--max-restarts={max_restarts}")
    return ("torch.distributed.run", *options, "--monitor-interval=0.1", "-m", "paceline")


@pytest.fixture(scope="module")
def uninterrupted(paceline_in, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Return a function from a number of ranks to an uninterrupted run on them."""
    folder = tmp_path_factory.mktemp("whole")

    def run_on(ranks: int) -> Path:
        run = folder / str(ranks)
        if not run.exists():
            args = (*ARGS, "data.workers=0", "checkpoint.every=30st", "--ranks", str(ranks), "--run-dir", str(run))
            paceline_in(folder)(*args).result  # noqa: B018
        return run

    return run_on


def steps_of(run: Path) -> int:
    path = run / "steps.rank0.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for(agent: "subprocess.Popen[str]", is_there: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not is_there():
        assert agent.poll() is None, agent.communicate(timeout=10)
        assert time.monotonic() < deadline_s, "it takes too long"
        time.sleep(0.005)


def rank_of(agent: "subprocess.Popen[str]", rank: int, attempt: int) -> psutil.Process | None:
    """Return the process of a rank after `attempt` restarts, or None if it has not started yet."""
    wanted = {"RANK": str(rank), "TORCHELASTIC_RESTART_COUNT": str(attempt)}
    for process in psutil.Process(agent.pid).children():
        try:
            if wanted.items() <= process.environ().items() and "train" in process.cmdline():
                return process
        except psutil.Error:  # the process ended in between
            continue
    return None


def completed(agent: "subprocess.Popen[str]") -> tuple[int, str]:
    out, err = agent.communicate(timeout=PATIENCE_S)
    return agent.returncode, err or out


# matrix: 11
# matrix: 12
# matrix: 13
@pytest.mark.long
def test_every_restart_succeeds_and_the_run_has_the_same_weights(
    paceline_anew, tmp_path: Path, uninterrupted, clean, state_digest
) -> None:
    """A victim is killed after so many steps of the run, the first one before its rank has joined the others.

    There are as many restarts as victims, so that one failed restart ends the run.
    """
    ranks, victims = 3, [(0, 2), (8, 0)]
    run = tmp_path / "run"
    agent = paceline_anew.start(*ARGS, "--run-dir", str(run), program=torchrun(ranks, len(victims)))
    for attempt, (step, rank) in enumerate(victims):
        wait_for(agent, lambda step=step: steps_of(run) >= step)
        wait_for(agent, lambda rank=rank, attempt=attempt: rank_of(agent, rank, attempt))
        process = rank_of(agent, rank, attempt)
        assert process is not None
        process.kill()
    code, output = completed(agent)
    assert code == 0, output
    assert state_digest(run) == state_digest(uninterrupted(ranks))
    results = [json.loads((each / "result.json").read_text()) for each in (run, uninterrupted(ranks))]
    assert results[0]["weights_sha256"] == results[1]["weights_sha256"]
    for rank in range(ranks):
        name = f"steps.rank{rank}.jsonl"
        assert (run / name).read_text() == (uninterrupted(ranks) / name).read_text()
    clean(run)


# matrix: 15
def test_no_process_outlives_a_killed_agent(paceline_anew, tmp_path: Path, clean, family_of) -> None:
    run = tmp_path / "run"
    agent = paceline_anew.start(*ARGS, "--run-dir", str(run), program=torchrun(2))
    wait_for(agent, lambda: steps_of(run) > 2)
    assert len(family_of(run)) >= 5  # the agent, two ranks, and one worker per rank
    agent.kill()
    clean_within(run, family_of, within_s=5)
    agent.communicate(timeout=30)


def clean_within(run: Path, family_of, within_s: float) -> None:
    _, alive = psutil.wait_procs(family_of(run), timeout=within_s)
    assert not [process.cmdline() for process in alive if process.is_running()]
    assert not family_of(run)


# matrix: 19
def test_stopping_the_agent_saves_a_checkpoint_of_the_current_step(
    paceline, paceline_anew, tmp_path: Path, uninterrupted, family_of, state_digest
) -> None:
    run = tmp_path / "run"
    args = (*ARGS, "data.workers=0", "checkpoint.every=30st", "--run-dir", str(run))
    agent = paceline_anew.start(*args, program=torchrun(2))
    wait_for(agent, lambda: steps_of(run) > 5)
    agent.send_signal(signal.SIGTERM)
    _, output = completed(agent)
    clean_within(run, family_of, within_s=5)
    kept = max((int(path.name[-8:]) for path in (run / "checkpoints").glob("step-*")), default=0)
    assert kept == steps_of(run), output
    assert 5 < kept < 30  # a checkpoint that no interval requires
    assert json.loads((run / "result.json").read_text())["status"] == "preempted"
    again = paceline(*args, "--resume", "--ranks", "2")
    assert again.result["steps"] == 40, again.err
    assert state_digest(run) == state_digest(uninterrupted(2))
