"""A preempted run saves its current step and exits with 75; a killed one leaves no process behind."""

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
    "train.steps=80",
    "train.ema.decay=0.9",
    "train.eval_every=40st",
    "checkpoint.every=50st",
    "log.every=1st",
    "log.samples=true",
    "log.tensorboard=off",
    "log.report=off",
    "parallel.threads=1",
    "--json",
)
WORKERS = ("data.workers=2",)
PATIENCE_S = 120.0
STOP_S = 20.0
"""A step, a save and the end of the processes: measured at most 1.5 s, on a machine with four times its load."""


@pytest.fixture(scope="module")
def uninterrupted(ranks_in, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an uninterrupted run on two ranks; the number of workers does not change it."""
    folder = tmp_path_factory.mktemp("whole")
    assert ranks_in(folder)(*ARGS, "--run-dir", "run", ranks=2).result["steps"] == 80
    return folder / "run"


@pytest.fixture
def same_as(state_digest, lines_of) -> Callable[[Path, Path], None]:
    """Return a function that asserts that two runs have the same final state and the same samples in each step."""

    def check(run: Path, other: Path) -> None:
        assert state_digest(run) == state_digest(other)
        assert result_of(run)["weights_sha256"] == result_of(other)["weights_sha256"]
        for rank in range(result_of(other)["world_size"]):
            name = f"steps.rank{rank}.jsonl"
            assert lines_of(run / name) == lines_of(other / name) != []

    return check


def result_of(run: Path) -> dict:
    return json.loads((run / "result.json").read_text())


def steps_of(run: Path) -> int:
    path = run / "steps.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def saved_steps(run: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*"))


def wait_for(process: "subprocess.Popen[str]", is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert process.poll() is None, process.communicate(timeout=10)
        assert time.monotonic() < deadline, "it takes too long"
        time.sleep(0.005)


def tree_of(process: "subprocess.Popen[str]") -> list[psutil.Process]:
    return [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]


def rank_of(process: "subprocess.Popen[str]", rank: int) -> psutil.Process:
    children = psutil.Process(process.pid).children()
    return sorted(children, key=lambda child: child.pid)[rank]  # ranks are started in order


def send(number: int, *processes: psutil.Process) -> float:
    """Send a signal to all processes, and return the time."""
    for process in processes:
        process.send_signal(number)
    return time.monotonic()


def assert_preempted(process: "subprocess.Popen[str]", run: Path, since: float) -> int:
    """Assert that a run saved its last step and reported that and nothing else; return the step."""
    out, err = process.communicate(timeout=PATIENCE_S)
    assert time.monotonic() - since < STOP_S
    assert process.returncode == 75, (process.returncode, err)
    assert "Traceback" not in err and "error" not in err, err
    result = result_of(run)
    assert result == json.loads(out)
    assert result["status"] == "preempted"
    assert saved_steps(run)[-1] == result["steps"] == steps_of(run)
    return result["steps"]


# matrix: 19
def test_a_signal_to_all_processes_loses_no_step(
    paceline, ranks, tmp_path: Path, uninterrupted, clean, same_as
) -> None:
    """The run is stopped by one signal after the other and resumed each time."""
    run, resume, came = tmp_path / "run", (), 0
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        process = paceline.start(*ARGS, *WORKERS, "--ranks", "2", "--run-dir", "run", *resume)
        wait_for(process, lambda came=came: steps_of(run) > came + 5)
        family = tree_of(process)
        assert len(family) == 1 + 2 + 2 * 2
        came = assert_preempted(process, run, since=send(number, *family))
        assert came < 80
        clean(run, within_s=5.0)
        resume = ("--resume",)
    resumed = ranks(*ARGS, "--run-dir", "run", *resume, ranks=2).result
    assert (resumed["status"], resumed["steps"]) == ("completed", 80)
    same_as(run, uninterrupted)


# matrix: 19
def test_a_stop_signal_to_one_rank_stops_all(paceline, tmp_path: Path, clean) -> None:
    process = paceline.start(*ARGS, "--ranks", "2", "--run-dir", "run")
    run = tmp_path / "run"
    wait_for(process, lambda: steps_of(run) > 5)
    assert_preempted(process, run, since=send(signal.SIGTERM, rank_of(process, 1)))
    clean(run, within_s=5.0)


# matrix: 19
def test_an_interrupted_evaluation_is_repeated(paceline, ranks, tmp_path: Path, lines_of) -> None:
    """The evaluation of the second step takes half a second, so it is in progress when the step has been logged."""
    args = (*ARGS, "data.source.num_val_images=4000", "data.source.image_size=16", "data.eval_batch_size=50")
    args = (*args, "train.eval_every=2st", "train.steps=3", "train.ema=off")
    unharmed = ranks(*args, "--run-dir", "whole").result
    process = paceline.start(*args, "--ranks", "1", "--run-dir", "run")
    run = tmp_path / "run"
    wait_for(process, lambda: steps_of(run) == 2)
    time.sleep(0.1)
    assert assert_preempted(process, run, since=send(signal.SIGTERM, psutil.Process(process.pid))) == 2
    assert result_of(run)["eval"] is None
    resumed = ranks(*args, "--run-dir", "run", "--resume").result
    assert resumed["weights_sha256"] == unharmed["weights_sha256"]
    assert (resumed["eval"], resumed["best"]) == (unharmed["eval"], unharmed["best"])
    assert len(lines_of(run / "evals.jsonl")) == len(lines_of(tmp_path / "whole" / "evals.jsonl")) == 2


# matrix: 19
# matrix: 20
@pytest.mark.parametrize("background", ["on", "off"])
def test_signals_50_ms_apart_during_a_save_do_no_harm(
    paceline, ranks, tmp_path: Path, uninterrupted, clean, same_as, background: str
) -> None:
    """The run saves after every step, so at least the save that the first signal causes is interrupted."""
    args = ("checkpoint.every=1st", f"checkpoint.background={background}", "--run-dir", "run")
    process = paceline.start(*ARGS, *args, "--ranks", "2")
    run = tmp_path / "run"
    wait_for(process, lambda: len(saved_steps(run)) > 2)
    launcher = psutil.Process(process.pid)
    since = send(signal.SIGTERM, launcher)
    time.sleep(0.05)
    send(signal.SIGTERM, launcher)
    time.sleep(0.05)
    send(signal.SIGINT, launcher)
    assert_preempted(process, run, since)
    clean(run, within_s=5.0)
    assert ranks(*ARGS, "--run-dir", "run", "--resume", ranks=2).result["steps"] == 80
    same_as(run, uninterrupted)


# matrix: 20
def test_a_second_ctrl_c_ends_a_run_that_does_not_stop(paceline, tmp_path: Path, clean) -> None:
    process = paceline.start(*ARGS, "--ranks", "2", "--run-dir", "run")
    run = tmp_path / "run"
    wait_for(process, lambda: steps_of(run) > 5)
    rank_of(process, 1).suspend()  # so that no step ends
    launcher = psutil.Process(process.pid)
    send(signal.SIGINT, launcher)
    time.sleep(0.5)
    assert process.poll() is None
    since = send(signal.SIGINT, launcher)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert time.monotonic() - since < 5.0
    assert process.returncode == 130 and "Traceback" not in err
    clean(run, within_s=5.0)


# matrix: 14
def test_ranks_that_cannot_stop_are_killed_after_the_grace_period(paceline, tmp_path: Path, clean) -> None:
    process = paceline.start(*ARGS, "checkpoint.grace=1s", "--ranks", "2", "--run-dir", "run")
    run = tmp_path / "run"
    wait_for(process, lambda: steps_of(run) > 5)
    rank_of(process, 1).suspend()
    since = send(signal.SIGTERM, psutil.Process(process.pid))
    _, err = process.communicate(timeout=PATIENCE_S)
    assert 1.0 < time.monotonic() - since < 9.0
    assert process.returncode == 128 + signal.SIGKILL
    assert "had not stopped 1 s after SIGTERM and was killed (raise checkpoint.grace)" in err.splitlines()[-1]
    clean(run, within_s=5.0)


# matrix: 15
def test_no_process_outlives_a_killed_launcher(paceline, tmp_path: Path, clean) -> None:
    process = paceline.start(*ARGS, *WORKERS, "--ranks", "2", "--run-dir", "run")
    run = tmp_path / "run"
    wait_for(process, lambda: steps_of(run) > 5)
    family = tree_of(process)
    assert len(family) == 7
    process.kill()
    _, alive = psutil.wait_procs(family, timeout=5.0)
    assert not alive
    process.communicate(timeout=30)
    clean(run)


# matrix: 15
@pytest.mark.long  # for the ranks it is like SIGKILL, which `test_torchrun` sends to the agent
def test_no_process_outlives_a_torchrun_agent_that_dies_of_a_signal(paceline_anew, tmp_path: Path, family_of) -> None:
    """By default torchrun does not forward SIGUSR1 but dies of it."""
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "paceline")
    process = paceline_anew.start(*ARGS, *WORKERS, "--run-dir", "run", program=torchrun)
    run = tmp_path / "run"
    wait_for(process, lambda: steps_of(run) > 5)
    family = tree_of(process)
    assert len(family) == 7
    send(signal.SIGUSR1, psutil.Process(process.pid))
    _, alive = psutil.wait_procs(family, timeout=5.0)
    assert not alive
    process.communicate(timeout=30)
    assert not family_of(run)


# matrix: 11
def test_a_run_that_lost_a_rank_restarts_by_itself_and_completes(
    paceline, tmp_path: Path, uninterrupted, clean, same_as
) -> None:
    args = (*ARGS, "checkpoint.every=5st", "--ranks", "2", "--run-dir", "run", "--max-restarts", "2")
    process = paceline.start(*args)
    run = tmp_path / "run"
    for rank, after in ((1, 8), (0, 30)):
        wait_for(process, lambda after=after: steps_of(run) > after)
        rank_of(process, rank).kill()
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    assert json.loads(out) == result_of(run)
    told = [line for line in err.splitlines() if line.startswith("warning: ") and "restart" in line]
    assert [line.partition("; ")[2] for line in told] == [
        f"restarting all ranks (restart {number} of 2)" for number in (1, 2)
    ]
    assert "Traceback" not in err
    assert result_of(run)["provenance"]["command"] == ["paceline", *args]  # as it was typed
    same_as(run, uninterrupted)
    clean(run)
