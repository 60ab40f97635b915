"""Two ranks judge as one does: raw weights, averages and training images, whatever joins the ranks."""

import pytest
import torch
from torch import Tensor

# Sums in another order, over six steps of float64. Images that were counted twice, statistics of another rank or raw
# weights in place of averaged ones are off by 1e-2 and more.
ROUNDING = 1e-10


@pytest.fixture(scope="module")
def alone(run_on_ranks, tmp_path_factory):
    return run_on_ranks("judging.py", 1, tmp_path_factory.mktemp("alone"))[0]


@pytest.fixture(scope="module")
def pair(run_on_ranks, tmp_path_factory):
    return run_on_ranks("judging.py", 2, tmp_path_factory.mktemp("pair"))


def of(found: dict[str, Tensor], way: str) -> dict[str, Tensor]:
    chosen = {name.removeprefix(f"{way}/"): tensor for name, tensor in found.items() if name.startswith(f"{way}/")}
    assert len(chosen) == 4 + 16 + 17  # what was judged; three layers' weights and statistics; the same averaged
    return chosen


@pytest.mark.parametrize("way", ["ddp", "fsdp", "fsdp resharding"])
def test_two_ranks_judge_what_one_judges_and_train_on_as_it_does(alone, pair, way: str) -> None:
    expected = of(alone, way)
    for rank in pair:
        found = of(rank, way)
        assert found.keys() == expected.keys()
        assert torch.equal(found["confusion"], expected["confusion"]) and found["confusion"].sum() == 21
        for name, tensor in found.items():
            torch.testing.assert_close(
                tensor, expected[name], rtol=ROUNDING, atol=ROUNDING, msg=lambda m, n=name: n + m
            )


def test_raw_weights_averages_and_training_images_are_told_apart(alone) -> None:
    found = of(alone, "ddp")
    losses = [found[f"{name}.numbers"][3].item() for name in ("val", "ema", "train")]
    assert len({round(loss, 3) for loss in losses}) == 3
    assert not torch.allclose(found["weights.0.weight"], found["average.0.weight"], rtol=1e-3)
