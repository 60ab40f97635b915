"""Train while one rank has a non-finite loss or gradient, with each policy; run by `rank.py`."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.errors import NonFiniteLossError
from paceline.core.stages import EXPOSED
from paceline.core.world import World
from paceline.measure.throughput import RunTimer
from paceline.parallel.build import build_strategy
from paceline.recipe.schema.train import Parallel, Train
from paceline.training.loss import CrossEntropy
from paceline.training.lr_schedule import LrSchedule, LrWarmup
from paceline.training.metrics_logger import MetricsLogger
from paceline.training.nonfinite import GradientProbe, NonFiniteReporter, SavedBuffers, build_nonfinite_guard
from paceline.training.precision import DynamicLossScaler, Precision
from paceline.training.state import TrainState
from paceline.training.trainer import OptimizerUpdate

CPU = torch.device("cpu")
BAD_RANK, BAD_STEP, STEPS = 1, 3, 5
WAYS = {"ddp": Parallel(), "fsdp": Parallel(strategy="fsdp"), "alone": Parallel(sync_gradients=False)}
CASES = {
    f"{strategy} {policy} {kind}": (strategy, policy, kind)
    for strategy in WAYS
    for policy in ("stop", "skip", "scaled")
    for kind in ("loss", "gradient")
}


class BadGradient(torch.autograd.Function):
    """Identity with an infinite gradient."""

    @staticmethod
    def forward(ctx, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient * torch.inf


class Losses:
    """A sink and a trace that record the loss of each record."""

    def __init__(self) -> None:
        self.logged: list[float] = []

    def step(self, record: Any) -> None:
        self.logged.append(record.loss)

    def record(self, step: int, batch: Any) -> None:
        """Ignore notes."""


def trained(way: str, policy: str, kind: str, rank: int, world_size: int) -> dict[str, Tensor]:
    """Return numbers of steps and skips, the scale and whether rank 1 was named; losses; and the weights."""
    world = World(rank, world_size, rank, world_size)
    strategy = build_strategy(WAYS[way], world, CPU)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    replica = strategy.prepare(model)
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD([{"params": parameters, "lr_factor": 1.0}], lr=0.1)
    precision = Precision("cpu", scaler=DynamicLossScaler()) if policy == "scaled" else Precision("cpu")
    section = Train(steps=STEPS, on_nonfinite="skip" if policy == "skip" else "stop")
    guard = build_nonfinite_guard(section, precision, NonFiniteReporter(world, strategy, lambda: "step-00000002"), CPU)
    schedule = LrSchedule(0.1, LrWarmup(0, 0.0), lambda step: 1.0)
    update = OptimizerUpdate(
        parameters,
        optimizer,
        schedule,
        precision,
        strategy,
        guard,
        SavedBuffers(model) if policy == "skip" else None,
        GradientProbe(model),
        None,
        math.inf,
    )
    state, message, sink = TrainState(), "", Losses()
    plan: Any = SimpleNamespace(log_every=1, total_steps=STEPS, batch_size=16, steps_per_epoch=STEPS)
    journal = MetricsLogger(plan, strategy, schedule, sink, sink, RunTimer(0.0, lambda: 0.0), None, state)
    images, labels = torch.randn(8, 6, generator=torch.Generator().manual_seed(rank)), torch.arange(8) % 3
    for step in range(STEPS):
        is_bad = rank == BAD_RANK and step == BAD_STEP
        with strategy.accumulate(final=True):
            logits = replica(images)
            loss = CrossEntropy(0.0)(BadGradient.apply(logits) if is_bad and kind == "gradient" else logits, labels)
            precision.backward(loss + torch.nan if is_bad and kind == "loss" else loss)
        mean_loss = loss.detach() * (torch.nan if is_bad and kind == "loss" else 1.0)
        try:
            update(state, mean_loss)
        except NonFiniteLossError as error:
            message = str(error)
            break
        journal.log_step(state, None, mean_loss)
        state.advance(16)
    weights = torch.cat([each.flatten() for each in strategy.gather(dict(model.named_parameters())).values()])
    numbers = [
        state.step,
        state.skipped,
        precision.scaler.value if precision.scaler else 1.0,
        "rank 1 of 2" in message,
        "step 4:" in message,
    ]
    return {
        "numbers": torch.tensor(numbers, dtype=torch.float64),
        "losses": torch.tensor(sink.logged),
        "weights": weights,
    }


def clipped(rank: int, world_size: int) -> dict[str, Tensor]:
    """Return gradients of norm 5 on rank 0 and 10 on rank 1, clipped to 6 on unsynchronized ranks, and the mean norm.

    Then the same with a non-finite gradient on rank 1.
    """
    strategy = build_strategy(WAYS["alone"], World(rank, world_size, rank, world_size), CPU)
    strategy.prepare(nn.Linear(1, 1))
    turned: list[str] = []
    strategy.on_comm_wait(turned.append)
    parameter, tensors = nn.Parameter(torch.zeros(2)), {}
    for name, number in (("finite", 6.0), ("inf", math.inf), ("nan", math.nan)):
        parameter.grad = torch.tensor([3.0, 4.0]) if rank == 0 else torch.tensor([number, 8.0])
        tensors[f"{name} norm"] = strategy.clip([parameter], 6.0)
        tensors[f"{name} gradient"] = parameter.grad
    assert turned == [EXPOSED, "optimizer"] * 3
    return tensors


def run(rank: int, world_size: int, folder: Path) -> dict[str, Tensor]:
    tensors = {name: trained(*case, rank, world_size) for name, case in CASES.items()}
    tensors["shortened"] = clipped(rank, world_size)
    return {f"{name}/{key}": tensor for name, values in tensors.items() for key, tensor in values.items()}
