"""Train, evaluate, save, load and continue on one rank or several; run by `rank.py` and imported by the test.

`write` and `read` handle one configuration each; `run`, on two ranks, writes and reads all that two ranks can.
"""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from paceline.core.world import World
from paceline.parallel.build import build_strategy
from paceline.recipe.schema.train import Parallel
from paceline.training.checkpoint import (
    CheckpointStorage,
    KeepPolicy,
    Snapshot,
    load_model,
    load_optimizer,
    load_tensor_group,
    model_tensors,
    optimizer_tensors,
)

SECTIONS = {
    "alone": Parallel(),
    "ddp": Parallel(),
    "fsdp": Parallel(strategy="fsdp"),
    "fsdp resharding": Parallel(strategy="fsdp", reshard=True),
}
STEPS = 2


class Run:
    """A model in training on `rank` of `world_size`."""

    def __init__(self, name: str, rank: int, world_size: int, seed: int = 0) -> None:
        world = World(rank, world_size, rank, world_size)
        self.rank, self.world_size = rank, world_size
        self.strategy = build_strategy(SECTIONS[name], world, torch.device("cpu"))
        torch.manual_seed(seed)
        self.model = nn.Sequential(
            nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU()),
            nn.Flatten(),
            nn.Linear(5 * 16, 3),
        ).to(memory_format=torch.channels_last)
        self.replica = self.strategy.prepare(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 0.01)

    def train(self, first: int) -> "Run":
        """Train for two steps from step `first`; each rank has its own images, so running statistics differ."""
        for step in range(first, first + STEPS):
            images = torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(step)).chunk(self.world_size)
            with self.strategy.accumulate(final=True):
                logits = self.replica(images[self.rank])
                functional.cross_entropy(logits, torch.arange(len(logits)) % 3).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return full tensors by part of the state."""
        parts = {"model": model_tensors(self.model), "optimizer": optimizer_tensors(self.optimizer)}
        return {name: self.strategy.gather(tensors) for name, tensors in parts.items()}

    def evaluated(self) -> Tensor:
        """Return logits [4, 3] of evaluation, after more forward passes on a later rank."""
        self.model.eval()
        with self.strategy.evaluating(self.model), torch.inference_mode():
            for _ in range(1 + 2 * self.rank):
                logits = self.model(torch.linspace(-1, 1, 4 * 3 * 36).view(4, 3, 6, 6))
        self.model.train()
        return logits.clone()


def write(name: str, rank: int, world_size: int, folder: Path) -> dict[str, Tensor]:
    """Train and save into `folder`/`name`; return the evaluation, and the weights after further training."""
    run = Run(name, rank, world_size)
    untrained = run.evaluated()
    run.train(0)
    state = run.state()
    evaluated = run.evaluated()
    if rank == 0:
        CheckpointStorage(folder / name, KeepPolicy(1)).save(STEPS, STEPS, Snapshot(state, {}))
    return {"untrained": untrained, "evaluated": evaluated, **run.train(STEPS).state()["model"]}


def read(writer: str, name: str, rank: int, world_size: int, folder: Path) -> dict[str, Tensor]:
    """Load what `writer` saved; return the loaded state, its evaluation, and the weights after further training."""
    run = Run(name, rank, world_size, seed=1)
    path = CheckpointStorage(folder / writer, KeepPolicy(1)).at_step(STEPS)
    load_model(path, run.model, shard_like=run.strategy.shard_like)
    load_optimizer(run.optimizer, load_tensor_group(path, "optimizer"), shard_like=run.strategy.shard_like)
    loaded = {f"{part}.{key}": each.clone() for part, tensors in run.state().items() for key, each in tensors.items()}
    return {**loaded, "evaluated": run.evaluated(), **run.train(STEPS).state()["model"]}


def run(rank: int, world_size: int, folder: Path) -> dict[str, Tensor]:
    names = [name for name in SECTIONS if name != "alone"]
    tensors = {}
    for name in names:
        tensors |= {f"{name}/{key}": tensor for key, tensor in write(name, rank, world_size, folder).items()}
    dist.barrier()
    for writer in SECTIONS:
        for name in names:
            loaded = read(writer, name, rank, world_size, folder)
            tensors |= {f"{writer} to {name}/{key}": tensor for key, tensor in loaded.items()}
    return tensors
