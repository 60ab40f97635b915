"""One of two ranks that hold half of every layer: python shard.py FOLDER RANK.

It takes three steps with each optimizer, its parameters sharded, and writes the parameters as one again.
"""

import sys
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from paceline.recipe.schema import optim as schema
from paceline.training.optim.build import build_optimizer

SECTIONS = [
    schema.Sgd(),
    schema.Adam(),
    schema.AdamW(),
    schema.RmsProp(lr=0.01),
    schema.NovoGrad(grad_averaging=True),
    schema.Lars(trust=0.1, nesterov=True),
    schema.Lamb(lr=0.05),
    schema.ScheduleFree(lr=0.1),
]
SHAPES = {"filters": (5, 2, 3, 3), "gain": (5,), "classifier": (3, 4), "bias": (3,)}


def walk(section, place):
    """Return the parameters after three steps of what `section` asks for; `place` makes one's tensors."""
    generator = torch.Generator().manual_seed(0)
    full = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}
    parameters = {name: nn.Parameter(place(value)) for name, value in full.items()}
    optimizer = build_optimizer(section, parameters.items(), "cpu")
    for _ in range(3):
        for name, parameter in parameters.items():
            parameter.grad = place(torch.randn(SHAPES[name], generator=generator, dtype=torch.float64))
        optimizer.step()
    numbers = [v for values in optimizer.state.values() for v in values.values() if torch.is_tensor(v) and v.ndim == 0]
    assert not any(isinstance(value, DTensor) for value in numbers)
    return parameters


def main(folder: str, rank: str) -> None:
    store = dist.FileStore(str(Path(folder, "store")), 2)
    dist.init_process_group("gloo", store=store, rank=int(rank), world_size=2, timeout=timedelta(seconds=60))
    mesh = init_device_mesh("cpu", (2,))
    found = {}
    for section in SECTIONS:
        parameters = walk(section, lambda full: distribute_tensor(full, mesh, [Shard(0)]))
        for name, parameter in parameters.items():
            found[f"{section.name}.{name}"] = parameter.detach().full_tensor().contiguous()
    save_file(found, Path(folder, f"rank{rank}.safetensors"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    main(*sys.argv[1:])
