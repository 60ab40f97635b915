"""Capture the training step as a CUDA graph per batch shape, and replay it with one launch per step.

It has not run on a GPU: the tests replay recorded CPU operations. `train.capture=on` selects it. A CUDA graph
(https://docs.nvidia.com/cuda/cuda-c-programming-guide/#cuda-graphs) has fixed addresses. The inputs of a step are
copied there before each replay: the batch, its draws and the learning rate. Loss and gradients are checked after the
replay; a non-finite value ends the run before the updated weights are evaluated or saved.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from paceline.core.stages import CAPTURE, CAPTURED
from paceline.core.world import World
from paceline.data.batch import Batch
from paceline.data.transfer import DeviceBatch
from paceline.measure.clock import NullClock
from paceline.recipe.schema.train import Parallel, Train
from paceline.training.nonfinite import StepValues
from paceline.training.optim.layerwise import Lamb, Lars, NovoGrad
from paceline.training.optim.muon import Muon
from paceline.training.optim.schedule_free import ScheduleFree
from paceline.training.precision import resolve_precision
from paceline.training.state import TrainState
from paceline.training.trainer import CaptureStep, EagerStep, OptimizerUpdate

EAGER_STEPS: Final = 3
"""Eager steps per shape before the capture, as torch recommends: they create optimizer state, and let cuDNN,
torch.compile and libraries choose kernels and allocate memory."""
_FAILED_GRAPHS: list[Any] = []
"""Graphs whose capture failed, kept alive: torch 2.11's pinned-memory allocator may still query their stream."""
_Shapes = tuple[torch.Size, torch.Size, torch.Size]


class CudaGraphPool:
    """CUDA graphs of the current device, captured on a separate stream.

    https://docs.pytorch.org/docs/stable/notes/cuda.html#whole-network-capture
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._pool: Any = torch.cuda.graph_pool_handle()

    @contextmanager
    def capture_stream(self) -> Iterator[None]:
        """Return a context on the capture stream, which waits for the current stream at both ends."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)

    def new_graph(self) -> "CudaGraph":
        """Return an empty graph."""
        return CudaGraph(self._stream, self._pool)


def build_graph_pool(device: torch.device) -> CudaGraphPool | None:
    """Return the graph pool of `device`, None for a CPU."""
    return CudaGraphPool() if device.type == "cuda" else None


class CudaGraph:
    """Captured device work. Graphs of a pool share memory, as they never run concurrently."""

    def __init__(self, stream: torch.cuda.Stream, pool: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._stream = stream
        self._pool = pool

    def capture(self, work: Callable[[], Tensor]) -> Tensor:
        """Record the device work of `work` without running it; return its result, which each replay overwrites.

        Raise `RuntimeError` if `work` synchronizes with the device.
        """
        current = torch.cuda.current_stream()
        try:
            # thread_local: other threads may use CUDA meanwhile, such as those that pin batches.
            with torch.cuda.graph(self._graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                return work()
        except BaseException:
            torch.cuda.set_stream(current)  # torch does not restore it if the end of a capture fails
            self._clean_up_failed_capture()
            raise

    def replay(self) -> None:
        """Run the recorded work."""
        self._graph.replay()

    def _clean_up_failed_capture(self) -> None:
        # As torch does itself from 2.13 on. Before, the allocator considers the capture unfinished, so memory is never
        # freed and `torch.cuda.empty_cache` fails; and the generator refuses to draw, so it gets a new state with the
        # same sequence, while earlier graphs keep the old one.
        device = torch.cuda.current_device()
        _FAILED_GRAPHS.append(self._graph)
        with suppress(RuntimeError):
            self._graph.reset()
        with suppress(AttributeError, RuntimeError):  # already ended, memory already released
            torch._C._cuda_endAllocateToPool(device, self._pool)
            torch._C._cuda_releasePool(device, self._pool)
        with suppress(RuntimeError):
            generator, fresh = torch.cuda.default_generators[device], torch.Generator(f"cuda:{device}")
            fresh.set_state(generator.get_state())
            generator.graphsafe_set_state(fresh.graphsafe_get_state())


@dataclass(frozen=True)
class _CapturedGraph:
    """A graph, its input batch, and its outputs, float32 [3]: loss, is-finite flag and gradient norm."""

    graph: CudaGraph
    inputs: Batch
    outputs: Tensor


class DeviceLrUpdate(OptimizerUpdate):
    """An update whose learning rates are float32 [] on the device, where a captured step reads them."""

    def set_lr(self, state: TrainState) -> float:
        """Write the learning rate of the next step to the device, and return it."""
        lr = self.schedule.lr(state.num_updates)
        for group in self.optimizer.param_groups:
            group["lr"].fill_(lr * group["lr_factor"])
        return lr


class CudaGraphStep:
    """Run the first steps of a shape eagerly, then capture one and replay it.

    After a failed capture, `warn` reports it and all further steps are eager. Capturing is the pause `capture` of the
    clock.
    """

    def __init__(self, step: EagerStep, warn: Callable[[str], None], *, pool: CudaGraphPool) -> None:
        keep_lr_on_device(step.update.optimizer)
        # Eager steps read the rate on the device as well, so that a resumed run, which starts with some, has the bits
        # of one that never stopped.
        update = DeviceLrUpdate(**{each.name: getattr(step.update, each.name) for each in fields(step.update)})
        self._eager_step = replace(step, update=update)
        self._untimed_step = replace(self._eager_step, clock=NullClock())
        self._pool = pool
        self._warn = warn
        self._num_eager: Counter[_Shapes] = Counter()
        self._graphs_by_shape: dict[_Shapes, _CapturedGraph] = {}
        self._has_failed = False

    def __call__(self, batch: Batch, state: TrainState) -> Tensor:
        """Run a step, as `EagerStep`."""
        if self._has_failed:
            return self._eager_step(batch, state)
        shapes = (batch.images.shape, batch.labels.shape, batch.draws.shape)
        if self._num_eager[shapes] < EAGER_STEPS:
            self._num_eager[shapes] += 1
            # after a capture, the flag is memory that a replay overwrites
            self._eager_step.update.probe.pop_is_finite()
            with self._pool.capture_stream():
                return self._eager_step(batch, state)
        if shapes not in self._graphs_by_shape:
            self._capture(batch, shapes)
        captured = self._graphs_by_shape.get(shapes)
        return self._replay(captured, batch, state) if captured else self._eager_step(batch, state)

    def _replay(self, captured: _CapturedGraph, batch: Batch, state: TrainState) -> Tensor:
        clock, update = self._eager_step.clock, self._eager_step.update
        with clock.stage("h2d"):
            _copy_inputs(captured.inputs, self._eager_step.transfer(batch))
        with clock.stage(CAPTURED):
            lr = update.set_lr(state)
            captured.graph.replay()
            if update.average:  # not in the graph: its decay changes, and not every step updates it
                update.average.update(state.step)
            # Cloned: a deferred check reads them after further replays.
            loss, is_finite, norm = captured.outputs.clone().unbind()
        with clock.stage("optimizer"):
            is_accepted = update.guard.check(StepValues(state.step + 1, lr, loss, is_finite, norm))
            assert is_accepted, "a guard that skips steps must check them before the update"
        return loss

    def _capture(self, batch: Batch, shapes: _Shapes) -> None:
        inputs = _allocate_inputs(batch, self._eager_step.transfer.device)
        causes: list[str] = []

        def work() -> Tensor:
            try:
                return self._run_step(inputs)
            except Exception as error:
                causes.append(_describe_error(error))  # the end of the capture fails as well, and hides the cause
                raise

        try:
            graph = self._pool.new_graph()
            with self._eager_step.clock.paused(CAPTURE), _capturable(self._eager_step.update.optimizer):
                outputs = graph.capture(work)
        except RuntimeError as error:
            self._fall_back_to_eager(causes[0] if causes else _describe_error(error))
        else:
            self._graphs_by_shape[shapes] = _CapturedGraph(graph, inputs, outputs)

    def _fall_back_to_eager(self, reason: str) -> None:
        self._has_failed = True
        self._graphs_by_shape.clear()
        self._eager_step.replica.zero_grad(set_to_none=True)
        self._eager_step.update.optimizer.zero_grad(set_to_none=True)
        self._eager_step.update.probe.pop_is_finite()  # a flag from a failed capture was never computed
        self._warn(
            f"train.capture: the step cannot be captured, so steps run eagerly: {reason} (set train.capture=off)"
        )

    def _run_step(self, inputs: Batch) -> Tensor:
        """Queue a whole step on the device. Host work in it runs only during the capture."""
        update = self._untimed_step.update
        update.probe.pop_is_finite()  # so that resetting the flag is captured too
        loss = self._untimed_step.forward_backward(inputs)
        norm = update.prepare_gradients()
        is_finite = update.probe.pop_is_finite()
        update.step_optimizer()
        update.optimizer.zero_grad(set_to_none=True)
        return torch.stack([loss.float(), is_finite.float(), norm])


def plan_capture(
    train: Train, parallel: Parallel, world: World, device: torch.device, optimizer: torch.optim.Optimizer
) -> tuple[CaptureStep | None, str]:
    """Return the function that captures the steps of a run, or None and a note on why they cannot be captured."""
    pool = build_graph_pool(device)
    kind, _, scheme = resolve_precision(train.precision, device).partition("_")
    reasons = {
        f"a {device.type.upper()} has no graphs to replay": pool is None,
        "ranks wait for each other inside a step": world.world_size > 1,
        "dataparallel copies the model anew in each step": parallel.strategy == "dataparallel",
        f"the loss scale of {train.precision} depends on what the host reads after each step": kind == "fp16",
        f"the learning rate is on the device in float32, and the weights are {train.precision}": kind == "fp64",
        f"{train.precision} keeps no weights in float32": scheme == "pure",
        "train.on_nonfinite=skip lets the host check each step before its update": train.on_nonfinite == "skip",
        f"{type(optimizer).__name__} reads its learning rate on the host": not reads_lr_on_device(optimizer),
    }
    reason = next((reason for reason, holds in reasons.items() if holds), "")
    if reason or pool is None:
        return None, f"train.capture: steps run eagerly, since {reason} (set train.capture=off)"
    return partial(CudaGraphStep, pool=pool), ""


def keep_lr_on_device(optimizer: torch.optim.Optimizer) -> None:
    """Store each group's learning rate as float32 [] on its device."""
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(float(group["lr"]), dtype=torch.float32, device=group["params"][0].device)


def reads_lr_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a step of `optimizer` can read the learning rate on the device, so that it can be captured."""
    # torch's other implementations read it, or count steps, on the host.
    match optimizer:
        case torch.optim.SGD() | torch.optim.Adam():  # AdamW among them
            return all(group["fused"] for group in optimizer.param_groups)
    return isinstance(optimizer, NovoGrad | Lars | Lamb | Muon | ScheduleFree)


def _describe_error(error: Exception) -> str:
    # As text: the error itself would keep tensors alive.
    return f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"


def _allocate_inputs(batch: Batch, device: torch.device) -> Batch:
    images, labels, draws = (
        torch.zeros_like(each, device=device) for each in (batch.images, batch.labels, batch.draws)
    )
    return Batch(images, labels, np.zeros(len(batch), dtype=np.int64), draws)


def _copy_inputs(inputs: Batch, device_batch: DeviceBatch) -> None:
    inputs.images.copy_(device_batch.images)
    inputs.labels.copy_(device_batch.labels)
    inputs.draws.copy_(device_batch.draws)


@contextmanager
def _capturable(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Temporarily set `capturable`, which torch's Adam checks although its fused kernels always are."""
    groups = [group for group in optimizer.param_groups if "capturable" in group]
    for group in groups:
        group["capturable"] = True
    try:
        yield
    finally:
        for group in groups:
            group["capturable"] = False
