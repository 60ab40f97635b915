"""If a rank dies, hangs, fails or diverges, the run ends soon, one line names the rank, and no process is left."""

import hashlib
import itertools
import os
import re
import signal
import socket
import subprocess
import time
from pathlib import Path

import psutil
import pytest

LONG = ("train", "train.epochs=500", "model.width=0.1", "data.batch_size=12", "data.workers=0", "parallel.threads=1")
TIMEOUT_S = 3
"""The value of `parallel.timeout` in tests of hangs; it also applies to the start, while one rank reads the data."""
NAMED_S = TIMEOUT_S + 2
ENDED_S = NAMED_S + 5
SLACK_S = 4
"""Allowance for a busy machine; the documented limits do not include it."""


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Run:
    """A run under test, with the results of its ranks and its port."""

    def __init__(self, process: "subprocess.Popen[str]", folder: Path) -> None:
        self.process, self.folder = process, folder
        self.started = time.monotonic()

    def wait_until_training(self, ranks: int) -> list[psutil.Process]:
        """Wait for the first logged step; return the ranks in order."""
        steps = self.folder / "steps.jsonl"
        deadline = self.started + 120
        while not (steps.exists() and steps.stat().st_size):
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        children = psutil.Process(self.process.pid).children()
        by_rank = sorted(children, key=lambda child: child.pid)  # ranks are started in order
        assert len(by_rank) == ranks
        return by_rank

    def end(self, within_s: float) -> tuple[int, list[str]]:
        """Return the exit code and the lines of standard error; the run must end in time."""
        since = time.monotonic()
        try:
            _, err = self.process.communicate(timeout=60)
        finally:
            self.process.kill()
        assert time.monotonic() - since < within_s + SLACK_S, err
        assert "Traceback" not in err
        return self.process.returncode, err.splitlines()


def assert_clean(ranks: list[psutil.Process], port: int) -> None:
    """Assert that no process and no listener of the run is left."""
    _, alive = psutil.wait_procs(ranks, timeout=5)
    assert not [rank for rank in alive if rank.status() != psutil.STATUS_ZOMBIE]
    with socket.socket() as again:
        assert again.connect_ex(("127.0.0.1", port)) != 0


def start(paceline, ranks: int, *args: str) -> tuple[Run, int]:
    port = free_port()
    process = paceline.start(*LONG, *args, "--ranks", str(ranks), "--run-dir", "run", "--port", str(port))
    return Run(process, paceline.folder / "run"), port


def start_without_launcher(paceline, ranks: int, *args: str, program: tuple[str, ...] = (), **environ: str):
    """Start ranks without a launcher, so that nothing else ends them."""
    world = {"WORLD_SIZE": str(ranks), "MASTER_PORT": str(free_port()), **environ}
    command = (*LONG, *args, "--run-dir", "run")
    return [paceline.start(*command, program=program, RANK=str(rank), **world) for rank in range(ranks)]


def results_of(processes, within_s: float = 60) -> list[tuple[int, list[str]]]:
    """Return exit codes and lines of standard error of `processes`; assert that all end in time."""
    try:
        output = [process.communicate(timeout=within_s)[1].splitlines() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [(process.returncode, lines) for process, lines in zip(processes, output, strict=True)]


# matrix: 10
@pytest.mark.parametrize(("rank", "ranks"), [(0, 2), (1, 3)])
def test_a_killed_rank_is_named_with_its_step_and_the_run_ends(paceline, rank: int, ranks: int) -> None:
    run, port = start(paceline, ranks)
    processes = run.wait_until_training(ranks)
    family = [*processes, *(child for each in processes for child in each.children(recursive=True))]
    os.kill(processes[rank].pid, signal.SIGKILL)
    code, lines = run.end(within_s=10)
    assert code == 128 + signal.SIGKILL
    named = [line for line in lines if f"rank {rank} is gone (last heartbeat " in line]
    assert len(named) == 1 and ", at step " in named[0], lines
    assert f"error: rank {rank} of {ranks} was killed by SIGKILL, so all ranks were ended" in lines
    assert len(lines) == 2
    assert_clean(family, port)


# matrix: 10
@pytest.mark.parametrize("rank", [0, pytest.param(2, marks=pytest.mark.long)])
def test_surviving_ranks_end_by_themselves(paceline, tmp_path: Path, rank: int) -> None:
    """Without a launcher, the surviving ranks have two seconds."""
    processes = start_without_launcher(paceline, 3)
    steps = tmp_path / "run" / "steps.jsonl"
    wait_for(lambda: steps.exists() and steps.stat().st_size)
    processes[rank].kill()
    killed = time.monotonic()
    ends = results_of(processes)
    assert time.monotonic() - killed < 2 + SLACK_S
    lines = [line for code, lines in ends for line in lines]
    assert len(lines) == 1 and f"rank {rank} is gone (last heartbeat " in lines[0], ends
    assert [code for code, _ in ends] == [-signal.SIGKILL if each == rank else 1 for each in range(3)]


def wait_for(is_so, within_s: float = 120) -> None:
    deadline = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


# matrix: 12
def test_a_rank_killed_in_the_first_second_never_causes_a_hang(paceline, paceline_anew) -> None:
    """It is killed before Python starts or in its imports, or, without imports, while it connects or after.

    Half of the killed ranks host the store.
    """
    starts = ((paceline_anew, (0.0, 0.4)), (paceline, (0.1, 0.3, 0.7)))
    for rank, (start, delays) in itertools.product((0, 1), starts):
        runs = [start.start(*LONG, "--ranks", "2", "--run-dir", f"run-{rank}-{delay}") for delay in delays]
        begun = 0.0
        for process, delay in zip(runs, delays, strict=True):
            wait_for(lambda process=process: len(psutil.Process(process.pid).children()) == 2)
            begun = begun or time.monotonic()
            time.sleep(max(0.0, begun + delay - time.monotonic()))
            ranks = sorted(psutil.Process(process.pid).children(), key=lambda each: each.pid)
            ranks[rank].kill()
        for process in runs:
            try:
                _, err = process.communicate(timeout=15)
            finally:
                process.kill()
            assert process.returncode == 128 + signal.SIGKILL, err
            assert f"rank {rank} of 2 was killed by SIGKILL" in err and "Traceback" not in err


# matrix: 14
@pytest.mark.parametrize("rank", [0])
def test_a_stopped_rank_is_named_in_time_and_killed(paceline, rank: int) -> None:
    run, port = start(paceline, 2, f"parallel.timeout={TIMEOUT_S}s")
    processes = run.wait_until_training(2)
    os.kill(processes[rank].pid, signal.SIGSTOP)
    stopped = time.monotonic()
    line = run.process.stderr.readline()
    assert TIMEOUT_S - 1 < time.monotonic() - stopped < NAMED_S + SLACK_S
    assert line.startswith(f"error: rank {1 - rank} of 2: rank {rank} is stopped by a signal (last heartbeat "), line
    assert ", at step " in line
    code, more = run.end(within_s=ENDED_S - NAMED_S)
    assert (code, more) == (1, [])
    assert_clean(processes, port)


FAULTY = """
import ctypes, os, time
from paceline.training.trainer import Trainer

step = Trainer.train_step

def train_step(self, batch, state):
    if os.environ["RANK"] == os.environ["FAULTY_RANK"] and state.step == 10:
        match os.environ["FAULT"]:
            case "keeps the GIL":
                ctypes.PyDLL(None).sleep(600)
            case "sleeps":
                with self.clock.stage("h2d"):
                    time.sleep(600)
            case "raises":
                raise RuntimeError("a bug on one rank")
            case "drifts":
                next(self.model.parameters()).data.view(-1)[0] += 1e-3
            case "ends":
                os._exit(0)
    return step(self, batch, state)

Trainer.train_step = train_step
from paceline.cli import main
main()
"""


def faulty(paceline, fault: str, rank: int, *args: str, ranks: int = 2):
    (paceline.folder / "faulty.py").write_text(FAULTY)
    # The program sets the last variable itself, but this process has loaded torch already.
    environ = {"FAULT": fault, "FAULTY_RANK": str(rank), "TORCH_CPP_LOG_LEVEL": "FATAL"}
    return start_without_launcher(paceline, ranks, *args, program=("faulty",), **environ)


# matrix: 14
@pytest.mark.parametrize("rank", [1])
def test_a_rank_that_holds_the_gil_is_named_and_writes_its_stacks(paceline, rank: int) -> None:
    processes = faulty(paceline, "keeps the GIL", rank, f"parallel.timeout={TIMEOUT_S}s")
    [(code, lines)] = results_of([processes[1 - rank]], within_s=ENDED_S + SLACK_S)
    stacks = paceline.folder / "run" / f"stacks.rank{rank}.txt"
    try:
        wait_for(lambda: "train_step" in stacks.read_text(), within_s=10)
    finally:
        processes[rank].kill()
        processes[rank].communicate(timeout=10)
    assert code == 1 and len(lines) == 1, "\n".join(lines)
    assert f"rank {1 - rank} of 2: rank {rank} does not answer (last heartbeat " in lines[0]


# matrix: 14
@pytest.mark.parametrize("rank", [0])
def test_a_hung_rank_is_named_with_step_and_stage_and_writes_its_stacks(paceline, rank: int) -> None:
    ends = results_of(faulty(paceline, "sleeps", rank, f"parallel.timeout={TIMEOUT_S}s"), within_s=120)
    lines = [line for _, lines in ends for line in lines]
    assert [code for code, _ in ends] == [1, 1] and len(lines) == 1, ends
    assert f"rank {rank}" in lines[0] and " makes no progress: at step 10 in h2d" in lines[0], lines
    stacks = Path("run") / f"stacks.rank{rank}.txt"
    assert f"(stacks in {stacks})" in lines[0]
    assert "train_step" in (paceline.folder / stacks).read_text()


READING = """
import hashlib, os
from pathlib import Path
from paceline.training import run

read = run.read_run_data

def read_run_data(recipe, exit_stack, is_first):
    if os.environ["RANK"] == os.environ["READING_RANK"]:
        Path("reads").touch()
        # One call of C, which computes all the time and leaves the GIL to others.
        hashlib.pbkdf2_hmac("sha256", b"", b"", int(os.environ["ROUNDS"]))
        Path("has_read").touch()
    return read(recipe, exit_stack, is_first)

run.read_run_data = read_run_data
from paceline.cli import main
main()
"""
ENDLESS = 2**31 - 1


def start_reading(paceline, rank: int, *args: str, rounds: int = ENDLESS, **environ: str):
    """Start two ranks, one of which takes long to read its data, and return once it is reading."""
    (paceline.folder / "reading.py").write_text(READING)
    environ = {"READING_RANK": str(rank), "ROUNDS": str(rounds), **environ}
    processes = start_without_launcher(paceline, 2, *args, program=("reading",), **environ)
    wait_for((paceline.folder / "reads").exists)
    return processes


OTHER_HOSTS = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
"""Each rank is the first of its host, and waits for the others after reading."""


# matrix: 10
# matrix: 14
@pytest.mark.parametrize(
    ("rank", "number", "hosts", "message"),
    [
        (0, signal.SIGKILL, {}, "is gone"),
        (0, signal.SIGSTOP, {}, "(is stopped by a signal|does not answer)"),  # if no heartbeat was received before
        (1, signal.SIGKILL, OTHER_HOSTS, "is gone"),
    ],
    ids=["killed, with the store", "stopped, with the store", "killed on another host"],
)
def test_a_rank_lost_while_reading_data_is_named_by_its_peer(
    paceline, rank: int, number: signal.Signals, hosts: dict[str, str], message: str
) -> None:
    processes = start_reading(paceline, rank, f"parallel.timeout={TIMEOUT_S}s", **hosts)
    processes[rank].send_signal(number)
    try:
        [(code, lines)] = results_of([processes[1 - rank]], within_s=ENDED_S + SLACK_S)
    finally:
        processes[rank].kill()
        processes[rank].communicate(timeout=10)
    assert code == 1 and len(lines) == 1, lines
    assert re.match(rf"error: rank {1 - rank} of 2: rank {rank} {message} \((last|no) heartbeat ", lines[0]), lines


def test_reading_data_may_take_longer_than_the_timeout(paceline) -> None:
    """The rank is in one C call all the time, and sends heartbeats."""
    timeout_s, rounds = TIMEOUT_S, 1_000_000
    since = time.thread_time()
    hashlib.pbkdf2_hmac("sha256", b"", b"", rounds)
    rounds = int(rounds * 2 * timeout_s / (time.thread_time() - since))
    args = ("train.epochs=0.1", "schedule.warmup=0ep", "log.report=off", f"parallel.timeout={timeout_s}s")
    processes = start_reading(paceline, 0, *args, rounds=rounds)
    assert results_of(processes, within_s=120) == [(0, []), (0, [])]
    took_s = (paceline.folder / "has_read").stat().st_mtime - (paceline.folder / "reads").stat().st_mtime
    assert took_s > timeout_s, "it was not slow"


# matrix: 25
@pytest.mark.parametrize("rank", [0, pytest.param(2, marks=pytest.mark.long)])
def test_only_the_rank_that_raised_prints_an_error(paceline, rank: int) -> None:
    ends = results_of(faulty(paceline, "raises", rank, ranks=3), within_s=120)
    assert [code for code, _ in ends] == [1, 1, 1]
    for other, (_, lines) in enumerate(ends):
        if other == rank:
            assert lines[-1] == f"error: rank {rank} of 3: RuntimeError: a bug on one rank"
        else:
            assert lines == []


# matrix: 24
def test_a_rank_with_fewer_steps_is_named_with_the_steps_of_both(paceline) -> None:
    """As if a sampler had given one rank fewer batches."""
    world = {"WORLD_SIZE": "2", "MASTER_PORT": str(free_port())}
    args = ("train.eval_every=off", "checkpoint.every=off", f"parallel.timeout={TIMEOUT_S}s", "--run-dir", "run")
    long = tuple(word for word in LONG if not word.startswith("train.epochs"))
    steps = ["train.steps=400", "train.steps=20"]
    processes = [paceline.start(*long, *args, steps[rank], RANK=str(rank), **world) for rank in range(2)]
    ends = results_of(processes, within_s=120)
    lines = [line for _, lines in ends for line in lines]
    assert ends[0][0] == 1 and len(lines) == 1, ends
    named = re.match(
        r"error: rank (?:0 of 2: rank 1|1 of 2) ended after step 20 while others continued, at step 2", lines[0]
    )
    assert named, lines


def test_a_diverged_replica_is_named_with_step_and_parameter(paceline) -> None:
    ends = results_of(faulty(paceline, "drifts", 1, "parallel.check_replicas=8st", ranks=3), within_s=120)
    lines = [line for _, lines in ends for line in lines]
    assert [code for code, _ in ends] == [1, 1, 1] and len(lines) == 1, ends
    assert lines[0].startswith(
        "error: parallel.check_replicas: rank 1 of 3 has other weights than the rest at step 16, "
    )


# matrix: 42
def test_a_missing_rank_is_named(paceline) -> None:
    completed = paceline(*LONG, "parallel.timeout=2s", RANK="0", WORLD_SIZE="3", MASTER_PORT=str(free_port()))
    completed.assert_error(
        "WORLD_SIZE: 3, but ranks 1, 2 did not come within 2s", "MASTER_ADDR=127.0.0.1", "MASTER_PORT="
    )
