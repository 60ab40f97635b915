"""Attribute each second of a script that paceline did not write to a stage of its steps, or to a pause. Torch-free.

The observer calls this timer from functions of torch that the script calls. Unlike `paceline.measure.clock`, the timer
must work out for itself where a step begins and ends, and which forwards evaluate.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import get_ident
from typing import Final, final

from paceline.core.stages import DATA_WAIT, EPOCH_BOUNDARY, EXPOSED, OTHER, PREPARE
from paceline.watch.device_events import DeviceEvents

FORWARD: Final = "forward"
LOSS: Final = "loss"
BACKWARD: Final = "backward"
OPTIMIZER: Final = "optimizer"
H2D: Final = "h2d"
EVALUATE: Final = "evaluate"
CHECKPOINT: Final = "checkpoint"
START_UP: Final = "start_up"
_MERGED_S: Final = 1e-3
"""Two pauses of one name become one if no more time lies between them, as from `iter(loader)` to its first batch."""

Seconds = dict[str, float]
Pause = tuple[str, float, float]
"""Name, start and end."""


@dataclass
class Step:
    """A step that has ended: exclusive host seconds of its stages, without the pauses inside."""

    n: int
    start_s: float
    end_s: float
    stages: Seconds
    pauses: list[Pause]
    samples: int
    micro_batches: int
    loader: int | None


@dataclass
class _Moment:
    """The state of the open step at `at_s`, to which it returns if an evaluation began there."""

    at_s: float
    stages: Seconds
    num_pauses: int
    samples: int
    num_recorded: int


@dataclass
class _Open:
    """The open step."""

    start_s: float
    stages: Seconds = field(default_factory=dict)
    pauses: list[Pause] = field(default_factory=list)
    samples: int = 0
    micro_batches: int = 0
    loader: int | None = None


@final
class StepTimer:
    """Time the steps of one thread: the first that takes an optimizer step.

    `on_step` gets each step once it is complete. Exactly one stage is open at any time. A call is attributed to its
    stage only if it is the outermost, except that exposed communication counts everywhere, and that an optimizer may
    compute the gradients itself in its closure, and a forward too.
    """

    def __init__(
        self, started_s: float, on_step: Callable[[Step], None], now: Callable[[], float] = time.perf_counter
    ) -> None:
        self.is_on = True
        self.in_forward = False
        self.device: DeviceEvents | None = None
        self._now = now
        self._on_step = on_step
        self._thread = get_ident()
        self._started_s = started_s
        self._n = 0
        self._reset(now())

    def _reset(self, now_s: float) -> None:
        self._open = _Open(now_s)
        self._stage = OTHER
        self._since_s = now_s
        self._floor = OTHER  # the stage around forward and backward: the optimizer runs both if it has a closure
        self._around_backward = OTHER
        self._around_optimizer = OTHER  # a forward that trains takes optimizer steps
        self._pause = ""
        self._around_pause = ""
        self._pause_start_s = 0.0
        self._optimizers: list[int] = []  # those inside of `step`, by id
        self._has_backward = False  # since the last optimizer step
        self._ever_backward = False
        self._ended: Step | None = None  # the next optimizer step may still be part of it
        self._has_started = False
        self._start_up_end_s: float | None = None
        self._backward_done_s: float | None = None
        self._train_loaders: set[int] = set()
        self._last_loader: int | None = None
        self._arrival: tuple[float, int] | None = None  # seconds of `other` and boundaries when the last batch came
        self._candidate: _Moment | None = None  # where an evaluation began, if the loader turns out to be for one
        self._evaluation: _Moment | None = None
        self._evaluation_end_s = 0.0
        self._may_train = False  # the last forward counts as evaluation, and a backward would show that it is none

    # Stages

    def begin_stage(self, stage: str) -> str | None:
        """Begin `stage` and return the one to give to `end_stage`, or return None if the call does not count."""
        if self._ignores():
            return None
        current = self._stage
        if (
            current in (OTHER, LOSS)
            or (stage == EXPOSED and current != EXPOSED)
            or (current in (OPTIMIZER, FORWARD) and stage in (FORWARD, BACKWARD))
        ):
            self._switch(stage)
            return current
        return None

    def _ignores(self) -> bool:
        return self._pause != "" or not self.is_on or get_ident() != self._thread

    def end_stage(self, stage: str, *, charge_to_it: bool = False) -> None:
        """Return to `stage`; with `charge_to_it` the time since `begin_stage` becomes part of it too."""
        if charge_to_it:
            self._stage = stage
        self._switch(stage)

    def _switch(self, stage: str) -> None:
        self._charge(self._now())
        if stage != self._stage:
            self._stage = stage
            if self.device is not None:
                self.device.record(stage)

    def _charge(self, now_s: float) -> None:
        stages, stage = self._open.stages, self._stage
        stages[stage] = stages.get(stage, 0.0) + now_s - self._since_s
        self._since_s = now_s

    # Pauses

    def begin_pause(self, name: str) -> bool:
        """Begin a pause; return False if it is part of another one.

        A checkpoint within an evaluation, as some frameworks save it, divides the evaluation in two.
        """
        if not self.is_on or get_ident() != self._thread:
            return False
        if self._pause == EVALUATE and name == CHECKPOINT:
            self.end_pause()
            self._around_pause = EVALUATE
        elif self._pause:
            return False
        self._switch(self._stage)
        if name == CHECKPOINT:
            self._close_evaluation()
        self._pause, self._pause_start_s = name, self._since_s
        if self.device is not None:
            self.device.record("")
        return True

    def end_pause(self) -> None:
        """End the open pause."""
        if not self._pause:  # it was open when another thread took the first step
            return
        now_s = self._now()
        self._add_pause(self._pause, self._pause_start_s, now_s)
        self._pause, self._around_pause = self._around_pause, ""
        self._pause_start_s = self._since_s = now_s
        if not self._pause and self.device is not None:
            self.device.record(self._stage)

    def _add_pause(self, name: str, start_s: float, end_s: float) -> None:
        pauses, stages = self._open.pauses, self._open.stages
        moment = self._evaluation or self._candidate  # pauses before it stay if the step returns there
        if len(pauses) > (moment.num_pauses if moment else 0) and pauses[-1][0] == name:
            gap_s = start_s - pauses[-1][2]
            if gap_s <= min(_MERGED_S, stages.get(OTHER, 0.0)):
                stages[OTHER] -= gap_s
                start_s = pauses.pop()[1]
        pauses.append((name, start_s, end_s))

    # Loaders

    def begin_loader(self, loader: int) -> bool:
        """Begin the creation of an iterator of `loader`; return False if it does not count."""
        if self._ignores() or self._stage not in (OTHER, LOSS):
            return False
        if not self._has_started:  # all until here prepared the training, a check of the validation too
            self._start_up_end_s = self._restart()
        self._follow_loader(loader)
        return self.begin_pause(EPOCH_BOUNDARY)

    def end_loader(self, loader: int) -> None:
        """End the creation of an iterator of `loader`."""
        self.end_pause()
        self._last_loader = loader

    def begin_wait(self, loader: int | None, *, is_first: bool) -> bool:
        """Begin to wait for a batch; return False if it does not count.

        The wait for the first batch of an iterator is a pause.
        """
        if self._ignores() or self._stage not in (OTHER, LOSS):
            return False
        self._switch(OTHER)  # a forward without a backward ends here
        self._follow_loader(loader)
        if is_first:
            self.begin_pause(EPOCH_BOUNDARY)
        else:
            self._switch(DATA_WAIT)
        return True

    def end_wait(self, loader: int | None, samples: int, *, is_end: bool) -> None:
        """End the wait for a batch of `samples`, or for the end of the loader, which is a pause."""
        if self._pause:
            self.end_pause()
        elif is_end:
            start_s, now_s = self._since_s, self._now()
            self._stage, self._since_s = OTHER, now_s
            self._add_pause(EPOCH_BOUNDARY, start_s, now_s)
            if self.device is not None:
                self.device.record(OTHER)
        else:
            self._switch(OTHER)
        self._last_loader, self._may_train = loader, False
        if self._evaluation is not None and loader not in self._train_loaders:
            self._extend_evaluation(self._evaluation)
        elif not is_end:
            self._open.samples += samples
            self._open.loader = loader
            self._note_arrival()
        elif loader in self._train_loaders:
            self._note_arrival()  # of the last batch, if the script fetches one ahead, as Accelerate does

    def _note_arrival(self) -> None:
        num_recorded = 0 if self.device is None else max(0, self.device.num_recorded - 1)  # with that of `other`
        self._arrival = self._open.stages.get(OTHER, 0.0), num_recorded

    def _follow_loader(self, loader: int | None) -> None:
        if loader in self._train_loaders:
            self._close_evaluation()
            self._candidate = None
        elif self._candidate is None:
            self._candidate = self._moment()

    # Forward and backward

    @property
    def takes_forward(self) -> bool:
        """Whether a forward would count: not in a pause, in backward (as a checkpointed layer) or while loading."""
        return not self._ignores() and self._stage not in (BACKWARD, DATA_WAIT)

    def begin_forward(self, *, is_training: bool, has_gradients: bool, is_known: bool) -> str | None:
        """Begin the outermost forward; return the stage to give to `end_forward`, or None if it does not count.

        `is_training` is the mode of the module, and `is_known` says that it has trained before. A forward without
        gradients evaluates if its batch came from another loader than those of training; so does a known module in
        evaluation mode. Others may be a teacher, or a generator whose images train a discriminator.
        """
        if not self.takes_forward:
            return None
        if is_training and has_gradients:
            self._close_evaluation()
            self._candidate = None
            if self._last_loader is not None:  # otherwise it may only create lazy layers
                self._start()
                self._train_loaders.add(self._last_loader)
            return self._begin_training_forward()
        is_other_loader = self._last_loader is not None and self._last_loader not in self._train_loaders
        if (
            self._stage in (OTHER, LOSS)
            and self._floor == OTHER
            and (is_other_loader or (is_known and not is_training))
        ):
            self._switch(OTHER)
            self._evaluation = self._evaluation or self._candidate or self._moment()
            return EVALUATE
        return self._begin_training_forward() if has_gradients else self.begin_stage(FORWARD)

    def _begin_training_forward(self) -> str | None:
        """Begin a forward; what no other stage has of the time since the batch arrived has prepared it."""
        around = self.begin_stage(FORWARD)
        if around is not None and self._arrival is not None:
            other_s, num_recorded = self._arrival
            stages = self._open.stages
            prepared_s = stages.get(OTHER, 0.0) - other_s
            if prepared_s > 0:
                stages[OTHER] -= prepared_s
                stages[PREPARE] = stages.get(PREPARE, 0.0) + prepared_s
                if self.device is not None:
                    self.device.rename_since(num_recorded, OTHER, PREPARE)
        self._arrival = None
        return around

    def end_forward(self, stage: str, *, has_gradients: bool) -> None:
        """End the outermost forward; the loss follows if it has gradients."""
        if stage != EVALUATE:
            self._switch(LOSS if has_gradients else stage)
        elif self._evaluation is not None:
            self._extend_evaluation(self._evaluation)
            self._may_train = has_gradients

    def begin_backward(self) -> bool:
        """Begin the outermost backward; return False if it does not count."""
        around = self.begin_stage(BACKWARD)
        if around is None:
            return False
        self._around_backward = self._floor if around == LOSS else around
        self._start()
        if self._may_train:
            self._revoke_evaluation()
        self._close_evaluation()
        self._emit_ended()
        self._has_backward = self._ever_backward = True
        self._backward_done_s = self._arrival = None
        self._open.micro_batches += 1
        return True

    def mark_gradients(self) -> None:
        """Record that all gradients of this rank are computed: the rest of backward waits for those of the others.

        The autograd engine may call this in another thread, while the thread of the step waits.
        """
        self._backward_done_s = self._now()
        if self.device is not None:
            self.device.record(EXPOSED)

    def end_backward(self) -> None:
        """End the outermost backward."""
        if self._backward_done_s is not None and self._stage == BACKWARD:
            self._charge(self._backward_done_s)
            self._stage, self._backward_done_s = EXPOSED, None
        self._switch(self._around_backward)

    # Optimizer steps

    def begin_optimizer(self, optimizer: int) -> None:
        """Begin `step` of an optimizer, given by its id."""
        if not self.is_on:
            return
        if get_ident() != self._thread:
            if self._n:  # steps of several threads, as of agents that learn side by side, do not follow one another
                return
            self._thread = get_ident()
            self._reset(self._now())
        if self._pause:  # an evaluation that adapts the model is no training
            return
        if optimizer in self._optimizers:  # its last step raised an error
            del self._optimizers[self._optimizers.index(optimizer) :]
        if not self._optimizers:
            self._start()
            self._around_optimizer = self._stage if self._stage == FORWARD else OTHER
            self._switch(OPTIMIZER)
            self._floor = OPTIMIZER
        self._optimizers.append(optimizer)

    def end_optimizer(self, optimizer: int) -> None:
        """End `step` of an optimizer; the outermost ends the step."""
        if not self.is_on or optimizer not in self._optimizers or get_ident() != self._thread:
            return
        del self._optimizers[self._optimizers.index(optimizer) :]
        if not self._optimizers:
            self._floor = OTHER
            self._switch(self._around_optimizer)
            self._end_step()

    def _end_step(self) -> None:
        self._close_evaluation()
        opened, end_s = self._open, self._since_s
        ended = self._ended
        if ended is not None and self._ever_backward and not self._has_backward:
            # A second optimizer of the same step.
            ended.end_s = end_s
            ended.pauses += opened.pauses
            ended.samples += opened.samples
            for stage, each_s in opened.stages.items():
                ended.stages[stage] = ended.stages.get(stage, 0.0) + each_s
        else:
            self._emit_ended()
            self._n += 1
            self._ended = Step(
                self._n,
                opened.start_s,
                end_s,
                opened.stages,
                opened.pauses,
                opened.samples,
                opened.micro_batches,
                opened.loader,
            )
        self._has_backward = False
        self._candidate = self._arrival = None
        self._open = _Open(end_s)
        if self.device is not None:
            self.device.end_step(self._n, self._stage)

    def _emit_ended(self) -> None:
        if self._ended is not None:
            ended, self._ended = self._ended, None
            self._on_step(ended)

    @property
    def num_steps(self) -> int:
        """Number of steps so far."""
        return self._n

    @property
    def has_seen_backward(self) -> bool:
        """Whether any backward was seen."""
        return self._ever_backward

    def finish(self) -> list[Pause]:
        """Complete the last step, and return the pauses after it."""
        self._emit_ended()
        while self._pause:
            self.end_pause()
        self._close_evaluation()
        pauses, self._open.pauses = self._open.pauses, []
        return pauses

    # Starts and evaluations

    def _start(self) -> None:
        """End the start-up at the first forward or backward that trains, or where its loader was created."""
        if self._has_started:
            return
        self._has_started = True
        end_s = self._restart() if self._start_up_end_s is None else self._start_up_end_s
        self._open.pauses.insert(0, (START_UP, self._started_s, end_s))

    def _restart(self) -> float:
        self._since_s = now_s = self._now()
        self._open = _Open(now_s)
        self._evaluation = self._candidate = self._arrival = None
        return now_s

    def _moment(self) -> _Moment:
        self._switch(self._stage)
        num_recorded = 0
        if self.device is not None:
            self.device.record("")
            num_recorded = self.device.num_recorded
        opened = self._open
        return _Moment(self._since_s, dict(opened.stages), len(opened.pauses), opened.samples, num_recorded)

    def _extend_evaluation(self, start: _Moment) -> None:
        """Move all time since `start` into the pause."""
        self._evaluation_end_s = self._since_s = self._now()
        self._stage, self._arrival = OTHER, None
        self._open.stages = dict(start.stages)
        self._open.samples = start.samples
        del self._open.pauses[start.num_pauses :]
        if self.device is not None:
            self.device.forget_since(start.num_recorded)
            self.device.record(OTHER)

    def _revoke_evaluation(self) -> None:
        """Make a first training step of a model in evaluation mode, as with frozen batch norm, a part of the step."""
        start, self._evaluation, self._may_train = self._evaluation, None, False
        if start is not None:
            stages = self._open.stages
            stages[OTHER] = stages.get(OTHER, 0.0) + self._evaluation_end_s - start.at_s
            if self._last_loader is not None:
                self._train_loaders.add(self._last_loader)

    def _close_evaluation(self) -> None:
        start, self._evaluation = self._evaluation, None
        if start is not None and self._evaluation_end_s > start.at_s:
            self._open.pauses.insert(start.num_pauses, (EVALUATE, start.at_s, self._evaluation_end_s))
            self._candidate = None
