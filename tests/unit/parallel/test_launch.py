"""Local ranks: started together, ended together. The ranks here are small programs without torch."""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.core.errors import WorldError
from paceline.parallel import launch as launcher
from paceline.parallel.launch import PREEMPTED, LaunchResult, flight_recorder_environ, launch


def program(text: str) -> list[str]:
    return [sys.executable, "-c", f"import os, sys, time, signal\nrank = int(os.environ['RANK'])\n{text}"]


def environ() -> dict[str, str]:
    return dict(os.environ)


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the others little time after a failure."""
    monkeypatch.setattr("paceline.parallel.launch._GRACE_S", 0.5)


def test_every_rank_gets_its_variables_and_success_is_zero(tmp_path: Path) -> None:
    text = f"open('{tmp_path}/' + os.environ['RANK'], 'w').write(os.environ['WORLD_SIZE'] + os.environ['LOCAL_RANK'])"
    assert launch(program(text), 3, environ()) == LaunchResult(0)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"0": "30", "1": "31", "2": "32"}


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([0, 2], LaunchResult(2)),
        ([2, 1, 1], LaunchResult(2)),
        ([1, 4], LaunchResult(4)),
        ([0, 1], LaunchResult(1)),
        ([1, 0], LaunchResult(1, was_lost=True)),
        ([75, 75], LaunchResult(PREEMPTED)),
        ([75, 1], LaunchResult(1, was_lost=True)),
        ([4, 75], LaunchResult(4)),
    ],
)
def test_the_code_of_the_rank_that_reported_its_error_wins(codes: list[int], expected: LaunchResult) -> None:
    assert launch(program(f"sys.exit({codes}[rank])"), len(codes), environ()) == expected


# matrix: 10
@pytest.mark.usefixtures("brief")
def test_a_killed_rank_is_named_and_the_others_end_with_it() -> None:
    started = time.monotonic()
    ended = launch(program("os.kill(os.getpid(), 9) if rank == 1 else time.sleep(600)"), 3, environ())
    assert ended.code == 128 + signal.SIGKILL and ended.was_lost
    assert ended.sentence == "rank 1 of 3 was killed by SIGKILL, so all ranks were ended"
    assert time.monotonic() - started < 10


@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize(
    ("number", "fix"), [(signal.SIGSEGV, "model.memory_format=contiguous"), (signal.SIGBUS, "df /dev/shm")]
)
def test_a_crashed_rank_is_named_with_a_fix(number: int, fix: str) -> None:
    ended = launch(program(f"os.kill(os.getpid(), {int(number)}) if rank == 1 else time.sleep(600)"), 2, environ())
    assert ended.code == 128 + number
    assert (
        ended.sentence.startswith(f"rank 1 of 2 was killed by {signal.Signals(number).name}") and fix in ended.sentence
    )


@pytest.mark.usefixtures("brief")
def test_ranks_that_outlive_a_failure_are_ended(tmp_path: Path) -> None:
    text = f"open('{tmp_path}/pid', 'w').write(str(os.getpid())) if rank == 0 else None\n"
    text += f"while rank == 0 or not os.path.exists('{tmp_path}/pid'): time.sleep(0.01)\n"
    text += "time.sleep(0.1)\nsys.exit(3)"
    assert launch(program(text), 2, environ()) == LaunchResult(3)
    pid = int((tmp_path / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_rank_0_inherits_the_open_socket_of_the_rendezvous(tmp_path: Path) -> None:
    text = "import socket\nfd = int(os.environ['PACELINE_STORE_FD'])\n"
    text += "name = socket.socket(fileno=fd).getsockname()[1] if rank == 0 else fd\n"
    text += f"open('{tmp_path}/' + str(rank), 'w').write(f\"{{name}} {{os.environ['MASTER_PORT']}}\")"
    assert launch(program(text), 2, environ()) == LaunchResult(0)
    port, told = (tmp_path / "0").read_text().split()
    assert port == told and int(port) > 1023
    assert (tmp_path / "1").read_text() == f"-1 {told}"


def test_a_taken_port_is_refused_in_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(WorldError, match=rf"^--port: {port} cannot be used: Address already in use \("):
            launch(program("pass"), 2, environ(), port=port)


# A rank that saves when it is asked to, if a second late; each marker file says that a rank has come so far.
SAVING = """
import pathlib
asked = []
for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP"):
    signal.signal(getattr(signal, name), lambda number, frame: asked.append(signal.Signals(number).name))
pathlib.Path(os.environ["TEST_MARKS"], str(rank)).touch()
while not asked:
    time.sleep(0.01)
"""


def marked(folder: Path, then: Callable[[], None], ranks: int = 2) -> threading.Thread:
    """Do `then` once all ranks have left their mark."""

    def wait() -> None:
        deadline = time.monotonic() + 60
        while len(list(folder.iterdir())) < ranks and time.monotonic() < deadline:
            time.sleep(0.01)
        then()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def launch_and_stop(folder: Path, text: str, *numbers: int, grace_s: float = 60.0) -> tuple[LaunchResult, float]:
    """Return how two ranks end that are sent signals through their launcher, and after how many seconds."""
    sent: list[float] = []

    def send() -> None:
        for number in numbers:
            sent.append(time.monotonic())
            os.kill(os.getpid(), number)
            time.sleep(0.2)

    thread = marked(folder, send)
    ended = launch(program(SAVING + text), 2, {**os.environ, "TEST_MARKS": str(folder)}, grace_s=grace_s)
    took = time.monotonic() - sent[0]
    thread.join(timeout=60)
    return ended, took


# matrix: 19
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_a_stop_signal_is_forwarded_and_saved_ranks_exit_with_75(tmp_path: Path, number: int) -> None:
    text = "time.sleep(0.5)\nopen(os.environ['TEST_MARKS'] + f'/saved{rank}', 'w').write(asked[0])\nsys.exit(75)"
    assert launch_and_stop(tmp_path, text, number)[0] == LaunchResult(PREEMPTED)
    told = "SIGTERM" if number == signal.SIGINT else signal.Signals(number).name
    assert [(tmp_path / f"saved{rank}").read_text() for rank in range(2)] == [told] * 2
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_rank_that_ignores_the_signal_is_killed_after_the_grace_time(tmp_path: Path) -> None:
    ended, took = launch_and_stop(tmp_path, "time.sleep(600 * rank)\nsys.exit(75)", signal.SIGUSR1, grace_s=1.0)
    assert ended.code == 128 + signal.SIGKILL and not ended.was_lost
    assert ended.sentence.startswith("rank 1 of 2 had not stopped 1 s after SIGUSR1 and was killed (")
    assert 1.0 < took < 6.0


# matrix: 20
def test_a_second_ctrl_c_kills_at_once(tmp_path: Path) -> None:
    ended, took = launch_and_stop(tmp_path, "time.sleep(600)", signal.SIGINT, signal.SIGINT)
    assert ended == LaunchResult(130)
    assert took < 5.0


@pytest.mark.usefixtures("brief")
def test_a_preempted_rank_gives_the_others_time_to_save() -> None:
    """Only one rank received the signal, from outside; the others stop with it."""
    text = "sys.exit(75) if rank == 1 else (time.sleep(1.5), sys.exit(75))"  # longer than after a failure
    assert launch(program(text), 2, environ()) == LaunchResult(PREEMPTED)


def test_an_ignored_signal_is_not_forwarded(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        thread = marked(tmp_path, lambda: os.kill(os.getpid(), signal.SIGHUP))
        # Our handler in the rank, which inherits that SIGHUP is ignored, would note it.
        text = SAVING.replace(
            "while not asked", "until = time.monotonic() + 1\nwhile not asked and time.monotonic() < until"
        )
        ended = launch(program(text + "sys.exit(len(asked))"), 2, {**os.environ, "TEST_MARKS": str(tmp_path)})
        thread.join(timeout=60)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert ended == LaunchResult(0)


def test_a_run_whose_rank_0_ended_well_is_not_lost_with_another_rank() -> None:
    ended = launch(program("os.kill(os.getpid(), 11) if rank == 1 else None"), 2, environ())
    assert (ended.code, ended.was_lost) == (128 + signal.SIGSEGV, False)


def test_a_rank_reads_its_attempt_number(tmp_path: Path) -> None:
    text = f"open('{tmp_path}/attempt', 'w').write(os.environ['PACELINE_ATTEMPT'])"
    assert launch(program(text), 1, environ(), attempt=3) == LaunchResult(0)
    assert (tmp_path / "attempt").read_text() == "3"


# matrix: 13
def test_a_port_can_be_used_again_at_once() -> None:
    """What a killed rank 0 leaves behind on its port does not keep the next attempt from it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    text = """
import socket
if rank == 0:
    met = socket.socket(fileno=int(os.environ["PACELINE_STORE_FD"])).accept()
    os.kill(os.getpid(), 9)
socket.create_connection(("127.0.0.1", int(os.environ["MASTER_PORT"]))).recv(1)
sys.exit(1)
"""
    for attempt in range(3):
        assert launch(program(text), 2, environ(), port=port, attempt=attempt).was_lost


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (signal.SIGTERM, LaunchResult(143, "SIGTERM came when 2 of 9 ranks had been started, so all were ended")),
        (signal.SIGINT, LaunchResult(130)),
    ],
)
def test_a_signal_while_ranks_are_started_ends_those_and_starts_no_other(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals, expected: LaunchResult
) -> None:
    """Of nine ranks, which ignore it, two have been started when a real signal arrives."""
    processes, start = [], launcher._start

    def start_and_signal(*asked):
        processes.append(start(*asked))
        if len(processes) == 2:
            os.kill(os.getpid(), number)
        return processes[-1]

    monkeypatch.setattr(launcher, "_start", start_and_signal)
    text = "[signal.signal(number, signal.SIG_IGN) for number in (signal.SIGTERM, signal.SIGINT)]; time.sleep(600)"
    assert launch(program(text), 9, environ(), grace_s=5.0) == expected
    assert [process.returncode for process in processes] == [-signal.SIGKILL] * 2


def test_nccls_flight_recorder_writes_into_the_run_directory() -> None:
    variables = flight_recorder_environ(Path("runs/one"))
    assert variables == {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_FR_DUMP_TEMP_FILE": "runs/one/nccl.rank"}
