"""Rendezvous, and the errors if ranks are missing: one process, and stores without a network."""

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from paceline.core.errors import PeerLostError, RecipeError, WorldError
from paceline.core.world import World
from paceline.parallel.heartbeat import Heartbeats
from paceline.parallel.process_group import RankStore, local_rank_zero_first, rendezvous
from paceline.parallel.rendezvous import open_store, wait_for_all_ranks
from paceline.recipe.schema.train import Parallel

SOON = timedelta(seconds=0.2)


def test_a_single_rank_connects_to_nothing_and_raises_its_errors() -> None:
    with pytest.raises(RecipeError, match="mine") as caught, rendezvous(World.single(), Parallel()) as rank_store:
        assert rank_store.store is None and rank_store.broadcast("name", "value") == "value"
        raise RecipeError("mine")
    assert caught.value.is_claimed


def test_other_errors_are_raised_unchanged() -> None:
    with pytest.raises(RuntimeError, match="shapes"), rendezvous(World.single(), Parallel()):
        raise RuntimeError("shapes do not match")


def test_missing_ranks_are_named_in_order() -> None:
    store = HashStore()
    store.set("round1/arrived/2", "")
    with pytest.raises(
        WorldError, match=r"^WORLD_SIZE: 4, but ranks 1, 3 did not come within 0.2s \(start it with MASTER_"
    ):
        wait_for_all_ranks(World(rank=0, world_size=4), store, SOON)
    assert store.get("round1/missing") == b"ranks 1, 3"


def test_the_other_ranks_read_which_ranks_are_missing() -> None:
    store = HashStore()
    with ThreadPoolExecutor() as ranks:
        main = ranks.submit(wait_for_all_ranks, World(rank=0, world_size=3), store, SOON)
        with pytest.raises(WorldError, match="rank 2 did not come") as caught:
            wait_for_all_ranks(World(rank=1, world_size=3), store, SOON)
        assert "rank 2 did not come" in str(main.exception())
    assert not caught.value.is_claimed


def test_rank_0_waits_until_the_others_have_read_which_are_missing() -> None:
    """The store may end with it, and a rank that had not read it would report that it found no rank 0."""
    store = HashStore()
    store.set("round1/arrived/1", "")
    with ThreadPoolExecutor() as ranks:
        main = ranks.submit(wait_for_all_ranks, World(rank=0, world_size=3), store, SOON)
        store.wait(["round1/missing"], timedelta(seconds=20))
        with pytest.raises(TimeoutError):
            main.exception(timeout=0.2)
        store.set("round1/acknowledged/1", "")
        assert "rank 2 did not come" in str(main.exception(timeout=1))


def test_a_rank_that_finds_no_rank_0_reports_it(monkeypatch) -> None:
    monkeypatch.setattr("paceline.parallel.rendezvous._EXTRA_WAIT_S", 0.0)
    with pytest.raises(WorldError, match=r"^MASTER_ADDR: rank 1 of 3 found no rank 0 at 127\.0\.0\.1") as caught:
        wait_for_all_ranks(World(rank=1, world_size=3), HashStore(), SOON)
    assert caught.value.is_claimed


def joined_rounds(store: HashStore, world_size: int) -> set[str]:
    """Let `world_size` ranks join a round in `store`; return the names of the rounds they joined."""
    worlds = [World(rank=rank, world_size=world_size) for rank in range(world_size)]
    with ThreadPoolExecutor(world_size) as ranks:
        return set(ranks.map(lambda world: wait_for_all_ranks(world, store, timedelta(seconds=20)), worlds))


@pytest.fixture
def store() -> Iterator[HashStore]:
    """Return a store that wakes who waits for a key. One in memory does so when some key is set, not when one is added
    to, as one with a server does."""
    store, is_over = HashStore(), threading.Event()

    def wake() -> None:
        while not is_over.wait(0.01):
            store.set("waking", "")

    with ThreadPoolExecutor(1) as waking:
        waking.submit(wake)
        yield store
        is_over.set()


def test_restarted_ranks_use_a_new_round_of_the_old_store(store: HashStore) -> None:
    """The order in which they come is the threads', and each of the later ranks finds the keys of those before."""
    assert [joined_rounds(store, 4) for _ in range(3)] == [{"round1"}, {"round2"}, {"round3"}]


@pytest.mark.parametrize("old_keys", [{"arrived/0": ""}, {"arrived/0": "", "arrived/1": "", "missing": "rank 2"}])
def test_an_abandoned_round_is_not_joined(store: HashStore, old_keys: dict[str, str]) -> None:
    store.add("paceline/rounds", 1)
    for name, value in old_keys.items():
        store.set(f"round1/{name}", value)
    worlds = [World(rank=rank, world_size=3) for rank in range(3)]
    with ThreadPoolExecutor(3) as ranks:
        later = [ranks.submit(wait_for_all_ranks, world, store, timedelta(seconds=20)) for world in worlds[1:]]
        while not old_keys.keys() & {"missing"} and not store.check(["round1/arrived/1", "round1/arrived/2"]):
            pass  # they have come to it before rank 0 calls another
        assert wait_for_all_ranks(worlds[0], store, timedelta(seconds=20)) == "round2"
        assert [each.result() for each in later] == ["round2", "round2"]


def test_a_long_wait_is_reported_once_with_the_fix(monkeypatch) -> None:
    monkeypatch.setattr("paceline.parallel.rendezvous.NOTICE_S", 0.05)
    said: list[str] = []
    with pytest.raises(WorldError):
        wait_for_all_ranks(World(rank=0, world_size=2, master_port=1234), HashStore(), SOON, said.append)
    assert said == [
        "waiting for rank 1 of 2 (start it with MASTER_ADDR=127.0.0.1 and MASTER_PORT=1234, as the others were)"
    ]


def test_a_port_without_a_listener_is_named() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        with pytest.raises(WorldError, match=f"^MASTER_ADDR: rank 1 cannot reach rank 0 at 127.0.0.1:{port}") as caught:
            open_store(World(rank=1, world_size=2, master_port=port), SOON)
    assert caught.value.is_claimed


def test_a_lost_peer_of_one_rank_is_still_explained() -> None:
    """A world of one has no peers, so what sounds like one that is lost is its own error."""
    with pytest.raises(RuntimeError, match="Connection closed by peer"), rendezvous(World.single(), Parallel()):
        raise RuntimeError("Connection closed by peer")


class Pair:
    """Rank 0, which has come to a meeting and waits for rank 1 to read; rank 1 is what a test makes of it."""

    def __init__(self) -> None:
        self.store, beats = HashStore(), HashStore()
        self.worlds = [World(rank=rank, world_size=2, local_world_size=1) for rank in range(2)]
        self.beats = [Heartbeats(world, beats) for world in self.worlds]
        self.looks = 0
        self.store.add("paceline/num_node_mains", 1)  # rank 1 reads too, on another host

    def meet(self, world: World, timeout: timedelta) -> RankStore:
        return RankStore(world, timeout, self.store, self.beats[world.rank])

    def waited(self, until: int) -> str:
        """Let rank 0 read at once and wait; rank 1 is done when rank 0 has looked up `until` times."""

        def waits() -> None:
            self.looks += 1
            if self.looks == until:
                self.store.add("turns/data/done", 1)
                self.store.add("all/data/done", 1)

        with rendezvous(self.worlds[0], Parallel(timeout=f"{SILENT_S}s")) as rank_store:
            result = local_rank_zero_first(rank_store, lambda is_first: "read" if is_first else "found", waits)
            self.store.set("paceline/disconnected/1", "")
            return result


SILENT_S, BEAT_S = 0.3, 0.01
"""How long a rank may be silent here, and how often ranks beat and look up."""


@pytest.fixture
def pair(monkeypatch) -> Iterator[Pair]:
    for name in ("INTERVAL_S", "_POLL_S"):
        monkeypatch.setattr(f"paceline.parallel.heartbeat.{name}", BEAT_S)
    monkeypatch.setattr("paceline.parallel.process_group._MAX_POLL_S", BEAT_S)
    monkeypatch.setattr("paceline.parallel.process_group.dist.barrier", lambda: None)
    pair = Pair()
    monkeypatch.setattr("paceline.parallel.process_group._connect", pair.meet)
    yield pair
    for beats in pair.beats:
        beats.close()


def test_a_rank_that_reads_beyond_the_timeout_is_waited_for_while_it_sends_heartbeats(pair: Pair) -> None:
    assert pair.waited(until=100) == "read"
    assert pair.looks >= 100  # for three times the timeout


def test_a_rank_that_is_silent_while_it_reads_is_named_as_in_a_collective(pair: Pair) -> None:
    pair.beats[1].close()
    with pytest.raises(
        PeerLostError, match=r"^rank 0 of 2: rank 1 does not answer \(last heartbeat .*, at step 0 in start"
    ) as caught:
        pair.waited(until=10_000)
    assert caught.value.is_claimed and not caught.value.is_explained and caught.value.exit_code == 1


def test_a_rank_that_fails_while_it_reads_reports_its_own_error(pair: Pair) -> None:
    assert pair.beats[1].claim_report(is_own=True)
    with pytest.raises(PeerLostError, match="another rank failed") as caught:
        pair.waited(until=10_000)
    assert caught.value.is_explained
