"""What does the stage clock cost? CIFAR ResNet-18 on the CPU, fp32, the clock on against the null clock.

Claim: a step with the clock takes less than 0.5 % longer than one without, medians of interleaved steps.

    python benchmarks/clock.py --steps 200 --threads 2 --json benchmarks/results/clock-cpu.json

It is one run of `paceline.training.run.run` in this process. Its clock is replaced by one that is `StageClock` and
`NullClock` in turns, in the order on off off on on off off on: each follows itself as often as the other, and a slow
drift of the machine's speed falls on both alike. A step is timed from outside, from asking for a batch to asking for
the next. The difference of two such medians is uncertain by more than the clock takes on a busy machine, so what the
clock does in a step, nine stages and its end, is also timed alone; relative to the median step it is the sharper
figure, and says nothing of what the clock may do to caches. Times are measured, not checked: the exit status is 0.
"""

import argparse
import os
import tempfile
import time
import timeit
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import numpy as np
import record

from paceline.core.run_dir import RunDir
from paceline.core.stages import STAGES
from paceline.core.world import World
from paceline.measure import Clock, ClockSummary, NullClock, StageClock, build_clock
from paceline.recipe.load import Patch, load
from paceline.recipe.schema import Recipe
from paceline.training import measurements
from paceline.training.process import Invocation
from paceline.training.run import run

T = TypeVar("T")
NUM_RESAMPLES = 10_000
NUM_ALONE = 20_000


def main() -> None:
    """Measure, print, and write the result."""
    args = parse_args()
    load_before = os.getloadavg()[0]
    turns = measure(recipe_for(args), args.warmup)
    on_s, off_s = (turns.step_s[name][args.warmup :] for name in ("on", "off"))
    alone_s = clock_alone(STAGES)
    result = {
        "benchmark": "clock",
        **record.provenance(),
        "load_before": round(load_before, 2),
        "config": {"preset": "cifar10-resnet18", **{name: getattr(args, name) for name in CONFIG}},
        "wall": compared(on_s, off_s),
        "alone": {
            "stages": len(STAGES),
            "s_per_step": round(alone_s, 9),
            "share_of_step": round(alone_s / float(np.median(off_s)), 7),
        },
        "stages_s": {name: round(total.host_s, 6) for name, total in turns.drain().stages.items()},
        "on_step_wall_s": [round(seconds, 6) for seconds in on_s],
        "off_step_wall_s": [round(seconds, 6) for seconds in off_s],
    }
    print(table(result))
    if args.json:
        record.write(args.json, result)


CONFIG = ("steps", "warmup", "batch_size", "width", "threads")


def parse_args() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="timed steps of each clock (default: 200)")
    parser.add_argument("--warmup", type=int, default=5, help="steps of each clock that are dropped (default: 5)")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--width", type=float, default=1.0, help="times the channels of ResNet-18")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="CPU threads")
    parser.add_argument("--json", type=Path, metavar="OUT", help="where to write the result")
    args = parser.parse_args()
    if args.steps < 1 or args.warmup < 1:
        parser.error("--steps, --warmup: at least 1 each")
    return args


def recipe_for(args: argparse.Namespace) -> Recipe:
    """Return the CIFAR-10 recipe on as many made-up images of that shape, and nothing but training and its log."""
    arguments = [
        "data.source.name=synthetic",
        "data.source.num_images=50000",
        "data.source.image_size=32",
        "data.source.channels=3",
        f"data.batch_size={args.batch_size}",
        f"model.width={args.width}",
        "schedule.warmup=0st",
        f"train.steps={2 * (args.warmup + args.steps)}",
        "train.eval_every=off",
        "checkpoint.every=off",
        "log.report=off",
        "parallel.device=cpu",
        f"parallel.threads={args.threads}",
    ]
    return load("cifar10-resnet18", Patch.parse(arguments)).recipe


class TakingTurns:
    """A clock that is on in some steps and off in the others, and has the seconds of each from outside."""

    def __init__(self, clock: Clock) -> None:
        self._clocks = {"on": clock, "off": NullClock()}
        self._turn = "on"
        self._clock: Clock = clock
        self.step_s: dict[str, list[float]] = {"on": [], "off": []}

    def batches(self, iterable: Iterable[T]) -> Iterator[T]:
        """Yield from `iterable`; asking for the next batch ends a step, and another clock has its turn."""
        batches, step, end = iter(iterable), 0, object()
        while True:
            self._turn = ("on", "off", "off", "on")[step % 4]
            self._clock = self._clocks[self._turn]
            start_s = time.perf_counter()
            with self._clock.stage("data_wait"):
                batch: Any = next(batches, end)
            if batch is end:
                return
            try:
                yield batch
            finally:  # the last step ends with this generator
                self.step_s[self._turn].append(time.perf_counter() - start_s)
            step += 1

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Return the context of the clock whose turn it is."""
        return self._clock.stage(name)

    def switch_stage(self, name: str) -> None:
        """Turn the clock whose turn it is."""
        self._clock.switch_stage(name)

    def end_step(self, images: int) -> None:
        """Close a step of the clock whose turn it is."""
        self._clock.end_step(images)

    def paused(self, name: str) -> AbstractContextManager[None]:
        """Return the pause of the clock whose turn it is."""
        return self._clock.paused(name)

    def drain(self) -> ClockSummary:
        """Return what the clock that is on has measured."""
        return self._clocks["on"].drain()

    @property
    def current_stage(self) -> str:
        """The stage or pause that is open, or nothing."""
        return self._clock.current_stage


def measure(recipe: Recipe, warmup_steps: int) -> TakingTurns:
    """Run `recipe` with a clock that is on and off in turns; return it."""
    made: list[TakingTurns] = []

    def taking_turns(*_: Any, **__: Any) -> Clock:
        made.append(TakingTurns(build_clock("on", device_type="cpu", warmup_steps=warmup_steps)))
        return made[0]

    with tempfile.TemporaryDirectory() as folder, mock.patch.object(measurements, "build_clock", taking_turns):
        run(recipe, World.single(), RunDir(Path(folder) / "run"), invocation=Invocation())
    return made[0]


def clock_alone(stages: Sequence[str]) -> float:
    """Return the seconds that a clock takes for a step of these stages with nothing in them, less the null clock's."""

    def step_of(clock: Clock) -> Callable[[], None]:
        def step() -> None:
            for name in stages:
                with clock.stage(name):
                    pass
            clock.end_step(1)

        return step

    on_s, off_s = (
        min(timeit.repeat(step_of(clock), number=NUM_ALONE, repeat=5)) for clock in (StageClock(), NullClock())
    )
    return (on_s - off_s) / NUM_ALONE


def compared(on_s: Sequence[float], off_s: Sequence[float]) -> dict[str, Any]:
    """Return both spreads and what the clock adds, relative to a step without, with bootstrap 95 % intervals.

    `of_medians` is the claim's. `of_pairs` is the median over neighboring pairs, which cancels what a busy machine
    does to both. Pairs are resampled whole, as they were measured.
    """
    pairs = min(len(on_s), len(off_s))
    on, off = np.array(on_s[:pairs]), np.array(off_s[:pairs])
    chosen = np.random.default_rng(0).integers(0, pairs, (NUM_RESAMPLES, pairs))
    medians = np.median(on[chosen], axis=1) / np.median(off[chosen], axis=1) - 1
    ratios = np.median((on / off)[chosen], axis=1) - 1
    return {
        "on": record.spread(on),
        "off": record.spread(off),
        "overhead": {
            "of_medians": _estimate(np.median(on) / np.median(off) - 1, medians),
            "of_pairs": _estimate(np.median(on / off) - 1, ratios),
        },
    }


def _estimate(value: float, resampled: np.ndarray) -> dict[str, Any]:
    low, high = np.percentile(resampled, [2.5, 97.5])
    return {"value": round(float(value), 6), "interval_95": [round(low, 6), round(high, 6)]}


def table(result: dict[str, Any]) -> str:
    """Return the result as a person reads it."""
    config, machine, wall, alone = (result[name] for name in ("config", "machine", "wall", "alone"))
    lines = [
        f"ResNet-18 x {config['width']:g}, batch {config['batch_size']}, fp32, {config['threads']} threads of "
        f"{machine['cpu']}; torch {machine['torch']}, Python {machine['python']}"
    ]
    for name in ("on", "off"):
        times = wall[name]
        lines.append(
            f"clock {name:3}  {times['median_s'] * 1e3:9.3f} ms a step (10th-90th percentile "
            f"{times['p10_s'] * 1e3:.3f}-{times['p90_s'] * 1e3:.3f}, n {times['n']})"
        )
    for name, found in wall["overhead"].items():
        low, high = found["interval_95"]
        lines.append(f"overhead {name:10}  {found['value']:+.3%} (95 % interval {low:+.3%} to {high:+.3%})")
    lines.append(f"alone: {alone['s_per_step'] * 1e6:.2f} us a step, {alone['share_of_step']:.5%} of one")
    lines.append(f"load average {result['load_before']} before, {result['load_average'][0]} after")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
