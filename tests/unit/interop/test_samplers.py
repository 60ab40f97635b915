"""`ExactSampler` for any DataLoader: the samples of `paceline train`, on any number of ranks, from any step."""

import json
import subprocess
import sys
from collections import Counter
from itertools import chain, islice

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from paceline.core.errors import CheckpointError, RecipeError, WorldError
from paceline.data.order import TrainOrder
from paceline.data.sampler import DistinctWeightedSampler, RepeatedSampler, ShuffleSampler, WeightedSampler
from paceline.interop import ExactEvalSampler, ExactLoader, ExactSampler

SIZE, BATCH, STEPS = 101, 12, 8
WEIGHTS = np.arange(SIZE, dtype=np.float64)  # one is 0
LABELS = np.array([0] * 90 + [1] * 11)


def ranks_of(world_size: int, **options) -> list[ExactSampler]:
    return [ExactSampler(SIZE, BATCH, rank=rank, world_size=world_size, **options) for rank in range(world_size)]


def together(parts: list[list[list[int]]]) -> list[list[int]]:
    """Return the batches of ranks put together, step by step."""
    return [list(chain(*step)) for step in zip(*parts, strict=True)]


def train_steps(first: int, stop: int, **options) -> list[list[int]]:
    """Return the indices of global steps `first` to `stop` - 1 of `paceline train`."""
    order = TrainOrder(options.pop("seed", 0), SIZE, BATCH, **options)
    return [order.indices(step).tolist() for step in range(first, stop)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("options", "sampler"),
    [
        ({}, ShuffleSampler()),
        ({"seed": 7}, ShuffleSampler()),
        ({"shuffle": False}, ShuffleSampler(is_random=False)),
        ({"sampler": RepeatedSampler(3, BATCH)}, RepeatedSampler(3, BATCH)),
        ({"weights": WEIGHTS.tolist()}, WeightedSampler(WEIGHTS)),
        (
            {"weights": torch.tensor(WEIGHTS, dtype=torch.bfloat16, requires_grad=True), "num_samples": 99},
            WeightedSampler(WEIGHTS, 99),
        ),
        ({"weights": WEIGHTS, "replacement": False, "num_samples": 99}, DistinctWeightedSampler(WEIGHTS, 99)),
        ({"labels": LABELS * 10**12}, WeightedSampler(1 / np.array([90, 11])[LABELS])),
    ],
    ids=["shuffle", "seed", "stored", "repeated", "weights", "tensor", "distinct", "labels"],
)
def test_ranks_together_have_the_steps_of_paceline(world_size: int, options, sampler) -> None:
    ranks = ranks_of(world_size, **options)
    assert all(len(rank) == STEPS for rank in ranks)
    for epoch in range(2):  # each iteration is the next epoch
        wanted = train_steps(STEPS * epoch, STEPS * (epoch + 1), sampler=sampler, seed=options.get("seed", 0))
        assert together([list(rank) for rank in ranks]) == wanted


def test_a_resume_at_any_step_continues_on_any_number_of_ranks() -> None:
    wanted = train_steps(0, 3 * STEPS)
    for step in range(2 * STEPS + 1):
        world_size = 1 + step % 4
        ranks = ranks_of(world_size, start_step=step)
        found = [together([list(rank) for rank in ranks]) for _ in range(3)]
        assert list(chain(*found))[: 3 * STEPS - step] == wanted[step:]
        assert len(found[0]) == STEPS - step % STEPS


def test_a_saved_state_resumes_after_the_last_batch() -> None:
    sampler = ExactSampler(SIZE, BATCH)
    list(sampler)
    list(islice(sampler, 3))
    state = json.loads(json.dumps(sampler.state_dict()))
    again = ranks_of(2)
    for rank in again:
        rank.load_state_dict(state)
    assert again[0].epoch == 1
    assert together([list(rank) for rank in again]) == train_steps(STEPS + 3, 2 * STEPS)


def test_the_next_iteration_after_a_loop_that_broke_off_is_the_next_epoch() -> None:
    sampler = ExactSampler(SIZE, BATCH)
    list(islice(sampler, 3))
    assert list(sampler) == train_steps(STEPS, 2 * STEPS)


def test_set_epoch_chooses_an_epoch_and_keeps_a_position_within_it() -> None:
    sampler = ExactSampler(SIZE, BATCH)
    sampler.set_epoch(2)
    assert list(sampler) == train_steps(2 * STEPS, 3 * STEPS)
    sampler.resume(STEPS + 5)
    sampler.set_epoch(1)  # as trainers do before the first epoch after a resume
    assert list(sampler) == train_steps(STEPS + 5, 2 * STEPS)


def test_a_trainer_that_counts_epochs_anew_after_a_resume_is_refused() -> None:
    sampler = ExactSampler(SIZE, BATCH, start_step=2 * STEPS + 1)
    with pytest.raises(RecipeError, match=r"set_epoch\(0\).*epoch 2 \(count epochs from 0 through"):
        sampler.set_epoch(0)


def test_a_loader_with_workers_saves_the_position_of_the_loop() -> None:
    sampler = ExactSampler(SIZE, BATCH)
    loader = ExactLoader(DataLoader(range(SIZE), batch_sampler=sampler, num_workers=1))
    taken = [batch.tolist() for batch in islice(loader, 2)]
    state = loader.state_dict()
    assert state["step"] == loader.step == 2 < sampler.state_dict()["step"]  # prefetched
    again = ExactLoader(DataLoader(range(SIZE), batch_sampler=ExactSampler(SIZE, BATCH)))
    again.load_state_dict(state)
    rest = [batch.tolist() for _ in range(2) for batch in again]
    assert taken + rest == train_steps(0, 2 * STEPS) and again.epoch == 2 and len(again) == STEPS
    # The sampler had drawn batches of the epoch that the loop left.
    assert [batch.tolist() for batch in loader] == train_steps(STEPS, 2 * STEPS)


def test_an_iterator_that_is_never_used_takes_no_epoch() -> None:
    """Lightning creates an iterator twice before the first epoch after a resume."""
    loader = ExactLoader(DataLoader(range(SIZE), batch_sampler=ExactSampler(SIZE, BATCH)))
    iter(loader)
    assert [batch.tolist() for batch in loader] == train_steps(0, STEPS)


def test_a_loader_with_another_sampler_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"batch_sampler is a BatchSampler \(give .*ExactSampler"):
        ExactLoader(DataLoader(range(SIZE), batch_size=4))


def test_single_indices_make_the_same_batches() -> None:
    for rank, sampler in enumerate(ranks_of(3)):
        indices = sampler.indices()
        assert len(indices) == STEPS * 4
        loader = DataLoader(range(SIZE), batch_size=4, sampler=indices, drop_last=True)
        for first in (0, STEPS):
            expected = train_steps(first, first + STEPS, rank=rank, world_size=3)
            assert [batch.tolist() for batch in loader] == expected


def test_single_indices_save_the_position_of_the_batches() -> None:
    """torchdata's `StatefulDataLoader` saves the state of its sampler."""
    indices, again = ExactSampler(SIZE, BATCH).indices(), ExactSampler(SIZE, BATCH).indices()
    list(indices)
    list(islice(indices, 3 * BATCH))
    again.load_state_dict(indices.state_dict())
    assert list(islice(again, BATCH)) == train_steps(STEPS + 3, STEPS + 4)[0]


def test_accelerate_divides_the_steps_of_one_rank_like_the_sampler() -> None:
    """With `split_batches=True`, a prepared loader has the same samples on each rank."""
    accelerate = pytest.importorskip("accelerate.data_loader", exc_type=ImportError)
    for rank, own in enumerate(ranks_of(2)):
        whole = ExactSampler(SIZE, BATCH, rank=0, world_size=1)
        divided = accelerate.BatchSamplerShard(whole, 2, rank, split_batches=True)
        assert list(divided) == list(own)
    with pytest.raises(WorldError, match=r"divide them again \(Accelerate: do not prepare"):
        accelerate.BatchSamplerShard(own, 2, 1)


def test_the_rank_is_that_of_torch_distributed_when_an_iteration_starts(monkeypatch) -> None:
    """Trainers initialize the process group after a program has built its samplers."""
    sampler, evaluation = ExactSampler(SIZE, BATCH), ExactEvalSampler(SIZE, BATCH)
    for name, value in {"is_initialized": True, "get_rank": 1, "get_world_size": 2}.items():
        monkeypatch.setattr(dist, name, lambda value=value: value)
    assert list(sampler) == list(ranks_of(2)[1])
    assert list(evaluation) == list(ExactEvalSampler(SIZE, BATCH, rank=1, world_size=2))


def test_ranks_that_are_not_joined_are_refused(monkeypatch) -> None:
    sampler = ExactSampler(SIZE, BATCH)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(WorldError, match=r"2 ranks were started \(initialize it first"):
        next(iter(sampler))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [1, 7, 65])
def test_every_sample_is_evaluated_once_and_ranks_have_as_many_batches(size: int, world_size: int) -> None:
    ranks = [ExactEvalSampler(size, 8, rank=rank, world_size=world_size) for rank in range(world_size)]
    batches = [list(rank) for rank in ranks]
    assert Counter(index for rank in batches for batch in rank for index in batch) == Counter(range(size))
    assert all(1 <= len(batch) <= 8 for rank in batches for batch in rank)
    assert [len(rank) for rank in ranks] == [len(rank) for rank in batches]
    assert size == 1 or len({len(rank) for rank in batches}) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dataset_size": 0}, r"dataset_size: 0 .*at least 1"),
        ({"dataset_size": range(5)}, r"dataset_size: range .*whole number"),
        ({"batch_size": 102}, r"batch_size: 102 is more than the 101 .*at most 101"),
        ({"batch_size": 2.5}, r"batch_size: float .*whole number"),
        ({"seed": -1}, r"seed: -1 .*at least 0"),
        ({"start_step": -1}, r"step: -1 .*at least 0"),
        ({"weights": [1.0]}, r"weights: has shape \[1\] .*\[101\]"),
        ({"weights": [-1.0] * SIZE}, r"weights: has -1 .*give 0 or"),
        ({"weights": [1e308] * SIZE}, r"weights: has 1e\+308 .*to 1e200"),
        ({"weights": [0.0] * SIZE}, r"weights: are all 0"),
        ({"weights": ["a"] * SIZE}, r"weights: <U1 is not a number"),
        ({"weights": [[1.0], [1.0, 2.0]]}, r"weights: has shape .*\[101\]"),
        ({"sampler": SequentialSampler(range(SIZE))}, r"sampler: SequentialSampler .*paceline.data.sampler"),
        ({"weights": WEIGHTS, "replacement": False}, r"num_samples: 101 .*at most 100"),
        ({"weights": WEIGHTS, "replacement": False, "num_samples": 101}, r"num_samples: 101 .*at most 100"),
        ({"weights": WEIGHTS, "labels": LABELS}, r"labels: has no effect with weights"),
        ({"labels": WEIGHTS}, r"labels: float64 .*whole numbers"),
        ({"num_samples": 5}, r"num_samples: 5 has no effect .*weights"),
        ({"labels": LABELS, "replacement": False}, r"replacement: False has no effect"),
        ({"rank": 0, "world_size": 5}, r"batch_size: 12 does not divide over 5 ranks \(try 15"),
        ({"rank": 2, "world_size": 2}, r"rank 2 of 2 .*rank from 0 on"),
        ({"rank": 0}, r"rank 0 of None .*give both"),
    ],
)
def test_an_invalid_argument_is_named_with_its_value_and_fix(arguments, message: str) -> None:
    with pytest.raises((RecipeError, WorldError), match=message):
        ExactSampler(**{"dataset_size": SIZE, "batch_size": BATCH, **arguments})


@pytest.mark.parametrize(
    "change", [{"seed": 1}, {"batch_size": 6}, {"dataset_size": 100}, {"weights": WEIGHTS}, {"shuffle": False}]
)
def test_a_state_of_another_order_is_refused(change) -> None:
    state = ExactSampler(SIZE, BATCH).state_dict()
    with pytest.raises(CheckpointError, match="digest" if "weights" in change else next(iter(change))):
        ExactSampler(**{"dataset_size": SIZE, "batch_size": BATCH, **change}).load_state_dict(state)


def test_a_state_of_another_number_of_samples_per_epoch_is_refused() -> None:
    state = ExactSampler(SIZE, BATCH, weights=WEIGHTS).state_dict()
    with pytest.raises(CheckpointError, match=r"num_samples 101, but this loader 50"):
        ExactSampler(SIZE, BATCH, weights=WEIGHTS, num_samples=50).load_state_dict(state)


def test_a_state_of_draws_with_and_without_replacement_differ() -> None:
    samplers = [ExactSampler(SIZE, BATCH, weights=WEIGHTS, num_samples=50, replacement=each) for each in (True, False)]
    for one, other in (samplers, reversed(samplers)):
        one.load_state_dict(one.state_dict())
        with pytest.raises(CheckpointError, match=r"replacement (False|None)"):
            one.load_state_dict(other.state_dict())


def test_without_replacement_an_epoch_has_every_sample_by_default() -> None:
    sampler = ExactSampler(SIZE, 1, weights=WEIGHTS + 1, replacement=False)
    assert sorted(chain(*sampler)) == list(range(SIZE))


def test_importing_the_sampler_loads_neither_models_nor_transforms() -> None:
    code = "import sys; from paceline.interop import ExactSampler; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    loaded = set(done.stdout.split())
    assert "paceline.interop.samplers" in loaded
    assert loaded & {"torchvision", "timm", "sklearn", "scipy", "paceline.training", "paceline.models"} == set()


def test_a_sampler_that_yields_batches_is_no_torch_batch_sampler() -> None:
    """Lightning rebuilds a `BatchSampler` around a sampler of its own; this one it refuses, and names the option."""
    assert not isinstance(ExactSampler(SIZE, BATCH), BatchSampler)
    assert isinstance(DataLoader(range(3), batch_sampler=ExactSampler(3, 1)).sampler, SequentialSampler)
