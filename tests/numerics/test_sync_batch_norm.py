"""Synchronized batch norm on two ranks equals batch norm of their images together: outputs, gradients, statistics."""

import runpy
from pathlib import Path

import pytest
import torch
from torch import Tensor

SCRIPT = runpy.run_path(str(Path(__file__).with_name("sync_batch_norm_script.py")))
CASES, PASSES = SCRIPT["CASES"], SCRIPT["PASSES"]

# References are in float64, where sums in another order differ by 1e-13. In float32 a mean of 1e4 has an error of 5e-4,
# and so has a deviation of 1 from it; a mean of squares minus the squared mean would be wrong by 10. bfloat16 numbers
# have a relative error of 2^-9, and running statistics were rounded three times.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-3, torch.bfloat16: 2**-7}


@pytest.fixture(scope="module")
def pair(run_on_ranks, tmp_path_factory):
    return run_on_ranks("sync_batch_norm_script.py", 2, tmp_path_factory.mktemp("pair"))


@pytest.fixture(params=list(CASES))
def cases(request, pair):
    """The case, the tensors of each rank, and those of torch's batch norm of the whole batch in float64."""
    case = CASES[request.param]
    tensors = [
        {name.partition("/")[2]: tensor for name, tensor in rank.items() if name.startswith(f"{request.param}/")}
        for rank in pair
    ]
    reference = SCRIPT["normalised"](case, SCRIPT["norm"](case), slice(0, case.shape[0]), is_exact=True)
    assert all(rank.keys() == reference.keys() for rank in tensors)
    return case, tensors, reference


def near(some: Tensor, other: Tensor, case) -> bool:
    dtype = torch.bfloat16 if case.autocast else case.dtype
    return torch.allclose(some.double(), other.double(), rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


def test_outputs_and_input_gradients_are_those_of_the_whole_batch(cases) -> None:
    case, tensors, reference = cases
    for number in range(PASSES):
        for name in (f"output{number}", f"images.grad{number}"):
            assert near(torch.cat([rank[name] for rank in tensors]), reference[name], case), name


def test_weight_gradients_sum_up_over_the_ranks(cases) -> None:
    case, tensors, reference = cases
    for name in [name for name in reference if name in ("weight.grad", "bias.grad")]:
        # Each rank rounds in its own dtype, and sums of 240 numbers are larger than these.
        total = torch.stack([rank[name].double() for rank in tensors]).sum(0)
        assert near(total / 100, reference[name] / 100, case), name
    assert ("weight.grad" in reference) == case.options.get("affine", True)


def test_statistics_and_evaluation_are_those_of_the_whole_batch(cases) -> None:
    case, tensors, reference = cases
    names = [name for name in reference if name.startswith(("running", "num_batches", "evaluated"))]
    assert len(names) == (4 if case.options.get("track_running_stats", True) else 1)
    for rank in tensors:
        for name in names:
            assert near(rank[name], reference[name], case), name
            assert torch.equal(rank[name], tensors[0][name]), name
