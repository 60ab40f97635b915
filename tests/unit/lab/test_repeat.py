"""Cases run in turns; a failed run is not repeated, except with another seed."""

from pathlib import Path

from paceline.core.run_dir import RunDir
from paceline.lab.repeat import (
    alternate_order,
    build_full_run_patch,
    collect_runs,
    run_interleaved,
)
from paceline.lab.trial import Trial, TrialOutcome, apply_patch
from paceline.recipe.load import Patch, load


class Made:
    """What runs trials, and fails those whose name is among `fails`, in the turns that it names."""

    def __init__(self, fails: dict[str, set[int]] | None = None) -> None:
        self.fails = fails or {}
        self.made: list[str] = []

    def run(self, trial: Trial, repeat: int) -> TrialOutcome:
        self.made.append(f"{trial.name}{repeat}")
        fails = repeat in self.fails.get(trial.name, set())
        result = None if fails else object()
        return TrialOutcome(
            trial, repeat, RunDir(Path(f"runs/scale/trials/{trial.name}-{repeat}")), result, "boom" if fails else ""
        )


def test_each_turn_runs_all_cases_once_and_a_failed_one_no_more() -> None:
    runner = Made({"b": {1}})
    cases = [Trial("a", ranks=1), Trial("b", ranks=2)]
    outcomes = list(run_interleaved(lambda turn: [case.in_turn(turn) for case in cases], 3, runner))
    assert runner.made == ["a1", "b1", "a2", "a3"]
    found = {name: collect_runs(name, outcomes) for name in "ab"}
    assert (found["a"].error, found["b"].error) == ("", "boom")
    assert (found["a"].folders, found["b"].folders) == (("trials/a-1", "trials/a-2", "trials/a-3"), ())


def test_every_other_turn_goes_backwards() -> None:
    runner = Made()
    trials = (Trial("a"), Trial("b"))
    list(run_interleaved(lambda turn: alternate_order(trials, turn), 3, runner))
    assert runner.made == ["a1", "b1", "b2", "a2", "a3", "b3"]


def test_a_trial_may_have_fewer_turns_than_others() -> None:
    runner, trials = Made(), [Trial("a", repeats=3), Trial("b", repeats=1), Trial("c", repeats=2)]
    list(run_interleaved(lambda turn: [trial for trial in trials if turn <= trial.repeats], 3, runner))
    assert runner.made == ["a1", "b1", "c1", "a2", "c2", "a3"]
    assert list(run_interleaved(lambda turn: trials, 0, runner)) == []


def test_another_seed_is_run_after_one_that_failed() -> None:
    runner = Made({"a": {1}})
    case = Trial("a", Patch((("optim.lr", 9.0),)), ranks=1, first_seed=7)
    outcomes = list(run_interleaved(lambda turn: [case.in_turn(turn)], 2, runner))
    assert runner.made == ["a1", "a2"]
    assert [each.trial.patch.assignments for each in outcomes] == [
        (("optim.lr", 9.0), ("seed", 7)),
        (("optim.lr", 9.0), ("seed", 8)),
    ]


def test_without_a_seed_all_turns_are_the_same_run() -> None:
    case = Trial("a", ranks=4, nodes=2)
    assert case.in_turn(1) == case.in_turn(2) == case


def test_a_whole_run_is_ended_by_no_target_and_saves_nothing() -> None:
    recipe = load("digits", Patch((("train.stop", {"top1": 0.9}), ("checkpoint.keep", 5)))).recipe
    whole = apply_patch(recipe, build_full_run_patch(recipe, Patch()))
    assert (whole.train.stop, whole.checkpoint.every) == ("off", "off")
    assert (whole.train.epochs, whole.optim, whole.schedule) == (recipe.train.epochs, recipe.optim, recipe.schedule)


def test_saving_that_was_requested_stands() -> None:
    said = Patch((("checkpoint.every", "1ep"),))
    recipe = load("digits", said).recipe
    assert build_full_run_patch(recipe, said) == Patch()
