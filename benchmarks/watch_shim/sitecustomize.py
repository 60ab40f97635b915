"""Imported when Python starts, in the scripts of `watch_scripts.py` and `watch_causes.py`, observed or not.

It is on both sides of every comparison, and edits no script. Environment variables say what it does:

- `SHIM_OUT`: write the times of optimizer steps, and digests of all losses and of the last weights, to OUT-RANK.json.
- `SHIM_TURNS`: with it, take turns with another run of the script, step by step; FOLDER:OWN:OTHER are a folder of named
  pipes and the sides of both runs. The times then leave out the turns of the other.
- `SHIM_CPU`: let scripts that expect GPUs for several ranks use CPUs: gloo for NCCL, DDP without `device_ids`, and
  tensors on the host. `SHIM_MODEL` replaces models whose weights are to be downloaded.
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
import select
import sys
import time
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from paceline.watch.imports import AfterImport

MODULES = ("torch", "timm.models._factory", "torch.utils.tensorboard.writer", "safetensors.torch")
SEED = 0
TURN_LIMIT_S = 300


def after_import(module: ModuleType) -> None:
    """Change a module that was just imported as the environment says."""
    if module.__name__ == "timm.models._factory":
        use_model(module, os.environ.get("SHIM_MODEL"))
        return
    if module.__name__ == "torch":
        seed(module)
        if os.environ.get("SHIM_CPU"):
            use_cpu(module)
        if os.environ.get("SHIM_OUT"):
            Stopwatch(module, os.environ["SHIM_OUT"], os.environ.get("SHIM_TURNS"))
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


def use_model(factory: ModuleType, name: str | None) -> None:
    """Replace models of timm that have weights to download by the model `name` without any."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def create_model(asked: str, pretrained: bool = False, **kwargs: Any) -> Any:
            return original(name if pretrained and name else asked, pretrained=False, **kwargs)

        return create_model

    wrap(factory, "create_model", make)


class Stopwatch:
    """The times of optimizer steps, of a clock and of this process's CPUs, their losses and the optimizers."""

    def __init__(self, torch: Any, out: str, turns: str | None) -> None:
        self._out = Path(f"{out}-{rank()}.json")
        self._turns = Turns(*turns.split(":")) if turns else None
        self._waited_s = 0.0
        self._times_s: list[float] = []
        self._cpu_s: list[float] = []
        self._losses: list[Any] = []
        self._optimizers: dict[int, Any] = {}
        before(torch.Tensor, "backward", lambda loss, *args, **kwargs: self._losses.append(loss.detach().clone()))
        sys.modules["torch.optim.optimizer"].register_optimizer_step_post_hook(self._after_step)

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        now_s = time.perf_counter()
        self._times_s.append(now_s - self._waited_s)
        self._cpu_s.append(time.process_time())
        if id(optimizer) not in self._optimizers:
            self._optimizers[id(optimizer)] = optimizer
            if len(self._optimizers) == 1:
                atexit.register(self._write)
        if self._turns:
            self._turns.end()
            self._waited_s += time.perf_counter() - now_s

    def _write(self) -> None:
        groups = [group for each in self._optimizers.values() for group in each.param_groups]
        weights = [each.detach() for group in groups for each in group["params"]]
        times = {"times_s": self._times_s, "cpu_s": self._cpu_s}
        self._out.write_text(json.dumps({**times, "losses": digest(self._losses), "weights": digest(weights)}))


class Turns:
    """Turns of a rank with the same rank of another run: one trains a step while the other waits.

    Both run until their first step ends. Then the run whose side is sorted first has its turn.
    """

    def __init__(self, folder: str, own: str, other: str) -> None:
        self._own, self._other = (os.open(f"{folder}/{side}-{rank()}", os.O_RDWR) for side in (own, other))
        self._is_first, self._is_started = own < other, False

    def end(self) -> None:
        """Give the turn to the other run, and wait until it is given back."""
        if not self._is_started:
            atexit.register(self._give)
        if self._is_first or self._is_started:
            self._give()
        self._is_started = True
        if not select.select([self._own], [], [], TURN_LIMIT_S)[0]:
            raise TimeoutError(f"the other run took no turn within {TURN_LIMIT_S} s")
        os.read(self._own, 1)

    def _give(self) -> None:
        os.write(self._other, b"x")


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
