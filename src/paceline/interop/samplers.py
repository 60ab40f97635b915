"""Exact, resumable order of samples for torch's DataLoader."""

from collections.abc import Iterator, Mapping
from operator import index
from typing import Any, Final, NoReturn, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray
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
from paceline.interop.distributed import find_place
from paceline.interop.position import Position

_MAX_SEED: Final = 2**63 - 1


class ExactSampler(TorchSampler[list[int]]):
    """Yield this rank's indices of each training step: `DataLoader(dataset, batch_sampler=ExactSampler(...))`.

    A batch is a list of `batch_size / world_size` indices below `dataset_size`. `batch_size` counts all ranks, so that
    a step has the same samples on any number of ranks, and a run can resume on another number. They are the samples of
    `paceline train` in the same step, and depend on `seed`, the epoch and the step alone. The incomplete last batch of
    an epoch is dropped, with different samples in each epoch.

    Each iteration is the next epoch, without `set_epoch`. Give `start_step`, or call `resume` or `load_state_dict`, to
    start at any step: the steps before it cost no time.

    By default each epoch is a new permutation, or with `shuffle=False` the order of the dataset. One of three arguments
    replaces it. `weights`, floats [dataset_size] of at least 0, draws `num_samples` samples per epoch (by default
    `dataset_size`) in proportion, with `replacement` or as different samples. `labels`, ints [dataset_size] of at least
    0, draws all classes equally often, with replacement. `sampler` is any other sampler of `paceline.data.sampler`.
    Arrays, tensors on the CPU and sequences are accepted.

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
        self._sampler = sampler or ShuffleSampler(is_random=shuffle)
        self._place = rank, world_size
        if self._place != (None, None):
            self._order()  # report an invalid rank at once
        epoch_samples = self._sampler.num_samples(self._size)
        if epoch_samples < self._batch_size:
            raise RecipeError(
                f"batch_size: {self._batch_size:,} is more than the {epoch_samples:,} samples of an epoch (give at "
                f"most {epoch_samples:,})"
            )
        identity: dict[str, int | str] = {"seed": self._seed, "batch_size": self._batch_size}
        identity |= {"dataset_size": self._size, "digest": self._sampler.digest}
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
        """Samples per step, on one rank.

        Raise `WorldError` on several ranks: whoever reads this would divide batches again that are divided already.
        """
        _refuse_another_division(find_place(*self._place)[1])
        return self._batch_size

    @property
    def epoch(self) -> int:
        """Epoch of the next iteration, from 0."""
        return self._position.epoch

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, from 0; an epoch that `resume` started within keeps its position.

        Not needed. Raise `RecipeError` for an epoch before that of a resume.
        """
        _set_epoch(self._position, epoch)

    def resume(self, step: int) -> None:
        """Start the next iteration at global step `step`, the number of steps trained so far in all epochs.

        Raise `RecipeError` for a step below 0.
        """
        self._position.resume(_whole_number("step", step, 0))

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch drawn.

        The worker processes of a DataLoader draw batches before the loop takes them. To save the position of the loop,
        iterate an `ExactLoader` and save its state, or count the steps and `resume` there. torchdata's
        `StatefulDataLoader` keeps the right state by itself.
        """
        return self._position.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume after the last batch of `state`, with any number of ranks.

        Raise `CheckpointError` for a state of another seed, batch size or dataset size, and for an invalid one.
        """
        self._position.load_state_dict(state)

    def indices(self) -> TorchSampler[int]:
        """Return the same order as single indices, for a trainer that insists on `DataLoader(sampler=...)`.

        The DataLoader must have `drop_last=True` and this sampler's `batch_size / world_size` as its batch size. State
        and epoch remain those of this sampler.
        """
        return _IndexSampler(self)

    def _order(self) -> TrainOrder:
        rank, world_size = find_place(*self._place)
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
    """Iterate `loader`, whose `batch_sampler` is an `ExactSampler`, and count the batches that the loop has taken.

    `state_dict` is the position of the loop, however many batches worker processes have prefetched. Each iteration is
    the next epoch, or the rest of the epoch of a loaded state. Batches are those of `loader`, a DataLoader or what a
    trainer wraps around one.

    Lightning saves and loads this state with its own checkpoints, and Accelerate after
    `accelerator.register_for_checkpointing(loader)`. Neither adds a sampler of its own to this loader. Raise
    `RecipeError` for another batch sampler.
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
        # The sampler may be ahead of the loop, or of a loop that stopped within an epoch.
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
        """Return the position after the last batch that the loop has taken; the same on every rank."""
        return self._position.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume after the last batch of `state`, as `ExactSampler.load_state_dict` does."""
        self._position.load_state_dict(state)


class ExactEvalSampler(TorchSampler[list[int]]):
    """Yield this rank's indices of an evaluation: `DataLoader(dataset, batch_sampler=ExactEvalSampler(...))`.

    Every index below `dataset_size` is in one batch of one rank, without padding: sum your counts over the ranks, and
    divide by `dataset_size`. A batch is a list of up to `batch_size` indices; this counts one rank. Batches are smaller
    if all ranks then have the same number of batches, so that loops with a collective per batch do not hang (unless
    `batch_size` is 1 or a rank has fewer than two samples). Every iteration is the same.

    `rank` and `world_size` are as in `ExactSampler`. Raise `RecipeError` for an invalid argument.
    """

    def __init__(
        self, dataset_size: int, batch_size: int, *, rank: int | None = None, world_size: int | None = None
    ) -> None:
        self._size = _whole_number("dataset_size", dataset_size, 1)
        self._batch_size = _whole_number("batch_size", batch_size, 1)
        self._place = rank, world_size
        if self._place != (None, None):
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
        """Samples per batch at most, on one rank.

        Raise `WorldError` on several ranks, as `ExactSampler.batch_size` does.
        """
        _refuse_another_division(find_place(*self._place)[1])
        return self._batch_size

    def _shard(self) -> EvalShard:
        rank, world_size = find_place(*self._place)
        return EvalShard(self._size, even_batch(self._size, self._batch_size, world_size), rank, world_size)


def _name_choice(shuffle: bool, weights: object, labels: object, sampler: object) -> str:
    given = {"weights": weights, "labels": labels, "sampler": sampler, "shuffle=False": None if shuffle else False}
    chosen = [name for name, value in given.items() if value is not None]
    if len(chosen) > 1:
        raise RecipeError(f"{chosen[1]}: has no effect with {chosen[0]} (give one of them)")
    return "".join(chosen)


def _build_weighted(weights: ArrayLike, size: int, replacement: bool, samples: int | None) -> Sampler:
    values = _read_array("weights", weights, size).astype(np.float64)
    unusable = find_unusable_weights(values)
    if len(unusable) or not values.any():
        problem = f"has {values[unusable[0]]:g}" if len(unusable) else "are all 0"
        raise RecipeError(f"weights: {problem} (give 0 or numbers from 1e-200 to 1e200, not all of them 0)")
    if replacement:
        return WeightedSampler(values, samples)
    num_drawn = int(np.count_nonzero(values))
    if samples is None or samples > num_drawn:
        raise RecipeError(
            f"num_samples: {samples} is no number of different samples per epoch (give at most {num_drawn}, the number "
            f"of weights above 0, or replacement=True)"
        )
    return DistinctWeightedSampler(values, samples)


def _build_balanced(labels: ArrayLike, size: int, samples: int | None) -> Sampler:
    values = _read_array("labels", labels, size)
    if values.dtype.kind not in "iu" or values.min() < 0:
        raise RecipeError(f"labels: {values.dtype} is not a class index (give whole numbers of at least 0)")
    # As `data.sampler=balanced` weights them.
    return WeightedSampler(np.take(inverse_powers(np.bincount(values), 1.0), values), samples)


def _read_array(name: str, values: ArrayLike, size: int) -> NDArray[Any]:
    array = np.asarray(values)
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


def _refuse_another_division(world_size: int) -> None:
    # Only code that divides batches among ranks reads `batch_size` of a batch sampler: it would divide them twice.
    if world_size > 1:
        raise WorldError(
            f"batch_size: the sampler divides its batches among {world_size} ranks, and another trainer would divide "
            f"them again (Accelerate: do not prepare the loader; Lightning: use_distributed_sampler=False; or wrap the "
            f"loader in ExactLoader)"
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
