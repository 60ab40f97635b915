"""The guard: a non-finite step never updates the weights unnoticed, and the error explains it."""

import pytest
import torch
from torch import nn

from paceline.core.errors import NonFiniteLossError
from paceline.core.world import World
from paceline.parallel.strategy import SingleDevice
from paceline.recipe.schema.optim import Sgd
from paceline.training.lr_schedule import LrSchedule, LrWarmup
from paceline.training.nonfinite import (
    MAX_SKIPS,
    STEPS_AHEAD,
    DeferredCheck,
    GradientProbe,
    ImmediateCheck,
    LossScalingGuard,
    NonFiniteReporter,
    SavedBuffers,
    SkipStep,
    StepValues,
)
from paceline.training.optim.build import build_optimizer
from paceline.training.precision import DynamicLossScaler, Precision
from paceline.training.state import TrainState
from paceline.training.trainer import OptimizerUpdate

REPORTER = NonFiniteReporter(World.single(), SingleDevice(), lambda: "run/checkpoints/step-00000010")


def step(number: int = 12, loss: float = 1.0, gradient: float = 1.0, norm: float = 1.0, skips: int = 0) -> StepValues:
    return StepValues(number, 0.1, torch.tensor(loss), torch.tensor(gradient), torch.tensor(norm), skips)


def bad(skips: int) -> StepValues:
    return step(norm=torch.nan, skips=skips)


def test_a_good_step_passes_every_guard() -> None:
    for guard in (
        ImmediateCheck(REPORTER),
        SkipStep(REPORTER),
        LossScalingGuard(DynamicLossScaler(), REPORTER, ImmediateCheck(REPORTER)),
    ):
        assert guard.check(step())


def test_stopping_names_step_rank_rate_checkpoint_and_what_to_do() -> None:
    with pytest.raises(NonFiniteLossError) as caught:
        ImmediateCheck(REPORTER).check(step(loss=torch.nan, norm=torch.nan))
    assert str(caught.value) == (
        "train: step 12: the loss is NaN or infinite on rank 0 of 1, at lr 0.1; last good checkpoint: "
        "run/checkpoints/step-00000010 (lower optim.lr, or set train.on_nonfinite=skip)"
    )


def test_a_non_finite_gradient_with_a_finite_loss_is_reported_as_such() -> None:
    for gradient, words in (
        (0.0, "the gradient is NaN or infinite on rank 0 of 1"),
        (1.0, "though the loss is finite on every"),
    ):
        with pytest.raises(NonFiniteLossError, match=words):
            ImmediateCheck(REPORTER).check(step(norm=torch.inf, gradient=gradient))


def test_a_deferred_check_reads_a_step_after_some_more_or_at_a_sync() -> None:
    waited = []

    def arrive(value):
        def wait() -> float:
            waited.append(value.item())
            return value.item()

        return wait

    guard = DeferredCheck(REPORTER, arrive)
    assert guard.check(step(1, norm=1.0)) and guard.check(step(2, norm=torch.nan))
    assert all(guard.check(step(number)) for number in range(3, STEPS_AHEAD + 1)) and waited == []
    assert guard.check(step(STEPS_AHEAD + 1)) and waited == [1.0]
    with pytest.raises(NonFiniteLossError, match="train: step 2:"):
        guard.check(step(STEPS_AHEAD + 2))
    guard = DeferredCheck(REPORTER, arrive)
    guard.check(step(7, norm=torch.inf))
    with pytest.raises(NonFiniteLossError, match="train: step 7:"):
        guard.sync()
    guard.sync()


def test_bad_steps_are_skipped_until_too_many_in_a_row() -> None:
    guard = SkipStep(REPORTER)
    for _ in range(2):
        assert not any(guard.check(bad(skips)) for skips in range(MAX_SKIPS - 1))
        assert guard.check(step())
    with pytest.raises(NonFiniteLossError) as caught:
        guard.check(bad(MAX_SKIPS - 1))  # the count is the run's: a process that resumed begins with it
    assert str(caught.value).endswith("step-00000010 (10 steps in a row were skipped: lower optim.lr)")


def test_the_last_good_checkpoint_is_the_one_from_before_the_skips() -> None:
    newest = ["step-00000010"]
    guard = SkipStep(NonFiniteReporter(World.single(), SingleDevice(), lambda: newest[0]))
    for number in range(MAX_SKIPS - 1):
        guard.check(bad(number))
        newest[0] = f"step-{20 + number:08d}"
    with pytest.raises(NonFiniteLossError, match="last good checkpoint: step-00000010 "):
        guard.check(bad(MAX_SKIPS - 1))


def test_weights_are_not_evaluated_or_saved_after_three_skips_in_a_row() -> None:
    guard = SkipStep(REPORTER)
    for skips in range(2):
        guard.check(bad(skips))
        guard.sync()
    guard.check(bad(2))
    with pytest.raises(NonFiniteLossError, match="3 steps in a row were skipped"):
        guard.sync()


def test_skipping_restores_batch_norm_statistics() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    undo = SavedBuffers(model)
    model(torch.rand(4, 2))
    undo.save()
    good = model[1].running_var.clone()
    model(torch.full((4, 2), torch.inf))
    assert not model[1].running_var.isfinite().any()
    undo.restore()
    assert torch.equal(model[1].running_var, good) and not torch.equal(good, torch.ones(3))


def test_an_overflow_lowers_the_scale_and_a_bad_loss_does_not() -> None:
    scale = DynamicLossScaler()
    guard = LossScalingGuard(scale, REPORTER, ImmediateCheck(REPORTER))
    assert not guard.check(step(norm=torch.inf)) and scale.value == 2.0**15
    with pytest.raises(NonFiniteLossError, match="the loss is NaN or infinite"):
        guard.check(step(loss=torch.nan, norm=torch.nan))
    assert scale.value == 2.0**15
    scale.value = 1.0
    with pytest.raises(NonFiniteLossError):
        guard.check(step(norm=torch.inf))


def test_a_lower_loss_scale_is_no_skip_in_a_row() -> None:
    """Two overflows, which lower the scale, and one NaN loss are not three bad steps."""
    model, scaler = nn.Linear(2, 2), DynamicLossScaler()
    optimizer = build_optimizer(Sgd(lr=0.1), model.named_parameters(), "cpu")
    schedule, precision = LrSchedule(0.1, LrWarmup(0, 0.0), lambda step: 1.0), Precision("cpu", scaler=scaler)
    guard = LossScalingGuard(scaler, REPORTER, SkipStep(REPORTER))
    parameters, probe, strategy = list(model.parameters()), GradientProbe(model), SingleDevice()
    update = OptimizerUpdate(
        parameters, optimizer, schedule, precision, strategy, guard, None, probe, None, max_norm=torch.inf
    )
    state = TrainState()

    def take_step(loss: float, gradient: float) -> None:
        for each in parameters:
            each.grad = torch.full_like(each, gradient)
        update(state, torch.tensor(loss))
        state.advance(1)

    for loss, gradient in ((1.0, torch.inf), (1.0, torch.inf), (torch.nan, torch.nan)):
        take_step(loss, gradient)
    guard.sync()
    assert (state.skipped, state.skips_in_row, scaler.value) == (3, 1, 2.0**14)
    take_step(torch.nan, torch.nan)
    take_step(torch.nan, torch.nan)
    with pytest.raises(NonFiniteLossError, match="3 steps in a row were skipped"):
        guard.sync()
    take_step(1.0, 1.0)
    assert (state.skipped, state.skips_in_row) == (5, 0)


def test_the_probe_sees_a_bad_gradient_once_it_has_reached_the_first_layer() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].weight.requires_grad_(requires_grad=False)
    probe = GradientProbe(model)
    model(torch.ones(1, 2)).sum().backward()
    assert probe.pop_is_finite() == 1
    (model(torch.ones(1, 2)).sum() * torch.inf).backward()
    assert probe.pop_is_finite() == 0
    assert probe.pop_is_finite() == 1
