"""Train with timed, traced, unsynchronized or compiled replicas, beside the same training without."""

import time
from dataclasses import replace

import torch
from strategies_script import CPU, Setting, batch, build_model, train
from torch import Tensor, nn
from torch.nn import functional

from paceline.core.world import World
from paceline.parallel.build import build_strategy
from paceline.recipe.schema.train import Parallel

CODES = {"exposed_communication": 1.0, "forward": 2.0}


def ways() -> dict[str, Setting]:
    small = Parallel(bucket_mb=0.001)  # three buckets once torch has regrouped the parameters
    ways = {
        "plain": Setting(small),
        "copied": Setting(Parallel(bucket_mb=0.001, bucket_view=False)),
        "static": Setting(Parallel(bucket_mb=0.001, static_graph=True)),
        "buffers": Setting(small, norm="batch"),
        "micro-batches": Setting(small, accumulate=2),
        "bf16": Setting(Parallel(bucket_mb=0.001, compression="bf16")),
        "fp16": Setting(Parallel(bucket_mb=0.001, compression="fp16")),
        "factors": Setting(Parallel(bucket_mb=0.001, compression="powersgd"), steps=14),
    }
    return {name: replace(way, dtype=torch.float32) for name, way in ways.items()}


class OwnForward(nn.Module):
    """A model whose forward pass is not torch's own; torch.compile would skip that of Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = build_model("batch")

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)


def alone(rank: int, world_size: int) -> dict[str, Tensor]:
    """Train without gradient averaging, and the bare model on the same images; then evaluate with rank 0's buffers."""
    strategy = build_strategy(Parallel(sync_gradients=False), World(rank, world_size, rank, world_size), CPU)
    turned: list[str] = []
    models = [build_model("batch"), build_model("batch")]
    replicas = [strategy.prepare(models[0]), models[1]]
    strategy.on_comm_wait(turned.append)
    strategy.warm_up_buckets(lambda: turned.append("rehearsed"))
    for model, replica in zip(models, replicas, strict=True):
        optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], 0.1)
        for step in range(3):
            images, labels = (each.chunk(world_size)[rank] for each in batch(step))
            for number, (some, their) in enumerate(zip(images.chunk(2), labels.chunk(2), strict=True), start=1):
                with strategy.accumulate(final=number == 2):
                    functional.cross_entropy(replica(some.float()), their).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert turned == []
    tensors = {
        f"{who}.{name}": each.clone()
        for who, model in zip(("ddp", "model"), models, strict=True)
        for name, each in model.state_dict().items()
    }
    with strategy.evaluating(models[0]):
        return tensors | {f"evaluated.{name}": each.clone() for name, each in models[0].named_buffers()}


def compiled(rank: int, world_size: int) -> dict[str, Tensor]:
    """Train a compiled model with buffers; return the observed stages and the number of graphs."""
    import torch._dynamo
    from torch._dynamo.utils import counters

    tensors = {}
    for name in ("silent", "listened"):
        torch._dynamo.reset()
        counters.clear()
        strategy = build_strategy(Parallel(), World(rank, world_size, rank, world_size), CPU)
        model, turned = OwnForward(), list[str]()
        replica = torch.compile(strategy.prepare(model), backend="aot_eager")
        if name == "listened":
            strategy.on_comm_wait(turned.append, compiled=True)
        optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], 0.1)
        for step in range(3):
            images, labels = (each.chunk(world_size)[rank] for each in batch(step))
            with strategy.accumulate(final=True):
                functional.cross_entropy(replica(images.float()), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
        tensors |= {f"{name}.{key}": each.clone() for key, each in model.state_dict().items()}
        tensors[f"{name}.graphs"] = torch.tensor(
            [counters["stats"]["unique_graphs"], counters["stats"]["calls_captured"]]
        )
        tensors[f"{name}.turned"] = torch.tensor([CODES[each] for each in turned])
    return tensors


def run(rank: int, world_size: int) -> dict[str, Tensor]:
    results = {}
    for name, way in ways().items():
        turned: list[str] = []
        tensors = {
            "silent": train(way, rank, world_size),
            "listened": train(way, rank, world_size, turn=turned.append),
            "timed": train(
                way, rank, world_size, turn=turned.append if name == "plain" else None, now=time.perf_counter
            ),
        }
        if name == "plain":
            del turned[len(turned) // 2 :]
        tensors["listened"]["turned"] = torch.tensor([CODES[each] for each in turned])
        results |= {f"{name}/{how}/{key}": each for how, some in tensors.items() for key, each in some.items()}
    results |= {f"alone/{key}": each for key, each in alone(rank, world_size).items()}
    results |= {f"compiled/{key}": each for key, each in compiled(rank, world_size).items()}
    strategy = build_strategy(Parallel(), World(rank, world_size, rank, world_size), CPU)
    return results | {
        "every": strategy.all_gather(torch.tensor([[rank, 1], [2, rank]]).T),
        "every scalar": strategy.all_gather(torch.tensor(float(rank))),
    }
