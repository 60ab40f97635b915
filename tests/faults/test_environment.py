"""Wrong hosts, ports and interfaces are reported within seconds, and a run listens only on this machine."""

import ipaddress
import os
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

SMALL = ("train", "model.width=0.1", "data.batch_size=12", "parallel.threads=1", "log.tensorboard=off")
SECOND_NODE = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
TIMEOUT_S = 2
WITHIN_S = 10


@pytest.fixture
def free_port() -> Iterator[str]:
    """A port that nothing listens on and that no other process can take: bound, but not listened on."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield str(held.getsockname()[1])


def error_of(ranks, *args: str, num_ranks: int = 1, absent: Sequence[int] = (), **environ: str) -> str:
    """Run ranks that cannot connect; return the one line that one of them prints within the time-out and a margin."""
    started = time.monotonic()
    completed = ranks(*SMALL, f"parallel.timeout={TIMEOUT_S}s", *args, ranks=num_ranks, absent=absent, **environ)
    assert time.monotonic() - started < WITHIN_S
    # A start that lasts names what it waits for.
    assert 2 in completed.codes and 0 not in completed.codes, completed
    assert completed.out in ("", "connecting the ranks ...\n"), completed
    output = [line for errors in completed.errors for line in errors.splitlines()]
    assert len(output) == 1 and output[0].startswith("error: "), completed.errors
    return output[0]


# matrix: 42
def test_a_host_without_an_address_is_named(ranks, free_port: str) -> None:
    output = error_of(ranks, **SECOND_NODE, MASTER_ADDR="no-such-host.invalid", MASTER_PORT=free_port)
    assert output.startswith("error: MASTER_ADDR: 'no-such-host.invalid' cannot be resolved on ")


# matrix: 42
def test_an_unreachable_rank_0_is_named(ranks, free_port: str) -> None:
    output = error_of(ranks, **SECOND_NODE, MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port)
    assert output.startswith(f"error: MASTER_ADDR: rank 1 cannot reach rank 0 at 127.0.0.1:{free_port}")


# matrix: 42
@pytest.mark.parametrize("missing", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_missing_rank_is_named(ranks, missing: int) -> None:
    assert f"rank {missing}" in error_of(ranks, num_ranks=3, absent=(missing,))


# matrix: 42
def test_a_missing_interface_is_named(ranks) -> None:
    output = error_of(ranks, num_ranks=2, GLOO_SOCKET_IFNAME="nowhere0")
    assert "GLOO_SOCKET_IFNAME: 'nowhere0' is not a network interface" in output and "lo" in output


# matrix: 47
def test_a_run_listens_only_on_the_loopback_interface(paceline, tmp_path: Path, family_of, clean) -> None:
    environ = {name: "" for name in ("GLOO_SOCKET_IFNAME",) if name in os.environ}
    process = paceline.start(*SMALL, "train.epochs=500", "--ranks", "2", "--run-dir", "run", **environ)
    try:
        steps = tmp_path / "run" / "steps.jsonl"
        deadline = time.monotonic() + 120
        while not (steps.exists() and steps.stat().st_size) and time.monotonic() < deadline:
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
        listening = [
            connection.laddr
            for each in family_of(tmp_path)
            for connection in each.net_connections(kind="inet")
            if connection.status == psutil.CONN_LISTEN or (connection.type == socket.SOCK_DGRAM and connection.laddr)
        ]
    finally:
        process.kill()
        process.communicate(timeout=30)
    assert len(listening) >= 3  # the store, and gloo on each rank
    assert [address for address in listening if not ipaddress.ip_address(address.ip).is_loopback] == []
    clean(tmp_path, within_s=10)
