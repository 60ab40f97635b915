"""A search finds faster settings that train alike in few runs, and reports all that it tried."""

import itertools
import math
import random
from collections.abc import Callable
from functools import reduce
from pathlib import Path

import pytest

from paceline.core.errors import RecipeError
from paceline.core.results import RunResult
from paceline.lab.ab_test import TrialBench
from paceline.lab.patches import build_measurement_patch
from paceline.lab.runner import TrialError
from paceline.lab.search_space import (
    Candidate,
    SearchSpace,
    build_search_space,
    compute_grid_size,
)
from paceline.lab.trial import apply_patch, format_patch
from paceline.lab.tune import Search, SearchResult
from paceline.recipe.load import Patch, load
from paceline.recipe.schema import Recipe
from paceline.recipe.schema.optim import Lars, Sgd

from .simulated_machine import Machine

DIGITS = load("digits").recipe
MEASURED = apply_patch(DIGITS, build_measurement_patch(DIGITS, 20, Patch(), lr_share=0.1))


def tuned(machine: Machine, space: SearchSpace, *, repeats: int = 2, budget: int | None = None) -> SearchResult:
    def lay(patch: Patch) -> Recipe | None:
        try:
            return apply_patch(MEASURED, patch)
        except RecipeError:
            return None

    return Search(TrialBench(MEASURED, machine.run), space, lay, 20, repeats, budget, lambda line: None).search()


def outcomes(found: SearchResult) -> dict[str, str]:
    return {tried.name: tried.status for tried in found.tried}


def by_hand(*words: str) -> SearchSpace:
    return build_search_space(words, MEASURED, allow_batch=False)


def noisy(speed: Callable[[Recipe], float], share: float = 0.005) -> Callable[[Recipe], float]:
    """Return a speed that scatters by so much, from run to run, the same in every test."""
    draw = random.Random(0)
    return lambda recipe: speed(recipe) * math.exp(draw.gauss(0, share))


def product(recipe: Recipe) -> float:
    """A machine on which what helps, helps whatever else is set: 2.4 times at best."""
    precision = {"fp32": 1.0, "bf16": 1.6, "fp64": 0.4}[recipe.train.precision]
    pieces = {1: 1.0, 2: 1.2, 4: 1.5}.get(recipe.train.accumulate, 0.9)
    layout = {"auto": 1.0, "contiguous": 0.8, "channels_last": 1.0}[recipe.model.memory_format]
    return 100 * precision * pieces * layout


WORDS = ("train.precision=fp32,bf16,fp64", "train.accumulate=1,2,4,8", "model.memory_format=auto,contiguous")


def test_the_best_of_a_grid_is_found_in_less_than_half_of_its_trials(tmp_path: Path) -> None:
    found = tuned(Machine(MEASURED, tmp_path, noisy(product)), by_hand(*WORDS), repeats=1)
    grid = [
        product(
            apply_patch(
                MEASURED, Patch((("train.precision", one), ("train.accumulate", two), ("model.memory_format", x)))
            )
        )
        for one, two, x in itertools.product(("fp32", "bf16", "fp64"), (1, 2, 4, 8), ("auto", "contiguous"))
    ]
    assert found.grid == len(grid)
    assert product(apply_patch(MEASURED, found.patch)) == max(grid)
    assert found.trials < len(grid) / 2
    assert sorted(format_patch(found.patch)) == ["train.accumulate=4", "train.precision=bf16"]
    assert found.gain is not None and found.gain.value == pytest.approx(2.4, rel=0.03)  # four times the scatter


SPACE: dict[str, tuple[str, ...]] = {
    "train.precision": ("fp32", "bf16"),
    "model.memory_format": ("contiguous", "auto"),
    "optim.implementation": ("loop", "foreach", "auto"),
    "parallel.threads": ("1", "auto"),
    "data.workers": ("1", "auto"),
}


def made_up(seed: int) -> Callable[[dict[str, str]], float]:
    """Return a machine on which each value has an effect of its own (about 20 %) and each pair of them (1.5 %)."""

    def effect(*values: str) -> float:
        mean, scatter = (0.1, 0.2) if len(values) == 1 else (0.0, 0.015)
        return random.Random(f"{seed} {values}").gauss(mean, scatter)  # text, as a tuple's hash is another each time

    def speed(setting: dict[str, str]) -> float:
        words = [f"{path}={value}" for path, value in setting.items()]
        return 100 * math.exp(sum(effect(*some) for size in (1, 2) for some in itertools.combinations(words, size)))

    return speed


@pytest.mark.parametrize("seed", range(4))
def test_settings_within_3_percent_of_the_best_of_a_grid_are_found_in_a_quarter_of_its_trials(
    seed: int, tmp_path: Path
) -> None:
    speed = made_up(seed)

    def of(recipe: Recipe) -> float:
        return speed({path: str(reduce(getattr, path.split("."), recipe)) for path in SPACE})

    corner = Patch.parse([f"{path}={values[0]}" for path, values in SPACE.items()])
    measured = apply_patch(MEASURED, corner)
    grid = [speed(dict(zip(SPACE, values, strict=True))) for values in itertools.product(*SPACE.values())]
    words = [f"{path}={','.join(values)}" for path, values in SPACE.items()]
    space = build_search_space(words, measured, allow_batch=False)
    machine = Machine(measured, tmp_path, noisy(of))
    bench = TrialBench(measured, machine.run)
    found = Search(
        bench, space, lambda patch: apply_patch(measured, patch), 20, 1, len(grid) // 4, lambda line: None
    ).search()
    assert len(grid) == 48
    assert found.trials <= len(grid) / 4
    assert of(apply_patch(measured, found.patch)) >= 0.97 * max(grid)


def test_what_helps_only_beside_something_else_is_found_in_a_later_round(tmp_path: Path) -> None:
    def speed(recipe: Recipe) -> float:
        is_fast = recipe.train.precision == "bf16"
        return 100 * (1.5 if is_fast else 1.0) * (1.3 if is_fast and recipe.train.accumulate == 2 else 1.0)

    found = tuned(Machine(MEASURED, tmp_path, speed), by_hand("train.precision=bf16", "train.accumulate=2"))
    assert dict(found.patch.assignments) == {"train.precision": "bf16", "train.accumulate": 2}
    assert [(tried.name, tried.round, tried.status) for tried in found.tried] == [
        ("train.precision=bf16", 1, "won"),
        ("train.accumulate=2", 1, "no_gain"),
        ("train.accumulate=2", 2, "won"),
    ]
    assert found.tried[-1].over == "train.precision=bf16"


def test_what_trains_otherwise_is_not_taken_however_fast_it_is(tmp_path: Path) -> None:
    machine = Machine(MEASURED, tmp_path, product, loss=lambda recipe: 3.0 if recipe.train.accumulate > 1 else 2.0)
    found = tuned(machine, by_hand(*WORDS))
    assert format_patch(found.patch) == ["train.precision=bf16"]
    assert outcomes(found)["train.precision=bf16 + train.accumulate=4"] == "differs"
    assert "train.accumulate=4" in outcomes(found)


def test_a_larger_batch_is_taken_by_itself_so_that_the_others_are_seen_to_train_alike(tmp_path: Path) -> None:
    def speed(recipe: Recipe) -> float:
        return product(recipe) * {128: 1.0, 256: 1.8, 512: 1.7}.get(recipe.data.batch_size, 0.5)

    machine = Machine(MEASURED, tmp_path, speed, loss=lambda recipe: 2.0 * recipe.data.batch_size / 128)
    found = tuned(machine, build_search_space([*WORDS, "data.batch_size=256,512"], MEASURED, allow_batch=True))
    won = [(tried.name, tried.round) for tried in found.tried if tried.status == "won"]
    together = "train.precision=bf16 + train.accumulate=4"
    assert won == [("train.precision=bf16", 1), ("train.accumulate=4", 1), (together, 1), ("batch-256", 2)]
    assert apply_patch(MEASURED, found.patch).optim.lr_scaling == "linear"


def test_what_has_no_room_is_no_failure_and_what_fails_is_reported(tmp_path: Path) -> None:
    def fails(recipe: Recipe) -> str:
        if recipe.train.accumulate == 2:
            return "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
        if recipe.train.accumulate == 4:
            return "rank 0 of 2 was killed by SIGKILL, so all ranks were ended"
        return "data.loader: native: cannot" if recipe.train.accumulate == 8 else ""

    found = tuned(Machine(MEASURED, tmp_path, product, fails=fails), by_hand("train.accumulate=2,4,8"))
    assert outcomes(found) == {
        "train.accumulate=2": "no_room",
        "train.accumulate=4": "no_room",
        "train.accumulate=8": "failed",
    }
    assert found.tried[-1].why == "data.loader: native: cannot"
    assert found.gain is None and found.patch == Patch()


def test_nothing_is_taken_where_nothing_is_faster(tmp_path: Path) -> None:
    found = tuned(Machine(MEASURED, tmp_path, noisy(lambda recipe: 100)), by_hand(*WORDS), repeats=3)
    assert found.patch == Patch()
    assert "won" not in outcomes(found).values()
    assert found.first == found.best


def test_one_pair_has_to_show_two_percent(tmp_path: Path) -> None:
    def speed(gain: float) -> Callable[[Recipe], float]:
        return lambda recipe: 100 * (gain if recipe.train.accumulate == 2 else 1.0)

    few = tuned(Machine(MEASURED, tmp_path / "few", speed(1.015)), by_hand("train.accumulate=2"), repeats=1)
    more = tuned(Machine(MEASURED, tmp_path / "more", speed(1.025)), by_hand("train.accumulate=2"), repeats=1)
    assert (few.tried[0].status, more.tried[0].status) == ("no_gain", "won")


@pytest.mark.parametrize("budget", range(4, 24))
def test_a_budget_is_never_exceeded(budget: int, tmp_path: Path) -> None:
    machine = Machine(MEASURED, tmp_path, noisy(product))
    found = tuned(machine, by_hand(*WORDS), repeats=1, budget=budget)
    assert len(machine.made) == found.trials <= budget


def test_pairs_are_fresh_runs_on_the_same_samples_with_the_first_place_taken_in_turns(tmp_path: Path) -> None:
    machine = Machine(MEASURED, tmp_path, product)
    tuned(machine, by_hand("train.accumulate=2"), repeats=3)
    pairs = [
        (trial.name, apply_patch(MEASURED, trial.patch).seed, repeat)
        for trial, repeat in machine.made
        if "pairs" in trial.name
    ]
    best, other = "pairs-1-best", "pairs-1-train.accumulate=2"
    assert pairs == [(best, 0, 1), (other, 0, 1), (other, 1, 2), (best, 1, 2), (best, 2, 3), (other, 2, 3)]


def test_the_same_search_again_requests_the_same_runs(tmp_path: Path) -> None:
    made = []
    for folder in ("one", "other"):
        machine = Machine(MEASURED, tmp_path / folder, noisy(product))
        tuned(machine, by_hand(*WORDS))
        made.append(machine.made)
    assert made[0] == made[1]


def test_a_recipe_that_cannot_be_run_ends_the_search_with_its_own_error(tmp_path: Path) -> None:
    machine = Machine(MEASURED, tmp_path, product, fails=lambda recipe: "no such folder")
    with pytest.raises(TrialError, match="no such folder"):
        tuned(machine, by_hand(*WORDS))


def test_by_the_verdict_moves_of_stages_that_take_nothing_are_not_tried(tmp_path: Path) -> None:
    found = tuned(Machine(MEASURED, tmp_path, product), by_hand())
    assert "precision-bf16" in outcomes(found) and "accumulate-4" in outcomes(found)
    assert not [name for name in outcomes(found) if name.startswith(("workers", "loader"))]
    waits = Machine(
        MEASURED, tmp_path / "waits", product, shares=lambda recipe: {"data_wait": 0.3, "forward": 0.3, "backward": 0.4}
    )
    assert "workers-3" in outcomes(tuned(waits, by_hand()))


def test_a_setting_that_was_left_for_a_faster_one_is_not_gone_back_to(tmp_path: Path) -> None:
    found = tuned(Machine(MEASURED, tmp_path, product), by_hand(*WORDS))
    later = [tried.name for tried in found.tried if tried.round > 1]
    assert not {"train.precision=fp32", "train.accumulate=1"} & set(later)


def test_a_move_of_which_only_a_part_was_left_is_no_way_back(tmp_path: Path) -> None:
    half = Patch((("train.precision", "bf16"),))
    whole = Patch((("train.precision", "fp32"), ("train.accumulate", 2)))

    def list_both(best: Recipe, result: RunResult) -> list[Candidate]:
        return [Candidate("half", "", half, ()), Candidate("whole", "", whole, ())]

    machine = Machine(MEASURED, tmp_path, lambda recipe: 120.0 if recipe.train.precision == "bf16" else 100.0)
    tried = [(tried.name, tried.round) for tried in tuned(machine, list_both).tried]
    assert ("whole", 2) in tried


def test_another_variant_is_tried_over_what_was_set_of_the_one_before(tmp_path: Path) -> None:
    def speed(recipe: Recipe) -> float:
        return 150.0 if isinstance(recipe.optim, Sgd) and recipe.optim.implementation == "loop" else 100.0

    assert isinstance(MEASURED.optim, Sgd) and "implementation" not in Lars.model_fields
    found = tuned(Machine(MEASURED, tmp_path, speed), by_hand("optim.implementation=loop", "optim.name=lars"))
    assert [(tried.name, tried.round, tried.status) for tried in found.tried] == [
        ("optim.implementation=loop", 1, "won"),
        ("optim.name=lars", 1, "no_gain"),
        ("optim.name=lars", 2, "lost"),
    ]


def test_a_setting_below_a_section_that_is_off_can_win(tmp_path: Path) -> None:
    machine = Machine(MEASURED, tmp_path, lambda recipe: 100.0 if recipe.train.ema == "off" else 150.0)
    assert format_patch(tuned(machine, by_hand("train.ema.every=2")).patch) == ["train.ema.every=2"]


MANY = ("train.accumulate=2,4,8,16,32", "train.precision=bf16,fp64", "model.memory_format=contiguous,channels_last")


def test_moves_of_later_rounds_are_compared_with_a_run_of_that_round(tmp_path: Path) -> None:
    """The machine grows a fifth slower after the first round, whatever is set."""
    machine = Machine(MEASURED, tmp_path, lambda recipe: 100.0 if len(machine.made) <= 9 else 80.0)
    later = [tried for tried in tuned(machine, by_hand(*MANY)).tried if tried.round == 2]
    assert later
    assert all(tried.ratio is not None and tried.ratio.value == 1.0 for tried in later)


def test_all_runs_that_are_compared_are_equally_long(tmp_path: Path) -> None:
    machine = Machine(MEASURED, tmp_path, noisy(product))
    tuned(machine, by_hand(*MANY))
    assert "round-2-best" in [trial.name for trial, _ in machine.made]
    lengths: dict[str, set[int]] = {}
    for trial, _ in machine.made:
        comparison = "-".join(trial.name.split("-")[:2]) + ("-longer" if trial.name.endswith("-longer") else "")
        lengths.setdefault(comparison, set()).add(int(apply_patch(MEASURED, trial.patch).train.steps))
    assert {"round-1", "round-2", "pairs-1"} <= set(lengths)
    assert all(len(steps) == 1 for steps in lengths.values())


def test_what_a_budget_leaves_for_one_pair_is_spent_on_the_next_move(tmp_path: Path) -> None:
    def speed(recipe: Recipe) -> float:
        is_fast = recipe.train.precision == "bf16"
        return 100 * (1.5 if is_fast else 1.0) * (1.3 if is_fast and recipe.train.accumulate == 2 else 1.0)

    machine = Machine(MEASURED, tmp_path, speed)
    found = tuned(machine, by_hand("train.precision=bf16", "train.accumulate=2"), repeats=1, budget=7)
    assert dict(found.patch.assignments) == {"train.precision": "bf16", "train.accumulate": 2}
    assert found.trials == 7


def test_a_budget_that_ends_a_search_is_reported(tmp_path: Path) -> None:
    found = tuned(Machine(MEASURED, tmp_path, noisy(product)), by_hand(*MANY), repeats=1, budget=6)
    assert found.stopped == "the budget of 6 runs leaves no room for another round"


def test_a_grid_counts_what_excludes_each_other_once(tmp_path: Path) -> None:
    machine = Machine(MEASURED, tmp_path, product)
    assert tuned(machine, by_hand("train.accumulate=1,2,4", "train.precision=bf16")).grid == 3 * 2
    assert compute_grid_size([]) == 1


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("train.precision", "lists no values"),
        ("train.precision=", "lists no values"),
        ("train.precison=bf16", "precison"),
        ("train.precision=bf16,half", "half"),
        ("train.steps=10,20", "not a setting to tune"),
        ("seed=1,2", "seed changes what is learned and not the speed"),
        ("optim.lr=0.01,0.1", r"^--vary: optim.lr changes what .* with paceline compare\)$"),
        ("optim={name: sgd, lr: 0.5}", "optim.lr changes what is learned and not the speed"),
        ("optim={implementation: loop, lr: 0.5}", "optim.lr changes what is learned and not the speed"),
        ("optim={name: adam},{name: sgd, lr: 0.5}", "optim.lr changes what is learned and not the speed"),
        ("optim={name: 'torch.optim:Adagrad'}", "optim.lr: is needed"),
        (
            "optim.nesterov=true,false",
            r"optim.nesterov changes what is learned, too, so the fastest value may be "
            r"the least accurate \(train one run per value, .* with paceline compare\)$",
        ),
        ("optim.layer_decay=0.5,off", "optim.layer_decay changes what is learned, too"),
        ("optim.learning_rate=1", "optim.learning_rate: no such field"),
        ("schedule.final=0.1", "schedule.final changes what is learned"),
        ("train.label_smoothing=0,0.1", "train.label_smoothing changes what is learned"),
        ("data.batch_size=64,256", "--allow-batch"),
        ("data={batch_size: 64}", "--allow-batch"),
    ],
)
def test_a_space_that_cannot_be_is_refused(word: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        by_hand(word)


def test_a_batch_is_tuned_as_that_of_all_ranks() -> None:
    with pytest.raises(RecipeError, match=r"^--vary: data\.rank_batch_size is varied as data\.batch_size, over all"):
        build_search_space(["data.rank_batch_size=16,32"], MEASURED, allow_batch=True)


def test_what_makes_a_step_of_an_optimizer_shorter_is_tuned() -> None:
    by_hand("optim.implementation=loop,foreach", "optim.name=sgd,adam", "train.clip_norm=1,2")


def test_another_optimizer_is_tuned_with_the_fields_that_it_needs(tmp_path: Path) -> None:
    def speed(recipe: Recipe) -> float:
        return 150.0 if recipe.optim.name == "torch.optim:Adagrad" else 100.0

    found = tuned(Machine(MEASURED, tmp_path, speed), by_hand("optim={name: 'torch.optim:Adagrad', lr: 0.01}"))
    assert dict(found.patch.assignments) == {"optim.name": "torch.optim:Adagrad", "optim.lr": 0.01}


def test_a_section_and_a_field_in_it_exclude_each_other(tmp_path: Path) -> None:
    def speed(recipe: Recipe) -> float:
        by_optimizer = {"adam": 150.0, "lamb": 140.0}.get(recipe.optim.name, 100.0)
        return by_optimizer * (1.2 if recipe.train.precision == "bf16" else 1.0)

    words = ("optim={name: adam}", "optim.name=lamb", "train.precision=bf16")
    found = tuned(Machine(MEASURED, tmp_path, speed), by_hand(*words))
    assert dict(found.patch.assignments) == {"optim.name": "adam", "train.precision": "bf16"}
    lamb = next(tried for tried in found.tried if tried.name == "optim.name=lamb")
    assert lamb.status == "lost" and lamb.why.endswith('less than optim={"name": "adam"}')


def test_a_batch_by_hand_has_its_learning_rate_follow() -> None:
    space = build_search_space(["data.batch_size=64,256"], MEASURED, allow_batch=True)
    result = Machine(MEASURED, Path("unused"), product)._result(MEASURED)
    moves = space(MEASURED, result)
    assert [move.name for move in moves] == ["batch-64", "batch-256"]
    assert all("optim.lr_scaling=linear" in format_patch(move.patch) for move in moves)


def test_a_recipe_that_was_measured_beside_other_programs_is_not_tuned(tmp_path: Path) -> None:
    machine = Machine(MEASURED, tmp_path, product, is_busy=lambda recipe: True)
    found = tuned(machine, by_hand(*WORDS))
    assert (found.patch, found.gain, found.tried, len(machine.made)) == (Patch(), None, (), 1)
    assert found.stopped.startswith("other processes held the cores 62 % of the time as the recipe was measured")


def test_a_move_that_was_measured_beside_other_programs_is_not_taken_and_that_is_reported(tmp_path: Path) -> None:
    def is_bf16(recipe: Recipe) -> bool:
        return recipe.train.precision == "bf16"

    machine = Machine(MEASURED, tmp_path, lambda recipe: 300.0 if is_bf16(recipe) else 100.0, is_busy=is_bf16)
    found = tuned(machine, by_hand("train.precision=fp32,bf16"))
    assert found.patch == Patch()
    assert set(outcomes(found).values()) == {"starved"}
    assert "1 of 1 trial could not be decided, as other processes used the cores" in found.stopped
