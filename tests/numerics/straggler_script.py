"""Train on ranks whose work is sleep, one of which sleeps a fifth of a step longer; return the times of their clocks.

Sleep leaves the cores free, so that a few cores suffice for more ranks.
"""

import time
from collections.abc import Iterator
from typing import Any

import torch
from strategies_script import CPU
from torch import Tensor, nn

from paceline.core.stages import WORK
from paceline.core.world import World
from paceline.measure.clock import StageClock
from paceline.parallel.build import build_strategy
from paceline.recipe.schema.train import Parallel

NUM_STEPS = 20
WORK_S = {"data_wait": 0.004, "h2d": 0.002, "forward": 0.024, "backward": 0.046, "optimizer": 0.004}
DELAY_S = 0.2 * sum(WORK_S.values())
CASES = {"none": ("", 0), "data_wait": ("data_wait", 0), "backward": ("backward", 1)}


class Sleep(torch.autograd.Function):
    """Identity that sleeps in forward and backward."""

    @staticmethod
    def forward(ctx: Any, numbers: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return numbers.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        time.sleep(ctx.backward_s)
        return gradient, None, None


class SleepingModel(nn.Module):
    def __init__(self, work_s: dict[str, float]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.work_s = work_s

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.norm(self.first(rows))
        return self.last(Sleep.apply(hidden, self.work_s["forward"], self.work_s["backward"]))


def batches(num_batches: int, each_s: float) -> Iterator[Tensor]:
    for _ in range(num_batches):
        time.sleep(each_s)
        yield torch.randn(4, 8)


def measure(slow_stage: str, slow_rank: int, rank: int, world_size: int) -> dict[str, Tensor]:
    """Return the mean seconds of a step and of its stages, and the exposed communication of each step."""
    work_s = {stage: each_s + DELAY_S * ((stage, rank) == (slow_stage, slow_rank)) for stage, each_s in WORK_S.items()}
    strategy = build_strategy(Parallel(), World(rank, world_size, rank, world_size), CPU)
    model = SleepingModel(work_s)
    replica = strategy.prepare(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    clock = StageClock(warmup_steps=2)
    strategy.on_comm_wait(clock.switch_stage)
    for rows in clock.batches(batches(NUM_STEPS + 2, work_s["data_wait"])):
        with strategy.accumulate(final=True):
            with clock.stage("h2d"):
                time.sleep(work_s["h2d"])
            with clock.stage("forward"):
                scores = replica(rows)
            with clock.stage("backward"):
                scores.square().mean().backward()
        with clock.stage("optimizer"):
            time.sleep(work_s["optimizer"])
            optimizer.step()
            optimizer.zero_grad()
        clock.end_step(len(rows))
    tensors = clock.drain()
    stages = [tensors.stages[name].device_s / tensors.n if name in tensors.stages else 0.0 for name in WORK]
    exposed_s = tensors.recent["exposed_communication"]
    return {
        "step_s": torch.tensor(tensors.wall_s / tensors.n),
        "stages": torch.tensor(stages),
        "exposed_s": torch.tensor(exposed_s),
    }


def run(rank: int, world_size: int) -> dict[str, Tensor]:
    return {
        f"{case}/{name}": each
        for case, (stage, slow_rank) in CASES.items()
        for name, each in measure(stage, slow_rank, rank, world_size).items()
    }
