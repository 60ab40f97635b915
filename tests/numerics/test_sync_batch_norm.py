"""Batch norm over two ranks is batch norm over their images together: outputs, gradients, statistics."""

import runpy
from pathlib import Path

import pytest
import torch
from torch import Tensor

SCRIPT = runpy.run_path(str(Path(__file__).with_name("sync_batch_norm_script.py")))
CASES, PASSES = SCRIPT["CASES"], SCRIPT["PASSES"]

# Compared is with float64. There, sums in another order leave 1e-13. In float32 a mean of 1e4 is known to 5e-4, a
# deviation of 1 from it to as much; a mean of squares less the square of the mean would be off by 10. Numbers of
# bfloat16 have a relative error of 2^-9, and its running statistics were rounded three times.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-3, torch.bfloat16: 2**-7}


@pytest.fixture(scope="module")
def pair(run_on_ranks, tmp_path_factory):
    return run_on_ranks("sync_batch_norm_script.py", 2, tmp_path_factory.mktemp("pair"))


@pytest.fixture(params=list(CASES))
def ways(request, pair):
    """The case, what each rank found, and what torch's batch norm finds in the whole batch in float64."""
    case = CASES[request.param]
    found = [
        {name.partition("/")[2]: tensor for name, tensor in rank.items() if name.startswith(f"{request.param}/")}
        for rank in pair
    ]
    whole = SCRIPT["normalised"](case, SCRIPT["norm"](case), slice(0, case.shape[0]), is_exact=True)
    assert all(rank.keys() == whole.keys() for rank in found)
    return case, found, whole


def near(some: Tensor, other: Tensor, case) -> bool:
    dtype = torch.bfloat16 if case.autocast else case.dtype
    return torch.allclose(some.double(), other.double(), rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


def test_outputs_and_gradients_of_the_images_are_those_of_the_whole_batch(ways) -> None:
    case, found, whole = ways
    for number in range(PASSES):
        for name in (f"output{number}", f"images.grad{number}"):
            assert near(torch.cat([rank[name] for rank in found]), whole[name], case), name


def test_gradients_of_the_weights_add_up_over_the_ranks(ways) -> None:
    case, found, whole = ways
    for name in [name for name in whole if name in ("weight.grad", "bias.grad")]:
        # Each rank's is rounded in its own dtype, and sums of 240 numbers are larger than these.
        total = torch.stack([rank[name].double() for rank in found]).sum(0)
        assert near(total / 100, whole[name] / 100, case), name
    assert ("weight.grad" in whole) == case.options.get("affine", True)


def test_statistics_and_evaluation_are_those_of_the_whole_batch_on_every_rank(ways) -> None:
    case, found, whole = ways
    names = [name for name in whole if name.startswith(("running", "num_batches", "evaluated"))]
    assert len(names) == (4 if case.options.get("track_running_stats", True) else 1)
    for rank in found:
        for name in names:
            assert near(rank[name], whole[name], case), name
            assert torch.equal(rank[name], found[0][name]), name
