"""paceline with parts that sleep, for tests of what its clock makes of it: `slowed.py FILE WAY train ...`.

Way `each` has one part after another sleep in turn, one a step. Way `late` has every rank sleep in forward, and rank 1
a fifth longer, in backward. How long each slept, and what the clock told of the same steps, is written to `FILE`.
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
from paceline.training.trainer import EagerStep, Trainer

PARTS = ("data_wait", "h2d", "device_augment", "forward", "loss", "backward", "optimizer", "other")
SLEPT_S = 0.03
STEP_S = 0.1
"""What each rank sleeps in forward, so that nearly all of a step is known."""


class Sleeper:
    """Sleep in the steps that `seconds` names, of a part that is called once in each; `slept_s` is how long it took."""

    def __init__(self, seconds: Callable[[int], float]) -> None:
        self._seconds = seconds
        self.slept_s: list[float] = []

    def __call__(self, *ignored: object) -> None:
        seconds = self._seconds(len(self.slept_s))
        start_s = time.perf_counter()
        if seconds:
            time.sleep(seconds)
        self.slept_s.append(time.perf_counter() - start_s)


def sleepers(way: str, rank: int) -> dict[str, Sleeper]:
    """Return who sleeps in each part."""
    if way == "late":
        sleeping = {"forward": STEP_S} | ({"backward": STEP_S / 5} if rank == 1 else {})
        return {part: Sleeper(lambda step, part=part: sleeping.get(part, 0.0)) for part in PARTS}
    turns = len(PARTS) + 1  # and in one step of each round nobody does
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


class SlowCouncil:
    """Ranks that think before they agree."""

    def __init__(self, council: Any, sleep: Sleeper) -> None:
        self.poll, self.flush = after(council.poll, sleep), council.flush


def slowed(trainer: Trainer, sleep: dict[str, Sleeper]) -> Trainer:
    """Return `trainer` with every part slowed."""
    plain = trainer.step
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
        step=step,
        coordinator=SlowCouncil(trainer.coordinator, sleep["other"]),
    )


class SlowUpdate:
    """An optimizer step that sleeps before it ends."""

    def __init__(self, update: Any, sleep: Sleeper) -> None:
        self._step, self.sync = after(update, sleep), update.sync

    def __call__(self, *args: Any) -> None:
        self._step(*args)


if __name__ == "__main__":
    file, way, *words = sys.argv[1:]
    sleep = sleepers(way, int(os.environ.get("RANK", "0")))
    trainers: list[Trainer] = []

    def build(**parts: Any) -> Trainer:
        trainers.append(slowed(Trainer(**parts), sleep))
        return trainers[-1]

    paceline.training.components.Trainer = build
    sys.argv[1:] = words
    try:
        main()
    finally:
        summary = trainers[0].clock.drain()
        told = {
            "slept_s": {part: each.slept_s for part, each in sleep.items()},
            "stages": summary.recent,
            "step_s": summary.step_s,
        }
        Path(f"{file}{os.environ.get('RANK', '')}").write_text(json.dumps(told))
