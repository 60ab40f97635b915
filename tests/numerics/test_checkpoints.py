"""Any strategy on any number of ranks loads the checkpoint of another with the same bits and evaluates equally."""

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
def found(run_on_ranks, folder: Path) -> list[dict[str, dict[str, Tensor]]]:
    """What each of two ranks found, by way and name; rank 0 of it also has what one process alone found."""
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
    assert len(parts["model"]) == 9 and len(parts["optimizer"]) == 18  # AdamW keeps 3 tensors for each of 6
    return {f"{part}.{name}": tensor for part, tensors in parts.items() for name, tensor in tensors.items()}


def assert_same_bits(some: dict[str, Tensor], others: dict[str, Tensor]) -> None:
    assert others and [name for name in others if not torch.equal(some[name], others[name])] == []


@pytest.mark.parametrize("writer", NAMES)
@pytest.mark.parametrize("reader", NAMES)
def test_what_one_strategy_saves_another_loads_with_the_same_bits(found, folder, writer: str, reader: str) -> None:
    for rank in found if reader != "alone" else found[:1]:
        assert_same_bits(rank[f"{writer} to {reader}"], saved(folder, writer))


@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(found, name: str) -> None:
    weights = {key: tensor for key, tensor in found[0][name].items() if key not in ("untrained", "evaluated")}
    assert len(weights) == 9
    assert_same_bits(found[0][f"{name} to {name}"], weights)


@pytest.mark.parametrize("writer", NAMES)
@pytest.mark.parametrize("reader", ON_TWO_RANKS)
def test_another_strategy_goes_on_to_rounding(found, writer: str, reader: str) -> None:
    """Two ranks normalise with statistics of half the batch each, so they are compared with two that do."""
    whole, other = found[0][f"{writer} to ddp"], found[0][f"{writer} to {reader}"]
    # Sums in another order leave 1e-7 in float32, which AdamW's division by a small root can make 1e-5.
    for name in ("0.0.weight", "0.1.weight", "2.weight", "0.1.running_var"):
        assert torch.allclose(other[name], whole[name], atol=2e-5), name


@pytest.mark.parametrize("name", ON_TWO_RANKS)
def test_ranks_evaluate_one_model_each_as_often_as_it_likes(found, name: str) -> None:
    for key in ("untrained", "evaluated"):
        assert torch.equal(found[0][name][key], found[1][name][key])
    assert torch.equal(found[0][name]["evaluated"], found[0][f"{name} to alone"]["evaluated"])
    assert torch.equal(found[0][name]["untrained"], found[0]["alone"]["untrained"])
    assert not torch.equal(found[0][name]["evaluated"], found[0][name]["untrained"])
