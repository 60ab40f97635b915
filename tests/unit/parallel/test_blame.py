"""`parallel.blame`: the surest sign first, and one line that names rank, step and stage."""

import pytest

from paceline.core.stages import CAPTURE, EPOCH_BOUNDARY, EXPOSED, FINISH, PAUSES, STAGES, TRACE, WORK
from paceline.parallel.blame import RankStatus, blame_rank


def no_stacks(rank: int) -> str:
    return ""


def blame(*statuses: RankStatus, me: int = 0, timed_out: bool = True, stacks=no_stacks) -> str:
    return blame_rank(statuses, me, timed_out=timed_out, stacks=stacks)


def at(rank: int, step: int, stage: str, **more) -> RankStatus:
    return RankStatus(rank, step, stage, **{"state": "stuck", "stalled_s": 5.0, **more})


def test_a_dead_rank_is_blamed_first() -> None:
    dead = at(2, 41, "backward", state="running", silent_s=0.4, condition="dead")
    assert blame(at(0, 41, "backward"), at(1, 40, "forward"), dead, timed_out=False) == (
        "rank 0 of 3: rank 2 is gone (last heartbeat 0.4 s ago, at step 41 in backward)"
    )


def test_a_silent_rank_is_gone_after_a_broken_connection_and_frozen_after_a_timeout() -> None:
    silent = at(1, 40, "forward", state="running", silent_s=5.2, condition="silent")
    assert "rank 1 is gone (last heartbeat 5.2 s ago" in blame(at(0, 41, "backward"), silent, timed_out=False)
    assert "rank 1 does not answer (last heartbeat 5.2 s ago, at step 40 in forward: frozen" in blame(
        at(0, 41, "backward"), silent
    )


def test_a_rank_without_any_heartbeat_is_named() -> None:
    never = RankStatus(1, silent_s=None, condition="silent")
    assert blame(at(0, 0, "start"), never, timed_out=False) == "rank 0 of 2: rank 1 is gone (no heartbeat received)"


def test_a_stopped_rank_is_named_with_where_it_was() -> None:
    stopped = at(1, 40, "forward", state="running", silent_s=5.0, condition="stopped")
    assert blame(at(0, 40, "backward"), stopped) == (
        "rank 0 of 2: rank 1 is stopped by a signal (last heartbeat 5.0 s ago, at step 40 in forward)"
    )


def test_a_rank_that_ended_early_is_named_with_both_steps() -> None:
    exited = RankStatus(1, 40, "between stages", state="exited")
    assert blame(at(0, 41, "backward"), exited, timed_out=False) == (
        "rank 0 of 2: rank 1 ended after step 40 while others continued, at step 41 in backward: "
        "the ranks have different numbers of steps"
    )


@pytest.mark.parametrize("me", [0, 1])
def test_a_rank_that_is_finishing_while_another_is_in_a_step_has_ended_early(me: int) -> None:
    """Both have counted 40 steps; one is waiting for gradients of the 41st. Either may report it."""
    line = blame(at(0, 40, EXPOSED), at(1, 40, FINISH), me=me)
    assert "rank 1" in line
    assert "ended after step 40 while others continued, at step 40 in exposed_communication" in line


def test_a_rank_that_hangs_in_its_last_record_is_not_one_with_more_steps() -> None:
    assert "rank 0 of 2: rank 1 makes no progress: at step 40 in other" in blame(at(0, 40, FINISH), at(1, 40, "other"))


@pytest.mark.parametrize(
    ("behind", "ahead"),
    [
        ((40, "backward"), (41, "data_wait")),
        ((40, "data_wait"), (40, "backward")),
        ((40, "evaluate, batch 3"), (40, "h2d")),
    ],
)
def test_the_rank_that_is_behind_is_waited_for(behind, ahead) -> None:
    line = blame(at(0, *ahead), at(1, *behind), at(2, *ahead), stacks=lambda rank: f"stacks.rank{rank}.txt")
    assert line == (
        f"rank 0 of 3: rank 1 makes no progress: at step {behind[0]} in {behind[1]} for 5.0 s, "
        f"rank 2 at step {ahead[0]} in {ahead[1]} (stacks in stacks.rank1.txt)"
    )


@pytest.mark.parametrize("name", [*STAGES, *PAUSES])
def test_every_stage_and_pause_is_known(name: str) -> None:
    status = at(1, 40, name)
    assert status.location == f"at step 40 in {name}" and status.stage_number is not None


@pytest.mark.parametrize("name", [*WORK, *PAUSES, "start"])
def test_a_rank_that_computes_is_behind_one_that_waits(name: str) -> None:
    assert blame(at(0, 40, EXPOSED), at(1, 40, name)) == (
        f"rank 0 of 2: rank 1 makes no progress: at step 40 in {name} for 5.0 s, rank 0 at step 40 in {EXPOSED}"
    )


def test_a_rank_that_waits_for_others_in_an_earlier_step_is_behind() -> None:
    assert "rank 0 of 2 makes no progress: at step 39" in blame(at(0, 39, EXPOSED), at(1, 40, "data_wait"))


@pytest.mark.parametrize(
    ("behind", "ahead"),
    [(EPOCH_BOUNDARY, "h2d"), ("checkpoint", EPOCH_BOUNDARY), (TRACE, "evaluate"), (TRACE, "h2d"), (CAPTURE, "h2d")],
)
def test_pauses_have_a_position(behind: str, ahead: str) -> None:
    assert "rank 1 makes no progress" in blame(at(0, 40, ahead), at(1, 40, behind))


def test_a_rank_that_is_behind_and_moves_is_late() -> None:
    assert "rank 1 is late: at step 40 in forward for 0.3 s" in blame(
        at(0, 40, "backward"), at(1, 40, "forward", state="running", stalled_s=0.3)
    )


def test_a_stage_without_a_position_is_not_compared() -> None:
    line = blame(at(0, 40, "backward"), at(1, 40, "between stages"))
    assert line == "rank 0 of 2: all ranks wait for one another: at step 40 in backward for 5.0 s"


def test_of_ranks_in_one_stage_the_one_at_another_line_is_named() -> None:
    waiting = [at(rank, 40, "backward", at="graph.py:900") for rank in (0, 1, 3)]
    hung = at(2, 40, "backward", at="hook.py:7")
    assert "rank 2 makes no progress: at step 40 in backward (hook.py:7)" in blame(*waiting[:2], hung, waiting[2])


def test_a_rank_that_blames_itself_is_named_once() -> None:
    line = blame(at(0, 40, "backward"), at(1, 40, "data_wait"), me=1)
    assert line.startswith("rank 1 of 2 makes no progress: at step 40")


def test_a_single_rank_makes_no_progress() -> None:
    assert blame(at(0, 12, "data_wait"), stacks=lambda rank: "run/stacks.rank0.txt") == (
        "rank 0 of 1: no progress: at step 12 in data_wait for 5.0 s (stacks in run/stacks.rank0.txt)"
    )


def test_a_rank_that_still_computes_is_waited_for() -> None:
    assert "waits for rank 1, which has not finished: at step 0 in start for 5.0 s (raise parallel.timeout" in blame(
        at(0, 0, "start"), at(1, 0, "start", state="running", stalled_s=0.1)
    )


def test_a_silent_rank_of_another_machine_may_be_cut_off_with_it() -> None:
    silent = at(1, 40, "forward", state="running", silent_s=5.2, condition="silent", is_remote=True)
    assert blame(at(0, 41, "backward"), silent).endswith("in a call that holds the GIL, or its machine is cut off)")
