"""Local ranks: started together, ended together. The ranks here are small programs without torch."""

import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from paceline.core.errors import WorldError
from paceline.parallel.launch import launch


def program(text: str) -> list[str]:
    return [sys.executable, "-c", f"import os, sys, time, signal\nrank = int(os.environ['RANK'])\n{text}"]


def environ() -> dict[str, str]:
    return dict(os.environ)


def test_every_rank_gets_its_place_and_success_is_zero(tmp_path: Path) -> None:
    text = f"open('{tmp_path}/' + os.environ['RANK'], 'w').write(os.environ['WORLD_SIZE'] + os.environ['LOCAL_RANK'])"
    assert launch(program(text), 3, environ()) == (0, "")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"0": "30", "1": "31", "2": "32"}


@pytest.mark.parametrize(("codes", "expected"), [([0, 2], 2), ([2, 1, 1], 2), ([1, 4], 4), ([0, 1], 1), ([75, 75], 75)])
def test_the_code_of_the_rank_that_explained_itself_is_the_runs(codes: list[int], expected: int) -> None:
    assert launch(program(f"sys.exit({codes}[rank])"), len(codes), environ()) == (expected, "")


def test_a_killed_rank_is_named_and_the_others_end_with_it() -> None:
    started = time.monotonic()
    code, sentence = launch(program("os.kill(os.getpid(), 9) if rank == 1 else time.sleep(600)"), 3, environ())
    assert code == 128 + signal.SIGKILL
    assert sentence == "rank 1 of 3 was killed by SIGKILL, so all ranks were ended"
    assert time.monotonic() - started < 10


def test_ranks_that_outlive_a_failure_are_ended(tmp_path: Path) -> None:
    text = f"open('{tmp_path}/pid', 'w').write(str(os.getpid())) if rank == 0 else None\n"
    text += "time.sleep(600) if rank == 0 else (time.sleep(0.5), sys.exit(3))"
    assert launch(program(text), 2, environ()) == (3, "")
    pid = int((tmp_path / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_rank_0_is_handed_the_open_socket_that_all_are_told_of(tmp_path: Path) -> None:
    text = "import socket\nfd = int(os.environ['PACELINE_STORE_FD'])\n"
    text += "name = socket.socket(fileno=fd).getsockname()[1] if rank == 0 else fd\n"
    text += f"open('{tmp_path}/' + str(rank), 'w').write(f\"{{name}} {{os.environ['MASTER_PORT']}}\")"
    assert launch(program(text), 2, environ()) == (0, "")
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
