"""Every strategy on any number of ranks loads every other's checkpoint bit for bit and evaluates it equally."""

import runpy
from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline.training.checkpoint import CheckpointStorage, KeepPolicy, load_tensor_group

SCRIPT = runpy.run_path(str(Path(__file__).with_name("checkpoint_script.py")))
NAMES = list(SCRIPT["SECTIONS"])
ON_TWO_RANKS = [name for name in NAMES if name != "alone"]
STEPS = SCRIPT["STEPS"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def tensors(run_on_ranks, folder: Path) -> list[dict[str, dict[str, Tensor]]]:
    """The tensors of each of two ranks by configuration and name; rank 0 also has those of a single process."""
    alone = {"alone": SCRIPT["write"]("alone", 0, 1, folder)}
    pair = []
    for rank in run_on_ranks("checkpoint_script.py", 2, folder):
        ways: dict[str, dict[str, Tensor]] = {}
        for name, tensor in rank.items():
            way, _, key = name.partition("/")
            ways.setdefault(way, {})[key] = tensor
        pair.append(ways)
    alone |= {f"{writer} to alone": SCRIPT["read"](writer, "alone", 0, 1, folder) for writer in NAMES}
    return [pair[0] | alone, pair[1]]


def saved(folder: Path, writer: str) -> dict[str, Tensor]:
    path = CheckpointStorage(folder / writer, KeepPolicy(1)).at_step(STEPS)
    parts = {part: load_tensor_group(path, part) for part in ("model", "optimizer")}
    assert len(parts["model"]) == 9 and len(parts["optimizer"]) == 18  # AdamW has 3 tensors for each of 6 parameters
    return {f"{part}.{name}": tensor for part, tensors in parts.items() for name, tensor in tensors.items()}


def assert_same_bits(some: dict[str, Tensor], others: dict[str, Tensor]) -> None:
    assert others and [name for name in others if not torch.equal(some[name], others[name])] == []


@pytest.mark.parametrize("writer", NAMES)
@pytest.mark.parametrize("reader", NAMES)
def test_every_strategy_loads_every_checkpoint_bit_for_bit(tensors, folder, writer: str, reader: str) -> None:
    for rank in tensors if reader != "alone" else tensors[:1]:
        assert_same_bits(rank[f"{writer} to {reader}"], saved(folder, writer))


@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_equals_an_uninterrupted_one(tensors, name: str) -> None:
    weights = {key: tensor for key, tensor in tensors[0][name].items() if key not in ("untrained", "evaluated")}
    assert len(weights) == 9
    assert_same_bits(tensors[0][f"{name} to {name}"], weights)


@pytest.mark.parametrize("writer", NAMES)
@pytest.mark.parametrize("reader", ON_TWO_RANKS)
def test_another_strategy_resumes_up_to_rounding(tensors, writer: str, reader: str) -> None:
    """On two ranks batch norm uses half of the batch per rank, so they are compared with two ranks."""
    whole, other = tensors[0][f"{writer} to ddp"], tensors[0][f"{writer} to {reader}"]
    # Sums in another order differ by 1e-7 in float32, which AdamW's division by a small root can amplify to 1e-5.
    for name in ("0.0.weight", "0.1.weight", "2.weight", "0.1.running_var"):
        assert torch.allclose(other[name], whole[name], atol=2e-5), name


@pytest.mark.parametrize("name", ON_TWO_RANKS)
def test_ranks_may_evaluate_different_numbers_of_batches(tensors, name: str) -> None:
    for key in ("untrained", "evaluated"):
        assert torch.equal(tensors[0][name][key], tensors[1][name][key])
    assert torch.equal(tensors[0][name]["evaluated"], tensors[0][f"{name} to alone"]["evaluated"])
    assert torch.equal(tensors[0][name]["untrained"], tensors[0]["alone"]["untrained"])
    assert not torch.equal(tensors[0][name]["evaluated"], tensors[0][name]["untrained"])
