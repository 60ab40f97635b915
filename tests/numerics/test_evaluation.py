"""Two and three ranks evaluate the same as one: weights, averages and training images, with any strategy."""

import pytest
import torch
from torch import Tensor

# Sums in another order, over six steps of float64. Images counted twice, statistics of another rank or weights in place
# of averaged ones differ by 1e-2 or more.
ROUNDING = 1e-10


@pytest.fixture(scope="module")
def single_rank(run_on_ranks, tmp_path_factory):
    return run_on_ranks("evaluation_script.py", 1, tmp_path_factory.mktemp("alone"))[0]


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.long), 3])
def several(run_on_ranks, tmp_path_factory, request):
    return run_on_ranks("evaluation_script.py", request.param, tmp_path_factory.mktemp("several"))


def of(tensors: dict[str, Tensor], way: str) -> dict[str, Tensor]:
    chosen = {name.removeprefix(f"{way}/"): tensor for name, tensor in tensors.items() if name.startswith(f"{way}/")}
    assert len(chosen) == 5 + 16 + 17  # the evaluation; weights and statistics of three layers; the same averaged
    return chosen


@pytest.mark.parametrize("way", ["ddp", "fsdp", "fsdp resharding"])
def test_several_ranks_evaluate_and_continue_like_one(single_rank, several, way: str) -> None:
    expected = of(single_rank, way)
    for rank in several:
        tensors = of(rank, way)
        assert tensors.keys() == expected.keys()
        assert torch.equal(tensors["confusion"], expected["confusion"]) and tensors["confusion"].sum() == 21
        for name, tensor in tensors.items():
            torch.testing.assert_close(
                tensor, expected[name], rtol=ROUNDING, atol=ROUNDING, msg=lambda m, n=name: n + m
            )


def test_raw_weights_averages_and_training_images_differ(single_rank) -> None:
    tensors = of(single_rank, "ddp")
    losses = [tensors[f"{name}.numbers"][3].item() for name in ("val", "ema", "train")]
    assert len({round(loss, 3) for loss in losses}) == 3
    assert not torch.allclose(tensors["weights.0.weight"], tensors["average.0.weight"], rtol=1e-3)


def test_the_worst_mistakes_are_the_same_on_several_ranks(single_rank, several) -> None:
    """Index, class and prediction are the same; the loss, which orders them, is compared elsewhere."""
    expected = of(single_rank, "ddp")["worst"]
    assert expected.shape == (7, 5) and (expected[:, 1] != expected[:, 2]).all()
    assert torch.equal(expected[:, 4], expected[:, 4].sort(descending=True).values)
    assert all(torch.equal(of(rank, "ddp")["worst"][:, :3], expected[:, :3]) for rank in several)
