"""Cases are run in turns; the same run is not tried again once it has failed, one of another seed is."""

from pathlib import Path

from paceline.core.rundir import RunDir
from paceline.lab.trial import Outcome, Trial, vary
from paceline.lab.turns import Case, error_of, run_turns, runs_of, there_and_back, whole_patch
from paceline.recipe.load import load
from paceline.recipe.patch import Patch


class Made:
    """What runs trials, and fails those whose name is among `fails`, in the turns that it names."""

    def __init__(self, fails: dict[str, set[int]] | None = None) -> None:
        self.fails = fails or {}
        self.made: list[str] = []

    def run(self, trial: Trial, repeat: int) -> Outcome:
        self.made.append(f"{trial.name}{repeat}")
        fails = repeat in self.fails.get(trial.name, set())
        result = None if fails else object()
        return Outcome(
            trial, repeat, RunDir(Path(f"runs/scale/trials/{trial.name}-{repeat}")), result, "boom" if fails else ""
        )


def test_each_turn_runs_all_cases_once_and_a_failed_one_no_more() -> None:
    runner = Made({"b": {1}})
    cases = [Case("a", Patch(), 1), Case("b", Patch(), 2)]
    outcomes = list(run_turns(lambda turn: [case.trial(turn) for case in cases], 3, runner))
    assert runner.made == ["a1", "b1", "a2", "a3"]
    assert (error_of("a", outcomes), error_of("b", outcomes)) == ("", "boom")
    assert (runs_of("a", outcomes), runs_of("b", outcomes)) == (("trials/a-1", "trials/a-2", "trials/a-3"), ())


def test_every_other_turn_goes_backwards() -> None:
    runner = Made()
    trials = (Trial("a"), Trial("b"))
    list(run_turns(lambda turn: there_and_back(trials, turn), 3, runner))
    assert runner.made == ["a1", "b1", "b2", "a2", "a3", "b3"]


def test_a_trial_may_have_fewer_turns_than_others() -> None:
    runner, trials = Made(), [Trial("a", repeats=3), Trial("b", repeats=1), Trial("c", repeats=2)]
    list(run_turns(lambda turn: [trial for trial in trials if turn <= trial.repeats], 3, runner))
    assert runner.made == ["a1", "b1", "c1", "a2", "c2", "a3"]
    assert list(run_turns(lambda turn: trials, 0, runner)) == []


def test_another_seed_is_run_after_one_that_failed() -> None:
    runner = Made({"a": {1}})
    case = Case("a", Patch((("optim.lr", 9.0),)), 1, first_seed=7)
    outcomes = list(run_turns(lambda turn: [case.trial(turn)], 2, runner))
    assert runner.made == ["a1", "a2"]
    assert [each.trial.patch.assignments for each in outcomes] == [
        (("optim.lr", 9.0), ("seed", 7)),
        (("optim.lr", 9.0), ("seed", 8)),
    ]


def test_without_a_seed_all_turns_are_the_same_run() -> None:
    case = Case("a", Patch(), 4, 2)
    assert case.trial(1) == case.trial(2) == Trial("a", ranks=4, nodes=2)


def test_a_whole_run_is_ended_by_no_target_and_saves_nothing() -> None:
    recipe = load("digits", Patch((("train.stop", {"top1": 0.9}), ("checkpoint.keep", 5)))).recipe
    whole = vary(recipe, whole_patch(recipe, Patch()))
    assert (whole.train.stop, whole.checkpoint.every) == ("off", "off")
    assert (whole.train.epochs, whole.optim, whole.schedule) == (recipe.train.epochs, recipe.optim, recipe.schedule)


def test_saving_that_was_asked_for_stands() -> None:
    said = Patch((("checkpoint.every", "1ep"),))
    recipe = load("digits", said).recipe
    assert whole_patch(recipe, said) == Patch()
