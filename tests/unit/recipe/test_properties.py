"""What holds for any recipe that can be written, and for anything else that stands where one should: a line."""

import copy
import math
from functools import cache
from typing import Any

from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from paceline.core.dataset import DatasetInfo
from paceline.core.errors import DataError, PacelineError, RecipeError
from paceline.recipe.load import Layer, Patch, load, merge_layers, preset_names, validate
from paceline.recipe.plan import Plan
from paceline.recipe.schema import Recipe
from paceline.recipe.yaml import read_yaml_text, read_yaml_value, to_yaml_text

POOL: tuple[Any, ...] = (
    *("on", "off", "auto", "1ep", "500st", "10%", "64img", "30min", "0st", "x", "", "none", "skip", "host", "device"),
    *("ddp", "fsdp", "sgd", "lamb", "schedule_free", "adam", "plateau", "one_cycle", "constant", "cosine", "group"),
    *(
        "bf16",
        "bf16_master",
        "fp16_pure",
        "amp",
        "linear",
        "sqrt",
        "contiguous",
        "channels_last",
        "stretch",
        "powersgd",
    ),
    *(["flip", "pad_crop"], ["mixup"], [{"name": "cutout", "size": 4}], ["1ep", "2ep"], [0.9, 0.99], {}, {"top1": 0.5}),
    *(-1, 0, 1, 2, 3, 7, 32, 0.0, 0.1, 0.5, 1.5, 1e-9, 1e300, math.inf, math.nan, 2**63, True, None),
)
LEAVES = st.sampled_from(POOL) | st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6)
KEYS = st.sampled_from(("name", "lr", "epochs", "steps", "every", "padding", "extends", "on", "x", ""))
VALUES = st.recursive(
    LEAVES, lambda below: st.lists(below, max_size=3) | st.dictionaries(KEYS, below, max_size=3), max_leaves=6
)


def dotted(section: type[BaseModel], prefix: str = "") -> list[str]:
    """Return the path of every field of a recipe; below a variant, those of all variants."""
    found = []
    for name, field in section.model_fields.items():
        found.append(f"{prefix}{name}")
        for below in sections_in(field.annotation):
            found += dotted(below, f"{prefix}{name}.")
    return found


def sections_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [each for part in getattr(annotation, "__args__", ()) for each in sections_in(part)]


PATHS = sorted(set(dotted(Recipe)))
BASES = tuple(load(name).stack.values for name in preset_names())


def is_accepted(path: str, value: Any) -> bool:
    """Whether `value` is one for the field at `path` of the smallest recipe there is."""
    layers = ({"train": {"epochs": 2}}, Patch(((path, value),)).values())
    try:
        Recipe.model_validate(merge_layers(Layer(each, "a test") for each in layers).values)
    except ValidationError:
        return False
    return True


@cache
def accepted() -> list[tuple[str, Any]]:
    """Return what each field takes of the pool; a second's work, which is not done to collect tests."""
    return [(path, value) for path in PATHS for value in POOL if is_accepted(path, value)]


FITTING = st.deferred(lambda: st.lists(st.sampled_from(accepted()), max_size=4))
ASSIGNMENTS = FITTING | st.lists(st.tuples(st.sampled_from(PATHS), VALUES), max_size=3)


def resolved(*layers: dict[str, Any]) -> Recipe:
    return validate(merge_layers([Layer(copy.deepcopy(values), "a test") for values in layers]))


def in_one_line(error: PacelineError) -> bool:
    return len(str(error).splitlines()) == 1 and bool(str(error))


def test_paths_to_search_exist() -> None:
    assert {"data.batch_size", "optim.nesterov", "train.ema.decay", "checkpoint.keep", "seed"} <= set(PATHS)
    assert len(PATHS) > 120
    assert len({path for path, _ in accepted()}) > 80 and len(BASES) > 30


@settings(max_examples=60)
@given(st.sampled_from(BASES), ASSIGNMENTS)
def test_any_assignments_make_a_recipe_that_reads_back_or_a_line(base: dict[str, Any], assignments) -> None:
    try:
        recipe = resolved(base, Patch(tuple(assignments)).values())
    except RecipeError as refused:
        assert in_one_line(refused)
        return
    again = resolved(read_yaml_text(to_yaml_text(recipe.to_dict()), "r.yaml").values)
    assert again == recipe and again.hash == recipe.hash


@settings(max_examples=40)  # the line that explains what is wrong costs a tenth of a second
@given(st.dictionaries(st.sampled_from([*Recipe.model_fields, "extends", "x"]), VALUES))
def test_any_mapping_is_a_recipe_or_a_line(values: dict[str, Any]) -> None:
    try:
        assert isinstance(resolved(values), Recipe)
    except RecipeError as refused:
        assert in_one_line(refused)


# Indicators of YAML, alone and against one another.
YAML = st.lists(
    st.sampled_from(("train:", "epochs", " 1", "\n", "\n  ", ": ", "- ", "[", "]", "{", "}", ",", "&a", "*a", "!!x "))
    | st.sampled_from(
        ("|", ">", "'", '"', "#", "?", "<<", "%YAML 1.1", "---", "...", "\t", "1e-3", "~", "\\", "2026-11-21")
    )
    | st.text(max_size=3),
    max_size=14,
).map("".join)


@given(YAML | st.text())
def test_any_text_is_values_that_read_back_or_a_line(text: str) -> None:
    for read in (lambda: read_yaml_text(text, "r.yaml").values, lambda: {"x": read_yaml_value(text, "x")}):
        try:
            values = read()
        except RecipeError as refused:
            assert in_one_line(refused) and str(refused).isprintable()
            continue
        assert same(read_yaml_text(to_yaml_text(values), "again").values, values)


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal, and no number is taken for equal that is none."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(same(*pair) for pair in zip(one, other, strict=True))
    return type(one) is type(other) and (one == other or (one != one and other != other))


def info(split: str, num_images: int, pixels: int | None) -> DatasetInfo:
    size = None if pixels is None else (pixels, pixels)
    return DatasetInfo("x", split, num_images, tuple("abc"), 3, size, (0.5,) * 3, (0.2,) * 3)


@given(
    st.sampled_from(BASES),
    FITTING,
    st.integers(1, 9),
    st.integers(1, 64),
    st.integers(1, 500),
    st.integers(1, 99),
    st.sampled_from((None, 8, 32)),
    st.integers(1, 3),
)
def test_the_plan_of_any_recipe_keeps_within_its_run(
    base,
    assignments,
    world_size: int,
    rank_batch: int,
    num_images: int,
    num_val: int,
    pixels: int | None,
    accumulate: int,
) -> None:
    sizes = {"data": {"batch_size": rank_batch * world_size}, "train": {"accumulate": accumulate}}
    try:
        recipe = resolved(base, Patch(tuple(assignments)).values(), sizes)
    except RecipeError:
        assume(False)
    try:
        plan = Plan.derive(recipe, world_size, info("train", num_images, pixels), info("val", num_val, pixels))
    except (RecipeError, DataError) as refused:
        assert in_one_line(refused)
        return
    check_plan(plan, recipe, num_images)


def check_plan(plan: Plan, recipe: Recipe, num_images: int) -> None:
    assert plan.batch_size == recipe.data.batch_size == plan.rank_batch * plan.world_size
    assert plan.rank_batch == plan.micro_batch * recipe.train.accumulate and plan.micro_batch >= 1
    assert 0 <= plan.dropped_images < plan.batch_size
    assert plan.steps_per_epoch * plan.batch_size + plan.dropped_images == num_images
    assert plan.total_steps >= 1 and plan.eval_batch >= 1
    for cadence in (plan.eval_every, plan.checkpoint_every, plan.log_every):
        assert cadence >= 0 and isinstance(cadence, int)
    assert plan.log_every >= 1 and (plan.eval_every == 0) == (recipe.train.eval_every == "off")
    assert math.isfinite(plan.peak_lr) and plan.peak_lr > 0
    starts = [step for step, _ in plan.train_sizes]
    assert starts[0] == 0 and starts == sorted(set(starts))
    assert all(1 <= plan.train_size(step) <= plan.image_size for step in (0, plan.total_steps // 2, plan.total_steps))
    assert plan.epoch_of(plan.steps_per_epoch) == 1 and plan.epoch_of(plan.steps_per_epoch - 1) == 0
