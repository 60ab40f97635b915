"""Exact, resumable order of samples for torch's DataLoader."""

from collections.abc import Iterator, Mapping
from operator import index
from typing import Any, Final, NoReturn, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.utils.data import Sampler as TorchSampler

from paceline.core.errors import RecipeError, WorldError
from paceline.data.order import EvalShard, TrainOrder
from paceline.data.sampler import (
    DistinctWeightedSampler,
    Sampler,
    ShuffleSampler,
    WeightedSampler,
    find_unusable_weights,
    inverse_powers,
)
from paceline.interop.distributed import find_rank_and_world_size
from paceline.interop.position import Position

_MAX_SEED: Final = 2**63 - 1


class ExactSampler(TorchSampler[list[int]]):
    """Yield this rank's indices of each training step: `DataLoader(dataset, batch_sampler=ExactSampler(...))`.

    `batch_size` is the number of samples per step over all ranks, and must be a multiple of `world_size`. A batch is a
    list of `batch_size / world_size` indices below `dataset_size`. The samples of a step depend on `seed`, the epoch
    and the step alone: they are the same on any number of ranks, and those of `paceline train` in the same step. The
    incomplete last batch of an epoch is dropped.

    Each iteration is the next epoch, without `set_epoch`. `start_step`, `resume` and `load_state_dict` start the next
    iteration at any step, without computing the steps before it.

    By default each epoch is a new permutation, so that it drops different samples, or with `shuffle=False` the order of
    the dataset. One of three arguments replaces it:

    - `weights`, floats [dataset_size] of at least 0: draw `num_samples` samples per epoch (by default `dataset_size`)
      in proportion to their weights, with or without `replacement`.
    - `labels`, ints [dataset_size] of at least 0: draw `num_samples` samples per epoch with replacement, each class
      that occurs with the same probability.
    - `sampler`: a sampler of `paceline.data.sampler`. A sampler of torch is not one.

    `weights` and `labels` may be a sequence, a numpy array or a tensor.

    `rank` and `world_size` default to those of torch.distributed when an iteration starts. Raise `RecipeError` for an
    invalid argument and `WorldError` for an invalid rank.
    """

    def __init__(
        self,
        dataset_size: int,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        weights: ArrayLike | None = None,
        labels: ArrayLike | None = None,
        sampler: Sampler | None = None,
        replacement: bool = True,
        num_samples: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        start_step: int = 0,
    ) -> None:
        self._size = _whole_number("dataset_size", dataset_size, 1)
        self._batch_size = _whole_number("batch_size", batch_size, 1)
        self._seed = _whole_number("seed", seed, 0, _MAX_SEED)
        chosen = _name_choice(shuffle, weights, labels, sampler)
        if num_samples is not None and chosen not in ("weights", "labels"):
            raise RecipeError(f"num_samples: {num_samples} has no effect (give weights or labels, or leave it out)")
        if not replacement and chosen != "weights":
            raise RecipeError("replacement: False has no effect (give weights, or leave it out)")
        samples = None if num_samples is None else _whole_number("num_samples", num_samples, 1)
        if weights is not None:
            sampler = _build_weighted(weights, self._size, replacement, samples)
        elif labels is not None:
            sampler = _build_balanced(labels, self._size, samples)
        elif sampler is not None and not callable(getattr(sampler, "select", None)):
            raise RecipeError(
                f"sampler: {type(sampler).__name__} is not a sampler of paceline.data.sampler (give one, or weights or "
                f"labels in place of a sampler of torch)"
            )
        self._sampler = sampler or ShuffleSampler(is_random=shuffle)
        self._rank_and_world_size = rank, world_size
        if self._rank_and_world_size != (None, None):
            self._order()  # report an invalid rank at once
        epoch_samples = self._sampler.num_samples(self._size)
        if epoch_samples < self._batch_size:
            raise RecipeError(
                f"batch_size: {self._batch_size:,} is more than the {epoch_samples:,} samples of an epoch (give at "
                f"most {epoch_samples:,})"
            )
        identity: dict[str, int | str] = {"seed": self._seed, "batch_size": self._batch_size}
        identity |= {"dataset_size": self._size, "num_samples": epoch_samples, "digest": self._sampler.digest}
        identity["shuffle"] = shuffle
        if not replacement:
            identity["replacement"] = False
        self._position = Position(epoch_samples // self._batch_size, identity)
        self.resume(start_step)

    def __len__(self) -> int:
        """Return the number of steps per epoch."""
        return self._position.steps_per_epoch

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the batches of the next epoch, or the rest of the epoch in which `resume` starts."""
        order = self._order()
        for step in self._position.iterate():
            self._position.step = step + 1
            yield order.indices(step).tolist()

    @property
    def batch_size(self) -> int:
        """Samples per step on a single rank.

        Raise `WorldError` on several ranks. Lightning and Accelerate read this attribute to divide the batches among
        ranks, and this sampler has divided them already.
        """
        _refuse_another_division(
            find_rank_and_world_size(*self._rank_and_world_size)[1], "or wrap the loader in ExactLoader"
        )
        return self._batch_size

    @property
    def epoch(self) -> int:
        """Epoch of the next iteration, from 0."""
        return self._position.epoch

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, from 0. Not needed, as each iteration is the next epoch.

        The epoch in which `resume` starts keeps its position. Raise `RecipeError` for an epoch before that of a resume.
        """
        _set_epoch(self._position, epoch)

    def resume(self, step: int) -> None:
        """Start the next iteration at global step `step`, the number of steps taken so far over all epochs.

        Raise `RecipeError` for a step below 0.
        """
        self._position.resume(_whole_number("step", step, 0))

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch that the DataLoader has taken from this sampler.

        A DataLoader with worker processes takes batches before your loop does. For the position of the loop, save the
        state of an `ExactLoader`, or count the steps and call `resume`. torchdata's `StatefulDataLoader` saves the
        position of the loop by itself.
        """
        return self._position.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume after the last batch of `state`, with any number of ranks.

        Raise `CheckpointError` for an invalid state, and for one of another seed, batch size, dataset size, number of
        samples per epoch, weights or `replacement`.
        """
        self._position.load_state_dict(state)

    def indices(self) -> TorchSampler[int]:
        """Return the same order as single indices, for code that accepts only `DataLoader(sampler=...)`.

        Give the DataLoader `batch_size / world_size` of this sampler as its `batch_size`, and `drop_last=True`. Both
        samplers have the same position.
        """
        return _IndexSampler(self)

    def _order(self) -> TrainOrder:
        rank, world_size = find_rank_and_world_size(*self._rank_and_world_size)
        if self._batch_size % world_size:
            more = -(-self._batch_size // world_size) * world_size
            raise RecipeError(
                f"batch_size: {self._batch_size} does not divide over {world_size} ranks (try {more}; it counts all "
                f"ranks)"
            )
        return TrainOrder(self._seed, self._size, self._batch_size, rank, world_size, self._sampler)


class _IndexSampler(TorchSampler[int]):
    """Yield the indices of `batches` one by one."""

    def __init__(self, batches: ExactSampler) -> None:
        self.set_epoch = batches.set_epoch
        # For torchdata's StatefulDataLoader, which saves its sampler's state.
        self.state_dict, self.load_state_dict = batches.state_dict, batches.load_state_dict
        self._batches = batches

    def __iter__(self) -> Iterator[int]:
        """Yield the indices of the next epoch on this rank."""
        for batch in self._batches:
            yield from batch

    def __len__(self) -> int:
        """Return the number of indices per epoch on this rank."""
        order = self._batches._order()
        return len(self._batches) * (order.batch_size // order.world_size)


class _BatchSampled(Protocol):
    @property
    def batch_sampler(self) -> Any: ...

    def __iter__(self) -> Iterator[Any]: ...


class ExactLoader:
    """Iterate a DataLoader whose `batch_sampler` is an `ExactSampler`, and save the position of your loop.

    Each iteration yields the batches of the next epoch, or the rest of the epoch of a loaded state. `state_dict` counts
    the batches that the loop has taken, without those that worker processes have prefetched.

    Lightning saves and loads this state in its own checkpoints, and Accelerate after
    `accelerator.register_for_checkpointing(loader)`. Neither inserts a sampler of its own into this loader. Raise
    `RecipeError` for a loader with another batch sampler.
    """

    def __init__(self, loader: _BatchSampled) -> None:
        sampler = loader.batch_sampler
        if not isinstance(sampler, ExactSampler):
            raise RecipeError(
                f"loader: its batch_sampler is a {type(sampler).__name__} (give DataLoader(..., "
                f"batch_sampler=ExactSampler(...)))"
            )
        self.loader = loader
        self._sampler = sampler
        self._position = sampler._position.copy()

    def __len__(self) -> int:
        """Return the number of batches per epoch."""
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of the next epoch, or the rest of the epoch of a loaded state."""
        # Workers may have prefetched beyond the loop, also beyond a loop that left its epoch early.
        self._sampler.resume(self._position.start)
        for batch, step in zip(self.loader, self._position.iterate(), strict=True):
            self._position.step = step + 1
            yield batch

    @property
    def step(self) -> int:
        """Number of batches that the loop has taken, in all epochs."""
        return self._position.step

    @property
    def epoch(self) -> int:
        """Epoch of the next iteration, from 0."""
        return self._position.epoch

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, from 0. Not needed.

        Raise `RecipeError` for an epoch before that of a resume.
        """
        _set_epoch(self._position, epoch)

    def resume(self, step: int) -> None:
        """Start the next iteration at global step `step`. Raise `RecipeError` for one below 0."""
        self._position.resume(_whole_number("step", step, 0))

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch that the loop has taken; the same on every rank.

        A state within an epoch resumes with the rest of it. If your loop leaves epochs early, first call
        `set_epoch(loader.epoch)`.
        """
        return self._position.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume after the last batch of `state`, as `ExactSampler.load_state_dict` does."""
        self._position.load_state_dict(state)


class ExactEvalSampler(TorchSampler[list[int]]):
    """Yield this rank's indices of an evaluation: `DataLoader(dataset, batch_sampler=ExactEvalSampler(...))`.

    Every index below `dataset_size` is in one batch of one rank, without padding: sum your counts over the ranks, and
    divide by `dataset_size`. A batch is a list of up to `batch_size` indices, counted per rank. Every iteration is the
    same.

    All ranks have the same number of batches, for which batches are made smaller where necessary, so that a loop with a
    collective per batch does not hang. The exceptions are a `batch_size` of 1, and ranks with fewer than two samples.

    `rank` and `world_size` are as in `ExactSampler`. Raise `RecipeError` for an invalid argument.
    """

    def __init__(
        self, dataset_size: int, batch_size: int, *, rank: int | None = None, world_size: int | None = None
    ) -> None:
        self._size = _whole_number("dataset_size", dataset_size, 1)
        self._batch_size = _whole_number("batch_size", batch_size, 1)
        self._rank_and_world_size = rank, world_size
        if self._rank_and_world_size != (None, None):
            self._shard()  # report an invalid rank at once

    def __len__(self) -> int:
        """Return the number of batches on this rank."""
        return self._shard().num_batches

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the batches of this rank, in the order of the dataset."""
        shard = self._shard()
        for number in range(shard.num_batches):
            yield shard.indices(number).tolist()

    @property
    def batch_size(self) -> int:
        """Largest number of samples per batch on a single rank.

        Raise `WorldError` on several ranks, as `ExactSampler.batch_size` does.
        """
        _refuse_another_division(find_rank_and_world_size(*self._rank_and_world_size)[1])
        return self._batch_size

    def _shard(self) -> EvalShard:
        rank, world_size = find_rank_and_world_size(*self._rank_and_world_size)
        return EvalShard(self._size, even_batch(self._size, self._batch_size, world_size), rank, world_size)


def _name_choice(shuffle: bool, weights: object, labels: object, sampler: object) -> str:
    given = {"weights": weights, "labels": labels, "sampler": sampler, "shuffle=False": None if shuffle else False}
    chosen = [name for name, value in given.items() if value is not None]
    if len(chosen) > 1:
        raise RecipeError(f"{chosen[1]}: has no effect with {chosen[0]} (give one of them)")
    return "".join(chosen)


def _build_weighted(weights: ArrayLike, size: int, replacement: bool, samples: int | None) -> Sampler:
    array = _read_array("weights", weights, size)
    if array.dtype.kind not in "biuf":
        raise RecipeError(f"weights: {array.dtype} is not a number (give 0 or numbers from 1e-200 to 1e200)")
    values = array.astype(np.float64)
    unusable = find_unusable_weights(values)
    if len(unusable) or not values.any():
        problem = f"has {values[unusable[0]]:g}" if len(unusable) else "are all 0"
        raise RecipeError(f"weights: {problem} (give 0 or numbers from 1e-200 to 1e200, not all of them 0)")
    if replacement:
        return WeightedSampler(values, samples)
    num_drawn = int(np.count_nonzero(values))
    samples = size if samples is None else samples
    if samples > num_drawn:
        raise RecipeError(
            f"num_samples: {samples} different samples per epoch are too many (give at most {num_drawn}, the number of "
            f"weights above 0, or replacement=True)"
        )
    return DistinctWeightedSampler(values, samples)


def _build_balanced(labels: ArrayLike, size: int, samples: int | None) -> Sampler:
    values = _read_array("labels", labels, size)
    if values.dtype.kind not in "iu" or values.min() < 0:
        raise RecipeError(f"labels: {values.dtype} is not a class index (give whole numbers of at least 0)")
    # As `data.sampler=balanced` weights them.
    _, classes, counts = np.unique(values, return_inverse=True, return_counts=True)
    return WeightedSampler(np.take(inverse_powers(counts, 1.0), classes), samples)


def _read_array(name: str, values: ArrayLike, size: int) -> NDArray[Any]:
    if isinstance(values, Tensor):  # numpy has no bfloat16
        values = (values.double() if values.is_floating_point() else values).numpy(force=True)
    try:
        array = np.asarray(values)
    except (TypeError, ValueError):  # rows of different lengths, or tensors on a GPU
        array = np.empty(0)
    if array.shape != (size,):
        raise RecipeError(f"{name}: has shape {list(array.shape)} (give one number per sample, [{size}])")
    return array


def even_batch(num_images: int, batch_size: int, world_size: int) -> int:
    """Return the largest batch size up to `batch_size` that gives all ranks the same number of batches.

    If none does, as with one image on some ranks and none on others, return `batch_size`.
    """
    fewest, rest = divmod(num_images, world_size)
    if rest:
        for size in range(batch_size, 0, -1):
            if -(-fewest // size) == -(-(fewest + 1) // size):
                return size
    return batch_size


def _set_epoch(position: Position, epoch: int) -> None:
    number = _whole_number("epoch", epoch, 0)
    if number < position.resumed_epoch:  # a trainer that counts its epochs anew after a resume
        raise RecipeError(
            f"epoch: set_epoch({number}) would repeat epochs after a resume in epoch {position.resumed_epoch} (count "
            f"epochs from 0 through the whole training, or leave out set_epoch)"
        )
    position.set_epoch(number)


def _refuse_another_division(world_size: int, *fixes: str) -> None:
    # Only code that divides batches among ranks reads `batch_size` of a batch sampler: it would divide them twice.
    if world_size > 1:
        fix = "; ".join(("Accelerate: do not prepare the loader", "Lightning: use_distributed_sampler=False", *fixes))
        raise WorldError(
            f"batch_size: the sampler divides its batches among {world_size} ranks, and another trainer would divide "
            f"them again ({fix})"
        )


def _whole_number(name: str, value: Any, least: int, most: float = float("inf")) -> int:
    try:
        number = index(value)
    except TypeError:
        _refuse(name, type(value).__name__, f"at least {least}")
    if not least <= number <= most:
        _refuse(name, str(number), f"at least {least}" if number < least else f"at most {most}")
    return number


def _refuse(name: str, value: str, limits: str) -> NoReturn:
    raise RecipeError(f"{name}: {value} is not valid (give a whole number, {limits})")
