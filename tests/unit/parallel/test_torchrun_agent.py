"""`parallel.torchrun_agent`: its exit code is that of the ranks."""

import signal
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from paceline.parallel.torchrun_agent import exit_code, host_store_on_first_node, main


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([2], 2),
        ([1, 3], 3),
        ([75, -15, 4], 4),
        ([1, -9], 137),
        ([-15, 1], 1),
        ([1, 75], 1),
        ([75, 75], 75),
        ([75, -15], 75),
        ([-15], 143),
    ],
)
def test_the_exit_code_is_that_of_the_most_informative_rank(codes: list[int], expected: int) -> None:
    assert exit_code(codes) == expected


@pytest.mark.parametrize(
    ("backend", "configured", "node_rank", "expected"),
    [
        ("c10d", "", "0", "is_host=1"),
        ("c10d", "join_timeout=9", 1, "join_timeout=9,is_host=0"),
        ("c10d", "is_host=1", 1, "is_host=1"),
        ("static", "", 0, ""),
    ],
)
def test_the_first_node_hosts_the_store_by_default(
    backend: str, configured: str, node_rank: object, expected: str
) -> None:
    options = SimpleNamespace(rdzv_backend=backend, rdzv_conf=configured, node_rank=node_rank)
    host_store_on_first_node(options)
    assert options.rdzv_conf == expected


@pytest.fixture
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put back what torchrun leaves changed: it expects to be a process of its own."""
    monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    asked = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    handlers = {number: signal.getsignal(number) for number in asked}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("_as_before")
@pytest.mark.parametrize(
    ("program", "expected"),
    [
        pytest.param("exit 0", 0, marks=pytest.mark.long),
        pytest.param("exit 2", 2, marks=pytest.mark.long),
        ("[ $RANK = 1 ] && exit 3; sleep 20; exit 1", 3),
        ("kill -9 $$$$", 137),
    ],
)
def test_real_ranks_give_their_exit_code(program: str, expected: int) -> None:
    """The ranks are shells, so that they cost no import of torch; the one that sleeps is ended for its peer's sake.

    torchrun makes one `$` of two.
    """
    options = ["--standalone", "--nproc-per-node=2", "--monitor-interval=0.05", "--no-python"]
    assert main([*options, "sh", "-c", program]) == expected
