"""Train while one rank meets a loss or a gradient that is no number, by each policy. Read by `rank.py`."""

import math
from pathlib import Path

import torch
from torch import Tensor, nn

from paceline.core.errors import NonFiniteLossError
from paceline.core.world import World
from paceline.parallel.strategy import build_strategy
from paceline.recipe.schema.parallel import Parallel
from paceline.recipe.schema.train import Train
from paceline.train.average import NoAverage
from paceline.train.guard import Reporter, build_guard
from paceline.train.loss import CrossEntropy
from paceline.train.precision import DynamicScale, Precision
from paceline.train.probe import Probe
from paceline.train.schedule import Curve, Flat, WarmUp
from paceline.train.state import TrainState
from paceline.train.undo import build_undo
from paceline.train.update import Update

CPU = torch.device("cpu")
BAD_RANK, BAD_STEP, STEPS = 1, 3, 5
CASES = {
    f"{strategy} {policy} {kind}": (strategy, policy, kind)
    for strategy in ("ddp", "fsdp")
    for policy in ("stop", "skip", "scaled")
    for kind in ("loss", "gradient")
}


class BadGradient(torch.autograd.Function):
    """Pass numbers on, and infinities back."""

    @staticmethod
    def forward(ctx, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient * torch.inf


def trained(strategy_name: str, policy: str, kind: str, rank: int, world_size: int) -> dict[str, Tensor]:
    """Return what happened as numbers: steps, skips, the scale, whether rank 1 was named, and the weights."""
    world = World(rank, world_size, rank, world_size)
    strategy = build_strategy(Parallel(strategy=strategy_name), world, CPU)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    replica = strategy.prepare(model)
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD([{"params": parameters, "lr_factor": 1.0}], lr=0.1)
    precision = Precision("cpu", scale=DynamicScale()) if policy == "scaled" else Precision("cpu")
    section = Train(steps=STEPS, on_nonfinite="skip" if policy == "skip" else "stop")
    guard = build_guard(section, precision, Reporter(world, strategy, lambda: "step-00000002"), CPU)
    schedule = Curve(0.1, WarmUp(0, 0.0), Flat())
    update = Update(
        parameters,
        optimizer,
        schedule,
        precision,
        strategy,
        guard,
        build_undo(section, model),
        Probe(model),
        NoAverage(),
        math.inf,
    )
    state, message = TrainState(), ""
    images, labels = torch.randn(8, 6, generator=torch.Generator().manual_seed(rank)), torch.arange(8) % 3
    for step in range(STEPS):
        is_bad = rank == BAD_RANK and step == BAD_STEP
        with strategy.accumulate(final=True):
            logits = replica(images)
            loss = CrossEntropy(0.0)(BadGradient.apply(logits) if is_bad and kind == "gradient" else logits, labels)
            precision.backward(loss + torch.nan if is_bad and kind == "loss" else loss)
        try:
            update(state, loss.detach() * (torch.nan if is_bad and kind == "loss" else 1.0))
        except NonFiniteLossError as error:
            message = str(error)
            break
        state.advance(16)
    weights = torch.cat([each.flatten() for each in strategy.gather(dict(model.named_parameters())).values()])
    numbers = [state.step, state.skipped, precision.scale.value, "rank 1 of 2" in message, "step 4:" in message]
    return {"numbers": torch.tensor(numbers, dtype=torch.float64), "weights": weights}


def run(rank: int, world_size: int, folder: Path) -> dict[str, Tensor]:
    found = {name: trained(*case, rank, world_size) for name, case in CASES.items()}
    return {f"{name}/{key}": tensor for name, values in found.items() for key, tensor in values.items()}
