"""The counted memory of a step, against sums by hand; and the largest micro-batch of a GPU."""

from dataclasses import replace

import pytest

from paceline.core.dataset import DatasetInfo
from paceline.lab.quote.memory import MemoryCounter, StepMemory, count_step_memory, find_largest
from paceline.recipe.load import Patch, load
from paceline.recipe.plan import Plan

TRAIN = DatasetInfo(
    name="none",
    split="train",
    num_images=4096,
    class_names=tuple(map(str, range(1000))),
    channels=3,
    image_size=(64, 64),
    mean=(),
    std=(),
)
VAL = replace(TRAIN, split="val", num_images=64)
SMALL = ["model.name=speednet95", "model.width=0.25", "data.batch_size=16", "train.precision=bf16"]


def plan_of(recipe, ranks: int = 1) -> Plan:
    return Plan.derive(recipe, ranks, TRAIN, VAL, TRAIN.num_images)


def count(*words: str, ranks: int = 1, number_format: str = "bf16") -> StepMemory:
    recipe = load("synthetic", Patch.parse([*SMALL, *words])).recipe
    plan = plan_of(recipe, ranks)
    return count_step_memory(recipe, plan, TRAIN, VAL, number_format, plan.micro_batch)


def test_a_step_of_one_layer_is_the_sum_of_its_tensors() -> None:
    """At the peak the images are there as uint8 and as float32."""
    found = count("model.name=empty", "model.width=1", "train.precision=fp32", number_format="fp32")

    pixels = 16 * 3 * 64 * 64
    parameters = 3 * 1000 * 4, 1000 * 4
    blocks = [-(-each // 512) * 512 for each in parameters]
    assert found.parts["weights"] == found.parts["optimizer"] == sum(blocks)
    assert found.parts["input"] >= pixels + 4 * pixels
    assert found.allocated_bytes == sum(found.parts.values()) < found.reserved_bytes


def test_settings_change_the_memory_that_they_are_for() -> None:
    plain = count()

    assert count("optim.name=adamw", "optim.lr=0.001").parts["optimizer"] > 1.9 * plain.parts["optimizer"]
    assert count("train.ema=on").parts["other"] >= plain.parts["weights"]
    residual = count("model.name=resnet18_cifar")
    checkpointed = count("model.name=resnet18_cifar", "model.checkpoint_activations=true")
    assert checkpointed.parts["activations"] < residual.parts["activations"] / 2
    assert checkpointed.allocated_bytes < 0.8 * residual.allocated_bytes
    fp32 = count("train.precision=fp32", number_format="fp32")
    assert 1.6 < fp32.allocated_bytes / plain.allocated_bytes < 2
    split = count("train.accumulate=4")
    assert split.micro_batch == 4 and split.allocated_bytes < plain.allocated_bytes / 2


def test_buckets_of_ddp_are_the_gradients_or_beside_them() -> None:
    alone, views, copies = (count("data.batch_size=16"), *(
        count("data.batch_size=32", f"parallel.bucket_view={view}", ranks=2) for view in ("true", "false")
    ))  # fmt: skip
    weights = alone.parts["weights"]
    assert views.parts["gradients"] == pytest.approx(weights, rel=0.02) and "other" not in views.parts
    assert copies.parts["other"] == pytest.approx(weights, rel=0.02)


def test_the_largest_micro_batch_is_the_last_that_fits() -> None:
    recipe = load("synthetic", Patch.parse(SMALL)).recipe
    counter, plan = MemoryCounter(recipe, TRAIN, VAL), plan_of(recipe)
    allowed = 300e6

    largest = counter.find_largest_micro_batch(plan, "bf16", allowed)

    assert counter.count(plan, "bf16", largest).allocated_bytes <= allowed
    assert counter.count(plan, "bf16", largest + 2).allocated_bytes > allowed


@pytest.mark.parametrize(
    ("fixed", "per_image", "floor", "allowed", "known", "largest"),
    [
        (100, 10, 0, 1000, [16], 90),
        (100, 10, 0, 1000, [512], 90),
        (100, 10, 400, 1000, [8], 90),  # on small numbers, other memory is the peak
        (100, 10, 0, 1000, [1, 2, 90], 90),
        (100, 10, 0, 105, [4], 0),
        (100, 10, 0, 110, [4], 1),
    ],
)
def test_a_line_is_followed_to_what_is_allowed(fixed, per_image, floor, allowed, known, largest) -> None:
    calls: list[int] = []

    def needed(number: int) -> int:
        calls.append(number)
        return max(floor, fixed + per_image * number)

    assert find_largest(needed, allowed, known) == largest
    assert len(calls) <= len(known) + 5
