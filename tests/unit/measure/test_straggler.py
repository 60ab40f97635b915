"""Find the late rank among simulated ranks, with the waiting that DDP makes of their work."""

import random

import pytest

from paceline.measure.straggler import RankTimes, find_straggler

BEFORE = {"data_wait": 2.0, "h2d": 1.0, "forward": 20.0, "loss": 1.0, "backward": 40.0, "optimizer": 5.0}
"""Milliseconds of work in a step."""
BEFORE_FORWARD = ("data_wait", "h2d")
UNTIL_READY = ("forward", "loss", "backward")
SEND_MS = 3.0


def play(works: list[list[dict[str, float]]], *, has_buffers: bool = True) -> list[RankTimes]:
    """Return what ranks measure whose work, in milliseconds, is `works[rank][step]`.

    A rank waits before forward for rank 0's buffers, and in backward until the last of them is ready; sending takes
    the same from then on. Rank 0 waits for no one before forward.
    """
    num_ranks, num_steps = len(works), len(works[0])
    clock = [0.0] * num_ranks
    exposed: list[list[float]] = [[] for _ in works]
    for step in range(num_steps):
        for rank in range(num_ranks):
            clock[rank] += sum(works[rank][step][stage] for stage in BEFORE_FORWARD)
        waited = [max(0.0, clock[0] - each) if has_buffers else 0.0 for each in clock]
        for rank in range(num_ranks):
            clock[rank] += waited[rank] + sum(works[rank][step][stage] for stage in UNTIL_READY)
        averaged = max(clock) + SEND_MS
        for rank in range(num_ranks):
            exposed[rank].append((waited[rank] + averaged - clock[rank]) / 1e3)
            clock[rank] = averaged + works[rank][step]["optimizer"]
    return [
        RankTimes(
            step_s=max(clock) / num_steps / 1e3,
            stages={stage: sum(step[stage] for step in works[rank]) / num_steps / 1e3 for stage in BEFORE},
            exposed_s=exposed[rank],
        )
        for rank in range(num_ranks)
    ]


def noisy(num_ranks: int, num_steps: int, spread_ms: float, **slow_ms: float) -> list[list[dict[str, float]]]:
    """Return work with normal noise in backward; `slow_ms` adds to a stage of the last rank."""
    draw = random.Random(0)
    works = [[dict(BEFORE) for _ in range(num_steps)] for _ in range(num_ranks)]
    for rank in works:
        for step in rank:
            step["backward"] += abs(draw.gauss(0, spread_ms))
    for stage, slower_ms in slow_ms.items():
        for step in works[-1]:
            step[stage] += slower_ms
    return works


@pytest.mark.parametrize("has_buffers", [True, False])
@pytest.mark.parametrize("stage", BEFORE)
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_slowed_by_a_fifth_is_named_with_its_stage(rank: int, stage: str, has_buffers: bool) -> None:
    works = noisy(3, 30, spread_ms=1.0)
    for step in works[rank]:
        step[stage] += 14.0
    rows, found = find_straggler(play(works, has_buffers=has_buffers))
    assert (found.rank, found.stage) == (rank, stage)
    # Noise is below 3 ms, a fifth of the delay. What the optimizer delays shows from the second step of 30 on.
    assert found.late_s == pytest.approx(0.014, abs=0.003)
    assert found.lost_s == pytest.approx(found.late_s, abs=0.001)
    assert found.share == pytest.approx(found.lost_s / rows[0].step_s)
    assert [row.rank for row in rows] == [0, 1, 2]
    assert [row.late_s > 0 for row in rows] == [row.rank == rank for row in rows]
    assert sum(row.late_s for row in rows) == pytest.approx(0)


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_ranks_that_are_late_in_turn_lose_time_and_none_is_named(num_ranks: int) -> None:
    _, found = find_straggler(play(noisy(num_ranks, 200, spread_ms=10.0)))
    assert (found.rank, found.stage, found.late_s) == (None, None, 0.0)
    assert found.lost_s > 0.004  # the largest of two half-normal numbers of spread 10 is above their mean by 4.1


def test_equal_ranks_lose_nothing() -> None:
    _, found = find_straggler(play([[dict(BEFORE)] * 30] * 3))
    assert (found.rank, found.lost_s, found.share) == (None, pytest.approx(0), pytest.approx(0))
    assert found.late_steps == 0.0


def test_steps_in_which_some_rank_is_late_are_counted() -> None:
    works = noisy(3, 20, spread_ms=0.0)
    for step in range(12):
        works[step % 3][step]["backward"] += 20.0
    assert find_straggler(play(works))[1].late_steps == 12 / 20


def test_a_single_stall_is_a_loss_of_one_step() -> None:
    works = noisy(2, 20, spread_ms=1.0)
    works[1][7]["backward"] += 10_000.0
    _, found = find_straggler(play(works))
    assert (found.rank, found.late_steps) == (None, 1 / 20)
    assert found.lost_s == pytest.approx(10.0 / 20, abs=0.003)  # what 19 steps of noise below 3 ms add


def test_a_rank_that_is_always_late_by_a_hair_is_not_named() -> None:
    works = noisy(3, 30, spread_ms=0.0, backward=3.0)  # 4 % of 72 ms
    assert find_straggler(play(works))[1].rank is None
    works = noisy(3, 30, spread_ms=0.0, backward=4.5)
    assert find_straggler(play(works))[1].rank == 2


@pytest.mark.parametrize(("num_late", "named"), [(21, None), (22, 1)])
def test_a_rank_is_named_when_a_coin_would_hardly_do_the_same(num_late: int, named: int | None) -> None:
    # 22 or more heads in 30 tosses: 0.8 %; 21 or more: 2.1 %
    late, early = [0.0] * num_late, [0.02] * num_late
    rest = 30 - num_late
    ranks = [RankTimes(0.1, {}, early + [0.0] * rest), RankTimes(0.1, {"forward": 0.1}, late + [0.02] * rest)]
    assert find_straggler(ranks)[1].rank == named


@pytest.mark.parametrize(("num_steps", "named"), [(0, None), (6, None), (7, 0)])
def test_few_steps_name_no_one(num_steps: int, named: int | None) -> None:
    ranks = [RankTimes(0.1, {}, [0.0] * num_steps), RankTimes(0.1, {}, [0.02] * num_steps)]
    assert find_straggler(ranks)[1].rank == named


def test_a_rank_late_in_no_stage_is_named_without_one() -> None:
    ranks = [RankTimes(0.1, {}, [0.0] * 30), RankTimes(0.1, {}, [0.02] * 30)]
    _, found = find_straggler(ranks)
    assert (found.rank, found.stage, found.late_s) == (0, None, pytest.approx(0.02))


def test_waiting_that_was_not_measured_names_no_one() -> None:
    ranks = [RankTimes(0.0, {}, [0.0] * 30)] * 2
    rows, found = find_straggler(ranks)
    assert (found.rank, found.lost_s, found.share) == (None, 0.0, 0.0)
    assert len(rows) == 2
