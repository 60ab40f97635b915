"""A rank slowed by a fifth on three real ranks is named with the stage in which it is slow."""

import pytest

from paceline.measure.straggler import WORK, RankTimes, stragglers

DELAY_S = 0.0084  # a fifth of the 42 ms of `straggling.WORK_S`


@pytest.fixture(scope="module")
def trio(run_on_ranks, tmp_path_factory):
    return run_on_ranks("straggling.py", 3, tmp_path_factory.mktemp("straggling"))


def judged(trio, case: str):
    times = [
        RankTimes(
            found[f"{case}/step_s"].item(),
            dict(zip(WORK, found[f"{case}/stages"].tolist(), strict=True)),
            found[f"{case}/exposed_s"].tolist(),
        )
        for found in trio
    ]
    assert {len(each.exposed_s) for each in times} == {20}
    return stragglers(times)


@pytest.mark.parametrize(("stage", "rank"), [("data_wait", 0), ("forward", 2), ("backward", 1), ("optimizer", 0)])
def test_a_rank_slowed_by_a_fifth_is_named(trio, stage: str, rank: int) -> None:
    _, found = judged(trio, stage)
    assert (found.rank, found.stage) == (rank, stage)
    # Sleep never ends early, and other ranks' noise can but delay them: they took up to 1 ms of it with five
    # processes to a core.
    assert 0.3 * DELAY_S < found.late_s < 2 * DELAY_S
    assert 0.05 < found.share < 0.4


def test_equal_ranks_name_no_one(trio) -> None:
    rows, found = judged(trio, "none")
    assert (found.rank, found.stage, found.late_s) == (None, None, 0.0)
    assert len(rows) == 3
