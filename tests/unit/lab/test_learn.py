"""`tune --learn`: the arithmetic of its rungs, its candidates, its short trainings, and its budget."""

import math
from itertools import pairwise
from pathlib import Path

import pytest

from paceline.core.errors import RecipeError
from paceline.core.results import EvalResult, RunResult, ThroughputResult, TimeResult
from paceline.core.run_dir import RunDir
from paceline.lab.learn import (
    BASE,
    SHARES,
    Budget,
    LearnSearch,
    build_candidate_patch,
    build_rung_patch,
    compute_cost,
    count_candidates,
    default_space,
    draw_candidates,
    read_space,
    rung_sizes,
)
from paceline.lab.trial import Trial, TrialOutcome, apply_patch
from paceline.recipe.load import Patch, load
from paceline.recipe.schema import Recipe


def recipe_of(*words: str) -> Recipe:
    return load("digits", Patch.parse(list(words))).recipe


class Trainings:
    """Runs that are made up: top-1 falls with the distance of the rate from 0.3, and each epoch takes a second."""

    def __init__(
        self, recipe: Recipe, *, slower: float = 1.0, broken: float = math.inf, unmeasured: float = math.inf
    ) -> None:
        self.recipe, self.slower, self.broken, self.unmeasured = recipe, slower, broken, unmeasured
        self.epochs: list[float] = []
        self.spent_s = 0.0

    def run(self, trial: Trial, repeat: int) -> TrialOutcome:
        recipe = apply_patch(self.recipe, trial.patch)
        assert recipe.train.epochs != "auto" and recipe.train.eval_every != "off"
        self.epochs.append(recipe.train.epochs)
        if recipe.optim.lr > self.broken:
            return TrialOutcome(trial, repeat, RunDir(Path("run")), None, "the loss is NaN", 3)
        seconds = recipe.train.epochs * (self.slower if len(self.epochs) > 1 else 1.0)
        self.spent_s += seconds
        top1 = 0.9 - 0.1 * abs(math.log10(recipe.optim.lr / 0.3)) + 0.001 * (recipe.seed % 3)
        top1 = math.nan if recipe.optim.lr > self.unmeasured else top1
        result = RunResult(
            status="completed",
            recipe_hash=recipe.hash,
            world_size=1,
            epochs=recipe.train.epochs,
            steps=20,
            images_seen=100,
            eval=EvalResult(images=100, loss=1.0, top1=top1, top5=top1),
            best=None,
            throughput=ThroughputResult(images_per_s=1.0, spread=(1.0, 1.0), n=3, excluded_s=0),
            time=TimeResult(wall_s=seconds, startup_s=1.0, train_s=2.0, eval_s=0, checkpoint_s=0, to_target_s=None),
            stages={},
            verdict={},
            lr="0.1",
            weights_sha256="ab",
            provenance={},
        )
        return TrialOutcome(trial, repeat, RunDir(Path("run")), result)


def searched(trainings: Trainings, budget: str, seeds: int = 2) -> tuple[LearnSearch, tuple]:
    def fail(outcome: TrialOutcome) -> None:
        raise AssertionError(outcome.error)

    space = default_space(trainings.recipe)
    search = LearnSearch(trainings.recipe, space, seeds, Budget.parse(budget), trainings.run, fail, lambda line: None)
    return search, search.search()


def test_a_third_of_the_candidates_is_promoted_and_the_recipe_is_on_every_rung() -> None:
    assert rung_sizes(27) == (27, 9, 3) and rung_sizes(4) == (4, 2, 1)
    assert compute_cost(27, 3) == pytest.approx(28 / 9 + 10 / 3 + 4 + 6)
    assert compute_cost(27, 3) <= 16.45 < compute_cost(28, 3)
    assert count_candidates(16.45, 3) == 27 and count_candidates(8, 3) == 0


@pytest.mark.parametrize("budget", ["9", "16", "30.5"])
def test_a_budget_of_trainings_is_used_and_never_exceeded(budget: str) -> None:
    trainings = Trainings(recipe_of("train.epochs=9"))
    search, _ = searched(trainings, budget)
    spent = sum(trainings.epochs) / 9
    assert spent == pytest.approx(search.spent, abs=0.01) and spent <= float(budget) < spent + 2
    assert [trial.rung for trial in search.trials if trial.name == BASE] == [1, 2, 3, 4, 4]


@pytest.mark.parametrize("slower", [1.0, 1.5])
def test_a_budget_of_time_holds_if_later_runs_are_slower(slower: float) -> None:
    """One more training, begun within the budget as far as was known, may end after it."""
    trainings = Trainings(recipe_of("train.epochs=9"), slower=slower)
    searched(trainings, "150s")
    assert 150 / 2 < trainings.spent_s <= 150 + 9 * slower


def test_the_best_candidate_reaches_the_finals_with_new_seeds() -> None:
    trainings = Trainings(recipe_of("train.epochs=9", "optim.lr=0.03"))
    search, (best, patch, values, recipe_values) = searched(trainings, "16", seeds=3)
    first_rung = [trial for trial in search.trials if trial.rung == 1 and trial.name != BASE]
    assert best == max(first_rung, key=lambda trial: trial.value or 0.0).name
    assert [trial.seed for trial in search.trials[-6:]] == [1, 1, 2, 2, 3, 3]
    assert len(values) == len(recipe_values) == 3 and min(values) > max(recipe_values)
    assert abs(math.log10(dict(patch.assignments)["optim.lr"] / 0.3)) < 0.2


def test_a_candidate_that_fails_is_not_promoted() -> None:
    search, (best, *_) = searched(Trainings(recipe_of("train.epochs=9"), broken=0.3), "16")
    failed = {trial.name for trial in search.trials if trial.value is None}
    assert failed and best not in failed
    assert all(trial.rung == 1 for trial in search.trials if trial.name in failed)


def test_a_candidate_whose_metric_is_nan_is_not_promoted() -> None:
    search, (best, *_) = searched(Trainings(recipe_of("train.epochs=9"), unmeasured=0.3), "16")
    unmeasured = {trial.name for trial in search.trials if trial.value is None}
    assert unmeasured and best not in unmeasured
    assert all(trial.rung == 1 and not trial.error for trial in search.trials if trial.name in unmeasured)


def test_a_recipe_whose_metric_is_nan_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"^train\.monitor: top1 of the recipe is NaN.*set another"):
        searched(Trainings(recipe_of("train.epochs=9"), unmeasured=0.0), "16")


def test_a_time_that_is_too_short_for_three_candidates_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"--budget: .* 7\.\d full training runs.*raise it"):
        searched(Trainings(recipe_of("train.epochs=9")), "20s")


def test_candidates_cover_the_space_and_depend_on_the_seed_alone() -> None:
    recipe = recipe_of()
    space = default_space(recipe)
    assert list(space) == ["optim.lr", "optim.weight_decay", "train.label_smoothing"]
    drawn = draw_candidates(recipe, space, 27)
    assert drawn[:9] == draw_candidates(recipe, space, 9) != draw_candidates(recipe_of("seed=1"), space, 9)
    rates = sorted(dict(patch.assignments)["optim.lr"] for patch in drawn)
    assert 0.01 <= rates[0] < 0.014 and 0.75 < rates[-1] <= 1.0
    assert max(high / low for low, high in pairwise(rates)) < 1.5  # even on a log scale: 27 points in two decades


def test_the_strength_of_an_augmentation_is_searched_in_its_list() -> None:
    recipe = recipe_of("data.augment=[flip,{name: rand_augment, magnitude: 9},{name: mixup, alpha: 0.2}]")
    space = default_space(recipe)
    assert {"data.augment.rand_augment.magnitude", "data.augment.mixup.alpha"} <= set(space)
    patch = build_candidate_patch(recipe, {"data.augment.rand_augment.magnitude": 4.6, "data.augment.mixup.alpha": 0.5})
    flip, rand_augment, mixup = apply_patch(recipe, patch).data.augment
    assert (flip.name, rand_augment.magnitude, mixup.alpha) == ("flip", 5, 0.5)
    assert rand_augment.num_ops == recipe.data.augment[1].num_ops


def test_a_short_training_has_the_whole_schedule() -> None:
    words = ("train.epochs=90", "schedule.name=step", "schedule.milestones=[30ep,60ep]", "schedule.warmup=9ep")
    recipe = recipe_of(*words, "schedule.warmup_by=epoch", "train.patience=5", "checkpoint.every=1ep")
    short = apply_patch(recipe, build_rung_patch(recipe, Patch.parse(["optim.lr=0.5"]), SHARES[1]))
    assert (short.train.epochs, short.optim.lr, str(short.schedule.warmup)) == (30, 0.5, "3ep")
    assert [str(each) for each in short.schedule.milestones] == ["10ep", "20ep"]
    assert (short.train.patience, short.checkpoint.every, str(short.train.eval_every)) == ("off", "off", "100%")
    sizes = recipe_of("train.epochs=90", "data.progressive={start_size: 8, begin: 9ep, end: 50%, multiple: 4}")
    progressive = apply_patch(sizes, build_rung_patch(sizes, Patch(), SHARES[1])).data.progressive
    assert (str(progressive.begin), str(progressive.end)) == ("3ep", "50%")
    words = ("model.freeze=backbone", "model.unfreeze=30ep", "data.augment=[flip,{name: mixup, until: 60ep}]")
    phases = recipe_of("train.epochs=90", *words)
    short = apply_patch(phases, build_rung_patch(phases, Patch(), SHARES[1]))
    assert (str(short.model.unfreeze), str(short.data.augment[1].until)) == ("10ep", "20ep")
    whole = apply_patch(recipe, build_rung_patch(recipe, Patch(), 1.0))
    assert whole.schedule == recipe.schedule and whole.train.epochs == 90


def test_a_space_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "search.yaml"
    path.write_text("optim:\n  lr: {low: 0.01, high: 1, scale: log}\ntrain.label_smoothing: {values: [0, 0.1]}\n")
    space = read_space(path, recipe_of())
    assert list(space) == ["optim.lr", "train.label_smoothing"]
    assert [space["optim.lr"].pick(share) for share in (0.0, 0.5)] == [0.01, 0.1]
    assert space["train.label_smoothing"].pick(0.9) == 0.1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no field"),
        ("optim.lr: {low: 1, high: 0.1}", "optim.lr: low 1 is not below high 0.1"),
        ("optim.lr: {low: 0, high: 0.1, scale: log}", "above 0 on a log scale"),
        ("optim.lr: {low: 0.1}", "optim.lr: has no range"),
        ("optim.lr: {low: few}", "optim.lr: low: .*give low, high"),
        ("optim.rate: {values: [1]}", "optim.rate"),
        ("optim.lr: {values: [-1, 1]}", "optim.lr"),
        ("data.augment.mixup.alpha: {low: 0.1, high: 1}", "data.augment.mixup.alpha: .*add it"),
    ],
)
def test_a_space_that_does_not_fit_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "search.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError, match=message):
        read_space(path, recipe_of())


@pytest.mark.parametrize("text", ["0", "-2", "inf", "nan", "many", "2ep", "0h"])
def test_a_budget_that_is_neither_trainings_nor_time_is_refused(text: str) -> None:
    with pytest.raises(RecipeError, match=r"--budget: .*write 20 or 2h"):
        Budget.parse(text)
