"""Train with PowerSGD, save its state, and resume it in replicas with other weights; run by `rank.py`."""

import json
import math

import torch
from strategies_script import CPU, batch, build_model
from torch import Tensor
from torch.nn import functional

from paceline.core.world import World
from paceline.parallel import collectives
from paceline.parallel.build import build_strategy
from paceline.recipe.schema.train import Parallel

SAVED, BAD = (12, 14), 11
FIRST = 10
SECTION = Parallel(compression="powersgd", powersgd_rank=2, bucket_mb=0.001)


class Run:
    """A model on `rank` of `world_size`, after more passes outside of steps than PowerSGD has uncompressed steps."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.strategy = build_strategy(SECTION, World(rank, world_size, rank, world_size), CPU)
        self.model = build_model("none").float()
        self.replica = self.strategy.prepare(self.model)
        for _ in range(FIRST + 2):
            self.black()
        self.strategy.warm_up_buckets(self.black)
        self.optimizer = torch.optim.SGD([each for each in self.model.parameters() if each.requires_grad], 0.02)

    def black(self) -> None:
        self.replica(torch.zeros(2, 3, 8, 8)).sum().backward()
        self.model.zero_grad()

    def train(self, first: int, end: int) -> None:
        """Train steps `first` to `end`; in one of them the loss of rank 0 is NaN, and the step is skipped."""
        for step in range(first, end):
            images, labels = (each.chunk(self.world_size)[self.rank] for each in batch(step))
            loss = functional.cross_entropy(self.replica(images.float()), labels)
            (loss * (math.nan if step == BAD and self.rank == 0 else 1)).backward()
            if step != BAD:
                self.optimizer.step()
            self.optimizer.zero_grad()

    def state(self) -> tuple[str, dict[str, Tensor]]:
        powersgd = self.strategy.powersgd
        assert powersgd is not None
        tensors = {name: each.clone() for name, each in powersgd.tensors().items()}
        return json.dumps(powersgd.values(self.model)), tensors


def shared(rank: int, world_size: int, state: tuple[str, dict[str, Tensor]]) -> tuple[str, dict[str, Tensor]]:
    """Return rank 0's state as a checkpoint that all ranks read would give it to them."""
    both = [state if rank == 0 else None]
    torch.distributed.broadcast_object_list(both, src=0)
    assert both[0] is not None
    return both[0]


def run(rank: int, world_size: int, folder: object) -> dict[str, Tensor]:
    original = Run(rank, world_size)
    values, tensors = original.state()
    results = {"steps before": torch.tensor(json.loads(values)["steps"]), "parts before": torch.tensor(len(tensors))}
    first = 0
    for saved in SAVED:
        original.train(first, saved)
        values, tensors = shared(rank, world_size, original.state())
        weights = {name: each.clone() for name, each in original.model.state_dict().items()}
        other = Run(rank, world_size)
        other.model.load_state_dict(weights)
        assert other.strategy.powersgd is not None
        assert other.strategy.powersgd.load(other.model, json.loads(values), tensors) == ""
        first = saved + 2
        for name, each in (("whole", original), ("other", other)):
            each.train(saved, first)
            results |= {f"{saved}/{name}/{key}": tensor.clone() for key, tensor in each.model.state_dict().items()}
            results |= {f"{saved}/{name} kept/{key}": tensor for key, tensor in each.state()[1].items()}
        results |= {f"{saved}/saved/{key}": tensor for key, tensor in tensors.items()}
    results["expected bytes"] = torch.tensor(original.strategy.powersgd.num_bytes(original.model))
    parameters = dict(original.model.named_parameters())
    for number, names in enumerate(json.loads(values)["buckets"]):
        results |= {f"buckets/{number}/{name}": parameters[name] for name in names}
    collectives._PIECE_BYTES = 16  # two float32 of each of two ranks
    for length in (0, 1, 2, 5):
        rows = collectives.gather_rows_on_rank_0(torch.arange(float(length)) + 10 * rank)
        assert (rows is None) == (rank > 0)
        if rows is not None:
            results[f"rows/{length}"] = rows
    return results
