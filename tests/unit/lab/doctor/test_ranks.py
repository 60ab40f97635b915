"""Missing ranks, lost ranks and a used port: one finding per fault, on rank 0."""

import contextlib
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from paceline.core.errors import PacelineError, PeerLostError, WorldError
from paceline.core.world import World
from paceline.lab.doctor import ranks
from paceline.lab.doctor.check import DoctorFinding
from paceline.lab.doctor.compare_ranks import RankFacts
from paceline.lab.doctor.ranks import check_ranks, exchange_facts


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Return a port that another program listens on; ranks are waited for a moment only."""
    monkeypatch.setattr(ranks, "_RENDEZVOUS_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield other.getsockname()[1]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def test_a_rank_that_does_not_come_is_named(taken: int) -> None:
    found = check_ranks(World(world_size=3, local_world_size=3, master_port=free_port()), [])
    assert found is not None
    (missing,) = found
    assert (missing.name, missing.state) == ("ranks", "wrong")
    assert missing.found == "WORLD_SIZE: 3, but ranks 1, 2 did not come within 0.2s"
    assert "MASTER_PORT" in missing.advice


def test_a_port_that_is_taken_is_reported_once(taken: int) -> None:
    world = World(world_size=2, local_world_size=2, master_port=taken)
    (found,) = check_ranks(world, []) or ()
    assert (found.name, found.state) == ("ranks", "wrong") and f"{taken} is in use" in found.found
    assert check_ranks(world, [DoctorFinding.problem("port", f"{taken} is in use by python", "end it")]) == ()


def test_a_rank_that_does_not_reach_rank_0_reports_it_itself(taken: int) -> None:
    with pytest.raises(WorldError, match=r"^MASTER_ADDR: rank 1 cannot reach rank 0") as caught:
        check_ranks(World(rank=1, world_size=2, local_rank=1, local_world_size=2, master_port=free_port()), [])
    assert caught.value.is_claimed


LOST = PeerLostError("rank 1 (b) was lost", is_explained=False)
SLOW = DoctorFinding.warning("all-reduce", "0.1 Gbit/s", "look at the cable")
PAIR = World(world_size=2, local_world_size=1, master_addr="10.0.0.1", master_port=29_500)


@pytest.fixture
def met(monkeypatch: pytest.MonkeyPatch):
    """Return a function that lets two ranks meet, of which rank 0 finds something, until there is an error."""

    def ends(error: PacelineError, *findings: DoctorFinding) -> None:
        @contextlib.contextmanager
        def meeting(world: World, section: object) -> Iterator[Any]:
            yield SimpleNamespace(world=world)
            raise error

        monkeypatch.setattr(ranks, "rendezvous", meeting)
        monkeypatch.setattr(ranks, "_iter_findings", lambda *arguments: iter(findings))

    return ends


def test_a_rank_that_is_lost_is_a_finding_beside_those_before_it(met) -> None:
    met(LOST, SLOW)
    assert check_ranks(PAIR, []) == (SLOW, DoctorFinding.problem("ranks", "rank 1 (b) was lost", ranks._OUTPUT_ADVICE))
    silent = DoctorFinding.problem("ranks", "2 ranks joined; rank 1 died or hung since", "see")
    met(LOST, silent)
    assert check_ranks(PAIR, []) == (silent,), "one finding for one fault"


def test_a_rank_whose_peer_has_exited_reports_it_itself(met) -> None:
    met(LOST)
    with pytest.raises(PeerLostError):
        check_ranks(World(rank=1, world_size=2, master_addr="10.0.0.1", master_port=29_500), [])


def test_ranks_that_are_silent_are_named_beside_what_others_find() -> None:
    store = HashStore()
    shm = DoctorFinding.warning("shared memory", "none", "mount it")
    exchange_facts(store, RankFacts(3, "b", "b", local_rank=1, own=(shm,)), 4, 0.01)
    said = exchange_facts(store, RankFacts(0, "a", "a"), 4, 0.01)
    assert [each.rank for each in said] == [0, 3]
    silent, other = ranks._compare_reported_ranks(said, 4)
    assert (silent.name, silent.state) == ("ranks", "wrong")
    assert silent.found == "4 ranks joined; ranks 1, 2 died or hung since"
    assert other == shm.with_location("rank 3 (b)")


def test_what_was_timed_before_a_failure_is_reported(met, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(here: object, device: object) -> None:
        raise RuntimeError("Timed out waiting")

    failed = DoctorFinding.problem("all-reduce", "fails", "see")
    monkeypatch.setattr(ranks, "process_group", lambda *arguments: contextlib.nullcontext())
    monkeypatch.setattr(ranks, "set_threads", lambda section, world: None)
    monkeypatch.setattr(ranks, "measure_all_reduces", lambda world, device, seconds_per_size: None)
    monkeypatch.setattr(ranks, "rate_all_reduce", lambda measured, said: SLOW)
    monkeypatch.setattr(ranks, "_time_host_pairs", fail)
    monkeypatch.setattr(ranks, "_build_all_reduce_failure", lambda here, join_s: failed)
    here = ranks._CheckSession(ranks.RankStore(PAIR, ranks.timedelta(1)), HashStore(), [], [0, 1], ranks.RankClocks())
    assert ranks._time_links(here, ranks.Parallel(), ranks.torch.device("cpu")) == [SLOW, failed]


def test_many_ranks_have_longer_to_join() -> None:
    assert [ranks._compute_collective_timeout_s(World(world_size=num)) for num in (2, 240, 1000)] == [60.0, 60.0, 250.0]
