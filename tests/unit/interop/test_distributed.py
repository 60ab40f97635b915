"""Ranks of somebody else's program: whose turn it is, and which GPU each has."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import pytest
from torch.distributed import HashStore

from paceline.core.errors import DataError, WorldError
from paceline.core.world import World
from paceline.interop.distributed import ExternalRank, check_gpus_differ, find_rank


def both(pool: ThreadPoolExecutor, work: Callable[[bool], Any]) -> list[Future]:
    """Return what `work` comes to on two ranks of a node that take their turns."""
    store = HashStore()
    return [pool.submit(ExternalRank(World(rank, 2, rank, 2), store).run_node_main_first, work) for rank in range(2)]


def test_if_the_first_rank_fails_the_others_name_it() -> None:
    def work(is_first: bool) -> None:
        raise DataError("no such folder")

    with ThreadPoolExecutor() as pool:
        first, other = both(pool, work)
        with pytest.raises(DataError, match="no such folder"):
            first.result(30)
        with pytest.raises(WorldError, match="rank 0 could not read it"):
            other.result(30)


def test_rank_0_with_the_store_returns_last() -> None:
    """Else it may end, and the store with it, while another still asks whether it is done."""
    let_read = threading.Event()

    def work(is_first: bool) -> bool:
        return is_first or let_read.wait(30)

    with ThreadPoolExecutor() as pool:
        first, other = both(pool, work)
        assert not wait([first], timeout=0.3).done
        let_read.set()
        assert first.result(30) and other.result(30)


def test_if_another_rank_fails_rank_0_names_it() -> None:
    def work(is_first: bool) -> None:
        if not is_first:
            raise DataError("no such folder")

    with ThreadPoolExecutor() as pool:
        first, other = both(pool, work)
        with pytest.raises(DataError, match="no such folder"):
            other.result(30)
        with pytest.raises(WorldError, match="rank 1 could not read it"):
            first.result(30)


def test_ranks_that_cannot_wait_for_one_another_are_all_the_first() -> None:
    assert ExternalRank(World(1, 2, 1, 2)).run_node_main_first(lambda is_first: is_first)


def test_an_explicit_rank_shares_its_node_with_the_launched_ranks(monkeypatch) -> None:
    """All images on each rank are not all cores for each."""
    assert find_rank(1, 4).world == World(1, 4, 1, 4)
    places = {"RANK": "13", "WORLD_SIZE": "16", "LOCAL_RANK": "5", "LOCAL_WORLD_SIZE": "8"}
    for name, value in {**places, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    world = find_rank(0, 1).world
    assert (world.rank, world.world_size, world.local_rank, world.local_world_size) == (0, 1, 5, 8)


def test_ranks_that_have_a_gpu_in_common_by_chance_are_refused() -> None:
    check_gpus_differ([("a", "gpu-0"), ("a", "gpu-1"), ("b", "gpu-0"), ("a", ""), ("a", "")])
    with pytest.raises(WorldError, match=r"ranks 1, 3 share one GPU of a,.*set_device"):
        check_gpus_differ([("b", "gpu-0"), ("a", "gpu-0"), ("a", "gpu-1"), ("a", "gpu-0")])
