"""How much faster is a hand-written loop that does the same work? CIFAR ResNet-18 on the CPU, fp32.

Claim: `bare_loop.train` is at most 2 % faster per step than `paceline train`, medians of interleaved steps.

    python benchmarks/overhead.py --steps 60 --json benchmarks/results/overhead-cpu.json

Both train in this process, on the same pixels and threads, from the same weights. Paceline's side is
`paceline.training.run.run` itself, files, TensorBoard and progress lines included; the one thing changed is that its
loader lets the bare loop step in between (`TakingTurns`). A step is timed from outside, from asking for a batch to
asking for the next, so waiting for data and logging are in it. Evaluations and checkpoints are off on both sides.
CPU time is kept beside wall time: it tells a slower program from a busier machine, except that threads which spin
while they wait count as computing. Before anything is timed, both take the same steps on the same batches and must
have equal losses. Times are measured, not checked: the exit status is 0.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import record
import torch
from bare_loop import LOG_EVERY, ResNet18, batches, train
from torch import nn

from paceline.cli.train_progress import build_train_progress
from paceline.core.results import LoaderResult
from paceline.core.run_dir import RunDir, read_lines
from paceline.core.world import World
from paceline.data.batch import Batch
from paceline.data.loaders.build import Loader
from paceline.recipe.load import Patch, load
from paceline.recipe.schema import Recipe
from paceline.training.context import RunContext
from paceline.training.process import Invocation
from paceline.training.run import run

NUM_RESAMPLES = 10_000
CHECKED_STEPS = 3
# Loss is about 2.3. Equal arithmetic gives equal bits here; 1e-5 leaves room for another order of a sum.
LOSS_TOLERANCE = 1e-5


def main() -> None:
    """Check, measure, print, and write the result."""
    args = parse_args()
    same_work = check_same_work(recipe_for(args, num_steps=CHECKED_STEPS, log_every=1))
    load_before = os.getloadavg()[0]
    # One step more, which is not timed: a run does not ask for a batch after its last step.
    turns = measure(recipe_for(args, num_steps=args.warmup + args.steps + 1, log_every=LOG_EVERY))
    timed = slice(args.warmup, args.warmup + args.steps)
    paceline, bare = turns.paceline[timed], turns.bare[timed]
    wall_s = [step.wall_s for step in paceline], [step.wall_s for step in bare]
    cpu_s = [step.cpu_s for step in paceline], [step.cpu_s for step in bare]
    is_logged = [(step + args.warmup + 1) % LOG_EVERY == 0 for step in range(args.steps)]
    result = {
        "benchmark": "overhead",
        **record.provenance(),
        "load_before": round(load_before, 2),
        "config": {
            "preset": "cifar10-resnet18",
            **{name: getattr(args, name) for name in ("steps", "warmup", "batch_size", "width", "threads", "clock")},
        },
        "same_work": same_work,
        "wall": compared(*wall_s),
        "wall_logged_steps": compared(*(list(compress(times, is_logged)) for times in wall_s)),
        "cpu_time": compared(*cpu_s),
        "paceline_step_wall_s": [round(seconds, 6) for seconds in wall_s[0]],
        "bare_step_wall_s": [round(seconds, 6) for seconds in wall_s[1]],
    }
    print(table(result))
    if args.json:
        record.write(args.json, result)


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="timed steps of each loop (default: 60)")
    parser.add_argument("--warmup", type=int, default=5, help="steps of each loop that are dropped (default: 5)")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--width", type=float, default=1.0, help="times the channels of ResNet-18")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="CPU threads of both loops")
    parser.add_argument("--clock", choices=["on", "off"], default="on", help="paceline's own clock")
    parser.add_argument("--json", type=Path, metavar="OUT", help="where to write the result")
    args = parser.parse_args()
    if args.steps < LOG_EVERY:
        parser.error(f"--steps: {args.steps} has no logged step to look at (use {LOG_EVERY} or more)")
    return args


def recipe_for(args: argparse.Namespace, *, num_steps: int, log_every: int) -> Recipe:
    """Return the CIFAR-10 recipe on as many made-up images of that shape, and nothing but training."""
    arguments = [
        "data.source.name=synthetic",
        "data.source.num_images=50000",
        "data.source.image_size=32",
        "data.source.channels=3",
        f"data.batch_size={args.batch_size}",
        f"model.width={args.width}",
        "model.memory_format=contiguous",  # like the bare loop; our default layout would flatter us
        "schedule.warmup=0st",
        f"train.steps={num_steps}",
        "train.eval_every=off",
        "checkpoint.every=off",
        f"log.every={log_every}st",
        "parallel.device=cpu",
        f"parallel.threads={args.threads}",
        f"measure.clock={args.clock}",
    ]
    return load("cifar10-resnet18", Patch.parse(arguments)).recipe


@dataclass
class Recording:
    """A loader that keeps the batches it hands out."""

    inner: Loader
    kept: list[Batch] = field(default_factory=list)

    def batches(self, first: int, stop: int) -> Iterator[Batch]:
        """Return an iterator over the batches."""
        for batch in self.inner.batches(first, stop):
            self.kept.append(batch)
            yield batch

    def stats(self) -> LoaderResult | None:
        """Return how the batches were made."""
        return self.inner.stats()


class Step(NamedTuple):
    """Seconds of one step, by the wall clock and of CPU time of the whole process, all threads together."""

    wall_s: float
    cpu_s: float

    @classmethod
    def now(cls) -> "Step":
        """Return the present, by both clocks."""
        return cls(time.perf_counter(), time.process_time())

    @classmethod
    def since(cls, start: "Step") -> "Step":
        """Return what has passed since `start`."""
        return cls(time.perf_counter() - start.wall_s, time.process_time() - start.cpu_s)


@dataclass
class TakingTurns:
    """A loader that runs the bare loop between paceline's steps, and times the steps of both by one clock.

    The order is P B B P P B B P: each loop follows itself as often as the other, and a slow drift of the machine's
    speed falls on both alike.
    """

    inner: Loader
    bare_steps: Iterator[object]
    paceline: list[Step] = field(default_factory=list)
    bare: list[Step] = field(default_factory=list)

    def batches(self, first: int, stop: int) -> Iterator[Batch]:
        """Return an iterator over the batches; asking it for the next one ends a step."""
        batches = self.inner.batches(first, stop)
        for step in range(first, stop):
            if step % 2 == 1:
                self._bare_step()
            start = Step.now()
            yield next(batches)
            self.paceline.append(Step.since(start))
            if step % 2 == 0:
                self._bare_step()

    def _bare_step(self) -> None:
        start = Step.now()
        next(self.bare_steps)
        self.bare.append(Step.since(start))

    def stats(self) -> LoaderResult | None:
        """Return how the batches were made."""
        return self.inner.stats()


def measure(recipe: Recipe) -> TakingTurns:
    """Run `recipe` as `paceline train` does, taking turns with the bare loop; return the times of all steps."""
    made: list[TakingTurns] = []
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "bare.log").open("w") as bare_log:

        def taking_turns(parts: RunContext, loader: Loader) -> Loader:
            train_set = parts.datasets.train
            images = torch.from_numpy(train_set.images.transpose(0, 3, 1, 2).copy())
            source = batches(images, torch.from_numpy(train_set.labels), recipe.data.batch_size)
            made.append(TakingTurns(loader, bare_steps(parts, source, bare_log)))
            return made[0]

        run_paceline(recipe, Path(folder), taking_turns)
    return made[0]


def check_same_work(recipe: Recipe) -> dict[str, Any]:
    """Let both run `recipe` from the same weights on the same batches; return what agreed, or end the program.

    It logs every step. The loss of step 0 compares networks and pixels, later ones optimizers and schedules too.
    """
    made: list[tuple[RunContext, Recording]] = []
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "bare.log").open("w") as bare_log:

        def recording(parts: RunContext, loader: Loader) -> Loader:
            made.append((parts, Recording(loader)))
            return made[0][1]

        rundir = run_paceline(recipe, Path(folder), recording)
        theirs = [line["loss"] for line in read_lines(rundir.steps)]
        (parts, recorder), *_ = made
        source = ((batch.images, batch.labels) for batch in recorder.kept)
        ours = [loss.item() for loss in bare_steps(parts, source, bare_log)]
        num_parameters = count_parameters(initial(parts)), count_parameters(copied(parts))
    largest = max(abs(one - other) for one, other in zip(theirs, ours, strict=True))
    if len(theirs) != CHECKED_STEPS or largest > LOSS_TOLERANCE or num_parameters[0] != num_parameters[1]:
        sys.exit(f"error: the loops differ: losses {theirs} and {ours}, parameters {num_parameters}")
    return {"parameters": num_parameters[0], "losses": theirs, "largest_loss_difference": largest}


def run_paceline(recipe: Recipe, folder: Path, wrap: Callable[[RunContext, Loader], Loader]) -> RunDir:
    """Run `recipe` into `folder` with its training loader in what `wrap` makes of it; return the run directory."""
    built = RunContext.create_train_loader
    rundir = RunDir(folder / "run")
    with (
        mock.patch.object(RunContext, "create_train_loader", lambda parts, place: wrap(parts, built(parts, place))),
        (folder / "paceline.log").open("w") as log,
    ):
        run(recipe, World.single(), rundir, invocation=Invocation(listeners=[build_train_progress(log)]))
    return rundir


def bare_steps(parts: RunContext, source: Iterator[Any], log: Any) -> Iterator[object]:
    """Return the bare loop's steps on `source`, from the weights that paceline starts from."""
    data, info = parts.recipe.data, parts.datasets.train.info
    assert data.mean == data.std == "auto", "the bare loop takes the set's own statistics"
    return train(
        copied(parts),
        source,
        num_steps=parts.plan.total_steps,
        peak_lr=parts.plan.peak_lr,
        mean=info.mean,
        std=info.std,
        out=log,
    )


def copied(parts: RunContext) -> nn.Module:
    """Return the bare network with paceline's initial weights: the tensors of both are in the same order."""
    model = ResNet18(num_classes=parts.plan.num_classes, width=parts.recipe.model.width)
    theirs = initial(parts).state_dict().values()
    model.load_state_dict(dict(zip(model.state_dict(), theirs, strict=True)))
    return model


def initial(parts: RunContext) -> nn.Module:
    """Return paceline's network as a run starts with it."""
    return parts.create_model(parts.create_precision(), is_new=True)


def count_parameters(model: nn.Module) -> int:
    """Return how many numbers are trained."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def compared(paceline_s: Sequence[float], bare_s: Sequence[float]) -> dict[str, Any]:
    """Return both spreads, and what paceline takes relative to the bare loop, with bootstrap 95 % intervals.

    `ratio_of_medians` of wall times is the claim's. `median_of_ratios` is over neighboring pairs, which cancels what
    a busy machine does to both. Pairs are resampled whole, as they were measured.
    """
    paceline, bare = np.array(paceline_s), np.array(bare_s)
    chosen = np.random.default_rng(0).integers(0, len(bare), (NUM_RESAMPLES, len(bare)))
    medians = np.median(paceline[chosen], axis=1) / np.median(bare[chosen], axis=1)
    ratios = np.median((paceline / bare)[chosen], axis=1)
    return {
        "paceline": record.spread(paceline),
        "bare": record.spread(bare),
        "ratio_of_medians": _estimate(np.median(paceline) / np.median(bare), medians),
        "median_of_ratios": _estimate(np.median(paceline / bare), ratios),
        "median_extra_s": round(float(np.median(paceline - bare)), 6),
    }


def _estimate(value: float, resampled: np.ndarray) -> dict[str, Any]:
    low, high = np.percentile(resampled, [2.5, 97.5])
    return {"value": round(float(value), 5), "interval_95": [round(low, 5), round(high, 5)]}


def table(result: dict[str, Any]) -> str:
    """Return the result as a person reads it."""
    config, machine, same = result["config"], result["machine"], result["same_work"]
    lines = [
        f"ResNet-18 x {config['width']:g}, batch {config['batch_size']}, fp32, clock {config['clock']}, "
        f"{config['threads']} threads of {machine['cpu']}; torch {machine['torch']}, Python {machine['python']}",
        f"same work: {same['parameters']:,} parameters, losses of {len(same['losses'])} steps equal within "
        f"{same['largest_loss_difference']:.0e}",
    ]
    for title, facts in (("wall", result["wall"]), ("CPU time", result["cpu_time"])):
        for name in ("paceline", "bare"):
            times = facts[name]
            lines.append(
                f"{title:8}  {name:8} {times['median_s'] * 1e3:9.2f} ms a step (10th-90th percentile "
                f"{times['p10_s'] * 1e3:.2f}-{times['p90_s'] * 1e3:.2f}, n {times['n']})"
            )
        for name in ("ratio_of_medians", "median_of_ratios"):
            low, high = facts[name]["interval_95"]
            lines.append(f"{title:8}  {name:16} {facts[name]['value']:.4f} (95 % interval {low:.4f}-{high:.4f})")
    logged = result["wall_logged_steps"]
    lines.append(
        f"median extra time {result['wall']['median_extra_s'] * 1e3:+.2f} ms a step, "
        f"{logged['median_extra_s'] * 1e3:+.2f} ms on the {logged['bare']['n']} logged ones"
    )
    lines.append(f"load average {result['load_before']} before, {result['load_average'][0]} after")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
