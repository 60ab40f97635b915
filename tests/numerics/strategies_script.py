"""Train a small model for a few steps on any number of ranks, with several strategies; each returns its tensors.

Run by `rank.py`. The images of a step are the same for every number of ranks, which share them in order.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.core.world import World
from paceline.parallel.build import build_strategy
from paceline.parallel.sync_batch_norm import convert_sync_batch_norm
from paceline.recipe.schema.train import Parallel
from paceline.training.checkpoint import model_tensors, optimizer_tensors

BATCH = 12
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Setting:
    """One way to train."""

    parallel: Parallel
    norm: str = "none"
    accumulate: int = 1
    max_norm: float = math.inf
    steps: int = 4
    dtype: torch.dtype = torch.float64
    lr: float = 0.1
    offset: float = 0.0
    """Added to every pixel."""
    blank: int = 0
    """Steps whose images are black, so that the first filters have no gradient."""
    bad_step: int = -1
    """Step whose loss is NaN on rank 0; it is skipped."""


def ways() -> dict[str, Setting]:
    ddp, fsdp = Parallel(), Parallel(strategy="fsdp")
    reshard = Parallel(strategy="fsdp", reshard=True)
    factors = Parallel(compression="powersgd", powersgd_rank=2)
    return {
        "ddp": Setting(ddp),
        "ddp in small buckets": Setting(Parallel(bucket_mb=0.001, bucket_view=False)),
        "ddp of a static graph": Setting(Parallel(static_graph=True)),
        "fsdp": Setting(fsdp),
        "fsdp resharding": Setting(reshard),
        "ddp, sync_batch": Setting(ddp, norm="batch", offset=10),
        "fsdp, sync_batch": Setting(fsdp, norm="batch", offset=10),
        "ddp, micro-batches": Setting(ddp, accumulate=3),
        "fsdp, micro-batches": Setting(fsdp, accumulate=3),
        "fsdp resharding, micro-batches": Setting(reshard, accumulate=3),
        "ddp, clipped": Setting(ddp, max_norm=0.01),
        "fsdp, clipped": Setting(fsdp, max_norm=0.01),
        "ddp in float32": Setting(ddp, dtype=torch.float32),
        "ddp in bf16": Setting(Parallel(compression="bf16"), dtype=torch.float32),
        "ddp in fp16": Setting(Parallel(compression="fp16"), dtype=torch.float32),
        "ddp in factors": Setting(factors, dtype=torch.float32, steps=40, lr=0.02),
        "ddp in factors, black, then bad": Setting(
            factors, dtype=torch.float32, steps=40, lr=0.02, blank=13, bad_step=15
        ),
    }


def build_model(norm: str) -> nn.Module:
    """Return the same model every time, channels-last as in training, with an indivisible layer."""
    torch.manual_seed(0)
    normalise = nn.BatchNorm2d if norm == "batch" else lambda channels: nn.Identity()
    features = [nn.Conv2d(3, 8, 3), normalise(8), nn.ReLU(), nn.Conv2d(8, 5, 3, bias=False), normalise(5), nn.ReLU()]
    model = nn.Sequential(nn.Sequential(*features), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(20, 3))
    model[3].bias.requires_grad_(False)
    return model.to(memory_format=torch.channels_last)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return images float64 [12, 3, 8, 8] with learnable labels, and the labels int64 [12], of a step."""
    generator = torch.Generator().manual_seed(step)
    labels = torch.arange(BATCH) % 3
    images = torch.randn(BATCH, 3, 8, 8, dtype=torch.float64, generator=generator)
    images[torch.arange(BATCH), labels] += 1
    return images.contiguous(memory_format=torch.channels_last), labels


def train(
    way: Setting,
    rank: int,
    world_size: int,
    *,
    turn: Callable[[str], None] | None = None,
    now: Callable[[], float] | None = None,
) -> dict[str, Tensor]:
    """Return the state after training: weights, the optimizer's, last gradients, and losses and norms of the steps.

    `turn` is called at each change of the stage. With `now` buckets are timed, and the result includes `wire_s`, and
    the bytes, count and times of each bucket.
    """
    strategy = build_strategy(way.parallel, World(rank, world_size, rank, world_size), CPU, now)
    model = convert_sync_batch_norm(build_model(way.norm), CPU).to(way.dtype)
    replica = strategy.prepare(model)
    if turn is not None:
        strategy.on_comm_wait(turn)
    trainable = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    parameters = [each for _, each in trainable]
    optimizer = torch.optim.SGD(parameters, way.lr, momentum=0.9)
    losses, norms = [], []
    for step in range(way.steps):
        optimizer.zero_grad()
        images, labels = (each.chunk(world_size)[rank] for each in batch(step))
        images = images * (step >= way.blank) + way.offset
        micros = list(zip(images.chunk(way.accumulate), labels.chunk(way.accumulate), strict=True))
        loss = torch.zeros((), dtype=way.dtype)
        for number, (some, their) in enumerate(micros, start=1):
            with strategy.accumulate(final=number == way.accumulate):
                part = functional.cross_entropy(replica(some.to(way.dtype)), their) / way.accumulate
                (part * (math.nan if step == way.bad_step and rank == 0 else 1)).backward()
            if way.parallel.strategy == "fsdp" and world_size > 1 and number < way.accumulate:
                assert all(each.grad is None for each in parameters), "shards are reduced once a step"
            loss += part.detach()
        norms.append(strategy.clip(parameters, way.max_norm))
        losses.append(strategy.mean(loss))
        if torch.isfinite(norms[-1]):
            optimizer.step()
    whole = strategy.gather(model_tensors(model))
    whole |= {f"optimizer.{name}": each for name, each in strategy.gather(optimizer_tensors(optimizer)).items()}
    whole |= strategy.gather({f"grad.{name}": each.grad for name, each in trainable})
    wire = strategy.comm_hook.times() if strategy.comm_hook else None
    assert (wire is None) == (now is None)
    if wire is not None:
        whole["wire"] = torch.tensor([[each.bytes, each.n, each.ready_s, each.wire_s] for each in wire.buckets])
        whole["wire_s"] = torch.tensor(wire.wire_s)
    return whole | {"loss": torch.stack(losses), "norm": torch.stack(norms)}


def run(rank: int, world_size: int, folder: Path) -> dict[str, Tensor]:
    return {
        f"{name}/{key}": tensor for name, way in ways().items() for key, tensor in train(way, rank, world_size).items()
    }
