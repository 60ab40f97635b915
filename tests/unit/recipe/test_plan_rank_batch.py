"""`data.rank_batch_size`: a batch per rank is the same recipe as the batch over all ranks that it comes to."""

from dataclasses import replace

import pytest

from paceline.core.dataset import DatasetInfo
from paceline.lab.patches import expand_equivalent_paths, merge_patches
from paceline.lab.trial import apply_patch
from paceline.recipe.load import Layer, Patch, load_values, merge_layers
from paceline.recipe.plan import (
    Plan,
    divide_batch,
    list_accumulations,
    list_batch_sizes,
    read_batch,
    resolve_batch,
    small_batch_warning,
    smallest_batch,
    write_batch,
)

TRAIN = DatasetInfo("toy", "train", 1000, ("a", "b", "c"), 1, (28, 28), (0.5,), (0.25,))
VAL = replace(TRAIN, split="val", num_images=100)
SCALED = ("train.accumulate=2", "optim.lr=0.1", "optim.lr_scaling=linear", "optim.base_batch_size=32")


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_32_images_on_each_rank_are_one_recipe_with_as_many_times_32_over_all(resolve, world_size: int) -> None:
    per_rank = resolve(*SCALED, "data.rank_batch_size=32").recipe
    whole = resolve(*SCALED, f"data.batch_size={32 * world_size}").recipe
    resolved = resolve_batch(per_rank, world_size)
    assert resolved == whole and resolved.hash == whole.hash
    assert resolve_batch(whole, world_size) == whole
    plan = Plan.derive(per_rank, world_size, TRAIN, VAL)
    assert plan == Plan.derive(whole, world_size, TRAIN, VAL)
    assert (plan.batch_size, plan.rank_batch, plan.micro_batch) == (32 * world_size, 32, 16)
    assert plan.peak_lr == pytest.approx(0.1 * world_size)


@pytest.mark.parametrize(
    ("before", "change", "after"),
    [
        ({"batch_size": 64}, {"rank_batch_size": 32}, {"rank_batch_size": 32}),
        ({"rank_batch_size": 32}, {"batch_size": 64}, {"batch_size": 64}),
        ({"batch_size": 64}, {"rank_batch_size": "auto"}, {"batch_size": 64, "rank_batch_size": "auto"}),
        ({}, {"batch_size": 64, "rank_batch_size": 32}, {"batch_size": 64, "rank_batch_size": 32}),
    ],
)
def test_the_later_layer_counts_the_images(before: dict, change: dict, after: dict) -> None:
    assert merge_layers([Layer({"data": before}, "file"), Layer({"data": change}, "command line")]).values == {
        "data": after
    }


def test_the_command_line_wins_over_a_file_and_a_script_over_what_it_extends(resolve) -> None:
    of_file = "train: {epochs: 1}\ndata: {batch_size: 64}\n"
    data = resolve("data.rank_batch_size=16", text=of_file).recipe.data
    assert (data.batch_size, data.rank_batch_size) == ("auto", 16)
    data = resolve("data.batch_size=96", text=of_file.replace("batch_size", "rank_batch_size")).recipe.data
    assert (data.batch_size, data.rank_batch_size) == (96, "auto")
    data = load_values({"extends": "digits", "data": {"rank_batch_size": 8}}).recipe.data
    assert (data.batch_size, data.rank_batch_size) == ("auto", 8)


def test_a_recipe_with_a_batch_per_rank_loads_again_to_an_equal_one(resolve) -> None:
    recipe = resolve("data.rank_batch_size=16").recipe
    assert load_values(recipe.to_dict()).recipe == recipe
    assert apply_patch(recipe, Patch((("data.batch_size", 64),))) == resolve("data.batch_size=64").recipe


def test_a_patch_over_a_preset_sets_the_batch_size(resolve) -> None:
    recipe = resolve().recipe
    whole, per_rank = Patch((("data.batch_size", 64),)), Patch((("seed", 3), ("data.rank_batch_size", 16)))
    assert merge_patches(recipe, whole, per_rank) == per_rank
    assert merge_patches(recipe, per_rank, whole) == Patch((("seed", 3), *whole.assignments))
    both = {"data.batch_size", "data.rank_batch_size"}
    assert [expand_equivalent_paths([each]) for each in (*both, "seed")] == [both, both, {"seed"}]


def test_two_batches_may_be_given_where_they_agree(resolve, refusal) -> None:
    both = resolve("data.batch_size=64", "data.rank_batch_size=32").recipe
    assert resolve_batch(both, 2) == resolve("data.batch_size=64").recipe
    assert refusal(resolve_batch, both, 4) == (
        "data.rank_batch_size: 32 on 4 ranks is 128 images per step, but data.batch_size is 64 (leave one of them out)"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("data.rank_batch_size=0",), "data.rank_batch_size: 0 should be greater than 0, or 'auto'"),
    ],
)
def test_a_batch_that_is_none_is_refused(resolve, refusal, words, message: str) -> None:
    assert refusal(resolve, *words).startswith(message)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("train.accumulate=3",), "32 does not divide evenly over 1 rank x 3 micro-batches (try 33)"),
        (
            ("train.accumulate=32", "data.augment=[mixup]"),
            "32 does not divide evenly over 1 rank x 32 micro-batches into the",
        ),
    ],
)
def test_a_batch_per_rank_divides_into_micro_batches(resolve, refusal, words, message: str) -> None:
    recipe = resolve("data.rank_batch_size=32", *words).recipe
    assert refusal(resolve_batch, recipe, 4).startswith(f"data.rank_batch_size: {message}")


@pytest.mark.parametrize(
    ("words", "world_size", "device", "is_thin"),
    [
        (("data.batch_size=256",), 16, "cuda", True),
        (("data.batch_size=256",), 8, "cuda", False),
        (("data.batch_size=256",), 16, "cpu", False),
        (("data.batch_size=16",), 1, "cuda", False),
        (("data.rank_batch_size=16",), 16, "cuda", False),
    ],
)
def test_a_small_batch_per_rank_is_noted(resolve, words, world_size, device, is_thin) -> None:
    note = small_batch_warning(resolve(*words).recipe.data, world_size, device)
    warning = (
        "data.batch_size: 256 over 16 ranks is 16 images per GPU and step "
        "(set data.rank_batch_size=256 for as many on each)"
    )
    assert note == (warning if is_thin else "")


@pytest.mark.parametrize(
    ("words", "world_size", "expected"),
    [
        (("data.batch_size=24",), 2, [1, 2, 3, 4, 6, 12]),
        (("data.batch_size=24", "data.augment=[mixup]"), 2, [1, 2, 3, 6]),
        (("data.rank_batch_size=6",), 4, [1, 2, 3, 6]),
    ],
)
def test_a_rank_batch_has_numbers_of_micro_batches_that_divide_it(resolve, words, world_size: int, expected) -> None:
    recipe = resolve_batch(resolve(*words, "train.accumulate=auto").recipe, world_size)
    assert list_accumulations(recipe, world_size) == expected
    assert smallest_batch(recipe, world_size).train.accumulate == expected[-1]


@pytest.mark.parametrize(
    ("words", "world_size", "num_samples", "expected"),
    [
        ((), 2, 600, [16, 32, 64]),
        (("train.accumulate=3",), 1, 200, [9, 18]),
        (("data.sampler={name: repeated, repeats: 9}",), 1, 0, [18]),
        (("data.augment=[mixup]",), 3, 100, [24]),
    ],
)
def test_batches_to_time_double_and_leave_8_steps(resolve, words, world_size: int, num_samples: int, expected) -> None:
    recipe = resolve("data.batch_size=auto", *words).recipe
    assert list_batch_sizes(recipe, world_size, num_samples) == expected
    assert smallest_batch(recipe, world_size).data.batch_size == expected[0]


def test_what_is_not_measured_yet_is_refused_outside_of_a_run(resolve, refusal) -> None:
    for word, field in (("data.batch_size=auto", "data.batch_size"), ("train.accumulate=auto", "train.accumulate")):
        recipe = resolve(word).recipe
        assert refusal(divide_batch, recipe, 2) == f"{field}: auto is measured only by paceline train (set a number)"
        assert read_batch(resolve().recipe, write_batch(recipe)) == recipe
        assert divide_batch(smallest_batch(recipe, 2), 2) > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("train.accumulate=auto", "train.capture=on"),
            "train.accumulate: auto does not measure steps with train.capt",
        ),
        (("data.batch_size=auto", "train.capture=on"), "data.batch_size: auto does not measure steps with train.capt"),
        (
            ("data.batch_size=auto", "train.compile=default"),
            "data.batch_size: auto does not measure steps with train.c",
        ),
        (("train.accumulate=auto", "train.compile=reduce-overhead"), "train.compile: reduce-overhead overwrites"),
        (("train.accumulate=auto", "parallel.static_graph=true"), "parallel.static_graph: true cannot leave"),
        (("train.accumulate=auto", "parallel.strategy=dataparallel"), "train.accumulate: auto does not measure steps"),
    ],
)
def test_steps_that_a_measurement_does_not_show_are_refused(resolve, refusal, words, message: str) -> None:
    assert refusal(resolve, *words).startswith(message)
