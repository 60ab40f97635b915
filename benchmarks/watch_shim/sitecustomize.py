"""Imported when Python starts, in the scripts of `watch_scripts.py` and `watch_causes.py`, observed or not.

It is on both sides of every comparison, and edits no script. Environment variables say what it does:

- `SHIM_OUT`: write the times of optimizer steps, and digests of all losses and of the last weights, to OUT-RANK.json.
- `SHIM_SWITCH`: with it, in observed runs, switch the observation on and off from step to step, and write these times.
- `SHIM_CPU`: let scripts that expect GPUs for several ranks use CPUs: gloo for NCCL, DDP without `device_ids`, and
  tensors on the host. `SHIM_MODEL` replaces models whose weights are to be downloaded, and `SHIM_SIZE`, PIXELS:BATCH,
  sizes that a script has fixed.
- `SHIM_CAUSE`: plant a cause of slowness, NAME:SECONDS; `SHIM_RANK`: on that rank only.
"""

import atexit
import builtins
import functools
import hashlib
import importlib.util
import json
import logging
import os
import random
import sys
import time
import timeit
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from paceline.watch.imports import AfterImport

TRANSFORMS = "torchvision.transforms.transforms"
MODULES = ("torch", TRANSFORMS, "timm.models._factory", "torch.utils.tensorboard.writer", "safetensors.torch")
SEED = 0


def after_import(module: ModuleType) -> None:
    """Change a module that was just imported as the environment says."""
    if module.__name__ == "timm.models._factory":
        use_model(module, os.environ.get("SHIM_MODEL"))
        return
    if os.environ.get("SHIM_SIZE") and module.__name__ in ("torch", TRANSFORMS):
        use_size(module, *map(int, os.environ["SHIM_SIZE"].split(":")))
    if module.__name__ == "torch":
        seed(module)
        if os.environ.get("SHIM_CPU"):
            use_cpu(module)
        if os.environ.get("SHIM_OUT"):
            Stopwatch(module, os.environ["SHIM_OUT"], Switch(module) if os.environ.get("SHIM_SWITCH") else None)
    name, _, seconds = os.environ.get("SHIM_CAUSE", "").partition(":")
    if name and os.environ.get("SHIM_RANK", rank()) == rank():
        plant(module, name, float(seconds))


def rank() -> str:
    """Return the rank as torchrun gives it, "0" alone."""
    return os.environ.get("RANK", "0")


def wrap(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a function of `owner` by what `make` returns for it."""
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(make(original)))


def before(owner: Any, name: str, act: Callable[..., Any]) -> None:
    """Call `act` with the arguments of a function before each of its calls."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def acted(*args: Any, **kwargs: Any) -> Any:
            act(*args, **kwargs)
            return original(*args, **kwargs)

        return acted

    wrap(owner, name, make)


def seed(torch: Any) -> None:
    """Seed all generators: not every script does."""
    import numpy as np

    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)


def use_cpu(torch: Any) -> None:
    """Let a script for several GPUs run on CPUs."""
    torch.cuda.set_device = lambda device: None

    def on_gloo(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda backend=None, *args, **kwargs: original("gloo", *args, **kwargs)

    def without_devices(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, module, device_ids=None, **kwargs: original(self, module, **kwargs)

    def on_host(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, device=None, **kwargs: original(*args, **kwargs)

    wrap(torch.distributed, "init_process_group", on_gloo)
    wrap(torch.nn.parallel.DistributedDataParallel, "__init__", without_devices)
    wrap(torch, "tensor", on_host)


def use_size(module: ModuleType, pixels: int, batch: int) -> None:
    """Replace the size of images in transforms, and that of batches in loaders."""

    def with_pixels(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, size, *args, **kwargs: original(self, (pixels, pixels), *args, **kwargs)

    def with_batch(original: Callable[..., Any]) -> Callable[..., Any]:
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            original(self, *args, **{**kwargs, **({"batch_size": batch} if "batch_size" in kwargs else {})})

        return __init__

    if module.__name__ == TRANSFORMS:
        wrap(module.RandomResizedCrop, "__init__", with_pixels)
        wrap(module.Resize, "__init__", with_pixels)
    else:
        wrap(module.utils.data.DataLoader, "__init__", with_batch)


def use_model(factory: ModuleType, name: str | None) -> None:
    """Replace models of timm that have weights to download by the model `name` without any."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def create_model(asked: str, pretrained: bool = False, **kwargs: Any) -> Any:
            return original(name if pretrained and name else asked, pretrained=False, **kwargs)

        return create_model

    wrap(factory, "create_model", make)


class Stopwatch:
    """The times of optimizer steps, of a clock and of this process's CPUs, their losses and the optimizers."""

    def __init__(self, torch: Any, out: str, switch: "Switch | None") -> None:
        self._out = Path(f"{out}-{rank()}.json")
        self._switch = switch
        self._times_s: list[float] = []
        self._cpu_s: list[float] = []
        self._losses: list[Any] = []
        self._optimizers: dict[int, Any] = {}
        before(torch.Tensor, "backward", lambda loss, *args, **kwargs: self._losses.append(loss.detach().clone()))
        sys.modules["torch.optim.optimizer"].register_optimizer_step_post_hook(self._after_step)

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._times_s.append(time.perf_counter())
        self._cpu_s.append(time.process_time())
        if id(optimizer) not in self._optimizers:
            self._optimizers[id(optimizer)] = optimizer
            if len(self._optimizers) == 1:
                atexit.register(self._write)

    def _write(self) -> None:
        groups = [group for each in self._optimizers.values() for group in each.param_groups]
        weights = [each.detach() for group in groups for each in group["params"]]
        times = {"times_s": self._times_s, "cpu_s": self._cpu_s}
        digests = {"losses": digest(self._losses), "weights": digest(weights)}
        switched = {"switched": self._switch.summary()} if self._switch else {}
        self._out.write_text(json.dumps({**times, **digests, **switched}))


class Switch:
    """Observe one step of each two, the first or the second at random, and time both.

    The functions of torch stay replaced in the others, and only pass calls on. `summary` has what that costs.
    """

    def __init__(self, torch: Any) -> None:
        self._torch, self._random = torch, random.Random(SEED)
        self._times_s: list[float] = []
        self._cpu_s: list[float] = []
        self._is_on = [True]  # of each step, and of the next
        self._num_calls = 0  # of modules in the second step
        self._counter: Any = None
        self._timer: Any = None
        wrap(sys.modules["paceline.watch.step_timer"].StepTimer, "end_optimizer", self._make)

    def _make(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def end_optimizer(timer: Any, optimizer: int) -> None:
            original(timer, optimizer)
            self._times_s.append(time.perf_counter())
            self._cpu_s.append(time.process_time())
            number = len(self._times_s)
            self._is_on.append(not self._is_on[-1] if number % 2 else self._random.random() < 0.5)
            self._timer, timer.is_on = timer, self._is_on[-1]
            if number == 1:
                hooks = self._torch.nn.modules.module
                self._counter = hooks.register_module_forward_pre_hook(self._count)
            elif number == 2:
                self._counter.remove()

        return end_optimizer

    def _count(self, module: Any, args: Any) -> None:
        self._num_calls += module.training

    def summary(self) -> dict[str, Any]:
        """Return the times of all steps' ends, which were observed, and the seconds per step that passing on takes."""
        module, replaced = self._torch.nn.Identity(), self._torch.nn.Module.__call__
        self._timer.is_on = False
        with_s, without_s = (
            min(timeit.repeat(functools.partial(call, module, 0), number=1000)) / 1000
            for call in (replaced, replaced.__wrapped__)
        )
        self._timer.is_on = True
        return {
            "times_s": self._times_s,
            "cpu_s": self._cpu_s,
            "is_on": self._is_on[:-1],
            "pass_on_s": self._num_calls * (with_s - without_s),
        }


def digest(tensors: list[Any]) -> str:
    """Return the SHA-256 of the bytes of tensors, one after the other."""
    return hashlib.sha256(b"".join(each.cpu().contiguous().numpy().tobytes() for each in tensors)).hexdigest()


def plant(module: ModuleType, cause: str, seconds: float) -> None:
    """Plant a cause in a module that was just imported."""
    match module.__name__, cause:
        case "torch", "load" | "augment":
            work = time.sleep if cause == "load" else spin
            fetcher = sys.modules["torch.utils.data._utils.fetch"]._MapDatasetFetcher
            before(fetcher, "fetch", lambda self, indices: work(seconds * len(indices)))
        case "torch", "prepare":
            before(module.Tensor, "to", lambda tensor, *args, **kwargs: spin(seconds * (tensor.dim() == 4)))
        case "torch", "forward" | "backward" | "evaluate":
            plant_in_model(module, cause, seconds)
        case "torch", "log":
            before(builtins, "print", lambda *args, **kwargs: time.sleep(seconds))
            before(logging.StreamHandler, "emit", lambda *args: time.sleep(seconds))
        case "torch.utils.tensorboard.writer", "log":
            before(module.SummaryWriter, "add_scalar", lambda *args, **kwargs: time.sleep(seconds))
        case "torch", "checkpoint":
            before(sys.modules["torch.serialization"], "_save", lambda *args, **kwargs: time.sleep(seconds))
        case "safetensors.torch", "checkpoint":
            before(module, "serialize_file", lambda *args, **kwargs: time.sleep(seconds))
        case "torch", "copy":
            before(module.Tensor, "to", lambda tensor, *args, **kwargs: time.sleep(seconds * (tensor.dim() == 4)))
        case "torch", "item":
            before(module.Tensor, "item", lambda tensor: time.sleep(seconds * tensor.is_cuda))  # not in loader workers


def plant_in_model(torch: Any, cause: str, seconds: float) -> None:
    """Make linear layers wait: in a training forward, in backward, or in an evaluation."""

    def hook(layer: Any, inputs: Any, output: Any) -> None:
        if not isinstance(layer, torch.nn.Linear) or torch.is_grad_enabled() == (cause == "evaluate"):
            return
        if cause == "backward":
            if output.requires_grad:
                output.register_hook(lambda gradient: time.sleep(seconds))
        elif layer.training == (cause == "forward"):
            time.sleep(seconds)

    torch.nn.modules.module.register_module_forward_hook(hook)


def spin(seconds: float) -> None:
    """Compute for some seconds of this thread's CPU time."""
    end_s = time.thread_time() + seconds
    while time.thread_time() < end_s:
        pass


def run_hidden() -> None:
    """Run the `sitecustomize` that this one hides, as that of the emulated GPU."""
    hiding = (str(Path(__file__).parent), "watch/inject")
    spec = PathFinder.find_spec("sitecustomize", [path for path in sys.path if not path.endswith(hiding)])
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


run_hidden()
sys.meta_path.insert(0, AfterImport(MODULES, after_import))
