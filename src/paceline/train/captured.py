"""Capture the training step as a CUDA graph per batch shape, and replay it with one launch per step.

Whatever differs between steps is copied to the graph's inputs before each replay: the batch, its draws, the learning
rate and the EMA decay. Random numbers come from torch's generators, which CUDA graphs support. Loss and gradients are
checked after the replay, when the weights have already moved; a non-finite value then ends the run before they are
evaluated or saved.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from torch import Tensor

from paceline.core.stages import CAPTURE, CAPTURED
from paceline.core.world import World
from paceline.data.batch import Batch
from paceline.data.placement import DeviceBatch
from paceline.measure.clock import NullClock
from paceline.recipe.schema import Recipe
from paceline.train.graph import DeviceGraph, GraphPool, build_graph_pool
from paceline.train.guard import StepValues
from paceline.train.optim import keep_lr_on_device, reads_lr_on_device
from paceline.train.precision import resolve_precision
from paceline.train.state import TrainState
from paceline.train.step import EagerStep, TrainStep

EAGER_STEPS: Final = 3
"""Eager steps per shape before the capture, as torch recommends. The first creates optimizer buffers, lets cuDNN and
torch.compile choose kernels, and lets libraries allocate memory."""

_Shapes = tuple[torch.Size, torch.Size, torch.Size]


@dataclass(frozen=True)
class _CapturedGraph:
    """A graph, its input batch, and its outputs: float32 [3] of loss, is-finite flag and gradient norm."""

    graph: DeviceGraph
    inputs: Batch
    outputs: Tensor
    updates_average: bool


class CudaGraphStep:
    """Run the first steps of a shape eagerly, then capture one and replay it.

    There is one graph per batch shape, and a second one if only some steps update the average; all share memory. If a
    capture fails, `warn` reports it and all further steps are eager. Its time is the clock's pause `capture`.
    """

    def __init__(self, step: EagerStep, pool: GraphPool, warn: Callable[[str], None]) -> None:
        self._eager_step = step
        self._untimed_step = replace(step, clock=NullClock())
        self._pool = pool
        self._warn = warn
        self._num_eager: Counter[_Shapes] = Counter()
        self._inputs: dict[_Shapes, Batch] = {}
        self._graphs_by_shape: dict[tuple[_Shapes, bool], _CapturedGraph] = {}
        self._has_failed = False
        keep_lr_on_device(step.update.optimizer)
        step.update.average.to_device()

    def __call__(self, batch: Batch, state: TrainState) -> Tensor:
        """Run a step; return the mean loss."""
        if self._has_failed:
            return self._eager_step(batch, state)
        shapes = (batch.images.shape, batch.labels.shape, batch.draws.shape)
        if self._num_eager[shapes] < EAGER_STEPS:
            self._num_eager[shapes] += 1
            self._eager_step.update.probe.pop_is_finite()  # after a capture, the flag is memory that a replay overwrites
            with self._pool.capture_stream():
                return self._eager_step(batch, state)
        averages = self._eager_step.update.average.is_due(state.step)
        if (shapes, averages) not in self._graphs_by_shape:
            self._capture(batch, shapes, averages)
        captured = self._graphs_by_shape.get((shapes, averages))
        return self._replay(captured, batch, state) if captured else self._eager_step(batch, state)

    def sync(self) -> None:
        """Check all steps so far."""
        self._eager_step.sync()

    def _replay(self, captured: _CapturedGraph, batch: Batch, state: TrainState) -> Tensor:
        clock, update = self._eager_step.clock, self._eager_step.update
        with clock.stage("h2d"):
            _copy_inputs(captured.inputs, self._eager_step.transfer(batch))
        with clock.stage(CAPTURED):
            lr = update.set_lr(state)
            if captured.updates_average:
                update.average.update_decay()
            captured.graph.replay()
            loss, is_finite, norm = captured.outputs.clone().unbind()
        with clock.stage("optimizer"):
            update.check_after_step(StepValues(state.step + 1, lr, loss, is_finite, norm))
        return loss

    def _capture(self, batch: Batch, shapes: _Shapes, averages: bool) -> None:
        """Capture the step for this shape, or fall back to eager steps with a warning."""
        if shapes not in self._inputs:
            self._inputs[shapes] = _allocate_inputs(batch, self._eager_step.transfer.device)
        inputs = self._inputs[shapes]
        causes: list[str] = []

        def work() -> Tensor:
            try:
                return self._run_step(inputs, averages)
            except Exception as error:
                causes.append(_describe_error(error))  # the end of the capture fails as well, and hides the cause
                raise

        try:
            graph = self._pool.new_graph()
            with self._eager_step.clock.paused(CAPTURE), _capturable(self._eager_step.update.optimizer):
                outputs = graph.capture(work)
        except RuntimeError as error:
            self._give_up(causes[0] if causes else _describe_error(error))
        else:
            self._graphs_by_shape[shapes, averages] = _CapturedGraph(graph, inputs, outputs, averages)

    def _give_up(self, why: str) -> None:
        self._has_failed = True
        self._graphs_by_shape.clear()
        self._inputs.clear()
        self._eager_step.replica.zero_grad(set_to_none=True)
        self._eager_step.update.optimizer.zero_grad(set_to_none=True)
        self._eager_step.update.probe.pop_is_finite()  # a flag from a failed capture was never computed
        self._warn(f"train.capture: the step cannot be captured, so steps run eagerly: {why} (set train.capture=off)")

    def _run_step(self, inputs: Batch, averages: bool) -> Tensor:
        """Queue a whole step on the device, without any host work that differs between steps."""
        update = self._untimed_step.update
        update.probe.pop_is_finite()  # so that resetting the flag is captured too
        loss = self._untimed_step.forward_backward(inputs)
        norm = update.prepare_gradients()
        is_finite = update.probe.pop_is_finite()
        update.step_optimizer()
        if averages:
            update.average.apply()
        update.optimizer.zero_grad(set_to_none=True)
        return torch.stack([loss.float(), is_finite.float(), norm])


def build_train_step(step: EagerStep, pool: GraphPool | None, warn: Callable[[str], None]) -> TrainStep:
    """Return the training step, captured if there are `pool`."""
    return step if pool is None else CudaGraphStep(step, pool, warn)


def choose_graph_pool(
    recipe: Recipe, world: World, device: torch.device, optimizer: torch.optim.Optimizer
) -> tuple[GraphPool | None, str]:
    """Return the graph pool of a run, or None with a note on why steps cannot be captured (empty if `train.capture` is
    off).
    """
    if recipe.train.capture == "off":
        return None, ""
    graphs = build_graph_pool(device)
    reason = _reason_not_to_capture(recipe, world, device, optimizer, has_graphs=graphs is not None)
    if reason:
        return None, f"train.capture: steps run eagerly, since {reason} (set train.capture=off)"
    return graphs, ""


def _reason_not_to_capture(
    recipe: Recipe, world: World, device: torch.device, optimizer: torch.optim.Optimizer, *, has_graphs: bool
) -> str:
    """Return the reason why steps of this run cannot be captured, or an empty string."""
    train, section = recipe.train, recipe.optim
    kind, _, scheme = resolve_precision(train.precision, device).partition("_")
    reasons = {
        f"a {device.type.upper()} has no graphs to replay": not has_graphs,
        "ranks wait for each other inside a step": world.world_size > 1,
        "dataparallel copies the model anew in each step": recipe.parallel.strategy == "dataparallel",
        f"the loss scale of {train.precision} depends on what the host reads after each step": kind == "fp16",
        f"the learning rate is on the device in float32, and the weights are {train.precision}": kind == "fp64",
        f"{train.precision} keeps no weights in float32": scheme == "pure",
        "train.on_nonfinite=skip lets the host check each step before its update": train.on_nonfinite == "skip",
        f"{section.name} reads its learning rate on the host": not reads_lr_on_device(optimizer),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _describe_error(error: Exception) -> str:
    """Return the error's type and the start of its message. The error itself would keep tensors alive."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"


def _allocate_inputs(batch: Batch, device: torch.device) -> Batch:
    """Return a batch of zeros on `device`, the inputs of a graph."""
    images, labels, draws = (
        torch.zeros_like(each, device=device) for each in (batch.images, batch.labels, batch.draws)
    )
    return Batch(images, labels, np.zeros(len(batch), dtype=np.int64), draws)


def _copy_inputs(inputs: Batch, placed: DeviceBatch) -> None:
    """Copy a batch on the device into `inputs`."""
    inputs.images.copy_(placed.images)
    inputs.labels.copy_(placed.labels)
    inputs.draws.copy_(placed.draws)


@contextmanager
def _capturable(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Temporarily set `capturable` on torch's Adam; its fused kernels are capturable anyway."""
    groups = [group for group in optimizer.param_groups if "capturable" in group]
    for group in groups:
        group["capturable"] = True
    try:
        yield
    finally:
        for group in groups:
            group["capturable"] = False
