"""Optimizers on sharded parameters, as FSDP has them: norms are those of whole layers."""

import runpy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from paceline.core.errors import RecipeError
from paceline.recipe.schema.optim import Muon, Sgd
from paceline.training.optim.build import build_optimizer

SCRIPT = Path(__file__).with_name("shard.py")
TIMEOUT_S = 120


def test_two_shards_move_as_the_whole_does(forking, tmp_path):
    ranks = [forking.start([str(SCRIPT), str(tmp_path), str(rank)], tmp_path, {}) for rank in range(2)]
    try:
        errors = [rank.communicate(timeout=TIMEOUT_S)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(errors)[-4000:]

    script = runpy.run_path(str(SCRIPT))
    whole = {
        f"{section.name}.{name}": parameter.detach()
        for section in script["SECTIONS"]
        for name, parameter in script["walk"](section, torch.Tensor.clone).items()
    }
    for rank in range(2):
        found = load_file(tmp_path / f"rank{rank}.safetensors")
        assert found.keys() == whole.keys() and len(found) == 32
        for name, value in found.items():
            # The norm of a whole is added up from two halves, and fused kernels round elsewhere: float64 roundings.
            torch.testing.assert_close(value, whole[name], rtol=1e-12, atol=1e-13, msg=name)


@pytest.fixture
def sharded(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    yield [(name, nn.Parameter(distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)]))) for name in ("inner", "head")]
    dist.destroy_process_group()


def test_what_cannot_be_sharded_says_so(sharded):
    with pytest.raises(RecipeError, match=r"^optim.name: muon .*set parallel.strategy=ddp"):
        build_optimizer(Muon(), sharded, "cpu")
    with pytest.raises(RecipeError, match=r"^optim.implementation: fused SGD .*set optim.implementation=foreach"):
        build_optimizer(Sgd(implementation="fused"), sharded, "cpu")
