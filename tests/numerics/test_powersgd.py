"""The state of PowerSGD covers all ranks, uses parameter names, and suffices to resume."""

import pytest
import torch
from torch import Tensor


@pytest.fixture(scope="module")
def pair(run_on_ranks, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Tensor]]:
    return run_on_ranks("powersgd_script.py", 2, tmp_path_factory.mktemp("remembering"))


def below(found: dict[str, Tensor], start: str) -> dict[str, Tensor]:
    return {name.removeprefix(start): tensor for name, tensor in found.items() if name.startswith(start)}


def test_gradients_outside_of_steps_are_not_part_of_the_state(pair) -> None:
    assert [(each["steps before"].item(), each["parts before"].item()) for each in pair] == [(0, 0)] * 2


@pytest.mark.parametrize("saved", [12, 14])
def test_other_replicas_resume_with_the_same_state_and_gradients(pair, saved: int) -> None:
    """Rank 0's gradient of step 11 is NaN, so its residual is reset, and later steps start with 0."""
    for found in pair:
        whole, other = below(found, f"{saved}/whole/"), below(found, f"{saved}/other/")
        assert len(whole) > 3
        assert [name for name in whole if not torch.equal(whole[name], other[name])] == []
    whole, other = below(pair[0], f"{saved}/whole kept/"), below(pair[0], f"{saved}/other kept/")
    assert any(name.endswith(".error") for name in whole) and not below(pair[1], f"{saved}/whole kept/")
    assert [name for name in whole if not torch.equal(whole[name], other[name])] == []


def test_residuals_differ_between_ranks(pair) -> None:
    after_bad, later = below(pair[0], "12/saved/"), below(pair[0], "14/saved/")
    errors = [name for name in later if name.endswith(".error")]
    assert len(errors) > 1 and any(after_bad[name].isnan().any() for name in errors)
    assert all(later[name].shape[0] == 2 and later[name].isfinite().all() for name in errors)
    assert any(not torch.equal(*later[name]) for name in errors)


def test_a_bucket_has_the_size_of_its_named_parameters(pair) -> None:
    buckets = below(pair[0], "buckets/")
    names = [name.partition("/")[2] for name in buckets]
    assert sorted(names) == sorted(below(pair[0], "14/whole/").keys() - {"3.bias"})  # a parameter that is not trained
    errors = {name: each for name, each in below(pair[0], "14/saved/").items() if name.endswith(".error")}
    assert {name.partition("/")[0] for name in buckets} == {name.partition(".")[0] for name in errors}
    for name, error in errors.items():
        number = name.partition(".")[0]
        assert error.shape[1] == sum(each.numel() for key, each in buckets.items() if key.startswith(f"{number}/"))
    assert pair[0]["expected bytes"] == sum(each.nbytes for each in errors.values())


def test_residuals_of_all_ranks_are_gathered_on_rank_0_in_pieces(pair) -> None:
    for length in (0, 1, 2, 5):
        row = torch.arange(float(length))
        assert torch.equal(pair[0][f"rows/{length}"], torch.stack([row, row + 10]))
