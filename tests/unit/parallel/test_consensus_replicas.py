"""A hash of weights changes with every bit and every position, in any dtype."""

import struct

import pytest
import torch
from torch import nn

from paceline.core.world import World
from paceline.parallel import consensus
from paceline.parallel.consensus import build_replica_check, hash_tensor
from paceline.recipe.schema.train import Parallel

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.bool]
MASK = (1 << 64) - 1


def split_mix(place: int) -> int:
    """The published SplitMix64, in integers of any size."""
    z = (place + 1) * 0x9E3779B97F4A7C15 & MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return z ^ z >> 31


def test_the_hash_is_the_formula_in_integers_of_any_size() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    words = struct.unpack("<1000i", values.numpy().tobytes())
    expected = 1000 + sum(word * (split_mix(place) | 1) for place, word in enumerate(words))
    assert hash_tensor(values).item() & MASK == expected & MASK


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_change_of_any_element_changes_the_hash(dtype) -> None:
    values = torch.zeros(257, dtype=dtype)
    found = {hash_tensor(values).item()}
    for place in range(257):
        changed = values.clone()
        changed[place] = 1
        found.add(hash_tensor(changed).item())
    assert len(found) == 258


def test_swapping_two_elements_changes_the_hash() -> None:
    values = torch.arange(64.0)
    swapped = values.clone()
    swapped[3], swapped[40] = values[40], values[3]
    assert hash_tensor(values) != hash_tensor(swapped)


def test_signed_zeros_and_nan_payloads_have_different_hashes() -> None:
    assert hash_tensor(torch.tensor([0.0])) != hash_tensor(torch.tensor([-0.0]))
    nans = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert hash_tensor(nans[:1]) != hash_tensor(nans[1:])


def test_the_hash_of_zeros_depends_on_their_number() -> None:
    assert len({hash_tensor(torch.zeros(length)).item() for length in range(5)}) == 5


def test_memory_layout_does_not_matter() -> None:
    images = torch.randn(2, 3, 4, 5)
    assert hash_tensor(images) == hash_tensor(images.to(memory_format=torch.channels_last))


@pytest.mark.parametrize("chunk", [1, 7, 64, 65])
def test_hashing_in_chunks_changes_nothing(monkeypatch, chunk: int) -> None:
    values = torch.arange(65.0)
    whole = hash_tensor(values)
    monkeypatch.setattr(consensus, "_CHUNK", chunk)
    assert hash_tensor(values) == whole


def test_no_check_for_one_rank_or_if_it_is_off() -> None:
    model = nn.Linear(2, 2)
    two = World(rank=0, world_size=2)
    assert build_replica_check(Parallel(check_replicas="5st"), World.single(), model, 5) is None
    assert build_replica_check(Parallel(), two, model, 0) is None
    assert build_replica_check(Parallel(check_replicas="5st"), two, model, 5) is not None


def test_other_steps_do_not_communicate() -> None:
    """No process group exists here, so a check that did anything would fail."""
    watched = build_replica_check(Parallel(check_replicas="5st"), World(rank=0, world_size=2), nn.Linear(2, 2), 5)
    for step in (1, 2, 3, 4, 6, 9):
        watched.check(step)
    with pytest.raises(ValueError, match="process group has not been initialized"):
        watched.check(10)
