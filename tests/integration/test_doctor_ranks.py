"""`paceline doctor` on real ranks of this machine: what is between them, and a rank that is not like the others."""

import json
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

PLANTED = Path(__file__).parents[1] / "planted.py"
TIMEOUT_S = 60


def amiss(rows: list[dict]) -> list[tuple[str, str]]:
    return [(row["name"], row["state"]) for row in rows if row["state"] != "ok"]


def test_two_healthy_ranks_are_timed_and_nothing_is_amiss_between_them(paceline) -> None:
    ended = paceline("doctor", "--ranks", "2", "--json")
    rows = {row["name"]: row for row in json.loads(ended.out)["ranks"]}
    assert list(rows) == ["ranks", "all-reduce"] and not amiss([*rows.values()]), rows
    assert rows["ranks"]["found"].startswith("2 ranks joined, on 1 host: ")
    assert "Gbit/s" in rows["all-reduce"]["found"] and "2 ranks of one host" in rows["all-reduce"]["found"]


@pytest.fixture
def told(forking, tmp_path: Path) -> Callable[..., tuple[list[int], list[dict]]]:
    """Return a function that lets ranks with these faults (none: "") look, to their exit codes and what rank 0 says."""

    def ended(*faults: str) -> tuple[list[int], list[dict]]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        number = str(len(faults))
        world = {"WORLD_SIZE": number, "LOCAL_WORLD_SIZE": number, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        commands = [(str(PLANTED), fault) if fault else ("-P", "-m", "paceline") for fault in faults]
        started = [
            forking.start((*words, "doctor", "--json"), tmp_path, {**world, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank, words in enumerate(commands)
        ]
        try:
            said = [process.communicate(timeout=TIMEOUT_S) for process in started]
        finally:
            for process in started:
                process.kill()
                process.wait()
        assert [out for out, _ in said[1:]] == [""] * (len(faults) - 1) and not [err for _, err in said if err], said
        return [process.returncode for process in started], json.loads(said[0][0])["ranks"]

    return ended


def test_a_rank_with_another_torch_is_named_and_nothing_is_sent(told) -> None:
    codes, rows = told("", "", "torch")
    assert codes == [1, 0, 0]
    assert amiss(rows) == [("versions of torch", "wrong")]
    (found,) = [row["found"] for row in rows if row["state"] == "wrong"]
    assert "2.0.1: rank 2 (" in found and ": ranks 0-1 (" in found
    assert "all-reduce" not in [row["name"] for row in rows]


def test_a_rank_that_no_message_comes_from_ends_in_a_finding_that_names_it(told) -> None:
    codes, rows = told("impatience", "silence")
    assert codes == [1, 0]
    assert amiss(rows) == [("all-reduce", "wrong")]
    (found,) = [row["found"] for row in rows if row["state"] == "wrong"]
    assert found.startswith("fails within 3.00 s: rank 0 (") and "Timed out waiting 3000ms" in found
    assert "rank 1 (" in found and found.endswith(") does not respond")


def test_a_rank_that_dies_after_the_ranks_have_met_is_named_and_the_others_are_judged(told) -> None:
    codes, rows = told("impatience", "torch", "death")
    assert codes == [1, 0, -signal.SIGKILL]
    assert amiss(rows) == [("ranks", "wrong"), ("versions of torch", "wrong")]
    assert rows[0]["found"] == "3 ranks joined; rank 2 died or hung since"
