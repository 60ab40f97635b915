"""`paceline doctor` on real ranks of this machine: the connections between ranks, and ranks that differ."""

import json
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

PLANTED = Path(__file__).parents[1] / "planted.py"
TIMEOUT_S = 60


def problems(rows: list[dict]) -> list[tuple[str, str]]:
    return [(row["name"], row["state"]) for row in rows if row["state"] != "ok"]


def test_two_healthy_ranks_have_a_bandwidth_and_no_problem(paceline) -> None:
    completed = paceline("doctor", "--ranks", "2", "--json")
    rows = {row["name"]: row for row in json.loads(completed.out)["ranks"]}
    assert list(rows) == ["ranks", "all-reduce"] and not problems([*rows.values()]), rows
    assert rows["ranks"]["found"].startswith("2 ranks joined, on 1 host: ")
    assert "Gbit/s" in rows["all-reduce"]["found"] and "2 ranks of one host" in rows["all-reduce"]["found"]


@pytest.fixture
def run_doctor(forking, tmp_path: Path) -> Callable[..., tuple[list[int], list[dict]]]:
    """Return a function that runs `doctor` on ranks with faults ("": none); it returns exit codes and rows."""

    def run(*faults: str) -> tuple[list[int], list[dict]]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        number = str(len(faults))
        world = {"WORLD_SIZE": number, "LOCAL_WORLD_SIZE": number, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        commands = [(str(PLANTED), fault) if fault else ("-P", "-m", "paceline") for fault in faults]
        started = [
            forking.start((*args, "doctor", "--json"), tmp_path, {**world, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank, args in enumerate(commands)
        ]
        try:
            output = [process.communicate(timeout=TIMEOUT_S) for process in started]
        finally:
            for process in started:
                process.kill()
                process.wait()
        assert [out for out, _ in output[1:]] == [""] * (len(faults) - 1) and not [err for _, err in output if err], (
            output
        )
        return [process.returncode for process in started], json.loads(output[0][0])["ranks"]

    return run


def test_a_rank_with_another_torch_version_is_named_and_no_collective_runs(run_doctor) -> None:
    codes, rows = run_doctor("", "", "torch")
    assert codes == [1, 0, 0]
    assert problems(rows) == [("versions of torch", "error")]
    (found,) = [row["found"] for row in rows if row["state"] == "error"]
    assert "2.0.1: rank 2 (" in found and ": ranks 0-1 (" in found
    assert "all-reduce" not in [row["name"] for row in rows]


def test_a_rank_that_does_not_respond_is_named(run_doctor) -> None:
    codes, rows = run_doctor("impatience", "silence")
    assert codes == [1, 0]
    assert problems(rows) == [("all-reduce", "error")]
    (found,) = [row["found"] for row in rows if row["state"] == "error"]
    assert found.startswith("fails within 3.00 s: rank 0 (") and "Timed out waiting 3000ms" in found
    assert "rank 1 (" in found and found.endswith(") does not respond")


def test_a_rank_that_dies_after_joining_is_named_and_the_others_are_checked(run_doctor) -> None:
    codes, rows = run_doctor("impatience", "torch", "death")
    assert codes == [1, 0, -signal.SIGKILL]
    assert problems(rows) == [("ranks", "error"), ("versions of torch", "error")]
    assert rows[0]["found"] == "3 ranks joined; rank 2 died or hung since"
