"""The counted memory of a step, against sums by hand; and the largest micro-batch of a GPU."""

import math
from dataclasses import replace

import pytest

from paceline.core.dataset import DatasetInfo
from paceline.core.errors import RecipeError
from paceline.lab.quote import memory as memory_module
from paceline.lab.quote.memory import MemoryCounter, StepMemory, count_step_memory, find_largest
from paceline.lab.quote.quote import count_step
from paceline.models.build import EmptyModel
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


def counter_of(*words: str, ranks: int = 1, image_size=(64, 64)) -> tuple[MemoryCounter, Plan]:
    recipe = load("synthetic", Patch.parse([*SMALL, *words])).recipe
    train, val = (replace(each, image_size=image_size) for each in (TRAIN, VAL))
    return MemoryCounter(recipe, train, val), Plan.derive(recipe, ranks, train, val, train.num_images)


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


def test_a_compiled_step_saves_less_for_backward_and_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """`speednet95` applies GELU to the result of each norm, which compiled code computes again in backward."""
    traces = []
    trace = memory_module.trace_compiled
    monkeypatch.setattr(memory_module, "trace_compiled", lambda *args: traces.append(args) or trace(*args))
    plain, (counter, plan) = count(), counter_of("train.compile=default")

    found = {images: counter.count(plan, "bf16", images) for images in (16, 32, 64)}

    assert len(traces) == 1 and not counter.is_without_compiler
    for part in ("weights", "optimizer", "input"):
        assert found[16].parts[part] == plain.parts[part]
    assert found[16].parts["activations"] < 0.7 * plain.parts["activations"]
    activations = [each.parts["activations"] for each in found.values()]
    assert activations[2] - activations[1] == pytest.approx(2 * (activations[1] - activations[0]), rel=0.1)


@pytest.mark.parametrize("name", ["trace_compiled", "CompiledModel"])
def test_what_cannot_be_traced_is_counted_without_the_compiler(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = getattr(memory_module, name)
    is_failing = True

    def fail(*args):
        if is_failing:
            raise RuntimeError("data-dependent")
        return real(*args)

    monkeypatch.setattr(memory_module, name, fail)
    counter, plan = counter_of("train.compile=default")
    plain = count()
    assert counter.count(plan, "bf16", plain.micro_batch) == plain
    is_failing = False
    assert counter.count(plan, "fp16", plain.micro_batch) != plain
    assert counter.is_without_compiler  # for the first format


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
        (500_000_000, 1_000_000, 3_000_000_000, 20_000_000_000, [8], 19_500),  # on the floor up to 2,500
        (500_000_000, 1_000_000, 3_000_000_000, 20_000_000_000, [8, 16], 19_500),
    ],
)
def test_a_line_is_followed_to_what_is_allowed(fixed, per_image, floor, allowed, known, largest) -> None:
    calls: list[int] = []

    def needed(number: int) -> int:
        calls.append(number)
        return max(floor, fixed + per_image * number)

    assert find_largest(needed, allowed, known) == largest
    assert len(calls) <= len(known) + 6


@pytest.mark.parametrize("allowed", [130, 10_000])
def test_a_number_that_cannot_be_counted_is_too_many(allowed: int) -> None:
    """A count that needs hardly more for more images grows at most eightfold, and numbers below `least` are none."""
    calls: list[int] = []

    def needed(number: int) -> float:
        calls.append(number)
        return 100 + number / 1000 if number <= 20_000 else math.inf

    found = find_largest(needed, allowed, [8], least=2)

    assert found == pytest.approx(20_000, rel=0.35) and found <= 20_000
    assert all(later <= 8 * max(calls[:number]) for number, later in enumerate(calls) if number)
    assert find_largest(lambda number: 100.0 * number, 150, [8], least=2) == 0


def test_a_micro_batch_larger_than_the_memory_of_the_host_is_counted() -> None:
    counter, plan = counter_of("model.name=resnet18_cifar")

    found = counter.count(plan, "bf16", 10**8)

    assert found.allocated_bytes > 10**8 * 3 * 64 * 64


def test_the_largest_of_several_micro_batches_leaves_room_for_gradients() -> None:
    """A step of two micro-batches keeps the gradients of the first while the second runs."""
    words = ("model.width=1",)
    counter, plan = counter_of(*words, image_size=(32, 32))
    split_counter, split_plan = counter_of(*words, "train.accumulate=2", image_size=(32, 32))
    allowed = counter.count(plan, "bf16", 12).allocated_bytes

    largest = counter.find_largest_micro_batch(plan, "bf16", allowed)

    needed, more = (split_counter.count(split_plan, "bf16", each).allocated_bytes for each in (largest, largest + 1))
    assert largest > 0 and needed <= allowed < more


def test_one_image_for_batch_norm_is_an_error_of_the_batch_size() -> None:
    words = "model.name=torchvision:resnet18", "model.width=1", "data.batch_size=4"
    counter, plan = counter_of(*words, ranks=4, image_size=(32, 32))

    with pytest.raises(RecipeError, match=r"data\.batch_size: 4 over 4 ranks.*data\.batch_size.*--ranks"):
        counter.count(plan, "bf16", plan.micro_batch)

    wider, two = counter_of(*words, ranks=2, image_size=(32, 32))
    allowed = wider.count(two, "bf16", 2).allocated_bytes
    assert wider.find_largest_micro_batch(two, "bf16", allowed) == 2
    assert wider.find_largest_micro_batch(two, "bf16", allowed / 2) == 0


def test_a_model_that_reads_values_when_it_is_built_is_counted() -> None:
    """RegNet computes its widths with tensors, which have no values on the meta device."""
    found = count("model.name=torchvision:regnet_x_400mf", "model.width=1")
    assert found.parts["weights"] > 4 * 5_000_000


@pytest.mark.parametrize("error", [IndexError, TypeError, ValueError])
def test_an_odd_model_is_an_error_of_the_recipe(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self, images):
        raise error("odd")

    monkeypatch.setattr(EmptyModel, "forward", forward)
    counter, plan = counter_of("model.name=empty", "model.width=1")

    with pytest.raises(RecipeError, match=r"model\.name: .*empty.*odd"):
        counter.count(plan, "bf16", 4)
    with pytest.raises(RecipeError, match=r"model\.name: .*empty.*odd"):
        count_step(load("synthetic", Patch.parse([*SMALL, "model.name=empty", "model.width=1"])).recipe, plan, "bf16")


def test_augmentation_on_the_host_takes_no_memory_of_the_gpu() -> None:
    """At the peak of a small network, the images and their flipped copies are there."""
    words = "model.name=empty", "model.width=1", "data.augment=[flip]"
    auto, device, host = (count(*words, f"data.augment_on={place}") for place in ("auto", "device", "host"))

    assert host.allocated_bytes < device.allocated_bytes == auto.allocated_bytes
