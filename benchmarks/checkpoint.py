"""What does saving cost a run at the default cadence, once an epoch? CIFAR ResNet-18 with momentum on the CPU, fp32.

    python benchmarks/checkpoint.py --rounds 10 --json benchmarks/results/checkpoint-cpu.json

Training steps on made-up images, with the recipe's own model and optimizer, are interrupted by saves as a run makes
them: `CheckpointWriter`, in the background and at once, and as it was before, by safetensors' own `save_file`
and a digest read back from the file. The ways take turns, round by round, in folders of one disk; two of them write
to a slow disk, which is the same disk and a writer that sleeps, so that it comes to `--slow-mb-s` at most.

A block is one save and the steps after it, as many as the write takes at least. What a save costs is what its block
takes longer than as many steps of the same round's block without a save: `stall_s`, for which training stood still,
and what computing beside a busy thread costs. The share is that of an epoch of 50,000 images, extrapolated from the
median step, not run. Evaluation and waiting for data are in neither. Times are measured, not checked: the exit status
is 0.
"""

import argparse
import contextlib
import math
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import record
import safetensors
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from paceline.models.build import build_model
from paceline.recipe.load import Patch, load
from paceline.training.checkpoint import (
    CheckpointStorage,
    CheckpointWriter,
    KeepPolicy,
    Snapshot,
    format,
    model_tensors,
    optimizer_tensors,
)
from paceline.training.checkpoint import format as tensorfile
from paceline.training.optim.build import build_optimizer

EPOCH_IMAGES = 50_000
WARMUP_STEPS = 5
NONE = "none"


def main() -> None:
    """Measure, print, and write the result."""
    args = parse_args()
    torch.set_num_threads(args.threads)
    load_before = os.getloadavg()[0]
    training = Training(args.batch_size, args.width)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder, contextlib.ExitStack() as stack:
        ways = build_ways(Path(folder), args.slow_mb_s, stack)
        # The first round makes memory and folders, and is dropped.
        rounds = [
            {name: block(training, way, number) for name, way in ways.items()} for number in range(args.rounds + 1)
        ]
        measured = summary(rounds[1:], args.batch_size)
        measured["longest_wait_of_another_thread_s"] = longest_waits(training.snapshot(), Path(folder))
    result = {
        "benchmark": "checkpoint",
        **record.provenance(),
        "load_before": round(load_before, 2),
        "config": {
            "preset": "cifar10-resnet18",
            **{name: getattr(args, name) for name in ("rounds", "batch_size", "width", "threads", "slow_mb_s")},
            "checkpoint_bytes": training.snapshot().num_bytes,
        },
        **measured,
    }
    print(table(result))
    if args.json:
        record.write(args.json, result)


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="saves of each way that are timed (default: 10)")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--width", type=float, default=1.0, help="times the channels of ResNet-18")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="CPU threads that compute")
    parser.add_argument("--slow-mb-s", type=float, default=30.0, help="MB/s of the slow disk (default: 30)")
    parser.add_argument("--folder", type=Path, help="where to write checkpoints (default: the folder for temporaries)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="where to write the result")
    return parser.parse_args()


class Training:
    """The model and optimizer of the recipe, on made-up images that are in memory already."""

    def __init__(self, batch_size: int, width: float) -> None:
        torch.manual_seed(0)
        recipe = load("cifar10-resnet18", Patch.parse([f"model.width={width}"])).recipe
        self.model = build_model(recipe.model, num_classes=10, channels=3).to(memory_format=torch.channels_last)
        self.optimizer = build_optimizer(recipe.optim, self.model.named_parameters(), "cpu")
        self.images = torch.randn(batch_size, 3, 32, 32).contiguous(memory_format=torch.channels_last)
        self.labels = torch.arange(batch_size) % 10
        for _ in range(WARMUP_STEPS):
            self.step()

    def step(self) -> None:
        """Train one step."""
        self.optimizer.zero_grad()
        functional.cross_entropy(self.model(self.images), self.labels).backward()
        self.optimizer.step()

    def snapshot(self) -> Snapshot:
        """Return what a checkpoint of this holds."""
        tensors = {"model": model_tensors(self.model), "optimizer": optimizer_tensors(self.optimizer)}
        return Snapshot(tensors, {"train": {"best_step": -1}})


@dataclass(frozen=True)
class Way:
    """One way to save: `sync` waits for what is still being written, and `steps` are trained after each save."""

    save: Callable[[int, Snapshot], None]
    sync: Callable[[], None]
    steps: int
    slow_mb_s: float = math.inf


@dataclass(frozen=True)
class Block:
    """Seconds that a save held training up, of each step after it, and of what was still to be waited for then."""

    stall_s: float
    steps_s: list[float]
    late_s: float


def build_ways(folder: Path, slow_mb_s: float, stack: contextlib.ExitStack) -> dict[str, Way]:
    """Return the ways by name; `stack` closes what they need."""

    def ours(name: str, *, background: bool, steps: int, mb_s: float = math.inf) -> Way:
        checkpoints = CheckpointStorage(folder / name, KeepPolicy(3))
        writer = CheckpointWriter(checkpoints, background=background, on_failure="stop", warn=print)
        stack.callback(writer.close)
        return Way(lambda step, snapshot: writer.save(step, -1, snapshot), writer.flush, steps, mb_s)

    return {
        NONE: Way(lambda step, snapshot: None, lambda: None, steps=4),
        "background": ours("background", background=True, steps=4),
        "at once": ours("once", background=False, steps=2),
        "at once, save_file": Way(lambda step, snapshot: as_before(folder, step, snapshot), lambda: None, steps=2),
        "slow disk, background": ours("slow background", background=True, steps=10, mb_s=slow_mb_s),
        "slow disk, at once": ours("slow once", background=False, steps=2, mb_s=slow_mb_s),
    }


def as_before(folder: Path, step: int, snapshot: Snapshot) -> None:
    """Save as paceline once did: contiguous copies, `save_file`, a digest of the file, and the way onto the disk."""
    beside = folder / f".before-{step:08d}.tmp"
    beside.mkdir()
    for name, tensors in snapshot.tensors.items():
        file = beside / f"{name}.safetensors"
        copies = {key: each.detach().to("cpu", copy=True).contiguous() for key, each in tensors.items()}
        save_file(copies, file)
        tensorfile.file_sha256(file)
        with file.open("rb") as written:
            os.fsync(written.fileno())
    format.sync_folder(beside)
    shutil.rmtree(folder / "before", ignore_errors=True)
    beside.replace(folder / "before")
    format.sync_folder(folder)


def block(training: Training, way: Way, number: int) -> Block:
    """Save in one way, and train on."""
    with disk_of(way.slow_mb_s):
        start_s = time.perf_counter()
        way.save(number, training.snapshot())
        times_s = [time.perf_counter() - start_s]
        for step in range(way.steps + 1):
            start_s = time.perf_counter()
            training.step() if step < way.steps else way.sync()
            times_s.append(time.perf_counter() - start_s)
    return Block(times_s[0], times_s[1:-1], times_s[-1])


@contextlib.contextmanager
def disk_of(mb_s: float) -> Iterator[None]:
    """Let the writer sleep after each piece of a file, so that it comes to `mb_s` at most."""
    pieces = format.safetensors_chunks

    def slow_pieces(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
        for piece in pieces(tensors):
            yield piece
            time.sleep(len(piece) / 1e6 / mb_s)

    with mock.patch.object(format, "safetensors_chunks", slow_pieces) if mb_s < math.inf else contextlib.nullcontext():
        yield


def longest_waits(snapshot: Snapshot, folder: Path) -> dict[str, float]:
    """Return how long a thread that wants to run again and again has to wait while the model is written, in seconds.

    That is the interpreter's lock, or a machine with too much to do: the same wait without a write is among them.
    """
    tensors = {name: each.detach().contiguous() for name, each in snapshot.tensors["model"].items()}
    works: dict[str, Callable[[], object]] = {
        "nothing": lambda: time.sleep(0.3),
        "tensorfile.write_file": lambda: tensorfile.write_hashed_file(
            folder / "a", tensorfile.safetensors_chunks(tensors)
        ),
        f"safetensors {safetensors.__version__} save_file": lambda: save_file(tensors, folder / "b"),
    }
    return {name: longest_wait_s(work) for name, work in works.items()}


def longest_wait_s(work: Callable[[], object]) -> float:
    """Return the longest that a thread which sleeps half a millisecond at a time was away, while `work` was done."""
    waits_s, is_over = [0.0], threading.Event()

    def watch() -> None:
        while not is_over.is_set():
            start_s = time.perf_counter()
            time.sleep(0.0005)
            waits_s.append(time.perf_counter() - start_s)

    watcher = threading.Thread(target=watch)
    watcher.start()
    time.sleep(0.05)
    waits_s.clear()
    work()
    time.sleep(0.001)  # a wait that ends with the work is counted too
    is_over.set()
    watcher.join()
    return round(max(waits_s, default=0.0), 6)


def summary(rounds: list[dict[str, Block]], batch_size: int) -> dict[str, Any]:
    """Return what a step takes without saves, and for each way what a save costs and the share of an epoch.

    Steps without a save are those of the same round, so that a slow drift of the machine's speed falls out.
    """
    step_s = [median(each[NONE].steps_s) for each in rounds]
    epoch_s = median(step_s) * math.ceil(EPOCH_IMAGES / batch_size)
    ways = {}
    for name in rounds[0]:
        blocks = [each[name] for each in rounds]
        extra_s = [
            each.stall_s + sum(each.steps_s) + each.late_s - len(each.steps_s) * alone_s
            for each, alone_s in zip(blocks, step_s, strict=True)
        ]
        cost_s = median(extra_s)
        ways[name] = {
            "stall": record.spread([each.stall_s for each in blocks]),
            "stall_in_steps": round(median([each.stall_s for each in blocks]) / median(step_s), 4),
            "late": record.spread([each.late_s for each in blocks]),
            "whole_cost": record.spread(extra_s),
            "share_of_epoch": round(cost_s / (epoch_s + cost_s), 6),
            "stall_share_of_epoch": round(median([each.stall_s for each in blocks]) / epoch_s, 6),
        }
    return {"step": record.spread(step_s), "epoch_s_extrapolated": round(epoch_s, 1), "ways": ways}


def median(values: Sequence[float]) -> float:
    """Return the median."""
    return float(np.median(values))


def table(result: dict[str, Any]) -> str:
    """Return the result as a person reads it."""
    config, machine = result["config"], result["machine"]
    lines = [
        f"ResNet-18 x {config['width']:g}, batch {config['batch_size']}, fp32, {config['threads']} threads of "
        f"{machine['cpu']}",
        f"checkpoint {config['checkpoint_bytes'] / 1e6:.1f} MB; slow disk {config['slow_mb_s']:g} MB/s",
        f"step {result['step']['median_s'] * 1e3:.1f} ms; an epoch would be {result['epoch_s_extrapolated']:,.0f} s",
    ]
    for name, facts in result["ways"].items():
        stall, cost = facts["stall"], facts["whole_cost"]
        lines.append(
            f"{name:22} stall {stall['median_s'] * 1e3:7.1f} ms ({facts['stall_in_steps']:.2f} steps, "
            f"{facts['stall_share_of_epoch']:.4%} of an epoch), whole cost {cost['median_s'] * 1e3:7.1f} ms "
            f"({cost['p10_s'] * 1e3:.0f} to {cost['p90_s'] * 1e3:.0f}, n {cost['n']}; {facts['share_of_epoch']:.3%})"
        )
    for name, wait_s in result["longest_wait_of_another_thread_s"].items():
        lines.append(f"another thread waits at most {wait_s * 1e3:.1f} ms for {name}")
    lines.append(f"load average {result['load_before']} before, {result['load_average'][0]} after")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
