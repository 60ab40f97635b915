"""Run paceline with components that sleep, to test its clock: `slowed.py FILE MODE train ...`.

In mode `each`, one component after another sleeps, one per step. In mode `late`, every rank sleeps in forward, and rank
1 sleeps a fifth longer, in backward. The times slept and the times measured by the clock in the same steps are written
to `FILE`.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import paceline.training.components
from paceline.cli import main
from paceline.training.out_of_memory import ExplainedStep
from paceline.training.trainer import EagerStep, Trainer

PARTS = ("data_wait", "h2d", "device_augment", "forward", "loss", "backward", "optimizer", "other")
SLEPT_S = 0.03
STEP_S = 0.1
"""Time that each rank sleeps in forward, so that nearly all of a step is known."""


class Sleeper:
    """Callable that sleeps `seconds(call number)`; `slept_s` has the measured time of each call."""

    def __init__(self, seconds: Callable[[int], float]) -> None:
        self._seconds = seconds
        self.slept_s: list[float] = []

    def __call__(self, *ignored: object) -> None:
        seconds = self._seconds(len(self.slept_s))
        start_s = time.perf_counter()
        if seconds:
            time.sleep(seconds)
        self.slept_s.append(time.perf_counter() - start_s)


def sleepers(mode: str, rank: int) -> dict[str, Sleeper]:
    """Return the sleeper of each stage."""
    if mode == "late":
        sleeping = {"forward": STEP_S} | ({"backward": STEP_S / 5} if rank == 1 else {})
        return {part: Sleeper(lambda step, part=part: sleeping.get(part, 0.0)) for part in PARTS}
    turns = len(PARTS) + 1  # in one step per round no component sleeps
    return {
        part: Sleeper(lambda step, number=number: SLEPT_S if step % turns == number else 0.0)
        for number, part in enumerate(PARTS)
    }


class SlowLoader:
    """A loader that sleeps before each batch."""

    def __init__(self, loader: Any, sleep: Sleeper) -> None:
        self._loader, self._sleep = loader, sleep

    def batches(self, first: int, stop: int) -> Iterator[Any]:
        for batch in self._loader.batches(first, stop):
            self._sleep()
            yield batch


def after(part: Callable[..., Any], sleep: Sleeper) -> Callable[..., Any]:
    """Return `part` with a sleep after each call."""

    def slow(*args: Any) -> Any:
        result = part(*args)
        sleep()
        return result

    return slow


class SlowCoordinator:
    """A coordinator that sleeps before each poll returns."""

    def __init__(self, coordinator: Any, sleep: Sleeper) -> None:
        self.poll, self.flush = after(coordinator.poll, sleep), coordinator.flush


def slowed(trainer: Trainer, sleep: dict[str, Sleeper]) -> Trainer:
    """Return `trainer` with a sleeper in every stage."""
    explained = trainer.step
    assert isinstance(explained, ExplainedStep)
    plain = explained.step
    assert isinstance(plain, EagerStep)
    plain.replica.register_forward_pre_hook(sleep["forward"])
    plain.replica.register_full_backward_pre_hook(sleep["backward"])
    step = replace(
        plain,
        transfer=after(plain.transfer, sleep["h2d"]),
        transforms=after(plain.transforms, sleep["device_augment"]),
        criterion=after(plain.criterion, sleep["loss"]),
        update=SlowUpdate(plain.update, sleep["optimizer"]),
    )
    return replace(
        trainer,
        loader=SlowLoader(trainer.loader, sleep["data_wait"]),
        step=replace(explained, step=step),
        coordinator=SlowCoordinator(trainer.coordinator, sleep["other"]),
    )


class SlowUpdate:
    """An optimizer update that sleeps before it returns."""

    def __init__(self, update: Any, sleep: Sleeper) -> None:
        self._step = after(update, sleep)

    def __call__(self, *args: Any) -> None:
        self._step(*args)


if __name__ == "__main__":
    file, mode, *cli_args = sys.argv[1:]
    sleep = sleepers(mode, int(os.environ.get("RANK", "0")))
    trainers: list[Trainer] = []

    def build(**parts: Any) -> Trainer:
        trainers.append(slowed(Trainer(**parts), sleep))
        return trainers[-1]

    paceline.training.components.Trainer = build
    sys.argv[1:] = cli_args
    try:
        main()
    finally:
        summary = trainers[0].clock.drain()
        report = {
            "slept_s": {part: each.slept_s for part, each in sleep.items()},
            "stages": summary.recent,
            "step_s": summary.step_s,
        }
        Path(f"{file}{os.environ.get('RANK', '')}").write_text(json.dumps(report))
