"""A number that is none on one of two ranks: both see it in the same step, before it has moved a weight on either."""

import pytest
import torch

NAMED = 1.0
SCALE = 65536.0


@pytest.fixture(scope="module")
def pair(run_on_ranks, tmp_path_factory):
    return run_on_ranks("bad_numbers.py", 2, tmp_path_factory.mktemp("bad"))


def numbers(pair, case: str) -> list[float]:
    """Return steps, skips, scale, whether rank 1 is named, and step 4: the same on both ranks, which kept in step."""
    assert torch.equal(pair[0][f"{case}/weights"], pair[1][f"{case}/weights"])
    assert pair[0][f"{case}/weights"].isfinite().all()
    found = [rank[f"{case}/numbers"].tolist() for rank in pair]
    assert found[0] == found[1]
    return found[0]


# matrix: 41
@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_the_run_stops_on_both_ranks_and_names_the_step_and_the_rank(pair, kind: str) -> None:
    assert numbers(pair, f"ddp stop {kind}") == [3, 0, 1, NAMED, 1]


def test_sharded_weights_stop_too_and_name_the_rank_whose_loss_it_was(pair) -> None:
    assert numbers(pair, "fsdp stop loss") == [3, 0, 1, NAMED, 1]
    steps, skipped, _, _, is_step_named = numbers(pair, "fsdp stop gradient")
    assert (steps, skipped, is_step_named) == (3, 0, 1)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_skipping_leaves_the_step_out_on_both_ranks(pair, strategy: str, kind: str) -> None:
    assert numbers(pair, f"{strategy} skip {kind}") == [5, 1, 1, 0, 0]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_scaled_loss_takes_a_bad_gradient_for_overflow_and_a_bad_loss_for_what_it_is(pair, strategy: str) -> None:
    assert numbers(pair, f"{strategy} scaled gradient") == [5, 1, SCALE / 2, 0, 0]
    assert numbers(pair, f"{strategy} scaled loss") == [3, 0, SCALE, NAMED, 1]
