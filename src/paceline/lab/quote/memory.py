"""Count the GPU memory of a training step without a GPU: the run's own step on the meta device, storage by storage.

What is counted is what `torch.cuda.max_memory_allocated` and `max_memory_reserved` report.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.core.dataset import DatasetInfo, Datasets, Sample
from paceline.core.errors import PacelineError, RecipeError
from paceline.core.world import World
from paceline.data.batch import Batch, batch_dtype
from paceline.data.loaders.choose import LoaderChoice
from paceline.data.sampler import ShuffleSampler
from paceline.measure.caching_allocator import CachingAllocator
from paceline.measure.clock import NullClock
from paceline.measure.memory import DEVICE_SHARE, StorageCounter
from paceline.models.compiled import CompiledGraphs, CompiledModel, trace_compiled
from paceline.models.meta_gpu import MetaGpu
from paceline.recipe.plan import Plan
from paceline.recipe.schema import Recipe
from paceline.recipe.schema.augment import CutMix, MixUp
from paceline.recipe.schema.optim import Adam, Sgd
from paceline.recipe.schema.train import CrossEntropyLoss, Train
from paceline.training.batch_fit import LEAST_WITH_BATCH_NORM, TrialSteps, build_trial_steps, has_batch_norm
from paceline.training.context import RunContext
from paceline.training.precision import Precision, build_precision
from paceline.training.trainer import EagerStep

aten = torch.ops.aten
_META: Final = torch.device("meta")
CONTEXT_BYTES: Final = 600_000_000
"""CUDA context, kernels and workspaces of the libraries. An assumption: no GPU was measured."""
_FUSED: Final = (aten._fused_sgd_, aten._fused_adam_, aten._fused_adamw_)
_PHASES: Final = {"h2d": "input", "device_augment": "input", "forward": "activations", "loss": "activations"}
COUNT_ERRORS: Final = (NotImplementedError, RuntimeError, AssertionError, ValueError, TypeError, LookupError)
"""What models raise that need values, other inputs, or operations that the meta device lacks."""
_NO_VARIANCE: Final = "Expected more than 1 value per channel"
"""What torch's batch norms say of one value per channel."""
_TRIAL_IMAGES: Final = 2
"""Images of the step that shows whether a traced model can be counted."""
_MAX_COUNTS: Final = 8
_MAX_GROWTH: Final = 8
"""How much larger a number is than the largest that was counted: memory may be almost flat up to there."""
_CLOSE: Final = 0.01


@dataclass(frozen=True)
class StepMemory:
    """The allocated bytes at the peak of a step with micro-batches of `micro_batch` images.

    `reserved_bytes` has the unused parts of the allocator's segments too. `parts` are `weights` with buffers,
    `gradients`, `optimizer`, `other` (weight averages, saved buffers, DDP's buckets), `input`, `activations` (all that
    forward creates), and `temporaries` of backward and the optimizer.
    """

    micro_batch: int
    allocated_bytes: int
    reserved_bytes: int
    parts: dict[str, int]
    has_batch_norm: bool = False


@dataclass(frozen=True)
class _NoImages:
    """A split of which only the description is known."""

    info: DatasetInfo

    def __len__(self) -> int:
        return self.info.num_images

    def read(self, index: int) -> Sample:
        raise AssertionError("no step reads images")

    def name_of(self, index: int) -> str:
        return f"{self.info.name}[{index}]"


class _MetaKernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Skip fused optimizers, which the meta device lacks, and create the results of batch norms at once.

    For batch norms the meta device runs a formula of many operations, which takes most of the time of counting.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = func.overloadpacket
        if packet in _FUSED:
            return None
        if packet is aten.native_batch_norm:
            images = args[0]
            statistics = (images.new_empty(images.shape[1], dtype=torch.float32) for _ in range(2))
            return torch.empty_like(images), *statistics
        if packet is aten.native_batch_norm_backward:
            images, weight, is_requested = args[1], args[2], args[9]
            sources = images, weight, weight
            pairs = zip(sources, is_requested, strict=True)
            return tuple(torch.empty_like(each) if is_wanted else None for each, is_wanted in pairs)
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class _MetaPrecision(Precision):  # torch.autocast has no meta device, so the two contexts of a step differ
    gpu: MetaGpu | None = None

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Return the context of the forward pass."""
        assert self.gpu is not None
        return self.gpu.autocast(self.autocast_dtype)

    def backward(self, loss: Tensor) -> None:
        """Compute gradients; checkpointed blocks repeat their forward pass under autocast."""
        assert self.gpu is not None
        with self.gpu.repeating(self.autocast_dtype):
            super().backward(loss)


class _KindClock(NullClock):  # type: ignore[misc]  # a step tells its stages to a clock, and nobody else
    def __init__(self, counter: StorageCounter) -> None:
        super().__init__()
        self._counter = counter

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Name the storages of a stage."""
        self._counter.kind = _PHASES.get(name, "temporaries")
        self._counter.stream = int(name == "h2d")  # copies have a stream of their own
        yield
        self._counter.kind, self._counter.stream = "temporaries", 0


def count_step_memory(
    recipe: Recipe,
    plan: Plan,
    train: DatasetInfo,
    val: DatasetInfo,
    number_format: str,
    micro_batch: int,
    graphs: CompiledGraphs | None = None,
) -> StepMemory:
    """Count the memory of a step, after the first step, which creates the optimizer's state.

    `number_format` is that of `find_number_format`. A step of several micro-batches is counted with two of them. With
    `graphs` the model is compiled.
    """
    allocator = CachingAllocator()
    gpu, counter = MetaGpu(), StorageCounter(allocator, device_type="meta")
    precision = _build_precision(recipe.train, number_format, gpu)
    num_micro_batches = min(2, plan.rank_batch // plan.micro_batch)
    has_ddp = plan.world_size > 1 and recipe.parallel.strategy == "ddp"
    with torch.random.fork_rng(devices=[]), gpu, _MetaKernels(), counter:  # type: ignore[no-untyped-call]
        counter.kind = "other"
        steps = _build_steps(recipe, plan, train, val, precision)
        step = replace(steps.step, clock=_KindClock(counter), accumulate=num_micro_batches)
        if graphs is not None:
            step = replace(step, replica=CompiledModel(steps.model, graphs))
        _run_steps(recipe, steps, step, counter, num_micro_batches * micro_batch, has_ddp=has_ddp)
    parts = {kind: num_bytes for kind, num_bytes in sorted(counter.parts_at_peak.items()) if num_bytes}
    return StepMemory(micro_batch, counter.peak, allocator.reserved, parts, has_batch_norm(steps.model))


def _trace_step(recipe: Recipe, plan: Plan, train: DatasetInfo, val: DatasetInfo, number_format: str) -> CompiledGraphs:
    """Trace the model of a run. Raise what the model or torch raise if it cannot be traced."""
    gpu = MetaGpu()
    precision = _build_precision(recipe.train, number_format, gpu)
    shape = plan.channels, *(2 * [max(side for _, side in plan.train_sizes)])
    with torch.random.fork_rng(devices=[]):
        with gpu:
            steps = _build_steps(recipe, plan, train, val, precision)
        return trace_compiled(steps.model, shape, precision.autocast_dtype, gpu, steps.context.memory_format)


def _run_steps(
    recipe: Recipe, steps: TrialSteps, step: EagerStep, counter: StorageCounter, images: int, *, has_ddp: bool
) -> None:
    """Run two steps, the second with the optimizer's state of the first, and count the peak of the second."""
    counter.set_kind(_list_weights(steps.model, step.precision), "weights")
    for parameter in steps.model.parameters():
        if parameter.requires_grad:
            hook = lambda each: counter.set_kind([each.grad], "gradients")  # noqa: E731
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    batch, update, has_views = _make_batch(steps, images), step.update, has_ddp and recipe.parallel.bucket_view
    buckets: list[Tensor] = []
    for number in range(2):
        counter.reset_peak()
        step.forward_backward(batch)
        update.prepare_gradients()
        if number == 0 and _is_fused(recipe):
            _fuse(update.optimizer)
        update.step_optimizer()
        if steps.average:
            steps.average.update(number)
        if number == 0:
            counter.set_kind(_list_state(update.optimizer), "optimizer")
            if has_ddp and not has_views:
                counter.kind = "other"
                buckets = [torch.empty_like(each.grad) for each in steps.model.parameters() if each.grad is not None]
        if not has_views:  # views of DDP's buckets take their memory from step to step
            update.optimizer.zero_grad(set_to_none=True)
    del buckets


class MemoryCounter:
    """Count the memory of steps of a recipe on images like those of `train` and `val`, each kind of step once.

    A compiled model that cannot be traced is counted without the compiler: `is_without_compiler`.
    """

    def __init__(self, recipe: Recipe, train: DatasetInfo, val: DatasetInfo) -> None:
        self._recipe, self._train, self._val = recipe, train, val
        self._counted: dict[tuple[str, bool, bool], dict[int, StepMemory]] = {}
        self._graphs: dict[str, CompiledGraphs | None] = {}
        self.is_without_compiler = False

    def count(self, plan: Plan, number_format: str, micro_batch: int) -> StepMemory:
        """Count a step of `plan` with other micro-batches. Raise `RecipeError` if the model cannot be counted."""
        points = self._points(plan, number_format)
        if micro_batch not in points:
            try:
                graphs = self._trace(plan, number_format)
                points[micro_batch] = count_step_memory(
                    self._recipe, plan, self._train, self._val, number_format, micro_batch, graphs
                )
            except PacelineError:  # a ValueError, whose message stands
                raise
            except COUNT_ERRORS as error:
                reason = " ".join(str(error).split())[:200]
                if micro_batch == 1 and _NO_VARIANCE in reason:
                    raise RecipeError(
                        f"data.batch_size: {plan.batch_size} over {plan.world_size} ranks leaves micro-batches of one "
                        f"image, of which BatchNorm has no variance (set data.batch_size to "
                        f"{LEAST_WITH_BATCH_NORM * plan.batch_size}, or lower --ranks or train.accumulate)"
                    ) from None
                raise RecipeError(
                    f"model.name: the memory of {self._recipe.model.name} cannot be counted: {reason} (quote another)"
                ) from None
        return points[micro_batch]

    def find_largest_micro_batch(self, plan: Plan, number_format: str, allowed: float) -> int:
        """Return the largest micro-batch of which a step takes at most `allowed` bytes; 0 if none does.

        One that is smaller than the batch of a rank is of a step of several, which keeps gradients between them.
        """
        largest = self._find_largest(plan, number_format, allowed)
        if largest < plan.rank_batch and not _is_split(plan):
            largest = self._find_largest(_split(plan), number_format, allowed)
        return largest

    def _find_largest(self, plan: Plan, number_format: str, allowed: float) -> int:
        unit = 2 if any(isinstance(each, MixUp | CutMix) for each in self._recipe.data.augment) else 1
        points = self._points(plan, number_format)
        if not points:
            self.count(plan, number_format, max(unit, plan.micro_batch // unit * unit))
        surely_counted = max(points)
        least = max(unit, LEAST_WITH_BATCH_NORM if points[surely_counted].has_batch_norm else 1)

        def count(units: int) -> float:
            try:
                return self.count(plan, number_format, units * unit).allocated_bytes
            except RecipeError:
                if units * unit <= surely_counted:
                    raise
                return math.inf  # too large even for the sizes of tensors

        known = [images // unit for images in points if images % unit == 0]
        return unit * find_largest(count, allowed, known or [max(1, surely_counted // unit)], -(-least // unit))

    def _trace(self, plan: Plan, number_format: str) -> CompiledGraphs | None:
        if self._recipe.train.compile == "off":
            return None
        if number_format not in self._graphs:
            split = self._recipe, plan, self._train, self._val, number_format
            self._graphs[number_format] = None
            try:
                graphs = _trace_step(*split)
                count_step_memory(*split, _TRIAL_IMAGES, graphs)
            except Exception:  # this is an estimate by what is private to torch, and there is another one
                self.is_without_compiler = True
            else:
                self._graphs[number_format] = graphs
        return self._graphs[number_format]

    def _points(self, plan: Plan, number_format: str) -> dict[int, StepMemory]:
        return self._counted.setdefault((number_format, plan.world_size > 1, _is_split(plan)), {})


def _is_split(plan: Plan) -> bool:
    return plan.micro_batch < plan.rank_batch


def _split(plan: Plan) -> Plan:
    """Return `plan` with twice as many images per rank, in two micro-batches."""
    return replace(plan, rank_batch=2 * plan.micro_batch)


def find_largest(count: Callable[[int], float], allowed: float, known: list[int], least: int = 1) -> int:
    """Return the largest number, of `least` or more, of which `count(number)` is `allowed`; 0 if none is.

    It has been counted itself, and is exact within 1 % after at most 8 calls beside those of the `known` numbers,
    unless it is millions of times as large. The peak of the memory is the largest of several sums that each grow
    along a line, so it is convex: a line through two points is above the memory between them, and below it elsewhere.
    """
    points = {number: count(number) for number in known}
    for _ in range(_MAX_COUNTS):
        guess = _guess(points, allowed, least)
        if guess is None:
            break
        points[guess] = count(guess)
    return max((number for number, needed in points.items() if needed <= allowed), default=0)


def _guess(points: dict[int, float], allowed: float, least: int) -> int | None:
    """Return the number to count next; None if the largest that is allowed is known."""
    below = sorted(number for number, needed in points.items() if needed <= allowed)
    above = sorted(number for number, needed in points.items() if needed > allowed)
    first_above = above[0] if above else math.inf
    most = min(first_above - 1, _cross(points, below[-2:], allowed), _cross(points, above[:2], allowed))
    if not below:
        if above[0] <= least:
            return None
        share = max(1 / _MAX_GROWTH, min(0.5, allowed / points[above[0]]))
        return max(least, math.floor(share * above[0] if most == above[0] - 1 else most))
    largest = below[-1]
    if most < max(largest + 1, (1 + _CLOSE) * largest):
        # Blocks of the allocator bend the lines a little, by which one image more of a few may still be allowed.
        return largest + 1 if largest < 1 / _CLOSE and first_above > largest + 1 else None
    if above and math.isfinite(points[above[0]]):
        between = _cross(points, [largest, above[0]], allowed)  # which is allowed, by convexity
        guess = between if between >= largest + 1 else most
        # For the same reason, a guess just below a number that is too many may be one.
        is_near = guess > (1 - _CLOSE) * above[0] and above[0] > 1 / _CLOSE
        return max(largest + 1, math.floor((1 - _CLOSE / 2) * above[0] if is_near else guess))
    if above:
        return math.isqrt(largest * above[0])
    grown = allowed / points[largest] if len(below) == 1 else math.inf
    return math.floor(min(most, max(2, min(grown, _MAX_GROWTH)) * largest))


def _cross(points: dict[int, float], pair: list[int], allowed: float) -> float:
    """Return where the line through a pair of points reaches `allowed`; infinity if there is none, or it is flat."""
    if len(pair) < 2:
        return math.inf
    (first, first_bytes), (second, second_bytes) = ((number, points[number]) for number in pair)
    slope = (second_bytes - first_bytes) / (second - first)
    if slope <= 0 or math.isinf(slope) or math.isnan(slope):  # other memory than that of the images is the peak
        return math.inf
    return first + (allowed - first_bytes) / slope


def usable_bytes(memory_gb: float) -> float:
    """Return the bytes of a GPU that tensors may take, as `train.accumulate=auto` allows on a GPU that is there."""
    return DEVICE_SHARE * (memory_gb * 2**30 - CONTEXT_BYTES)


def _build_precision(section: Train, number_format: str, gpu: MetaGpu) -> _MetaPrecision:
    _, _, scheme = section.precision.partition("_")
    is_half = number_format in ("fp16", "bf16")
    name: Any = f"{number_format}_{scheme}" if is_half and scheme else number_format
    found = build_precision(name, torch.device("cuda"))
    return _MetaPrecision("meta", found.dtype, found.autocast_dtype, found.master, found.scaler, gpu)


def _build_steps(
    recipe: Recipe, plan: Plan, train: DatasetInfo, val: DatasetInfo, precision: _MetaPrecision
) -> TrialSteps:
    optim = recipe.optim.model_copy(update={"implementation": "loop"}) if _is_fused(recipe) else recipe.optim
    recipe = recipe.model_copy(
        update={
            "optim": optim,
            # Other losses take a few numbers per class and image, and class weights need the labels.
            "train": recipe.train.model_copy(update={"loss": CrossEntropyLoss(), "class_weights": "off"}),
            "data": recipe.data.model_copy(update={"augment_on": "device"} if recipe.data.augment_on == "auto" else {}),
            "model": recipe.model.model_copy(
                update={"norm": "batch"} if recipe.model.norm == "sync_batch" else {}  # which needs other ranks
            ),
        }
    )
    is_contiguous = recipe.model.memory_format == "contiguous"
    with contextlib.ExitStack() as stack:
        context = RunContext(
            recipe,
            World.single(),
            _META,
            Datasets(*(_NoImages(_with_statistics(each)) for each in (train, val))),
            plan,
            ShuffleSampler(),
            LoaderChoice("processes", 0),
            stack,
            torch.contiguous_format if is_contiguous else torch.channels_last,
        )
        try:
            with _META:
                model = context.create_model(precision, is_new=False)
        except NotImplementedError:  # some constructors read values, which the meta device does not have
            model = context.create_model(precision, is_new=False).to(_META)
        return build_trial_steps(context, precision, model)


def _is_fused(recipe: Recipe) -> bool:
    return isinstance(recipe.optim, Sgd | Adam) and recipe.optim.implementation in ("auto", "fused")


def _fuse(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer run fused on the meta device, on which torch builds no fused one, before its first step."""
    optimizer._need_device_dtype_check_for_fused = False  # type: ignore[attr-defined]
    for group in optimizer.param_groups:
        group["fused"], group["foreach"] = True, False
        if isinstance(optimizer, torch.optim.Adam):  # which checks the device when it creates its state
            for parameter in group["params"]:
                if parameter.grad is not None:
                    averages = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                    optimizer.state[parameter] = {"step": torch.zeros((), device=_META), **averages}


def _with_statistics(info: DatasetInfo) -> DatasetInfo:
    """Return `info` with any mean and standard deviation, which data that is not here lacks."""
    return replace(info, mean=info.mean or (0.5,) * info.channels, std=info.std or (0.5,) * info.channels)


def _make_batch(steps: TrialSteps, images: int) -> Batch:
    """Return a batch on the host that takes no memory there."""
    plan, transforms = steps.context.plan, steps.step.transforms
    side = max(side for _, side in plan.train_sizes)
    num_draws = sum(each.num_draws for each in transforms.augments)
    num_draws += transforms.mix.num_draws if transforms.mix else 0
    # Views of one number, as the host may have less memory than the GPU that is quoted.
    pixels = torch.zeros(1, dtype=batch_dtype(steps.step.transfer.pixels)).expand(images, plan.channels, side, side)
    draws = torch.zeros(1, dtype=torch.float64).expand(images, num_draws)
    labels = torch.zeros(1, dtype=torch.int64).expand(images)
    return Batch(pixels, labels, np.broadcast_to(np.zeros(1, dtype=np.int64), images), draws)


def _list_weights(model: nn.Module, precision: Precision) -> list[Tensor]:
    return [*model.parameters(), *model.buffers(), *precision.tensors().values()]


def _list_state(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    values = (value for state in optimizer.state.values() for value in state.values())
    return [value for value in values if isinstance(value, Tensor)]
