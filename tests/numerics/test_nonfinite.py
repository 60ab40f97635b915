"""A NaN on one of two ranks stops or skips the step on both, before it changes a weight on either."""

import pytest
import torch

NAMED = 1.0
SCALE = 65536.0


@pytest.fixture(scope="module")
def pair(run_on_ranks, tmp_path_factory):
    return run_on_ranks("nonfinite_script.py", 2, tmp_path_factory.mktemp("bad"))


def numbers(pair, case: str) -> list[float]:
    """Return steps, skips, scale, whether rank 1 is named, and step 4: the same on both ranks."""
    weights = [rank[f"{case}/weights"] for rank in pair]
    assert torch.equal(*weights) != case.startswith("alone")
    assert all(each.isfinite().all() for each in weights)
    tensors = [rank[f"{case}/numbers"].tolist() for rank in pair]
    assert tensors[0] == tensors[1]
    losses = pair[0][f"{case}/losses"]
    assert torch.equal(losses, pair[1][f"{case}/losses"]) and losses.isfinite().all()
    assert len(losses) == tensors[0][0] - tensors[0][1]  # no metrics of a skipped step
    return tensors[0]


# matrix: 41
@pytest.mark.parametrize("way", ["ddp", "alone"])
@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_a_non_finite_loss_stops_both_ranks_and_names_step_and_rank(pair, way: str, kind: str) -> None:
    assert numbers(pair, f"{way} stop {kind}") == [3, 0, 1, NAMED, 1]


def test_a_run_with_sharded_weights_stops_and_names_the_rank(pair) -> None:
    assert numbers(pair, "fsdp stop loss") == [3, 0, 1, NAMED, 1]
    steps, skipped, _, _, is_step_named = numbers(pair, "fsdp stop gradient")
    assert (steps, skipped, is_step_named) == (3, 0, 1)


@pytest.mark.parametrize("way", ["ddp", "fsdp", "alone"])
@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_a_non_finite_step_is_skipped_on_both_ranks(pair, way: str, kind: str) -> None:
    assert numbers(pair, f"{way} skip {kind}") == [5, 1, 1, 0, 0]


@pytest.mark.parametrize("way", ["ddp", "fsdp", "alone"])
def test_loss_scaling_treats_bad_gradients_as_overflow_but_not_bad_losses(pair, way: str) -> None:
    assert numbers(pair, f"{way} scaled gradient") == [5, 1, SCALE / 2, 0, 0]
    assert numbers(pair, f"{way} scaled loss") == [3, 0, SCALE, NAMED, 1]


def test_unsynchronised_ranks_clip_their_own_gradient_and_share_the_mean_norm(pair) -> None:
    assert [rank["shortened/finite norm"].item() for rank in pair] == [7.5, 7.5]
    assert pair[0]["shortened/finite gradient"].tolist() == [3.0, 4.0]
    # The divisor is 10 + 1e-6.
    assert pair[1]["shortened/finite gradient"].tolist() == pytest.approx([3.6, 4.8], rel=1e-6)


@pytest.mark.parametrize("bad", ["inf", "nan"])
def test_a_bad_gradient_of_an_unsynchronised_rank_shows_in_the_shared_norm(pair, bad: str) -> None:
    assert [str(rank[f"shortened/{bad} norm"].item()) for rank in pair] == [bad, bad]
    assert pair[0][f"shortened/{bad} gradient"].tolist() == [3.0, 4.0]  # it is skipped, but not changed
