"""Ranks that rendezvous, send heartbeats and wait, without training: requests, errors and losses reach all ranks."""

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

WATCHING = Path(__file__).with_name("watchdog_script.py")
TIMEOUT_S = 60
STEP = 60

Ends = list[tuple[int, str, str]]


@pytest.fixture
def ranks_with(forking, tmp_path: Path) -> Callable[..., Ends]:
    """Return a function that starts `ranks` ranks, one of which has `fault` at step 60.

    It returns exit code, stdout and stderr of each.
    """

    def run(fault: str, rank: int, ranks: int = 3, timeout_s: int = 8) -> Ends:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        command = [str(WATCHING), str(tmp_path), fault, str(rank), str(STEP), str(timeout_s)]
        world = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        started = [
            forking.start(command, tmp_path, {**world, "RANK": str(each), "LOCAL_RANK": str(each)})
            for each in range(ranks)
        ]
        try:
            output = [process.communicate(timeout=TIMEOUT_S) for process in started]
        finally:
            for process in started:
                process.kill()
                process.wait()
        return [(process.returncode, *each) for process, each in zip(started, output, strict=True)]

    return run


def test_a_request_to_one_rank_reaches_all(ranks_with, tmp_path: Path) -> None:
    ends = ranks_with("is_asked", rank=1)
    assert [code for code, _, _ in ends] == [0, 0, 0], ends
    assert ["asked SIGTERM" in out for _, out, _ in ends] == [True, False, True]
    assert not list(tmp_path.iterdir())


# matrix: 25
@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_rank_with_an_error_reports_it(ranks_with, rank: int) -> None:
    """Rank 0 hosts the store, and the others nevertheless learn of its error."""
    ends = ranks_with("refuses", rank)
    assert [code for code, _, _ in ends] == [3 if each == rank else 1 for each in range(3)], ends
    assert [err for _, _, err in ends if err] == ["error: PacelineError: data.x: 3 is wrong (try 4)\n"]


# matrix: 24
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_ends_early_is_named_by_a_peer(ranks_with, rank: int) -> None:
    ends = ranks_with("ends", rank)
    errors = [err for _, _, err in ends if err]
    assert len(errors) == 1, ends
    assert f"rank {rank} ended after step {STEP} while others continued, at step " in errors[0], ends


# matrix: 14
def test_a_rank_in_an_endless_loop_is_named_by_waiting_ranks(ranks_with) -> None:
    ends = ranks_with("busy", rank=1, timeout_s=3)
    errors = [err for _, _, err in ends if err]
    assert [code for code, _, _ in ends] == [1, 1, 1] and len(errors) == 1, ends
    assert f"at step {STEP} in data_wait" in errors[0] and "rank 1" in errors[0], errors


@pytest.mark.parametrize(
    ("rank", "ranks", "message"), [(1, 3, "rank 1 of 3 has other"), (1, 2, "ranks 0, 1 of 2 have different")]
)
def test_weights_that_differ_slightly_are_reported(ranks_with, rank: int, ranks: int, message: str) -> None:
    ends = ranks_with("weights", rank, ranks)
    errors = [err for _, _, err in ends if err]
    assert len(errors) == 1 and message in errors[0] and f"at step {STEP}, first in weight" in errors[0], ends
