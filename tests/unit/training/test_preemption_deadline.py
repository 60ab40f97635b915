"""A run stops while there is time to save before the end of its job, and not without need."""

from dataclasses import dataclass, field

import pytest

from paceline.core.world import NEVER, BatchJob, World
from paceline.training.preemption import MARGIN_S, TIME_LIMIT_REASON, Deadline, build_deadline
from paceline.training.state import StepInterval

STEP_S = 2.0
GRACE_S = 60.0
END_S = 1000.0
ENDLESS = StepInterval(every=0, last=10**9)


@dataclass
class Run:
    """A run that lives by a clock which is moved by hand, in a job that ends after `end_s` seconds."""

    evaluation: StepInterval = ENDLESS
    end_s: float = END_S
    save_s: float = 5.0
    now_s: float = 0.0
    left: list[float] = field(default_factory=list)
    steps: int = 0

    def __post_init__(self) -> None:
        self.limit = Deadline(
            self.end_s,
            self.evaluation,
            lambda: self.save_s,
            self.left.append,
            grace_s=GRACE_S,
            now=lambda: self.now_s,
        )

    def trains(self, steps: int = 10**6, step_s: float = STEP_S) -> "Run":
        """Make `steps` steps, as long as it is not asked to leave."""
        for _ in range(steps):
            if self.left or self.steps == self.evaluation.last:
                break
            self.now_s += step_s
            self.steps += 1
            self.limit.end_step(self.steps)
        return self

    def evaluates(self, batches: int, batch_s: float = 1.0) -> "Run":
        """Evaluate so many batches, as long as it is not asked to leave."""
        for _ in range(batches):
            if self.left:
                break
            self.limit.begin_eval_batch()
            self.now_s += batch_s
        return self


def test_it_leaves_when_two_steps_and_two_saves_and_the_margin_are_left() -> None:
    run = Run().trains()
    assert run.left == [MARGIN_S + 2 * STEP_S + 2 * 5.0]
    assert run.now_s == END_S - run.left[0]


def test_before_a_save_the_lead_has_the_grace() -> None:
    assert Run(save_s=0.0).trains().left == [MARGIN_S + 2 * STEP_S + GRACE_S]


def test_the_slowest_step_counts_but_not_the_first_which_compiles() -> None:
    assert Run().trains(1, step_s=100.0).trains().left == [MARGIN_S + 2 * STEP_S + 10.0]
    assert Run().trains(10).trains(1, step_s=21.0).trains().left[0] == pytest.approx(82.0, abs=STEP_S)


def test_the_length_of_an_evaluation_does_not_count_since_it_can_be_aborted() -> None:
    run = Run().trains(10).evaluates(300).trains()
    assert run.left == [MARGIN_S + 2 * (STEP_S + 1.0) + 10.0]  # from its last batch to the end of the next step


def test_it_leaves_in_the_middle_of_an_evaluation() -> None:
    run = Run().trains(10).evaluates(2000)
    assert run.left == [MARGIN_S + 2 * STEP_S + 10.0]
    assert run.steps == 10


def test_it_requests_one_stop() -> None:
    run = Run().trains()
    run.limit.end_step(run.steps + 1)
    run.limit.begin_eval_batch()
    assert len(run.left) == 1


@pytest.mark.parametrize("started_s", [20.0, 50.0, 59.0])
def test_a_job_shorter_than_its_lead_trains_for_half_of_its_time(started_s: float) -> None:
    run = Run(end_s=60.0, save_s=0.0).trains(1, step_s=started_s).trains(step_s=0.125)
    assert run.left == [pytest.approx((60.0 - started_s) / 2, abs=0.125)]


def test_a_run_that_will_have_ended_is_not_cut_short() -> None:
    # After 478 steps 44 s are left, the lead: a step by 1.25, two of the slowest, a save and the margin need 41.5.
    assert Run(StepInterval(0, last=479)).trains().steps == 479
    assert not Run(StepInterval(0, last=479)).trains().left
    cut = Run(StepInterval(0, last=490)).trains()
    assert cut.left and cut.steps == 478


def test_one_foreground_save_does_not_predict_all_remaining_steps() -> None:
    """After 9,899 of 10,000 steps 270 s are left, the lead, and a hundred steps of 0.1 s and a save need 70."""
    run = Run(StepInterval(0, last=10_000), end_s=270.0 + 60.0 + 0.1 * 9_899, save_s=60.0)
    run.trains(5000, step_s=0.1).trains(1, step_s=60.1).trains(step_s=0.1)
    assert run.steps == 10_000 and not run.left
    cut = Run(StepInterval(0, last=11_000), end_s=270.0 + 60.0 + 0.1 * 9_899, save_s=60.0)
    cut.trains(5000, step_s=0.1).trains(1, step_s=60.1).trains(step_s=0.1)
    assert cut.left == [pytest.approx(270.2, abs=0.11)]  # within a step of the lead, and sums of tenths are not exact


def test_step_times_exclude_evaluations() -> None:
    # The lead is 138 s, with which 17 steps are to come: they need 130.5, and would 143 if 200 s were of the steps.
    run = Run(StepInterval(0, last=348), save_s=50.0).trains(10).evaluates(100, batch_s=STEP_S).trains()
    assert run.steps == 348 and not run.left


def test_after_the_last_step_no_stop_is_requested() -> None:
    run = Run(StepInterval(0, last=20)).trains(19).trains(1, step_s=955.0)
    assert run.steps == 20 and not run.left


def test_a_remaining_evaluation_counts_once_one_has_been_timed() -> None:
    short = Run(StepInterval(470, last=478), end_s=END_S + 12.0).trains(470).evaluates(4).trains()
    assert short.steps == 478 and not short.left
    unknown = Run(StepInterval(479, last=479)).trains()
    assert unknown.left and unknown.steps == 478


def test_an_evaluation_under_way_is_waited_for_as_long_as_the_longest_took() -> None:
    run = Run(StepInterval(239, last=478), end_s=END_S + 40.0).trains(239).evaluates(20).trains()
    assert run.steps == 478 and not run.left
    assert not run.evaluates(20).left
    assert run.evaluates(60).left  # it takes longer than any before


def test_no_deadline_without_a_future_end_or_on_other_ranks() -> None:
    world = World(rank=0, world_size=2)

    def built(end_s: float, world: World = world) -> object:
        return build_deadline(
            BatchJob("7", 0, end_s), world, ENDLESS, lambda: 0.0, print, print, grace_s=1.0, unix=lambda: 1e9
        )

    assert isinstance(built(1e9 + 60.0), Deadline)
    for end_s, where in [(NEVER, world), (1e9, world), (0.0, world), (1e9 + 60.0, World(rank=1, world_size=2))]:
        assert built(end_s, where) is None, end_s


def test_the_end_is_converted_to_the_monotonic_clock() -> None:
    asked, said, now_s = [], [], [50.0]
    deadline = build_deadline(
        BatchJob("7", 0, 1e9 + 1000.0),
        World.single(),
        ENDLESS,
        lambda: 5.0,
        asked.append,
        said.append,
        grace_s=GRACE_S,
        unix=lambda: 1e9,
        now=lambda: now_s[0],
    )
    for step in range(1, 461):
        now_s[0] += STEP_S
        deadline.end_step(step)
    assert not asked
    now_s[0] += 60.0
    deadline.end_step(461)
    assert asked == [TIME_LIMIT_REASON]
    assert said == ["the job ends in 20.0 s: saving and stopping (queue it again to resume)"]
