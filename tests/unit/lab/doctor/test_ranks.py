"""Missing ranks, lost ranks and a used port: one finding per fault, on rank 0."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from paceline.core.errors import PacelineError, PeerLostError, WorldError
from paceline.core.world import World
from paceline.lab.doctor import ranks
from paceline.lab.doctor.check import DoctorFinding
from paceline.lab.doctor.ranks import RankFacts, check_ranks, collect_facts, exchange_facts


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
    assert (missing.name, missing.state) == ("ranks", "error")
    assert missing.found == "WORLD_SIZE: 3, but ranks 1, 2 did not come within 0.2s"
    assert "MASTER_PORT" in missing.advice


def test_a_port_that_is_taken_is_reported_once(taken: int) -> None:
    world = World(world_size=2, local_world_size=2, master_port=taken)
    (found,) = check_ranks(world, []) or ()
    assert (found.name, found.state) == ("ranks", "error") and f"{taken} is in use" in found.found
    assert check_ranks(world, [DoctorFinding("port", "error", f"{taken} is in use by python", "end it")]) == ()


def test_a_rank_that_does_not_reach_rank_0_reports_it_itself(taken: int) -> None:
    with pytest.raises(WorldError, match=r"^MASTER_ADDR: rank 1 cannot reach rank 0") as caught:
        check_ranks(World(rank=1, world_size=2, local_rank=1, local_world_size=2, master_port=free_port()), [])
    assert caught.value.is_claimed


LOST = PeerLostError("rank 1 (b) was lost", is_explained=False)
SLOW = DoctorFinding("all-reduce", "warning", "0.1 Gbit/s", "look at the cable")
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
    assert check_ranks(PAIR, []) == (SLOW, DoctorFinding("ranks", "error", "rank 1 (b) was lost", ranks._OUTPUT_ADVICE))
    silent = DoctorFinding("ranks", "error", "2 ranks joined; rank 1 died or hung since", "see")
    met(LOST, silent)
    assert check_ranks(PAIR, []) == (silent,), "one finding for one fault"


def test_a_rank_whose_peer_has_exited_reports_it_itself(met) -> None:
    met(LOST)
    with pytest.raises(PeerLostError):
        check_ranks(World(rank=1, world_size=2, master_addr="10.0.0.1", master_port=29_500), [])


def test_ranks_that_are_silent_are_named_beside_what_others_find(monkeypatch) -> None:
    store = HashStore()
    shm = DoctorFinding("shared memory", "warning", "none", "mount it")
    monkeypatch.setattr(ranks, "_FACTS_TIMEOUT_S", 0.01)
    exchange_facts(store, RankFacts(rank=3, host="b", machine="b", own=(shm,)), 4)
    said = exchange_facts(store, RankFacts(rank=0, host="a", machine="a"), 4)
    assert [each.rank for each in said] == [0, 3]
    silent, other = ranks.compare_ranks(said, 4)
    assert (silent.name, silent.state) == ("ranks", "error")
    assert silent.found == "4 ranks joined; ranks 1, 2 died or hung since"
    assert other == shm.with_location("rank 3 (b)")


def facts(rank: int) -> RankFacts:
    world = World(rank=rank, world_size=3, local_rank=rank, local_world_size=3)
    return collect_facts(world, [SLOW], {}, ranks.torch.device("cpu"), "")


def test_ranks_of_one_checkout_at_different_commits_have_different_versions(monkeypatch) -> None:
    """An editable install keeps its version; the digest of the files tells them apart."""
    machine = {"paceline": "0.1.1.dev5+g1a2b3c4", "paceline_sha256": "1a2b"}
    monkeypatch.setattr(ranks, "describe_machine", lambda: machine)
    assert facts(0).versions == {"paceline": "0.1.1.dev5+g1a2b3c4 1a2b"}


def test_rank_0_hears_of_all_and_the_others_know_themselves() -> None:
    store, found = HashStore(), {}
    threads = [
        threading.Thread(target=lambda rank=rank: found.update({rank: exchange_facts(store, facts(rank), 3)}))
        for rank in (2, 1, 0)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert [each.rank for each in found[0]] == [0, 1, 2]
    assert [[each.rank for each in found[rank]] for rank in (1, 2)] == [[1], [2]]
    assert found[0][2] == found[2][0] and found[0][2].own == (SLOW,) and found[0][2].versions["torch"]
    assert len({each.machine for each in found[0]}) == 1


def test_many_ranks_have_longer_to_join() -> None:
    assert [ranks._compute_collective_timeout_s(World(world_size=num)) for num in (2, 240, 1000)] == [60.0, 60.0, 250.0]
