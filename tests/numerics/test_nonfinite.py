"""A NaN on one of two ranks: both see it in the same step, before it has changed a weight on either."""

import pytest
import torch

NAMED = 1.0
SCALE = 65536.0


@pytest.fixture(scope="module")
def pair(run_on_ranks, tmp_path_factory):
    return run_on_ranks("nonfinite_script.py", 2, tmp_path_factory.mktemp("bad"))


def numbers(pair, case: str) -> list[float]:
    """Return steps, skips, scale, whether rank 1 is named, and step 4: the same on both ranks, which kept in step."""
    weights = [rank[f"{case}/weights"] for rank in pair]
    assert torch.equal(*weights) != case.startswith("alone")
    assert all(each.isfinite().all() for each in weights)
    found = [rank[f"{case}/numbers"].tolist() for rank in pair]
    assert found[0] == found[1]
    losses = pair[0][f"{case}/losses"]
    assert torch.equal(losses, pair[1][f"{case}/losses"]) and losses.isfinite().all()
    assert len(losses) == found[0][0] - found[0][1]  # none of a skipped step
    return found[0]


# matrix: 41
@pytest.mark.parametrize("way", ["ddp", "alone"])
@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_the_run_stops_on_both_ranks_and_names_the_step_and_the_rank(pair, way: str, kind: str) -> None:
    assert numbers(pair, f"{way} stop {kind}") == [3, 0, 1, NAMED, 1]


def test_sharded_weights_stop_too_and_name_the_rank_whose_loss_it_was(pair) -> None:
    assert numbers(pair, "fsdp stop loss") == [3, 0, 1, NAMED, 1]
    steps, skipped, _, _, is_step_named = numbers(pair, "fsdp stop gradient")
    assert (steps, skipped, is_step_named) == (3, 0, 1)


@pytest.mark.parametrize("way", ["ddp", "fsdp", "alone"])
@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_skipping_skips_the_step_on_both_ranks(pair, way: str, kind: str) -> None:
    assert numbers(pair, f"{way} skip {kind}") == [5, 1, 1, 0, 0]


@pytest.mark.parametrize("way", ["ddp", "fsdp", "alone"])
def test_a_scaled_loss_takes_a_bad_gradient_for_overflow_and_a_bad_loss_for_what_it_is(pair, way: str) -> None:
    assert numbers(pair, f"{way} scaled gradient") == [5, 1, SCALE / 2, 0, 0]
    assert numbers(pair, f"{way} scaled loss") == [3, 0, SCALE, NAMED, 1]


def test_ranks_that_train_alone_shorten_their_own_gradient_and_share_the_mean_of_their_norms(pair) -> None:
    assert [rank["shortened/finite norm"].item() for rank in pair] == [7.5, 7.5]
    assert pair[0]["shortened/finite gradient"].tolist() == [3.0, 4.0]
    # The divisor is 10 + 1e-6.
    assert pair[1]["shortened/finite gradient"].tolist() == pytest.approx([3.6, 4.8], rel=1e-6)


@pytest.mark.parametrize("bad", ["inf", "nan"])
def test_a_bad_gradient_of_a_rank_that_trains_alone_shows_in_the_norm_of_all(pair, bad: str) -> None:
    assert [str(rank[f"shortened/{bad} norm"].item()) for rank in pair] == [bad, bad]
    assert pair[0][f"shortened/{bad} gradient"].tolist() == [3.0, 4.0]  # which is left out, but not spoilt
