"""Two and three ranks evaluate as one does: raw weights, averages and training images, with any strategy."""

import pytest
import torch
from torch import Tensor

# Sums in another order, over six steps of float64. Images that were counted twice, statistics of another rank or raw
# weights in place of averaged ones are off by 1e-2 and more.
ROUNDING = 1e-10


@pytest.fixture(scope="module")
def alone(run_on_ranks, tmp_path_factory):
    return run_on_ranks("evaluation_script.py", 1, tmp_path_factory.mktemp("alone"))[0]


@pytest.fixture(scope="module", params=[2, 3])
def several(run_on_ranks, tmp_path_factory, request):
    return run_on_ranks("evaluation_script.py", request.param, tmp_path_factory.mktemp("several"))


def of(found: dict[str, Tensor], way: str) -> dict[str, Tensor]:
    chosen = {name.removeprefix(f"{way}/"): tensor for name, tensor in found.items() if name.startswith(f"{way}/")}
    assert len(chosen) == 5 + 16 + 17  # what was judged; three layers' weights and statistics; the same averaged
    return chosen


@pytest.mark.parametrize("way", ["ddp", "fsdp", "fsdp resharding"])
def test_several_ranks_evaluate_and_train_on_as_one_does(alone, several, way: str) -> None:
    expected = of(alone, way)
    for rank in several:
        found = of(rank, way)
        assert found.keys() == expected.keys()
        assert torch.equal(found["confusion"], expected["confusion"]) and found["confusion"].sum() == 21
        for name, tensor in found.items():
            torch.testing.assert_close(
                tensor, expected[name], rtol=ROUNDING, atol=ROUNDING, msg=lambda m, n=name: n + m
            )


def test_raw_weights_averages_and_training_images_differ(alone) -> None:
    found = of(alone, "ddp")
    losses = [found[f"{name}.numbers"][3].item() for name in ("val", "ema", "train")]
    assert len({round(loss, 3) for loss in losses}) == 3
    assert not torch.allclose(found["weights.0.weight"], found["average.0.weight"], rtol=1e-3)


def test_the_worst_mistakes_of_several_ranks_are_those_of_one(alone, several) -> None:
    """Index, class, and what it was taken for are the same; the loss, by which they are in order, has been compared."""
    expected = of(alone, "ddp")["worst"]
    assert expected.shape == (7, 5) and (expected[:, 1] != expected[:, 2]).all()
    assert torch.equal(expected[:, 4], expected[:, 4].sort(descending=True).values)
    assert all(torch.equal(of(rank, "ddp")["worst"][:, :3], expected[:, :3]) for rank in several)
