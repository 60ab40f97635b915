"""`train.attempts`: every second of every process of a run is attributed once."""

import json
import math
import resource
from pathlib import Path

import pytest

from paceline.core.errors import RecipeError
from paceline.core.results import GoodputResult
from paceline.core.run_dir import RunDir
from paceline.core.world import BatchJob
from paceline.measure.clock import ClockSummary, StageTotal
from paceline.training.goodput import (
    Attempt,
    AttemptStart,
    TimeSpent,
    build_goodput_tracker,
    compute_goodput,
    estimate_last_end,
    read_attempts,
)

STEP_S, BATCH = 2.0, 8


def summary(*, steps: int = 0, eval_s: float = 0.0, checkpoint_s: float = 0.0, after_s: float = 0.0) -> ClockSummary:
    """Return what a clock sees of `steps` steps, half of them warm-up, that wait for data a quarter of their time."""
    counted_s = steps * STEP_S / 2
    stages = {"data_wait": StageTotal(counted_s, counted_s / 4, 1.0)} if steps else {}
    pauses = {"evaluate": eval_s, "checkpoint": checkpoint_s}
    return ClockSummary(steps // 2, 0, counted_s, stages, counted_s, pauses, after_s, ())


class Story:
    """A run as its processes would live it, by a clock that is moved by hand. Steps take two seconds."""

    def __init__(self, folder: Path) -> None:
        self.rundir = RunDir(folder)
        self.now = 1e9
        self.kept = (0, 0.0, TimeSpent())  # what the newest checkpoint holds: step, trained_s, spent
        self.step = 0
        self.trained_s = 0.0
        self.steps = self.evaluated_s = self.saved_s = 0.0

    def starts(self, startup_s: float, first_s: float = math.inf) -> None:
        self.now += startup_s
        self.step, self.trained_s, before = self.kept
        self.ledger = build_goodput_tracker(
            self.rundir,
            1,
            from_step=self.step,
            trained_s=self.trained_s,
            spent_before=before,
            startup_s=startup_s,
            first_started_s=first_s,
            now=lambda: self.now,
        )
        rows = [json.loads(line) for line in self._lines() if json.loads(line)["step"] <= self.step]
        self.rundir.steps.write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.steps = self.evaluated_s = self.saved_s = 0.0

    def trains(self, steps: int) -> None:
        self._passes(steps * STEP_S)
        self.step, self.steps = self.step + steps, self.steps + steps
        with self.rundir.steps.open("a") as file:
            file.write(json.dumps({"step": self.step, "trained_s": self.trained_s}) + "\n")

    def evaluates(self, seconds: float) -> None:
        self._passes(seconds)
        self.evaluated_s += seconds

    def saves(self, stall_s: float) -> None:
        self.kept = (self.step, self.trained_s, self.ledger.time_spent(self.clock()))
        self._passes(stall_s)
        self.saved_s += stall_s

    def is_away(self, seconds: float) -> None:
        self.now += seconds

    def clock(self, after_s: float = 0.0) -> ClockSummary:
        return summary(steps=int(self.steps), eval_s=self.evaluated_s, checkpoint_s=self.saved_s, after_s=after_s)

    def goodput(self, after_s: float = 0.0) -> GoodputResult:
        self._passes(after_s)
        found = self.ledger.goodput(self.trained_s, self.clock(after_s / 2), after_s / 2)
        assert found is not None
        parts = found.model_dump(exclude={"share", "wall_s", "starts"})
        # Sums of a dozen numbers below 1e9 with 1e-7 of rounding each.
        assert sum(parts.values()) == pytest.approx(found.wall_s) == pytest.approx(self.now - 1e9, abs=1e-4)
        assert found.share == found.useful_s / found.wall_s
        return found

    def _passes(self, seconds: float) -> None:
        self.now += seconds
        self.trained_s += seconds

    def _lines(self) -> list[str]:
        return self.rundir.steps.read_text().splitlines() if self.rundir.steps.exists() else []


@pytest.fixture
def story(tmp_path: Path) -> Story:
    return Story(tmp_path)


def close(found: GoodputResult, **wanted: float) -> bool:
    """Times since 1970 are kept to 1e-7 s, so differences of a few of them are right to 1e-4 s with room."""
    return all(math.isclose(getattr(found, name), value, abs_tol=1e-4) for name, value in wanted.items())


def test_a_run_of_one_process_is_attributed_by_its_clock(story: Story) -> None:
    story.starts(5.0)
    story.trains(20)
    story.evaluates(3.0)
    story.saves(0.5)
    found = story.goodput(after_s=1.0)
    assert close(
        found, useful_s=30.0, data_wait_s=10.0, startup_s=5.0, eval_s=3.0, checkpoint_s=0.5, other_s=1.0, rework_s=0.0,
        down_s=0.0, starts=1,
    )  # fmt: skip


def test_what_a_killed_process_did_after_its_checkpoint_is_rework(story: Story) -> None:
    story.starts(5.0)
    story.trains(10)
    story.saves(0.5)
    story.trains(4)
    story.is_away(60.0)
    story.starts(5.0)
    story.trains(10)
    found = story.goodput()
    # The stall of the checkpoint comes after what it holds, so it is told with the four steps.
    assert close(
        found, useful_s=30.0, data_wait_s=10.0, startup_s=10.0, rework_s=8.5, down_s=60.0, checkpoint_s=0.0, starts=2
    )


def test_three_kills_on_one_checkpoint_lose_each_what_they_did(story: Story) -> None:
    story.starts(1.0)
    story.trains(10)
    story.saves(0.0)
    for _ in range(3):
        story.trains(5)
        story.is_away(2.0)
        story.starts(1.0)
    story.trains(10)
    assert close(story.goodput(), useful_s=30.0, data_wait_s=10.0, rework_s=30.0, down_s=6.0, startup_s=4.0, starts=4)


def test_kept_and_lost_evaluations_are_attributed_differently(story: Story) -> None:
    story.starts(1.0)
    story.trains(10)
    story.evaluates(3.0)
    story.saves(0.0)
    story.trains(1)
    story.evaluates(4.0)
    story.trains(1)  # without a later record nobody knows of the evaluation
    story.starts(1.0)
    assert close(story.goodput(), eval_s=3.0, rework_s=8.0)


def test_a_process_that_stopped_after_saving_lost_nothing(story: Story) -> None:
    story.starts(1.0)
    story.trains(10)
    story.saves(0.5)
    story.is_away(2.0)  # taking leave
    story.ledger.end(story.step, story.trained_s, "preempted")
    story.is_away(30.0)
    story.starts(1.0)
    story.trains(10)
    assert close(story.goodput(), useful_s=30.0, rework_s=0.0, down_s=30.0, other_s=2.5, starts=2)


def test_a_process_that_failed_in_order_lost_what_it_had_not_saved(story: Story) -> None:
    story.starts(1.0)
    story.trains(10)
    story.saves(0.0)
    story.trains(6)
    story.ledger.end(story.step, story.trained_s, "failed")
    story.starts(1.0)
    assert close(story.goodput(), rework_s=12.0, down_s=0.0)


def test_without_a_checkpoint_everything_is_done_again(story: Story) -> None:
    story.starts(1.0)
    story.trains(10)
    story.starts(1.0)
    story.trains(20)
    assert close(story.goodput(), useful_s=30.0, rework_s=20.0)


def test_a_run_that_goes_back_behind_its_own_start_loses_what_earlier_processes_did(story: Story) -> None:
    """The newest checkpoints were damaged, say."""
    story.starts(1.0)
    story.trains(10)
    story.saves(0.0)
    old = story.kept
    story.trains(10)
    story.saves(0.0)
    story.starts(1.0)
    story.trains(2)
    story.kept = old
    story.starts(1.0)
    story.trains(14)
    assert close(story.goodput(), useful_s=36.0, data_wait_s=12.0, rework_s=24.0, starts=3)


def test_the_end_of_a_killed_process_is_estimated_from_its_last_record(story: Story) -> None:
    story.starts(1.0)
    story.trains(10)
    ends = estimate_last_end(read_attempts(story.rundir.attempts), story.rundir)
    assert ends[0].end is not None and (ends[0].end.step, ends[0].end.how) == (10, "killed")
    assert close_to(ends[0].end.ended_s, story.now)
    saved_later = estimate_last_end(read_attempts(story.rundir.attempts), story.rundir, resumed_trained_s=25.0)[0].end
    assert saved_later is not None and close_to(saved_later.ended_s, story.now + 5.0)


def close_to(value: float, wanted: float) -> bool:
    return math.isclose(value, wanted, rel_tol=0, abs_tol=1e-4)


def test_a_clock_that_was_set_back_makes_no_negative_part(story: Story) -> None:
    story.starts(1.0)
    story.trains(10)
    story.saves(0.0)
    story.now -= 3600.0
    story.starts(1.0)
    story.trains(10)
    found = story.ledger.goodput(story.trained_s, story.clock(), 0.0)
    assert found is not None and min(found.model_dump().values()) >= 0
    assert close(found, useful_s=30.0, data_wait_s=10.0, startup_s=2.0, down_s=0.0, wall_s=42.0)


def test_a_clock_that_is_off_leaves_all_trained_time_useful(story: Story) -> None:
    story.starts(1.0)
    story.trains(10)
    found = story.ledger.goodput(story.trained_s, ClockSummary(0, 0, 0.0, {}, 0.0, {}, 0.0, ()), 0.0)
    assert found is not None and close(found, useful_s=20.0, data_wait_s=0.0)


def test_a_ledger_that_begins_in_the_middle_of_a_run_counts_from_there() -> None:
    """The run was begun before there were ledgers."""
    values = {"started_s": 1e9, "startup_s": 1.0, "from_step": 50, "world_size": 1, "host": "a", "pid": 1}
    begun = Attempt(AttemptStart(number=1, trained_s=100.0, **values))
    found = compute_goodput([begun.with_end(1e9 + 21.0, 60, 120.0, "completed")], 120.0, TimeSpent())
    assert close(found, useful_s=20.0, wall_s=21.0, starts=1)


def test_the_ledger_says_who_trained_from_where_and_how_it_ended(story: Story) -> None:
    story.starts(1.5)
    story.trains(10)
    story.ledger.end(10, 20.0, "preempted")
    story.kept = (10, 20.0, TimeSpent())
    story.starts(1.0)
    rows = [json.loads(line) for line in story.rundir.attempts.read_text().splitlines()]
    assert [(row["event"], row["number"]) for row in rows] == [("start", 1), ("end", 1), ("start", 2)]
    assert rows[0]["startup_s"] == 1.5 and rows[0]["pid"] > 0 and rows[0]["host"] and rows[0]["world_size"] == 1
    assert (rows[1]["how"], rows[1]["step"]) == ("preempted", 10) and rows[2]["from_step"] == 10


def test_attempts_have_the_batch_job_and_its_restarts(tmp_path: Path) -> None:
    options = {"from_step": 0, "trained_s": 0.0, "spent_before": TimeSpent(), "startup_s": 1.0}
    for restarts in (0, 1):
        ledger = build_goodput_tracker(RunDir(tmp_path), 1, **options, batch_job=BatchJob("4711", restarts))
        ledger.end(10, 20.0, "preempted")
    build_goodput_tracker(RunDir(tmp_path), 1, **options)
    starts = [attempt.start for attempt in read_attempts(tmp_path / "attempts.jsonl")]
    assert [(start.job_id, start.job_restarts) for start in starts] == [("4711", 0), ("4711", 1), ("", 0)]


def test_a_ledger_of_before_batch_jobs_were_noted_is_read(story: Story) -> None:
    story.starts(1.0)
    row = json.loads(story.rundir.attempts.read_text())
    del row["job_id"], row["job_restarts"]
    story.rundir.attempts.write_text(json.dumps(row) + "\n")
    (attempt,) = read_attempts(story.rundir.attempts)
    assert (attempt.start.job_id, attempt.start.job_restarts) == ("", 0)


def test_an_end_that_cannot_be_written_is_left_to_the_next_process(story: Story, tmp_path: Path) -> None:
    story.starts(1.0)
    text = story.rundir.attempts.read_text()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))  # what Python makes an error of, not a signal
    try:
        story.ledger.end(1, 1.0, "completed")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    assert story.rundir.attempts.read_text() == text


def test_a_folder_that_is_gone_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"cannot be written to: No such file or directory \(name another\)$"):
        build_goodput_tracker(
            RunDir(tmp_path / "gone"),
            1,
            from_step=0,
            trained_s=0.0,
            spent_before=TimeSpent(),
            startup_s=1.0,
        )


DAMAGED = ['{"event": "end"}', '{"event": "start", "number": 1}', "{}", '{"event": 3}', "garbage", "[]", "[" * 100_000]


@pytest.mark.parametrize("line", DAMAGED)
def test_a_damaged_line_of_the_ledger_is_a_warning_and_the_others_count(story: Story, line: str) -> None:
    story.starts(1.0)
    story.trains(10)
    story.saves(0.0)
    whole = story.rundir.attempts.read_text()
    story.rundir.attempts.write_text(f"{line}\n{whole}{line}\n")
    warnings: list[str] = []
    attempts = read_attempts(story.rundir.attempts, warnings.append)
    assert [attempt.start.number for attempt in attempts] == [1]
    assert len(warnings) == 1 and warnings[0].startswith(f"{story.rundir.attempts}: line 1 and 1 more line ")
    story.starts(1.0)
    story.trains(10)
    assert close(story.goodput(), useful_s=30.0, data_wait_s=10.0, startup_s=2.0, starts=2)
    read_attempts(story.rundir.attempts, warnings.append)
    assert len(warnings) == 1  # what was skipped is gone from the file


def test_an_end_whose_start_is_damaged_does_not_end_another_process(story: Story) -> None:
    story.starts(1.0)
    story.starts(1.0)
    story.ledger.end(1, 1.0, "completed")
    first, end_of_first, _, end = story.rundir.attempts.read_text().splitlines(keepends=True)
    story.rundir.attempts.write_text(first + end_of_first + "garbage\n" + end)
    (attempt,) = read_attempts(story.rundir.attempts)
    assert attempt.end is not None and attempt.end.how == "killed" and attempt.end.number == 1
    story.rundir.attempts.write_text(end)
    assert read_attempts(story.rundir.attempts) == ()


def test_a_damaged_record_of_steps_does_not_keep_a_killed_run_from_its_account(story: Story) -> None:
    story.starts(1.0)
    story.trains(10)
    with story.rundir.steps.open("a") as file:
        file.write(f'garbage\n{{"step": "x"}}\n{{"step": 1{"0" * 400}, "trained_s": 1e999}}\n')
    (attempt,) = estimate_last_end(read_attempts(story.rundir.attempts), story.rundir)
    assert attempt.end is not None and (attempt.end.step, attempt.end.trained_s) == (10, 20.0)


def test_processes_that_died_before_any_step_are_down_from_the_first_start_of_the_run(story: Story) -> None:
    first_s = story.now
    story.is_away(300.0)
    story.starts(5.0, first_s=first_s)
    story.trains(20)
    story.saves(0.0)
    assert close(story.goodput(), down_s=300.0, startup_s=5.0, useful_s=30.0, data_wait_s=10.0, starts=1)
    story.is_away(10.0)
    story.starts(5.0, first_s=first_s)
    assert close(story.goodput(), down_s=310.0, startup_s=10.0, starts=2)


def test_rank_hours_are_those_of_all_processes_with_their_own_ranks_and_no_downtime(tmp_path: Path) -> None:
    now = [1e9]

    def start(world_size: int):
        return build_goodput_tracker(
            RunDir(tmp_path), world_size, from_step=0, trained_s=0.0, spent_before=TimeSpent(), startup_s=0.0,
            now=lambda: now[0],
        )  # fmt: skip

    first = start(4)
    now[0] += 3600
    first.end(10, 3600.0, "preempted")
    now[0] += 7200
    second = start(2)
    now[0] += 1800
    assert second.rank_hours() == pytest.approx(4 * 1 + 2 * 0.5) and second.running_s() == pytest.approx(5400)
