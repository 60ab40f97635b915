"""Averaged weights: the closed form, what is averaged in which format, swapping and resuming bit by bit."""

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from paceline.core.errors import CheckpointError, RecipeError
from paceline.recipe.schema.train import Ema
from paceline.training.ema import (
    NUM_UPDATES_KEY,
    ExponentialMovingAverage,
    OptimizerWeightAverage,
    WeightAverage,
    build_weight_average,
    load_averages,
)
from paceline.training.optim.schedule_free import ScheduleFree
from paceline.training.precision import MasterWeights


def net(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2)).to(dtype)


def move(model: nn.Module, step: int) -> None:
    """Give `model` other weights, statistics and counts, as a step of training would."""
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.add_(torch.randn(tensor.shape, generator=generator).to(tensor.dtype))
            else:
                tensor.add_(1)


def course(model: nn.Module, average: WeightAverage, steps: int, first: int = 0) -> list[dict[str, Tensor]]:
    """Train for `steps` steps; return the weights before the first and after each."""
    seen = [copy.deepcopy(model.state_dict())]
    for step in range(first, first + steps):
        move(model, step)
        average.update(step)
        seen.append(copy.deepcopy(model.state_dict()))
    return seen


def floating(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
    assert len(found) == 8  # weight and bias of three layers, and the statistics of one
    return found


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_the_average_is_the_sum_of_falling_shares_of_all_weights() -> None:
    model, decay, steps = net(), 0.9, 12
    average = ExponentialMovingAverage(model, decay, 1, warmup=False)
    seen = course(model, average, steps)
    tensors = average.tensors()
    for name in floating(seen[0]):
        shares = [decay**steps] + [decay ** (steps - number) * (1 - decay) for number in range(1, steps + 1)]
        expected = sum(share * weights[name] for share, weights in zip(shares, seen, strict=True))
        # The recursion rounds at each of twelve updates, the sum once.
        torch.testing.assert_close(tensors[name], expected, rtol=1e-12, atol=1e-13)


def test_warmup_reduces_the_weight_of_the_initial_weights() -> None:
    """By value: shares of the old average are 1/10, 2/11, 3/12, ... and `decay` once that is larger."""
    model = net()
    average = ExponentialMovingAverage(model, 0.2, 1, warmup=True)
    name = "3.bias"
    expected = model.state_dict()[name].clone()
    for step, decay in enumerate([1 / 10, 2 / 11, 0.2, 0.2]):
        move(model, step)
        average.update(step)
        expected = decay * expected + (1 - decay) * model.state_dict()[name]
        torch.testing.assert_close(average.tensors()[name], expected, rtol=1e-13, atol=1e-14)  # lerp's last bits


def test_updates_come_every_so_many_steps_and_are_counted() -> None:
    model, other = net(), net()
    average = ExponentialMovingAverage(model, 0.5, 3, warmup=False)
    seen = course(model, average, 8)
    expected = ExponentialMovingAverage(other, 0.5, 1, warmup=False)
    for step, weights in enumerate([seen[3], seen[6]]):
        other.load_state_dict(weights)
        expected.update(step)
    assert equal(average.tensors(), expected.tensors())
    assert average.tensors()[NUM_UPDATES_KEY].item() == 2


def test_counts_are_copied_at_an_update() -> None:
    model = net()
    average = ExponentialMovingAverage(model, 0.5, 2, warmup=False)
    course(model, average, 3)
    assert model.state_dict()["1.num_batches_tracked"].item() == 3
    assert average.tensors()["1.num_batches_tracked"].item() == 2


@pytest.mark.parametrize(
    ("dtype", "kept_in"),
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
    ],
)
def test_averages_are_float32_at_least_and_the_model_keeps_its_format(dtype: torch.dtype, kept_in: torch.dtype) -> None:
    model = net(dtype)
    average = ExponentialMovingAverage(model, 0.5, 1, warmup=False)
    course(model, average, 3)
    tensors = {name: tensor for name, tensor in average.tensors().items() if name != NUM_UPDATES_KEY}
    assert {tensor.dtype for tensor in floating(tensors).values()} == {kept_in}
    with average.swapped():
        assert equal(model.state_dict(), {name: tensor.to(dtype) for name, tensor in floating(tensors).items()} | {
            "1.num_batches_tracked": tensors["1.num_batches_tracked"]
        })  # fmt: skip


def test_small_steps_of_16_bit_weights_are_not_lost_in_the_average() -> None:
    """A thousandth of the way from 1 to 2 is less than bfloat16 can tell from 1."""
    model = nn.Linear(1, 1, bias=False).bfloat16()
    nn.init.ones_(model.weight)
    average = ExponentialMovingAverage(model, 0.999, 1, warmup=False)
    nn.init.constant_(model.weight, 2.0)
    average.update(0)
    assert average.tensors()["weight"].item() == pytest.approx(1.001, rel=1e-7)


def test_the_average_follows_the_copies_that_16_bit_weights_round_away() -> None:
    model, weights = nn.Linear(1, 1, bias=False).bfloat16(), MasterWeights()
    nn.init.ones_(model.weight)
    ((_, master),) = named = weights.create(model)
    average = build_weight_average(Ema(decay=0.5, warmup=False), model, torch.optim.SGD([master], 0.1), named)
    with torch.no_grad():
        master.add_(2.0**-10)
    weights.copy_to_model()
    average.update(0)
    assert model.weight.item() == 1.0  # a step of bfloat16 beside 1 is 2^-7
    assert average.tensors()["weight"].item() == 1 + 2.0**-11  # half way, and float32 holds it


def test_the_average_of_copies_is_rounded_into_the_model_and_leaves_the_copies_alone() -> None:
    model, weights = net(torch.bfloat16), MasterWeights()
    named = weights.create(model)
    average = ExponentialMovingAverage(model, 0.5, 1, warmup=False, named=named)
    move_copies(model, weights, 0)
    average.update(0)
    before, copies = copy.deepcopy(model.state_dict()), copy.deepcopy(weights.tensors())
    expected = {
        name: each.to(before[name].dtype) for name, each in average.tensors().items() if name != NUM_UPDATES_KEY
    }
    with average.swapped():
        assert equal(model.state_dict(), expected) and not equal(before, expected)
        assert equal(weights.tensors(), copies)
    assert equal(model.state_dict(), before) and equal(weights.tensors(), copies)


def test_an_average_of_copies_resumes_to_the_bit() -> None:
    options = {"decay": 0.9, "every": 2, "warmup": True}
    model, weights = net(torch.bfloat16), MasterWeights()
    average = ExponentialMovingAverage(model, named=weights.create(model), **options)
    for step in range(5):
        move_copies(model, weights, step)
        average.update(step)
    saved = [copy.deepcopy(each) for each in (model.state_dict(), weights.tensors(), average.tensors())]

    resumed_model, resumed_weights = net(torch.bfloat16), MasterWeights()
    resumed_model.load_state_dict(saved[0])
    resumed = ExponentialMovingAverage(resumed_model, named=resumed_weights.create(resumed_model), **options)
    resumed_weights.load(saved[1])
    resumed.load(saved[2])
    for step in range(5, 11):
        move_copies(model, weights, step)
        average.update(step)
        move_copies(resumed_model, resumed_weights, step)
        resumed.update(step)
    assert equal(resumed.tensors(), average.tensors()) and resumed.tensors()[NUM_UPDATES_KEY].item() == 5
    assert equal(resumed_model.state_dict(), model.state_dict())


def move_copies(model: nn.Module, weights: MasterWeights, step: int) -> None:
    """Move the copies of `model`'s weights by less than bfloat16 tells apart, and its buffers, as a step would."""
    move(model, step)
    generator = torch.Generator().manual_seed(step)
    for tensor in weights.tensors().values():
        tensor.add_(1e-3 * torch.randn(tensor.shape, generator=generator))
    weights.copy_to_model()


@pytest.mark.parametrize("fails", [False, True])
def test_swapping_puts_the_averages_in_and_the_raw_weights_back_bit_by_bit(fails: bool) -> None:
    model = net(torch.float32)
    average = ExponentialMovingAverage(model, 0.5, 1, warmup=False)
    course(model, average, 3)
    with torch.no_grad():
        model[3].bias[0] = -0.0
        model[3].bias[1] = torch.nan
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    addresses = [tensor.data_ptr() for tensor in model.state_dict().values()]
    averages = {name: tensor.clone() for name, tensor in average.tensors().items()}
    try:
        with average.swapped():
            assert equal({**model.state_dict(), NUM_UPDATES_KEY: averages[NUM_UPDATES_KEY]}, averages)
            assert 1 / 0 if fails else True
    except ZeroDivisionError:
        assert fails
    after = model.state_dict()
    assert [tensor.data_ptr() for tensor in after.values()] == addresses
    bits = {name: tensor.reshape(-1).view(torch.uint8) for name, tensor in before.items()}
    assert equal({name: tensor.reshape(-1).view(torch.uint8) for name, tensor in after.items()}, bits)
    assert equal(average.tensors(), averages)


def test_a_resumed_average_equals_an_uninterrupted_one() -> None:
    options = {"decay": 0.9, "every": 2, "warmup": True}
    model = net(torch.float32)
    average = ExponentialMovingAverage(model, **options)
    course(model, average, 5)
    weights, saved = copy.deepcopy(model.state_dict()), copy.deepcopy(average.tensors())
    course(model, average, 6, first=5)

    resumed_model = net(torch.float32)
    resumed = ExponentialMovingAverage(resumed_model, **options)
    resumed_model.load_state_dict(weights)
    resumed.load(saved)
    course(resumed_model, resumed, 6, first=5)
    assert equal(resumed.tensors(), average.tensors()) and resumed.tensors()[NUM_UPDATES_KEY].item() == 5


def test_loading_copies() -> None:
    model = net()
    average = ExponentialMovingAverage(model, 0.5, 1, warmup=False)
    saved = copy.deepcopy(average.tensors())
    average.load(saved)
    saved["3.bias"].fill_(7)
    assert not torch.equal(average.tensors()["3.bias"], saved["3.bias"])


def test_the_averages_of_another_model_are_refused_in_one_line() -> None:
    average = ExponentialMovingAverage(net(), 0.5, 1, warmup=False)
    wrong = {name: tensor for name, tensor in average.tensors().items() if not name.startswith("3.")}
    with pytest.raises(CheckpointError, match=r"^average: 3\.bias and 1 more do not fit the recipe \(resume"):
        average.load(wrong)
    with pytest.raises(CheckpointError, match=r"^average: 3\.bias do not fit"):
        load_averages(None, {"3.bias": torch.zeros(2)})


def test_buffers_that_no_checkpoint_holds_are_left_alone() -> None:
    model = net()
    model.register_buffer("scratch", torch.zeros(1), persistent=False)
    average = ExponentialMovingAverage(model, 0.5, 1, warmup=False)
    assert set(average.tensors()) == {*model.state_dict(), NUM_UPDATES_KEY}


def schedule_free(model: nn.Module) -> ScheduleFree:
    groups = [{"params": list(model.parameters()), "weight_decay": 0.0, "lr_factor": 1.0}]
    return ScheduleFree(groups, lr=0.1, momentum=0.9)


def test_schedule_frees_own_average_is_swapped_in() -> None:
    model = net(torch.float32)
    optimizer = schedule_free(model)
    average = build_weight_average("off", model, optimizer, list(model.named_parameters()))
    images = torch.randn(8, 3, 4, 4)
    for step in range(4):
        optimizer.zero_grad()
        model(images).square().mean().backward()
        optimizer.step()
        average.update(step)
    raw = copy.deepcopy(model.state_dict())
    names = [name for name, _ in model.named_parameters()]
    expected = {name: optimizer.average_of(each).clone() for name, each in model.named_parameters()}
    with average.swapped():
        inside = copy.deepcopy(model.state_dict())
    assert equal({name: inside[name] for name in names}, expected)
    assert not any(torch.equal(inside[name], raw[name]) for name in names if name.endswith("weight"))
    assert equal(model.state_dict(), raw)
    assert average.tensors() == {}


def test_the_recipe_and_the_optimizer_choose_the_average() -> None:
    model = net()
    sgd, named = torch.optim.SGD(model.parameters(), 0.1), list(model.named_parameters())
    assert build_weight_average("off", model, sgd, named) is None
    assert isinstance(build_weight_average(Ema(), model, sgd, named), ExponentialMovingAverage)
    assert isinstance(build_weight_average("off", model, schedule_free(model), named), OptimizerWeightAverage)


def test_the_fields_of_the_recipe_take_effect() -> None:
    model = net()
    sgd, named = torch.optim.SGD(model.parameters(), 0.1), list(model.named_parameters())
    average = build_weight_average(Ema(decay=0.75, every=2, warmup=False), model, sgd, named)
    seen = course(model, average, 2)
    expected = 0.75 * seen[0]["3.bias"] + 0.25 * seen[2]["3.bias"]
    torch.testing.assert_close(average.tensors()["3.bias"], expected, rtol=1e-14, atol=1e-15)  # lerp's last bit


def test_two_averages_at_once_are_refused() -> None:
    model = net()
    with pytest.raises(RecipeError, match=r"^train\.ema: has no effect with optim\.name schedule_free"):
        build_weight_average(Ema(), model, schedule_free(model), list(model.named_parameters()))


def test_an_optimizer_that_moves_a_copy_of_the_weights_cannot_average_them() -> None:
    model, copied = net(torch.bfloat16), net(torch.float32)
    with pytest.raises(RecipeError, match=r"^optim\.name: schedule_free keeps no master copy \(set train\.precision="):
        build_weight_average("off", model, schedule_free(copied), list(copied.named_parameters()))


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """Join a group of one process, which is what sharding needs."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_sharded_weights_are_averaged_as_whole_ones_are() -> None:
    whole, sharded = net(torch.float32), net(torch.float32)
    fully_shard(sharded)
    averages = [ExponentialMovingAverage(model, 0.9, 1, warmup=True) for model in (whole, sharded)]
    for step in range(3):
        move(whole, step)
        with torch.no_grad():
            for ours, theirs in zip(sharded.state_dict().values(), whole.state_dict().values(), strict=True):
                local(ours).copy_(theirs)
        for average in averages:
            average.update(step)
    expected, tensors = averages[0].tensors(), averages[1].tensors()
    assert equal({name: local(tensor) for name, tensor in tensors.items()}, expected)
    raw = {name: local(tensor).clone() for name, tensor in sharded.state_dict().items()}
    with averages[1].swapped():
        inside = {name: local(tensor).clone() for name, tensor in sharded.state_dict().items()}
    assert equal({**inside, NUM_UPDATES_KEY: expected[NUM_UPDATES_KEY]}, expected)
    assert equal({name: local(tensor) for name, tensor in sharded.state_dict().items()}, raw)
    averages[1].load(copy.deepcopy(tensors))


def local(tensor: Tensor) -> Tensor:
    """Return the part of `tensor` that this process has: all of it."""
    return tensor.to_local() if isinstance(tensor, dist.tensor.DTensor) else tensor
