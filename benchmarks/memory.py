"""How many bytes does a training step of ResNet-50 keep at its peak, and for what?

Each step is counted on fake tensors, which have shapes and storages but no data, so that 64 images take as long as one.
The storages of all operations are counted while they live, and those alive at the peak are sorted by kind. The count is
exact and repeatable. It does not see the workspaces of cuDNN and oneDNN, or an allocator's unused blocks.

`runs` compares the count with the peak resident memory of `paceline train` on the CPU:

    python benchmarks/memory.py --json benchmarks/results/memory.json
"""

import argparse
import contextlib
import copy
import json
import subprocess
import sys
import tempfile
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from record import provenance, write
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from paceline.models.build import build_model
from paceline.recipe.schema.model import Model

MODEL = "torchvision:resnet50"
NUM_CLASSES = 1000
RUN_CLASSES = 10  # of runs: the images of 1,000 synthetic classes would need memory of their own
KINDS = ("weights", "gradients", "optimizer", "activations", "weights_16_bit", "input", "other")


@dataclass(frozen=True)
class Step:
    """What a step computes: `batch` images in `accumulate` micro-batches."""

    batch: int
    accumulate: int = 1
    precision: str = "fp32"
    optimizer: str = "sgd"
    image_size: int = 224


BATCHES = tuple(Step(batch) for batch in (1, 2, 4, 8, 16, 32, 64))
VARIANTS = (
    Step(64, precision="bf16"),
    Step(64, accumulate=4),
    Step(64, accumulate=4, precision="bf16"),
    Step(64, image_size=160),
    Step(64, optimizer="adamw"),
)
RUNS = (Step(8), Step(32), Step(32, accumulate=4), Step(32, precision="bf16"))


class StorageCounter(TorchDispatchMode):
    """Count the bytes of all storages while they live; `kinds` sorts them by the number of each storage."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: dict[int, str] = {}
        self._live: dict[int, tuple[int, int]] = {}  # by address: number and bytes
        self._created = 0
        self._bytes = self._peak_bytes = 0
        self._at_peak: list[tuple[int, int]] = []

    def add(self, tensor: Tensor, kind: str = "") -> None:
        """Count the storage of `tensor`, if it is new; `kind` holds for good."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address not in self._live:
            self._created += 1
            self._live[address] = (self._created, storage.nbytes())
            self._bytes += storage.nbytes()
            weakref.finalize(storage, self._drop, address)
            if self._bytes > self._peak_bytes:
                self._peak_bytes, self._at_peak = self._bytes, list(self._live.values())
        if kind:
            self.kinds.setdefault(self._live[address][0], kind)

    def reset_peak(self) -> None:
        """Forget the peak so far."""
        self._peak_bytes, self._at_peak = self._bytes, list(self._live.values())

    def peak(self) -> dict[str, int]:
        """Return the bytes at the peak by kind."""
        found = Counter[str]()
        for number, num_bytes in self._at_peak:
            found[self.kinds.get(number, "other")] += num_bytes
        return {kind: found[kind] for kind in KINDS}

    def _drop(self, address: int) -> None:
        self._bytes -= self._live.pop(address)[1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count its outputs."""
        output = func(*args, **(kwargs or {}))
        # Autocast's copies of the weights, which it keeps until its context ends and backward needs until then.
        is_cast = func is torch.ops.aten._to_copy.default and isinstance(args[0], nn.Parameter)
        for tensor in tree_iter(output):
            if isinstance(tensor, Tensor):
                self.add(tensor, "weights_16_bit" if is_cast else "")
        return output


def count(step: Step, num_classes: int = NUM_CLASSES, *, is_fake: bool = True) -> dict[str, int]:
    """Return the bytes at the peak of a step by kind, of the second step, which has an optimizer state."""
    model = build_model(Model(name=MODEL), num_classes=num_classes, channels=3).to(memory_format=torch.channels_last)
    fake = FakeTensorMode()
    if is_fake:
        with FakeCopyMode(fake):
            model = copy.deepcopy(model)
    counter = StorageCounter()
    with fake if is_fake else contextlib.nullcontext(), counter:
        for tensor in (*model.parameters(), *model.buffers()):
            counter.add(tensor, "weights")
        train(model, step, counter)
    return counter.peak()


def train(model: nn.Module, step: Step, counter: StorageCounter) -> None:
    """Take two steps as paceline does, and name the kinds of their storages."""
    if step.optimizer == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, fused=True)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(2):
        counter.reset_peak()
        for _ in range(step.accumulate):
            images, labels = make_batch(step)
            counter.add(images, "input")
            with named_saved_tensors(counter), autocast(step):
                loss = functional.cross_entropy(model(images), labels) / step.accumulate
            loss.backward()
            del images, labels, loss
            for parameter in model.parameters():
                assert parameter.grad is not None
                counter.add(parameter.grad, "gradients")
        optimizer.step()
        for state in optimizer.state.values():
            for tensor in state.values():
                counter.add(tensor, "optimizer")
        optimizer.zero_grad(set_to_none=True)


def make_batch(step: Step) -> tuple[Tensor, Tensor]:
    """Return the images and labels of one micro-batch."""
    size = step.batch // step.accumulate
    images = torch.randn(size, 3, step.image_size, step.image_size).to(memory_format=torch.channels_last)
    return images, torch.zeros(size, dtype=torch.int64)


def autocast(step: Step) -> torch.autocast:
    """Return the autocast context of the step's precision."""
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=step.precision == "bf16")


@contextlib.contextmanager
def named_saved_tensors(counter: StorageCounter) -> Iterator[None]:
    """Name all that autograd saves for backward `activations`, unless it has a name."""

    def pack(tensor: Tensor) -> Tensor:
        counter.add(tensor, "activations")
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


def count_saved(*, is_compiled: bool) -> float:
    """Return the bytes per image that autograd saves for backward in float32, with or without torch.compile.

    The backend has the partitioner of the default one, which chooses what to save, and generates no code.
    """
    model = build_model(Model(name=MODEL), num_classes=NUM_CLASSES, channels=3).to(memory_format=torch.channels_last)
    forward = torch.compile(model, backend="aot_eager_decomp_partition") if is_compiled else model
    uncounted = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    images, labels = make_batch(Step(2))
    uncounted.add(images.untyped_storage()._cdata)
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        functional.cross_entropy(forward(images), labels)
    counted = [tensor.untyped_storage().nbytes() for address, tensor in saved.items() if address not in uncounted]
    return sum(counted) / len(images)


def run(step: Step) -> int:
    """Return the peak resident memory in bytes of `paceline train` with the same step."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "model.name": MODEL,
            "model.width": 1,
            "data.source.image_size": step.image_size,
            "data.source.num_classes": RUN_CLASSES,
            "data.source.num_images": 64,
            "data.source.num_val_images": 1,
            "data.batch_size": step.batch,
            "data.workers": 1,
            "train.accumulate": step.accumulate,
            "train.precision": step.precision,
            "train.steps": 2,
            "train.epochs": "auto",
            "train.eval_every": "off",
            "checkpoint.every": "off",
        }
        words = [f"{name}={value}" for name, value in settings.items()]
        command = [
            sys.executable,
            "-m",
            "paceline",
            "train",
            "synthetic",
            *words,
            "--run-dir",
            f"{folder}/run",
            "--json",
        ]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    return int(json.loads(output)["memory"]["host_bytes"])


def main() -> None:
    """Count all steps, run some of them, print, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    model = build_model(Model(name=MODEL), num_classes=NUM_CLASSES, channels=3)
    result: dict[str, Any] = {
        "unit": "bytes at the peak of a step",
        "model": MODEL,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }
    for name, steps in (("batches", BATCHES), ("variants", VARIANTS)):
        result[name] = []
        for step in steps:
            peak = count(step)
            result[name].append({**asdict(step), "peak": peak, "total": sum(peak.values())})
            kinds = "  ".join(f"{kind} {num_bytes / 1e6:.1f}" for kind, num_bytes in peak.items() if num_bytes)
            print(f"{step}: {sum(peak.values()) / 1e6:,.1f} MB: {kinds}", flush=True)
    result["real_tensors_equal"] = [step.batch for step in BATCHES[:2] if count(step, is_fake=False) == count(step)]
    print(f"real tensors give the same count at a batch of {result['real_tensors_equal']}", flush=True)
    saved = {name: count_saved(is_compiled=name == "compiled") for name in ("eager", "compiled")}
    result["saved_per_image"] = saved
    print("saved per image: " + ", ".join(f"{name} {saved[name] / 1e6:.1f} MB" for name in saved), flush=True)
    result["runs"] = []
    for step in RUNS:
        resident, counted = run(step), sum(count(step, RUN_CLASSES).values())
        result["runs"].append({**asdict(step), "counted": counted, "resident": resident})
        print(f"{step}: counted {counted / 1e6:,.1f} MB, resident {resident / 1e6:,.1f} MB", flush=True)
    if options.json:
        write(options.json, {**result, "provenance": provenance()})


if __name__ == "__main__":
    main()
