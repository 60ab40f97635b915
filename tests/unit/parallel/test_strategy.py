"""The strategy of a recipe, the strategy of a single rank, and the sharding units of a model."""

import math

import pytest
import torch
from torch import nn

from paceline.core.errors import WorldError
from paceline.core.world import World
from paceline.parallel.build import build_strategy
from paceline.parallel.ddp import DDP
from paceline.parallel.fsdp import sharding_units
from paceline.parallel.strategy import DataParallel, SingleDevice
from paceline.recipe.schema.train import Parallel

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
TWO = World(1, 2, 1, 2)


@pytest.mark.parametrize("section", [Parallel(), Parallel(strategy="fsdp", reshard=True), Parallel(compression="bf16")])
def test_one_rank_is_a_single_device(section: Parallel) -> None:
    assert isinstance(build_strategy(section, World.single(), CPU), SingleDevice)


def test_two_ranks_use_ddp_by_default() -> None:
    assert isinstance(build_strategy(Parallel(), TWO, CPU), DDP)


def test_data_parallel_needs_gpus_in_one_process() -> None:
    section = Parallel(strategy="dataparallel")
    assert isinstance(build_strategy(section, World.single(), GPU), DataParallel)
    start, end = r"^parallel.strategy: dataparallel needs ", r" \(set parallel.strategy=ddp[^()]*\)$"
    with pytest.raises(WorldError, match=f"{start}GPUs in one process, and this run is on a CPU{end}"):
        build_strategy(section, World.single(), CPU)
    with pytest.raises(WorldError, match=f"{start}all GPUs in one process, and this run has 2 ranks{end}"):
        build_strategy(section, TWO, GPU)


def test_data_parallel_wraps_the_model_without_sharding() -> None:
    model = nn.Linear(2, 2)
    strategy = DataParallel()
    assert isinstance(strategy.prepare(model), nn.DataParallel)
    assert strategy.gather({"weight": model.weight}) == {"weight": model.weight}


def test_a_static_graph_refuses_micro_batches_in_one_line() -> None:
    strategy = DDP(2, CPU, bucket_mb=1, bucket_view=True, static_graph=True, sync_gradients=True, comm_hook=None)
    strategy._module = object()  # type: ignore[assignment]  # what wraps the model is not asked
    strategy.accumulate(final=True)
    with pytest.raises(WorldError, match=r"^parallel.static_graph: true does not work with micro-batches \(set "):
        strategy.accumulate(final=False)


@pytest.mark.parametrize("strategy", [SingleDevice(), DataParallel()])
def test_one_rank_reduces_to_its_own_value(strategy: SingleDevice | DataParallel) -> None:
    turned: list[str] = []
    strategy.on_comm_wait(turned.append)
    model = nn.BatchNorm1d(2)
    model(torch.ones(3, 2)).sum().backward()
    assert turned == [] and strategy.comm_hook is None
    assert strategy.all_gather(torch.tensor([1.0, 2.0])).tolist() == [[1.0, 2.0]]


def with_gradient(values: list[float], dtype: torch.dtype) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(len(values), dtype=dtype))
    parameter.grad = torch.tensor(values, dtype=dtype)
    return parameter


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_gradient_of_all_parameters_is_one_vector(dtype: torch.dtype) -> None:
    parameters = [with_gradient([3.0, 0.0], dtype), with_gradient([4.0], dtype), nn.Parameter(torch.zeros(2))]
    norm = SingleDevice().clip(parameters, math.inf)
    assert (norm.item(), norm.dtype, norm.shape) == (5.0, torch.float32, ())
    assert parameters[1].grad.item() == 4.0
    assert SingleDevice().clip(parameters, 2.5).item() == 5.0
    # The divisor is 5 + 1e-6, and a number of 16 bits has a relative error of 2^-9.
    assert parameters[1].grad.item() == pytest.approx(2.0, rel=2**-9 if dtype.itemsize == 2 else 1e-6)
    before = parameters[1].grad.item()
    SingleDevice().clip(parameters, 10.0)
    assert parameters[1].grad.item() == before


def test_a_long_gradient_in_float16_has_a_norm() -> None:
    assert SingleDevice().clip([with_gradient([60_000.0] * 4, torch.float16)], math.inf).item() == 120_000.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_non_finite_gradient_gives_a_non_finite_norm(bad: float) -> None:
    assert not SingleDevice().clip([with_gradient([1.0, bad], torch.float32)], 1.0).isfinite()


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(width, width), nn.Linear(width, width)


class Encoder(nn.Module):
    """A module that is nearly the whole network, as those of vision transformers are."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Block(16) for _ in range(4)))
        self.norm = nn.LayerNorm(16)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(3, 4)
        self.stages = nn.Sequential(nn.Sequential(Block(8), nn.ReLU()), nn.ModuleList([Block(16), nn.Identity()]))
        self.head = nn.Linear(16, 10)


def test_blocks_are_units_and_containers_are_split() -> None:
    network = Network()
    # The stem has 16 of 874 parameters, so it is worth a message of its own.
    block, large = network.stages[0][0], network.stages[1][0]
    assert sharding_units(network) == [network.stem, block, large.one, large.two, network.head]


def test_a_module_with_most_parameters_is_split() -> None:
    encoder = Encoder()
    model = nn.Sequential(encoder, nn.Linear(16, 3))
    assert sharding_units(model) == [*encoder.layers, encoder.norm, model[1]]


def test_small_modules_stay_with_the_root() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(8))
    assert sharding_units(model) == [model[0]]
