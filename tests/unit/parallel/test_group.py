"""Meeting, and what is missing when ranks do not: one process, and stores without a network."""

import socket
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from paceline.core.errors import RecipeError, WorldError
from paceline.core.world import World
from paceline.parallel.group import meeting
from paceline.parallel.rendezvous import assemble, open_store
from paceline.recipe.schema.parallel import Parallel

SOON = timedelta(seconds=0.2)


def test_one_rank_meets_nobody_and_keeps_its_errors() -> None:
    with pytest.raises(RecipeError, match="mine") as caught, meeting(World.single(), Parallel()) as met:
        assert met.store is None and met.share("name", "value") == "value"
        raise RecipeError("mine")
    assert caught.value.is_claimed


def test_an_error_that_is_no_lost_peer_stays_what_it_is() -> None:
    with pytest.raises(RuntimeError, match="shapes"), meeting(World.single(), Parallel()):
        raise RuntimeError("shapes do not match")


def test_ranks_that_did_not_come_are_named_in_order() -> None:
    store = HashStore()
    store.set("paceline/here/2", "")
    with pytest.raises(
        WorldError, match=r"^WORLD_SIZE: 4, but ranks 1, 3 did not come within 0.2s \(start it with MASTER_"
    ):
        assemble(World(rank=0, world_size=4), store, SOON)
    assert store.get("paceline/missing") == b"ranks 1, 3"


def test_the_other_ranks_hear_who_is_missing() -> None:
    store = HashStore()
    store.set("paceline/missing", "rank 2")
    with pytest.raises(WorldError, match="rank 2 did not come") as caught:
        assemble(World(rank=1, world_size=3), store, SOON)
    assert not caught.value.is_claimed


def test_all_ranks_that_come_go_on() -> None:
    store = HashStore()
    for rank in (1, 0, 2):
        if rank:
            store.set(f"paceline/here/{rank}", "")
    assemble(World(rank=0, world_size=3), store, SOON)
    assemble(World(rank=1, world_size=3), store, SOON)


def test_a_long_wait_is_said_once_with_what_to_set(monkeypatch) -> None:
    monkeypatch.setattr("paceline.parallel.rendezvous.NOTICE_S", 0.05)
    said: list[str] = []
    with pytest.raises(WorldError):
        assemble(World(rank=0, world_size=2, master_port=1234), HashStore(), SOON, said.append)
    assert said == [
        "waiting for rank 1 of 2 (start it with MASTER_ADDR=127.0.0.1 and MASTER_PORT=1234, as the others were)"
    ]


def test_a_port_where_nobody_listens_is_named() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        with pytest.raises(WorldError, match=f"^MASTER_ADDR: rank 1 cannot reach rank 0 at 127.0.0.1:{port}") as caught:
            open_store(World(rank=1, world_size=2, master_port=port), SOON)
    assert caught.value.is_claimed


def test_a_lost_peer_of_one_rank_is_still_explained() -> None:
    """A world of one has no peers, so what sounds like one that is lost is its own error."""
    with pytest.raises(RuntimeError, match="Connection closed by peer"), meeting(World.single(), Parallel()):
        raise RuntimeError("Connection closed by peer")
