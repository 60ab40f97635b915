"""Choose `train.accumulate=auto` and `data.batch_size=auto` by steps on a model that is thrown away.

The steps see random pixels. Micro-batches must fit in memory, and batches are timed, with the run's own strategy.
"""

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from paceline.core.dataset import ArraySource
from paceline.core.errors import RecipeError
from paceline.core.units import count, size
from paceline.data.batch import Batch, batch_dtype
from paceline.data.loaders.choose import count_device_bytes
from paceline.data.loaders.process import BATCHES_PER_WORKER
from paceline.data.loaders.sampler import count_samples
from paceline.data.workers import estimate_batch_bytes
from paceline.measure.clock import NullClock
from paceline.measure.memory import count_host_bytes, memory_budget, read_device_bytes
from paceline.measure.timer import now_s
from paceline.parallel.build import build_strategy
from paceline.parallel.collectives import all_gather_rows
from paceline.parallel.strategy import SingleDevice, Strategy
from paceline.recipe.plan import list_accumulations, list_batch_sizes, with_accumulate, with_batch_size
from paceline.recipe.schema import Recipe
from paceline.training.components import build_training_state, build_update
from paceline.training.context import RunContext
from paceline.training.distill import build_criterion
from paceline.training.ema import WeightAverage
from paceline.training.loss import build_loss
from paceline.training.nonfinite import NonFiniteReporter
from paceline.training.optim.build import layers_for_decay
from paceline.training.precision import Precision
from paceline.training.trainer import EagerStep
from paceline.training.unfreeze import build_unfreezing

LEAST_WITH_BATCH_NORM: Final = 2
"""Images of the smallest micro-batch that `auto` chooses for a model with BatchNorm."""
_FIRST_IMAGES: Final = 2
"""Images of the first micro-batch that is measured."""
_WORKER_BYTES: Final = 200 * 10**6
"""Memory of a worker process, which imports torch."""
_TIMED_S: Final = 0.5
_TIMED_STEPS: Final = (2, 20)
_CLOSE_TO_BEST: Final = 0.97
_NONE_FITS: Final = 2**40


def fit_batch(
    context: RunContext, requested: Recipe, on_progress: Callable[[], None]
) -> tuple[RunContext, dict[str, Any]]:
    """Return the context with the numbers that `requested` leaves to `auto`, and their measurements for provenance.

    `context` has the smallest of them. `on_progress` is called after each measurement. Raise `RecipeError` if not even
    the smallest micro-batch fits in memory. Collective.
    """
    measures_batch, measures_parts = requested.data.is_batch_measured, requested.train.accumulate == "auto"
    if not measures_batch and not measures_parts:
        return context, {}
    recipe, world = context.recipe, context.world
    notes: list[str] = []
    measured: dict[str, Any] = {}
    speeds: dict[int, float] = {}
    with torch.random.fork_rng([context.device] if context.device.type == "cuda" else []):
        if measures_batch:
            # A batch that needs more micro-batches is no faster.
            context = replace(context, recipe=with_accumulate(recipe, 1) if measures_parts else recipe)
            sizes = _list_fitting_batches(context, on_progress)
            _free_memory(context.device)
            speeds = _time_batches(context, sizes, on_progress)
            recipe = with_batch_size(context.recipe, choose_batch(speeds))
            measured["images_per_s"] = {str(batch): round(speed, 1) for batch, speed in speeds.items()}
        else:
            fit = _fit_micro_batch(context, on_progress)
            recipe = with_accumulate(recipe, fit.accumulate)
            notes += fit.notes(context.plan.rank_batch)
            measured |= {"needed_bytes": fit.needed_bytes, "allowed_bytes": fit.allowed_bytes}
    _free_memory(context.device)
    fitted = RunContext.derive(recipe, world, context.device, context.datasets, context.exit_stack)
    fitted.check_worker_limits()
    plan = fitted.plan
    if measures_batch:
        timed = ", ".join(f"{batch}: {speed:,.0f}" for batch, speed in speeds.items())
        notes.append(
            f"data.batch_size={plan.batch_size}: the smallest within 3 % of the fastest, in images/s of steps without "
            f"loading ({timed}); a batch size changes what is learnt: learning rate {plan.lr_sentence}"
        )
    measured |= {"accumulate": recipe.train.num_micro_batches, "batch_size": plan.batch_size}
    return fitted.with_notes(*notes), {"measured_batch": measured}


def choose_batch(speeds: dict[int, float]) -> int:
    """Return the smallest batch whose images/s are within 3 % of the best."""
    best = max(speeds.values())
    return min(batch for batch, speed in speeds.items() if speed >= _CLOSE_TO_BEST * best)


class MicroBatchFit(NamedTuple):
    """Micro-batches per rank and step, and the memory of one, of the rank that needs most; `next_bytes`: of a larger.

    0 bytes are unknown.
    """

    accumulate: int
    needed_bytes: int
    allowed_bytes: int
    next_bytes: int = 0
    has_batch_norm: int = 0

    def notes(self, rank_batch: int) -> Iterator[str]:
        """Yield the notes of the run on this choice."""
        images = count(rank_batch // self.accumulate, "image")
        larger = f"; the next larger ones need {size(self.next_bytes)}" if self.next_bytes else ""
        yield (
            f"train.accumulate={self.accumulate}: micro-batches of {images} need {size(self.needed_bytes)} of the "
            f"{size(self.allowed_bytes)} that a rank may use{larger}"
        )
        if self.has_batch_norm and self.accumulate > 1:
            yield f"train.accumulate={self.accumulate}: BatchNorm sees micro-batches of {images}, not the rank's batch"


def choose_accumulation(
    numbers: Sequence[int], images: int, need: Callable[[int], float], allowed: int
) -> MicroBatchFit:
    """Return the first of the ascending `numbers` of micro-batches whose `need(micro_batch)` bytes are `allowed`.

    `images` are the rank's batch. If none fits, its `accumulate` is 2**40.
    """
    larger = needed = 0.0
    for number in numbers:
        larger, needed = needed, need(images // number)
        if needed <= allowed:
            return MicroBatchFit(number, int(needed), allowed, int(larger) if math.isfinite(larger) else 0)
    return MicroBatchFit(_NONE_FITS, int(needed) if math.isfinite(needed) else 0, allowed)


def extrapolate(points: Sequence[tuple[int, int]], images: int) -> int:
    """Return the bytes of a micro-batch of `images` by measured `points` (images, bytes) in ascending order.

    It is the next larger measurement, or beyond the last one the line through the last two.
    """
    larger = next((num_bytes for number, num_bytes in points if number >= images), None)
    if larger is not None:
        return larger
    large, large_bytes = points[-1]
    small, small_bytes = points[-2] if len(points) > 1 else (0, 0)
    return round(large_bytes + max(0.0, (large_bytes - small_bytes) / (large - small)) * (images - large))


def is_on_line(points: Sequence[tuple[int, int]]) -> bool:
    """Return whether `points` (images, bytes) have reached the line on which activations exceed all other memory.

    In small micro-batches the peak is that of the gradients of large layers, which hides what an image needs.
    """
    if len(points) < 3:
        return False
    (first, first_bytes), (second, second_bytes), (third, third_bytes) = points[-3:]
    before = (second_bytes - first_bytes) / (second - first)
    slope = (third_bytes - second_bytes) / (third - second)
    return slope <= 1.05 * before and third_bytes >= 1.5 * second_bytes


def _fit_micro_batch(context: RunContext, on_progress: Callable[[], None]) -> MicroBatchFit:
    """Return the fewest micro-batches that fit on every rank. Raise `RecipeError` if none does."""
    numbers, images = list_accumulations(context.recipe, context.world.world_size), context.plan.rank_batch
    memory = _StepMemory(context, images, on_progress)
    if memory.has_batch_norm:  # which has no variance of one image
        numbers = [each for each in numbers if images // each >= LEAST_WITH_BATCH_NORM] or numbers
    local = choose_accumulation(numbers, images, memory.need, memory.allowed)
    row = torch.tensor(local._replace(has_batch_norm=int(memory.has_batch_norm)), device=context.device)
    rows = all_gather_rows(row) if context.world.world_size > 1 else row[None]
    fit = MicroBatchFit(*max(rows.tolist()))
    if fit.accumulate == _NONE_FITS:
        needs = f"needs {size(fit.needed_bytes)}" if fit.needed_bytes else "needs more"
        raise RecipeError(
            f"train.accumulate: auto: a micro-batch of {count(images // numbers[-1], 'image')} {needs} of the "
            f"{size(fit.allowed_bytes)} that a rank may use (set train.precision=amp, a smaller data.image_size or "
            "model, or model.checkpoint_activations=true)"
        )
    return fit


def _list_fitting_batches(context: RunContext, on_progress: Callable[[], None]) -> list[int]:
    """Return the batch sizes to time, which fit on every rank. Raise `RecipeError` if none does."""
    recipe, world_size = context.recipe, context.world.world_size
    num_samples = count_samples(recipe.data, context.plan.train_images)
    sizes = list_batch_sizes(recipe, world_size, num_samples)
    micro_batches = [batch // world_size // recipe.train.num_micro_batches for batch in sizes]
    memory = _StepMemory(context, micro_batches[-1], on_progress)
    num_fitting = sum(1 for _ in takewhile(lambda images: memory.need(images) <= memory.allowed, micro_batches))
    num_fitting = -_max_over_ranks(context, -num_fitting)
    if not num_fitting:
        raise RecipeError(
            f"data.batch_size: auto: {count(sizes[0], 'image')} per step do not fit in memory (set data.batch_size, "
            "and train.accumulate=auto)"
        )
    return sizes[:num_fitting]


def _time_batches(context: RunContext, sizes: Sequence[int], on_progress: Callable[[], None]) -> dict[int, float]:
    """Return the images/s of all ranks by batch size, until larger ones are slower."""
    world, parts = context.world, context.recipe.train.num_micro_batches
    speeds: dict[int, float] = {}
    steps = _build_steps(context, build_strategy(context.recipe.parallel, world, context.device))
    for batch in sizes:
        on_progress()
        speeds[batch] = batch / _seconds_per_step(context, steps, batch // world.world_size, parts)
        if len(speeds) > 2 and max([*speeds.values()][-2:]) < max(speeds.values()):
            break
    return speeds


def _seconds_per_step(context: RunContext, steps: "TrialSteps", images: int, parts: int) -> float:
    """Return the mean time of a step, of the slowest rank."""
    batch = steps.make_batch(images)

    def run(number: int) -> float:
        started_s = now_s()
        for _ in range(number):
            steps.forward_backward(batch, parts)
            steps.update()
        if context.device.type == "cuda":
            torch.cuda.synchronize()
        return _max_over_ranks(context, round((now_s() - started_s) * 1e9 / number)) / 1e9

    run(1)
    least, most = _TIMED_STEPS
    return run(min(most, max(least, math.ceil(_TIMED_S / run(1)))))


def _max_over_ranks(context: RunContext, value: int) -> int:
    if context.world.world_size == 1:
        return value
    return int(all_gather_rows(torch.tensor(value, device=context.device)).max())


@dataclass(frozen=True)
class TrialSteps:
    """Training steps of a throw-away model on random pixels."""

    context: RunContext
    model: nn.Module
    step: EagerStep
    average: WeightAverage | None

    def make_batch(self, images: int) -> Batch:
        """Return a batch of random pixels of the largest training size, on the host."""
        plan, transforms = self.context.plan, self.step.transforms
        side = max(side for _, side in plan.train_sizes)
        dtype = batch_dtype(self.step.transfer.pixels)
        pixels = torch.rand(images, plan.channels, side, side)
        num_draws = sum(each.num_draws for each in transforms.augments)
        num_draws += transforms.mix.num_draws if transforms.mix else 0
        return Batch(
            pixels.mul_(255).to(dtype) if dtype == torch.uint8 else pixels,
            torch.zeros(images, dtype=torch.int64),
            np.arange(images),
            torch.rand(images, num_draws, dtype=torch.float64),
        )

    def forward_backward(self, batch: Batch, parts: int = 1) -> Tensor:
        """Add the gradients of `batch`, in micro-batches."""
        return replace(self.step, accumulate=parts).forward_backward(batch)

    def update(self) -> None:
        """Update the weights, their average and the optimizer, and drop the gradients."""
        update = self.step.update
        update.prepare_gradients()
        update.step_optimizer()
        if self.average:
            self.average.update(0)
        update.optimizer.zero_grad(set_to_none=True)


def _build_steps(context: RunContext, strategy: Strategy) -> TrialSteps:
    precision = context.create_precision()
    return build_trial_steps(context, precision, context.create_model(precision, is_new=False), strategy)


def build_trial_steps(
    context: RunContext, precision: Precision, model: nn.Module, strategy: Strategy | None = None
) -> TrialSteps:
    """Build the training steps of a throw-away `model`, with all that a run keeps in memory; by default alone."""
    recipe, strategy = context.recipe, strategy or SingleDevice()
    context.add_adapters(model)
    unfreezing = build_unfreezing(recipe.model, context.plan, model)
    if unfreezing.names:  # then steps need the most memory
        unfreezing.unfreeze(model)
    layers = layers_for_decay(recipe.optim, model)
    replica = strategy.prepare(model)
    state = build_training_state(context, model, precision, strategy, layers)
    loss, _ = build_loss(recipe.train, context.datasets.train, context.device)
    step = EagerStep(
        replica=replica,
        criterion=build_criterion(loss, "off", None),
        precision=precision,
        strategy=strategy,
        transfer=context.create_transfer(precision.dtype),
        transforms=context.create_transforms(precision.dtype),
        update=build_update(context, state, NonFiniteReporter(context.world, strategy, str), unfreezing),
        clock=NullClock(),
        accumulate=1,
        accuracy=None,
    )
    return TrialSteps(context, model, step, state.average)


def has_batch_norm(model: nn.Module) -> bool:
    """Return whether any layer of `model` takes statistics of the batch."""
    return any(isinstance(each, nn.modules.batchnorm._BatchNorm) for each in model.modules())


class _StepMemory:
    """The memory of a training step by its micro-batch: measured on a GPU, else extrapolated from smaller ones.

    To exhaust the memory of a GPU is an error that can be caught. On a CPU the kernel would kill the process, and with
    fsdp the other ranks would wait in a collective. fsdp on CPUs is measured as one whole replica, which needs more.
    """

    def __init__(self, context: RunContext, most_images: int, on_progress: Callable[[], None]) -> None:
        world, parallel = context.world, context.recipe.parallel
        is_gpu = context.device.type == "cuda"
        shards = is_gpu and world.world_size > 1 and parallel.strategy == "fsdp"
        self._tries, self._on_progress = is_gpu and not shards, on_progress
        self._allocated = read_device_bytes if is_gpu else count_host_bytes
        self._most_images, self._device = most_images, context.device
        # The steps of fsdp are collective, so all ranks must decide alike how many to take.
        self._agree = partial(_max_over_ranks, context) if shards else int
        allowed = max(0, memory_budget(context.device, world.local_world_size) - _data_bytes(context))
        self.allowed = -self._agree(-allowed)
        if not shards and context.recipe.model.norm == "sync_batch":  # each rank measures for itself
            model = context.recipe.model.model_copy(update={"norm": "batch"})
            context = replace(context, recipe=context.recipe.model_copy(update={"model": model}))
        strategy = build_strategy(parallel, world, context.device) if shards else SingleDevice()
        fixed = self._allocated(lambda: self._build(context, strategy))
        self.has_batch_norm = has_batch_norm(self._steps.model)
        has_copy = world.world_size > 1 and parallel.strategy == "ddp" and not parallel.bucket_view
        gradients = [each.grad for each in self._steps.model.parameters() if each.grad is not None]
        self._fixed_bytes = self._agree(fixed.kept + has_copy * sum(each.nbytes for each in gradients))
        self._update_bytes = self._allocated(self._steps.update).peak
        self._points: list[tuple[int, int]] = []

    def need(self, images: int) -> float:
        """Return the bytes of training with micro-batches of `images`; infinite if a step ran out of memory."""
        self._on_progress()
        activations: float = math.inf
        try:
            activations = self._measure(images) if self._tries else self._extrapolate(images)
        except torch.OutOfMemoryError:
            if not self._tries:
                raise
        if math.isinf(activations):  # after the error, whose traceback keeps tensors
            _free_memory(self._device)
        return self._fixed_bytes + max(self._update_bytes, activations)

    def _build(self, context: RunContext, strategy: Strategy) -> None:
        """Build the model, and run a step, which creates the optimizer's state; keep the gradients of another."""
        self._steps = _build_steps(context, strategy)
        batch = self._steps.make_batch(min(_FIRST_IMAGES, self._most_images))
        self._steps.forward_backward(batch)
        self._steps.update()
        self._steps.forward_backward(batch)

    def _measure(self, images: int) -> int:
        """Return the bytes of a forward and backward pass beside existing gradients."""
        batch = self._steps.make_batch(images)
        if self._tries:
            self._steps.forward_backward(batch)  # lets cuDNN choose its kernels
        peak = self._allocated(lambda: self._steps.forward_backward(batch)).peak
        return self._agree(peak)

    def _extrapolate(self, images: int) -> int:
        if not self._points:
            self._points = [*self._iter_points()]
        return extrapolate(self._points, images)

    def _iter_points(self) -> Iterator[tuple[int, int]]:
        """Measure micro-batches, each at most twice the one before, as long as they are needed and surely fit."""
        images, points = min(_FIRST_IMAGES, self._most_images), []
        while True:
            points.append((images, self._measure(images)))
            yield points[-1]
            is_last = images == self._most_images or self._fixed_bytes + 2 * points[-1][1] > self.allowed
            if is_last or is_on_line(points):
                return
            images = min(2 * images, self._most_images)


def _data_bytes(context: RunContext) -> int:
    """Return the memory that the data of this rank will take on the model's device."""
    choice, info, plan = context.loader_choice, context.datasets.train.info, context.plan
    if context.device.type == "cuda":
        source = context.datasets.train
        return count_device_bytes(source) if choice.loader == "device" and isinstance(source, ArraySource) else 0
    batch = estimate_batch_bytes(plan.rank_batch, info.pixel_format, max(side for _, side in plan.train_sizes))
    per_worker = BATCHES_PER_WORKER * batch + (_WORKER_BYTES if choice.loader == "processes" else 0)
    return batch + choice.workers * per_worker


def _free_memory(device: torch.device) -> None:
    gc.collect()  # modules and their hooks are cycles
    if device.type == "cuda":
        torch.cuda.empty_cache()
