"""Two ranks train the same as one on the whole batch, up to rounding, with any strategy and communication hook."""

import pytest
import torch
from torch import Tensor

# Sums over a batch have another order, so last bits differ: by up to 1e-13 over 4 steps in float64, where weights and
# gradients are about 1. A wrong average, a missing rank or a skipped micro-batch differs by 1e-2 or more.
ROUNDING = 1e-11
EXACT = [
    "ddp",
    "ddp in small buckets",
    "ddp of a static graph",
    "fsdp",
    "fsdp resharding",
    "ddp, sync_batch",
    "fsdp, sync_batch",
    "ddp, micro-batches",
    "fsdp, micro-batches",
    "fsdp resharding, micro-batches",
    "ddp, clipped",
    "fsdp, clipped",
]
FACTORS = ["ddp in factors", "ddp in factors, black, then bad"]


@pytest.fixture(scope="module")
def single_rank(run_on_ranks, tmp_path_factory):
    return run_on_ranks("strategies_script.py", 1, tmp_path_factory.mktemp("alone"))[0]


@pytest.fixture(scope="module")
def pair(run_on_ranks, tmp_path_factory):
    return run_on_ranks("strategies_script.py", 2, tmp_path_factory.mktemp("pair"))


def of(tensors: dict[str, Tensor], way: str) -> dict[str, Tensor]:
    chosen = {name.removeprefix(f"{way}/"): tensor for name, tensor in tensors.items() if name.startswith(f"{way}/")}
    assert len(chosen) >= 12  # 4 trainable parameters, a fixed one, 4 gradients, momentum, loss and norm
    return chosen


def bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def largest_difference(some: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    assert some.keys() == others.keys()
    return max((some[name].double() - others[name].double()).abs().max().item() for name in some)


@pytest.mark.parametrize("way", EXACT)
def test_two_ranks_train_the_same_as_one_on_the_whole_batch(single_rank, pair, way: str) -> None:
    for rank in pair:
        assert largest_difference(of(rank, way), of(single_rank, way)) < ROUNDING


@pytest.mark.parametrize("way", ["ddp, micro-batches", "fsdp, micro-batches", "fsdp resharding, micro-batches"])
def test_micro_batches_train_the_same_as_the_batch(single_rank, pair, way: str) -> None:
    for tensors in (single_rank, *pair):
        assert largest_difference(of(tensors, way), of(single_rank, "ddp")) < ROUNDING


@pytest.mark.parametrize("way", [*EXACT, *FACTORS, "ddp in bf16", "ddp in fp16"])
def test_replicas_stay_bitwise_equal(pair, way: str) -> None:
    one, other = of(pair[0], way), of(pair[1], way)
    assert [name for name in one if not torch.equal(bits(one[name]), bits(other[name]))] == []


@pytest.mark.parametrize("way", ["ddp, clipped", "fsdp, clipped"])
def test_a_large_gradient_is_clipped_and_its_norm_returned(pair, way: str) -> None:
    tensors = of(pair[1], way)
    assert (tensors["norm"] > 0.1).all() and tensors["norm"].dtype == torch.float32
    gradient = torch.cat([tensor.flatten() for name, tensor in tensors.items() if name.startswith("grad.")])
    # The divisor is the norm plus 1e-6, so the clipped gradient is shorter than 0.01 by a few millionths of that.
    assert gradient.norm().item() == pytest.approx(0.01, rel=1e-5)


# A 16-bit number has a relative error of 2^-9 (bf16) or 2^-12 (fp16). In float32 the ranks differ by 1e-7.
@pytest.mark.parametrize(("way", "share"), [("ddp in bf16", 2**-9), ("ddp in fp16", 2**-12)])
def test_16_bit_gradient_compression_only_rounds(single_rank, pair, way: str, share: float) -> None:
    exact, sent = of(single_rank, "ddp in float32"), of(pair[0], way)
    first_loss = (sent["loss"][0] - exact["loss"][0]).abs().item()
    assert first_loss < 1e-6  # no communication before the first step
    # Four steps of lr 0.1 with momentum move a weight by less than 1, so the weights differ by less than one rounding.
    differences = [(sent[name] - exact[name]).abs().max().item() for name in ("0.0.weight", "0.3.weight", "3.weight")]
    assert 1e-6 < max(differences) < share


def test_powersgd_begins_after_ten_steps_and_learns_as_well(single_rank, pair) -> None:
    exact, factors = of(single_rank, "ddp in factors")["loss"], of(pair[0], "ddp in factors")["loss"]
    # The weights of step 10 are the last from uncompressed gradients; loss 10 is theirs, and loss 11 that of PowerSGD.
    assert (factors - exact)[:11].abs().max() < 1e-5 < (factors - exact)[11:].abs().max()
    assert factors[-1] < 0.6 * factors[0]
    assert factors[-1].item() == pytest.approx(exact[-1].item(), abs=0.1)


def test_powersgd_survives_zero_and_non_finite_gradients(single_rank, pair) -> None:
    exact, factors = of(single_rank, FACTORS[1]), of(pair[0], FACTORS[1])
    assert torch.isnan(factors["norm"]).nonzero().flatten().tolist() == [15]
    assert torch.equal(torch.isnan(factors["norm"]), torch.isnan(exact["norm"]))
    assert factors["loss"][-1] < 0.8 * factors["loss"][0]
    assert factors["loss"][-1].item() == pytest.approx(exact["loss"][-1].item(), abs=0.1)
