"""Number formats: what they hold, what they lose, and what keeps small numbers alive."""

import pytest
import torch
from torch import nn

from paceline.core.errors import RecipeError
from paceline.training.loss import CrossEntropy
from paceline.training.precision import (
    INITIAL_SCALE,
    DynamicLossScaler,
    MasterWeights,
    Precision,
    build_precision,
    cpu_half_precision,
    resolve_precision,
    set_numerics,
)

CPU = torch.device("cpu")
TORCH_DEFAULT = (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32)
"""What torch rounds to TF32 unless told otherwise: this is read before any test runs."""
NAMES_ON_CPU = ("fp64", "fp32", "torch_default", "bf16", "amp", "bf16_master", "bf16_pure")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 3))


@pytest.mark.parametrize("name", NAMES_ON_CPU)
def test_every_format_of_a_cpu_makes_a_step(name) -> None:
    precision = build_precision(name, CPU)
    model = network()
    precision.cast_model(model)
    parameters = [parameter for _, parameter in precision.optimized_parameters(model)]
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    with precision.autocast():
        logits = model(torch.rand(8, 1, 4, 4, dtype=precision.dtype))
        loss = CrossEntropy(0.0)(logits, torch.arange(8) % 3)
    precision.backward(loss)
    if precision.master:
        precision.master.copy_grads()
    optimizer.step()
    if precision.master:
        precision.master.copy_to_model()
    assert loss.dtype == (torch.float64 if name == "fp64" else torch.float32)
    assert all(not torch.equal(new, old) for new, old in zip(model.parameters(), before, strict=True) if old.ndim > 1)


@pytest.mark.parametrize(
    ("name", "instead"),
    [("fp16", "bf16"), ("tf32", "fp32"), ("fp16_master", "bf16_master"), ("fp16_pure", "bf16_pure")],
)
def test_a_gpus_format_on_a_cpu_is_refused_with_the_one_to_use(name, instead) -> None:
    with pytest.raises(RecipeError, match=rf"^train.precision: {name} needs a GPU.*\(set train.precision={instead}\)$"):
        build_precision(name, CPU)


@pytest.mark.parametrize(
    ("name", "numerics"),
    [("fp32", ("highest", False)), ("torch_default", TORCH_DEFAULT), ("tf32", ("high", True)), ("amp", ("high", True))],
)
def test_tf32_flags_follow_the_precision(name, numerics) -> None:
    """The settings are torch's own, of the process: no GPU is needed to make them."""
    before = (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark)
    try:
        set_numerics(name, torch.device("cuda"), benchmark=True)
        assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == numerics
        assert torch.backends.cudnn.benchmark
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = before[1:]


def test_amp_is_bfloat16_on_a_cpu() -> None:
    assert resolve_precision("amp", CPU) == "bf16" and resolve_precision("fp32", CPU) == "fp32"


def test_master_weights_add_up_updates_that_16_bits_would_lose() -> None:
    moved = {}
    for name in ("bf16_master", "bf16_pure"):
        precision = build_precision(name, CPU)
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        precision.cast_model(model)
        parameters = [parameter for _, parameter in precision.optimized_parameters(model)]
        optimizer = torch.optim.SGD(parameters, lr=0.001)
        for _ in range(100):
            precision.backward(model(torch.ones(1, 1, dtype=torch.bfloat16)).float().sum())
            if precision.master:
                precision.master.copy_grads()
            optimizer.step()
            if precision.master:
                precision.master.copy_to_model()
            optimizer.zero_grad()
        moved[name] = 1 - model.weight.item()
    # A bfloat16 next to 1 is 1/256 below it: steps of 0.001 vanish one by one, but a hundred of them are 0.1.
    assert moved["bf16_pure"] == 0
    assert moved["bf16_master"] == pytest.approx(0.1, abs=1 / 256)


def test_master_weights_leave_batch_norms_in_float32_and_pure_does_not() -> None:
    kinds = {}
    for name in ("bf16_master", "bf16_pure"):
        model = network()
        build_precision(name, CPU).cast_model(model)
        kinds[name] = {model[0].weight.dtype, model[1].weight.dtype, model[1].running_var.dtype}
    assert kinds == {"bf16_master": {torch.bfloat16, torch.float32}, "bf16_pure": {torch.bfloat16}}


def test_master_weights_go_on_from_their_tensors() -> None:
    one, other = MasterWeights(), MasterWeights()
    model = network()
    Precision("cpu", torch.bfloat16, master=one).cast_model(model)
    masters = dict(one.create(model))
    with torch.no_grad():
        masters["0.weight"].add_(1e-4)
    other.create(model)
    other.load(one.tensors())
    assert set(one.tensors()) == {"0.weight", "0.bias", "3.weight", "3.bias"}
    assert all(torch.equal(one.tensors()[name], other.tensors()[name]) for name in one.tensors())


def test_a_scale_halves_on_overflow_down_to_one_and_doubles_after_2000_good_steps() -> None:
    scale = DynamicLossScaler()
    assert scale.value == INITIAL_SCALE == 65536
    assert [scale.backoff() for _ in range(17)] == [True] * 16 + [False]
    assert scale.value == 1
    for _ in range(1999):
        scale.update()
    assert scale.value == 1
    scale.update()
    assert scale.value == 2
    again = DynamicLossScaler()
    again.load_state_dict(scale.state_dict())
    assert again == scale


def test_a_scale_keeps_float16_gradients_alive_and_is_undone_without_rounding() -> None:
    gradients = {}
    for scaler in (None, DynamicLossScaler()):
        precision = Precision("cpu", torch.float16, master=MasterWeights(), scaler=scaler)
        weight = nn.Parameter(torch.ones(4, dtype=torch.float16))
        precision.backward((weight * 4e-8).float().mean())  # as a loss is, a mean
        gradient = [weight.grad.float()]
        if scaler:
            scaler.unscale(gradient)
        gradients[scaler is not None] = gradient[0]
    assert gradients[False].tolist() == [0] * 4  # 1e-8 is below float16's smallest number, 6e-8
    assert gradients[True].tolist() == pytest.approx([1e-8] * 4, rel=1e-3)


def test_a_non_finite_loss_makes_every_gradient_nan_even_if_a_constant_is_infinite() -> None:
    for bad in (torch.nan, torch.inf):
        model = network()
        loss = CrossEntropy(0.0)(model(torch.rand(4, 1, 4, 4)), torch.arange(4) % 3)
        build_precision("fp32", CPU).backward(loss + bad)
        assert all(parameter.grad.isnan().all() for parameter in model.parameters())


def test_cross_entropy_smooths_classes_and_probabilities_equally() -> None:
    logits, labels = torch.randn(6, 5), torch.arange(6) % 5
    one_hot = nn.functional.one_hot(labels, 5).double()
    for smoothing in (0.0, 0.1):
        loss = CrossEntropy(smoothing)
        assert torch.allclose(loss(logits, labels), loss(logits, one_hot))
    assert CrossEntropy(0.1)(logits, labels) != CrossEntropy(0.0)(logits, labels)


@pytest.mark.parametrize(
    ("name", "on_cpu"),
    [("fp32", ""), ("fp64", ""), ("amp", "bf16"), ("bf16", "bf16"), ("bf16_pure", "bf16_pure")],
)
def test_which_16_bits_a_cpu_computes_in(name, on_cpu: str) -> None:
    assert cpu_half_precision(name, torch.device("cpu")) == on_cpu
    assert cpu_half_precision(name, torch.device("cuda")) == ""
