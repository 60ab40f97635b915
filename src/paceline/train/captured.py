"""A step that is recorded once for each shape of batch and replayed as a whole: the host launches one thing a step.

All that differs between steps is written to where the recording reads it, before each replay: the batch, its draws, the
learning rate and the weight of the average. What a step draws itself comes from torch's generators, which are seeded
outside and which a CUDA graph follows. What the host looks at, it looks at afterwards: a bad loss or gradient has then
moved the weights, and the run ends before they are judged or saved.
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
from paceline.data.placement import Placed
from paceline.measure.clock import NullClock
from paceline.recipe.schema import Recipe
from paceline.train.graph import Graph, Graphs, build_graphs
from paceline.train.guard import Step as Looked
from paceline.train.optim import keep_lr_on_device, reads_lr_on_device
from paceline.train.precision import resolve
from paceline.train.state import TrainState
from paceline.train.step import PlainStep, Step

WARM_STEPS: Final = 3
"""Steps of a shape that run as they are before it is captured, which is what torch advises. In the first, the
optimizer's buffers begin to exist, cuDNN and torch.compile choose kernels, and libraries take their memory."""

_Shapes = tuple[torch.Size, torch.Size, torch.Size]


@dataclass(frozen=True)
class _Captured:
    """A graph, the batch that it reads, and what it fills: float32 [3], loss, whether the gradient is finite, norm."""

    graph: Graph
    inputs: Batch
    found: Tensor
    averages: bool


class CapturedStep:
    """Take the first steps of a shape as `plain` does, then capture one and replay it.

    There is a graph for each shape of batch, and one more where only some steps move the average; they share memory.
    Where a capture fails, which is told by `warn`, all steps from there on are plain ones. Nothing is undone after a
    capture: it carries nothing out. The time it takes is the pause `capture` of the clock.
    """

    def __init__(self, plain: PlainStep, graphs: Graphs, warn: Callable[[str], None]) -> None:
        self._plain = plain
        self._silent = replace(plain, clock=NullClock())
        self._graphs = graphs
        self._warn = warn
        self._warmed: Counter[_Shapes] = Counter()
        self._inputs: dict[_Shapes, Batch] = {}
        self._captured: dict[tuple[_Shapes, bool], _Captured] = {}
        self._has_failed = False
        keep_lr_on_device(plain.update.optimizer)
        plain.update.average.weigh_on_device()

    def __call__(self, batch: Batch, state: TrainState) -> Tensor:
        """Return the mean loss."""
        if self._has_failed:
            return self._plain(batch, state)
        shapes = (batch.images.shape, batch.labels.shape, batch.draws.shape)
        if self._warmed[shapes] < WARM_STEPS:
            self._warmed[shapes] += 1
            self._plain.update.probe.take()  # of a capture before, it is memory that another replay writes to
            with self._graphs.aside():
                return self._plain(batch, state)
        averages = self._plain.update.average.due(state.step)
        if (shapes, averages) not in self._captured:
            self._capture(batch, shapes, averages)
        captured = self._captured.get((shapes, averages))
        return self._replayed(captured, batch, state) if captured else self._plain(batch, state)

    def settle(self) -> None:
        """Make sure of all steps so far."""
        self._plain.settle()

    def _replayed(self, captured: _Captured, batch: Batch, state: TrainState) -> Tensor:
        clock, update = self._plain.clock, self._plain.update
        with clock.stage("h2d"):
            _fill(captured.inputs, self._plain.place(batch))
        with clock.stage(CAPTURED):
            lr = update.set_lr(state)
            if captured.averages:
                update.average.weigh()
            captured.graph.replay()
            loss, is_finite, norm = captured.found.clone().unbind()
        with clock.stage("optimizer"):
            update.look(Looked(state.step + 1, lr, loss, is_finite, norm))
        return loss

    def _capture(self, batch: Batch, shapes: _Shapes, averages: bool) -> None:
        """Capture the step of such a batch, or say why that is not possible and make all steps plain from now on."""
        if shapes not in self._inputs:
            self._inputs[shapes] = _like(batch, self._plain.place.device)
        inputs = self._inputs[shapes]
        why: list[str] = []

        def work() -> Tensor:
            try:
                return self._work(inputs, averages)
            except Exception as error:
                why.append(_told(error))  # the end of the capture fails too, and hides what can be mended
                raise

        try:
            graph = self._graphs.new()
            with self._plain.clock.paused(CAPTURE), _counting_on_device(self._plain.update.optimizer):
                found = graph.capture(work)
        except RuntimeError as error:
            self._give_up(why[0] if why else _told(error))
        else:
            self._captured[shapes, averages] = _Captured(graph, inputs, found, averages)

    def _give_up(self, why: str) -> None:
        self._has_failed = True
        self._captured.clear()
        self._inputs.clear()
        self._plain.replica.zero_grad(set_to_none=True)
        self._plain.update.optimizer.zero_grad(set_to_none=True)
        self._plain.update.probe.take()  # what was seen in a capture is no number
        self._warn(f"train.capture: the step cannot be recorded, so it runs as it is: {why} (set train.capture=off)")

    def _work(self, inputs: Batch, averages: bool) -> Tensor:
        """Ask the device for a whole step, and nothing of the host that differs between steps."""
        update = self._silent.update
        update.probe.take()  # so that what it starts from is part of the work
        loss = self._silent.passes(inputs)
        norm = update.measure()
        is_finite = update.probe.take()
        update.move()
        if averages:
            update.average.move()
        update.optimizer.zero_grad(set_to_none=True)
        return torch.stack([loss.float(), is_finite.float(), norm])


def build_step(plain: PlainStep, graphs: Graphs | None, warn: Callable[[str], None]) -> Step:
    """Return the step to train with: captured by `graphs` where there are any, else as it is."""
    return plain if graphs is None else CapturedStep(plain, graphs, warn)


def choose_graphs(
    recipe: Recipe, world: World, device: torch.device, optimizer: torch.optim.Optimizer
) -> tuple[Graphs | None, str]:
    """Return what captures the steps of a run, or None and, where capturing was asked for, a note why not."""
    if recipe.train.capture == "off":
        return None, ""
    graphs = build_graphs(device)
    reason = _why_not(recipe, world, device, optimizer, has_graphs=graphs is not None)
    if reason:
        return None, f"train.capture: a step runs as it is, since {reason} (set train.capture=off)"
    return graphs, ""


def _why_not(
    recipe: Recipe, world: World, device: torch.device, optimizer: torch.optim.Optimizer, *, has_graphs: bool
) -> str:
    """Return what of a run keeps its steps from being captured, in words; nothing where nothing does."""
    train, section = recipe.train, recipe.optim
    kind, _, scheme = resolve(train.precision, device).partition("_")
    reasons = {
        f"a {device.type.upper()} has no graphs to replay": not has_graphs,
        "ranks wait for each other inside of it": world.world_size > 1,
        "dataparallel copies the model anew in each": recipe.parallel.strategy == "dataparallel",
        f"the scale of {train.precision} follows what the host sees of each": kind == "fp16",
        f"the learning rate is on the device in float32, and the weights are {train.precision}": kind == "fp64",
        f"{train.precision} keeps no weights in float32": scheme == "pure",
        "train.on_nonfinite=skip has the host look at each before it moves anything": train.on_nonfinite == "skip",
        f"{section.name} asks the host for its learning rate": not reads_lr_on_device(optimizer),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _told(error: Exception) -> str:
    """Return the kind of an error and the beginning of what it says. The error itself would keep tensors alive."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"


def _like(batch: Batch, device: torch.device) -> Batch:
    """Return a batch of zeros on `device` for others to be copied to. The host's indices are of no step."""
    images, labels, draws = (
        torch.zeros_like(each, device=device) for each in (batch.images, batch.labels, batch.draws)
    )
    return Batch(images, labels, np.zeros(len(batch), dtype=np.int64), draws)


def _fill(inputs: Batch, placed: Placed) -> None:
    """Copy a batch that is on the device to the tensors of `inputs`."""
    inputs.images.copy_(placed.images)
    inputs.labels.copy_(placed.labels)
    inputs.draws.copy_(placed.draws)


@contextmanager
def _counting_on_device(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Let torch's Adam be captured: it asks for a promise that its fused kernels keep anyway."""
    promised = [group for group in optimizer.param_groups if "capturable" in group]
    for group in promised:
        group["capturable"] = True
    try:
        yield
    finally:
        for group in promised:
            group["capturable"] = False
