"""Real ranks agree: each gets the same sums and numbers, one call later, and none waits within a step."""

import runpy
from pathlib import Path

import pytest

SCRIPT = runpy.run_path(str(Path(__file__).with_name("consensus_script.py")))
STEPS, LARGE, LATE_S, vote = (SCRIPT[name] for name in ("STEPS", "LARGE", "LATE_S", "vote"))


@pytest.fixture(scope="module", params=[1, 2, 3])
def ranks(request, run_on_ranks, tmp_path_factory):
    return run_on_ranks("consensus_script.py", request.param, tmp_path_factory.mktemp(f"ranks{request.param}"))


def sums(step: int, world_size: int) -> list[int]:
    return [sum(votes) for votes in zip(*(vote(step, rank) for rank in range(world_size)), strict=True)]


def test_every_rank_gets_the_sums_of_the_previous_call(ranks) -> None:
    world_size = len(ranks)
    by_step = [sums(step, world_size) for step in range(STEPS)]
    expected = by_step if world_size == 1 else [[0, 0], *by_step[:-1]]
    assert [row[0] for row in by_step].count(1) == (world_size > 1)
    for rank in ranks:
        assert rank["votes"].tolist() == expected
        assert rank["settled"].tolist() == [by_step[-1]] * 2


def test_gathered_numbers_are_sorted_and_unique(ranks) -> None:
    world_size = len(ranks)
    for rank in ranks:
        assert rank["union0"].tolist() == []
        assert rank["union1"].tolist() == list(range(world_size))
        assert rank["union2"].tolist() == [*range(6 - world_size, 6), LARGE]
        assert rank["union3"].tolist() == [-1, 7]


def test_a_vote_does_not_wait_for_a_late_rank(ranks) -> None:
    """The last rank votes half a second late: its peers send their votes, and wait only when they read the result."""
    for rank in ranks[:-1]:
        assert rank["sent_s"].item() < LATE_S / 2 < rank["read_s"].item()


# matrix: 10
def test_a_lost_rank_raises_in_the_next_votes(ranks) -> None:
    assert [rank["lost"].item() for rank in ranks] == [True] * (len(ranks) - 1) + [False]
