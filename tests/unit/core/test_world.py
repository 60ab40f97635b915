"""`core.world`: what a process may conclude from its place."""

from dataclasses import FrozenInstanceError

import pytest

from paceline.core.world import World


def test_a_single_process_is_rank_0_of_1_on_one_node_and_does_everything():
    world = World.single()
    assert (world.rank, world.world_size, world.local_rank, world.local_world_size) == (0, 1, 0, 1)
    assert (world.num_nodes, world.is_main, world.is_node_main) == (1, True, True)
    assert world.launcher == "single"


def test_one_rank_of_all_is_main_and_one_rank_of_each_node_is_its_node_main():
    worlds = [World(rank=rank, world_size=4, local_rank=rank % 2, local_world_size=2) for rank in range(4)]
    assert [world.is_main for world in worlds] == [True, False, False, False]
    assert [world.is_node_main for world in worlds] == [True, False, True, False]


@pytest.mark.parametrize(
    ("world_size", "local_world_size", "nodes"), [(1, 1, 1), (4, 4, 1), (8, 4, 2), (9, 4, 3), (3, 4, 1)]
)
def test_nodes_are_counted_up_to_the_last_one_that_is_not_full(world_size, local_world_size, nodes):
    assert World(world_size=world_size, local_world_size=local_world_size).num_nodes == nodes


def test_a_world_is_a_value():
    assert World(rank=1, world_size=2) == World(rank=1, world_size=2)
    assert World(rank=1, world_size=2) != World(rank=0, world_size=2)
    with pytest.raises(FrozenInstanceError):
        World.single().rank = 1
