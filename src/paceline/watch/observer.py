"""Observe training in a process that did not ask for it: replace functions of torch by ones that time the same calls.

No replaced function changes an argument, a result or a random number, except by requested patches, and none waits for
a GPU. If the observer fails, it stops timing and leaves a note. Nothing here imports torch before the script does.
"""

import atexit
import contextlib
import functools
import json
import multiprocessing.util
import os
import socket
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, ValuesView
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, Final, cast, final

from paceline.core.stages import DATA_WAIT, EXPOSED, SYNC
from paceline.watch.device_events import DeviceEvents
from paceline.watch.imports import AfterImport
from paceline.watch.losses import LossRecorder
from paceline.watch.patches import ScriptPatches
from paceline.watch.record_writer import RecordWriter
from paceline.watch.setup import SetupRecorder
from paceline.watch.step_timer import H2D, Step, StepTimer
from paceline.watch.targets import ALIASES, FRAMEWORKS, MOVES, PAUSES, READS, TARGETS

FORMAT: Final = 1
_BATCH_DEPTH: Final = 3
Function = Callable[..., Any]


def install() -> AfterImport:
    """Observe this process once it imports torch, and return the finder that waits for this.

    The folder for records is the environment variable `PACELINE_WATCH_DIR`; with `PACELINE_WATCH_LOSSES` they have
    losses. `PACELINE_WATCH_PATCHES` has changes of the script as JSON.
    """
    keeps_losses = bool(os.environ.get("PACELINE_WATCH_LOSSES"))
    folder = Path(os.environ["PACELINE_WATCH_DIR"])
    patches = ScriptPatches(json.loads(os.environ.get("PACELINE_WATCH_PATCHES") or "{}"), folder)
    observer = Observer(folder, keeps_losses=keeps_losses, patches=patches)
    names = {"torch", "PIL.Image", *TARGETS, *(name for each in ALIASES.values() for name in each)}
    finder = AfterImport(names, observer.patch)
    sys.meta_path.insert(0, finder)
    return finder


@final
class Observer:
    """The replaced functions of one process, their timer and their records."""

    def __init__(self, folder: Path, *, keeps_losses: bool, patches: ScriptPatches) -> None:
        self._folder = folder
        self._patches = patches
        self._keeps_losses = keeps_losses
        self._torch: Any = None
        self._skip_code: Callable[[CodeType], None]
        self._device: DeviceEvents | None = None
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()  # modules that have trained
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # of loaders and iterators
        self._num_loaders = 0
        self._framework: str | None = None
        self._begin_anew(_process_start_s())
        os.register_at_fork(after_in_child=self._after_fork)

    def _begin_anew(self, started_s: float) -> None:
        self._started_s = started_s
        self._writer = RecordWriter(self._folder)
        self._is_known_process = False
        self._written_outcomes: dict[str, str] = {}
        self._losses = LossRecorder() if self._keeps_losses else None
        self._setup = SetupRecorder()
        self.timer = StepTimer(started_s, self._write_step)

    def _after_fork(self) -> None:
        """Forget the parent's steps: a child has its own, if it trains at all."""
        is_on = self.timer.is_on
        self._device = None
        self._begin_anew(time.perf_counter())
        self.timer.is_on = is_on

    # Replacing functions

    def patch(self, module: ModuleType) -> None:
        """Replace functions of a module that was just imported."""
        try:
            if module.__name__ == "torch" and self._torch is None:  # another finder may run its loader twice
                self._patch_torch(module)
                for name in TARGETS:
                    self._patch_targets(name)
            elif module.__name__ == "PIL.Image":
                self._patches.patch_pillow()
            elif self._torch is not None:
                self._patch_targets(module.__name__)
        except Exception as error:
            self._fail(error)

    def _patch_targets(self, name: str) -> None:
        for source in (name, *(source for source, aliases in ALIASES.items() if name in aliases)):
            module = sys.modules.get(source)
            if module is None:
                continue
            for path, stage in TARGETS.get(source, ()):
                make = self._paused if stage in PAUSES else self._timed
                owners = [sys.modules[alias] for alias in ALIASES.get(source, ()) if alias in sys.modules]
                self._replace([module, *owners], path, functools.partial(make, stage))

    def _replace(self, modules: list[Any], path: str, make: Callable[[Function], Function]) -> None:
        """Replace the function `path` of the first module, and the same function in the others."""
        *parents, name = path.split(".")
        owners = [functools.reduce(lambda owner, each: getattr(owner, each, None), parents, one) for one in modules]
        owner = owners[0]
        found = None if owner is None else vars(owner).get(name)
        if not callable(found):
            return
        wrapper: Any = found if hasattr(found, "__paceline_watch__") else self._wrap(found, make)
        original = wrapper.__paceline_watch__
        for each in owners:
            if each is not None and vars(each).get(name) is original:
                setattr(each, name, wrapper)

    def _wrap(self, original: Function, make: Callable[[Function], Function]) -> Function:
        wrapper: Any = functools.wraps(original)(make(original))
        wrapper.__paceline_watch__ = original
        self._skip_code(wrapper.__code__)
        return cast(Function, wrapper)

    def _timed(self, stage: str, original: Function) -> Function:
        is_compiling, begin, end = self._torch.compiler.is_compiling, self._begin_stage, self._end_stage

        def timed(*args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return original(*args, **kwargs)
            previous = begin(stage)
            if previous is None:
                return original(*args, **kwargs)
            try:
                return original(*args, **kwargs)
            finally:
                end(previous)

        return timed

    def _paused(self, name: str, original: Function) -> Function:
        def paused(*args: Any, **kwargs: Any) -> Any:
            if not self._try(self.timer.begin_pause, name):
                return original(*args, **kwargs)
            try:
                return original(*args, **kwargs)
            finally:
                self._try(self.timer.end_pause)

        return paused

    def _patch_torch(self, torch: Any) -> None:
        self._torch = torch
        # torch.compile must not compile frames of the observer, but those that they call.
        self._skip_code = _find_skip_code(torch._C._dynamo.eval_frame)
        for code in _own_code():
            self._skip_code(code)
        data = torch.utils.data
        self._replace([torch.autograd], "backward", self._backward)
        self._replace([torch.nn.Module], "__call__", self._forward)
        self._replace([data.DataLoader], "__iter__", self._loader_iter)
        self._replace([data.dataloader._BaseDataLoaderIter], "__next__", self._loader_next)
        self._replace([data._utils.worker], "_worker_loop", self._worker_loop)
        if torch.distributed.is_available():
            work = torch._C._distributed_c10d.Work
            self._replace([work], "wait", functools.partial(self._timed, EXPOSED))
        is_compiling = torch.compiler.is_compiling

        def before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
            if not is_compiling():
                self._try(self.timer.begin_optimizer, id(optimizer))

        def after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
            if not is_compiling():
                self._try(self.timer.end_optimizer, id(optimizer))
                if self._framework is None:
                    self._try(self._follow_first_step, optimizer)

        for hook in (before_step, after_step):
            self._skip_code(hook.__code__)
        optimizer = sys.modules["torch.optim.optimizer"]  # torch.optim deletes the name
        optimizer.register_optimizer_step_pre_hook(before_step)
        optimizer.register_optimizer_step_post_hook(after_step)
        self._patches.patch_torch(torch)

    def _follow_first_step(self, optimizer: Any) -> None:
        """Learn what is known only once a step was taken."""
        self._setup.see_optimizer(optimizer)
        self._framework = _find_framework()
        self._patches.patch_model(self._known)
        torch = self._torch
        if not torch.cuda.is_initialized():
            return  # on a CPU nothing is copied, and no value is waited for
        self._device = DeviceEvents(
            functools.partial(torch.cuda.Event, enable_timing=True), torch.cuda.is_current_stream_capturing
        )
        self.timer.device = self._device
        for name in MOVES:
            self._replace_inherited(torch.Tensor, name, self._move)
        for name in READS:
            self._replace_inherited(torch.Tensor, name, self._read)
        self._replace([torch.cuda], "synchronize", functools.partial(self._timed, SYNC))

    def _replace_inherited(self, owner: Any, name: str, make: Callable[[Function], Function]) -> None:
        original = getattr(owner, name, None)
        if original is not None:
            setattr(owner, name, self._wrap(original, make))

    # Replaced functions

    def _forward(self, original: Function) -> Function:
        is_compiling, is_grad_enabled = self._torch.compiler.is_compiling, self._torch.is_grad_enabled

        def forward(module: Any, /, *args: Any, **kwargs: Any) -> Any:
            timer = self.timer
            if timer.in_forward or not timer.is_on or is_compiling() or not timer.takes_forward:
                return original(module, *args, **kwargs)
            has_gradients = is_grad_enabled()
            stage = self._try(self._begin_forward, module, has_gradients=has_gradients)
            if stage is None:
                return original(module, *args, **kwargs)
            timer.in_forward = True
            try:
                return original(module, *args, **kwargs)
            finally:
                timer.in_forward = False
                self._try(timer.end_forward, stage, has_gradients=has_gradients)
                if has_gradients:
                    self._try(self._remember, module)

        return forward

    def _begin_forward(self, module: Any, *, has_gradients: bool) -> str | None:
        if not _has_parameters(module):
            return None
        is_training = module.training
        is_known = not is_training and module in self._known
        return self.timer.begin_forward(is_training=is_training, has_gradients=has_gradients, is_known=is_known)

    def _remember(self, module: Any) -> None:
        if module.training and module not in self._known:
            self._setup.see_forward(self._torch)
            # Evaluations may use the module inside of a wrapper.
            inside = (getattr(module, name, None) for name in ("module", "_orig_mod", "_fsdp_wrapped_module"))
            self._known.update(each for each in (module, *inside) if isinstance(each, self._torch.nn.Module))

    def _backward(self, original: Function) -> Function:
        torch = self._torch
        is_compiling = torch.compiler.is_compiling

        def backward(*args: Any, **kwargs: Any) -> Any:
            if is_compiling() or not self._try(self.timer.begin_backward):
                return original(*args, **kwargs)
            tensors = args[0] if args else kwargs.get("tensors")
            if self._losses is not None:
                with contextlib.suppress(Exception):  # the times count without losses
                    self._losses.add(torch, tensors)
            hook = self._try(self._mark_gradients_in, tensors)
            hooks = self._try(self._patches.begin_backward, tensors)
            try:
                return original(*args, **kwargs)
            finally:
                if hook is not None:
                    hook.remove()
                self._try(self._patches.end_backward, hooks or [])
                self._try(self.timer.end_backward)

        return backward

    def _mark_gradients_in(self, tensors: Any) -> Any:
        """Have the engine tell when all gradients of this rank are computed; return the hook to remove afterwards."""
        torch = self._torch
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return None
        # Not the first of any iterable: an iterator would lose it.
        first = tensors[0] if isinstance(tensors, list | tuple) and tensors else tensors
        if not isinstance(first, torch.Tensor) or not first.requires_grad:
            return None
        engine, mark = (
            torch.autograd.Variable._execution_engine,
            functools.partial(self._try, self.timer.mark_gradients),
        )

        def queue(gradient: Any) -> None:
            # DDP queues its wait for the all-reduces when its last bucket is full: after this callback.
            engine.queue_callback(mark)

        return first.register_hook(queue)

    def _loader_iter(self, original: Function) -> Function:
        def __iter__(loader: Any) -> Any:  # noqa: N807
            number = self._try(self._number_of, loader)
            if number is None or not self._try(self.timer.begin_loader, number):
                iterator = original(loader)
            else:
                try:
                    iterator = original(loader)
                finally:
                    self._try(self.timer.end_loader, number)
            self._try(self._number_iterator, iterator, number)
            return iterator

        return __iter__

    def _number_of(self, loader: Any) -> int:
        number = self._numbers.get(loader)
        if number is None:
            self._numbers[loader] = number = self._num_loaders
            self._num_loaders += 1
        return number

    def _number_iterator(self, iterator: Any, number: int) -> None:
        with contextlib.suppress(TypeError):  # the iterator of a subclass may have no weak references
            self._numbers[iterator] = number

    def _loader_next(self, original: Function) -> Function:
        def __next__(iterator: Any) -> Any:  # noqa: N807
            number = self._try(self._numbers.get, iterator)
            if not self._try(self.timer.begin_wait, number, is_first=not getattr(iterator, "_num_yielded", True)):
                return original(iterator)
            try:
                batch = original(iterator)
            except BaseException as error:
                self._try(self.timer.end_wait, number, 0, is_end=isinstance(error, StopIteration))
                raise
            shape = _find_shape(batch)
            self._try(self.timer.end_wait, number, shape[0] if shape else 0, is_end=False)
            self._setup.see_batch(shape)
            return batch

        return __next__

    def _worker_loop(self, original: Function) -> Function:
        def _worker_loop(*args: Any, **kwargs: Any) -> Any:
            self.timer.is_on = False  # a worker loads batches, and its transforms may be modules
            return original(*args, **kwargs)

        return _worker_loop

    def _move(self, original: Function) -> Function:
        is_compiling, is_copy = self._torch.compiler.is_compiling, original.__name__ == "copy_"

        def move(tensor: Any, /, *args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return original(tensor, *args, **kwargs)
            source = args[0] if is_copy and args else tensor
            was_on_gpu = getattr(source, "is_cuda", False)
            previous = self._begin_stage(SYNC if was_on_gpu else H2D)
            if previous is None:
                return original(tensor, *args, **kwargs)
            has_moved = False
            try:
                result = original(tensor, *args, **kwargs)
                has_moved = getattr(result, "is_cuda", was_on_gpu) != was_on_gpu
                return result
            finally:
                self._end_stage(previous, charge_to_it=not has_moved)

        return move

    def _read(self, original: Function) -> Function:
        is_compiling, begin, end = self._torch.compiler.is_compiling, self._begin_stage, self._end_stage

        def read(tensor: Any, /, *args: Any, **kwargs: Any) -> Any:
            if is_compiling() or not tensor.is_cuda:
                return original(tensor, *args, **kwargs)
            previous = begin(SYNC)
            if previous is None:
                return original(tensor, *args, **kwargs)
            try:
                return original(tensor, *args, **kwargs)
            finally:
                end(previous)

        return read

    # Failures

    def _begin_stage(self, stage: str) -> str | None:
        try:
            return self.timer.begin_stage(stage)
        except Exception as error:
            self._fail(error)
            return None

    def _end_stage(self, stage: str, *, charge_to_it: bool = False) -> None:
        try:
            self.timer.end_stage(stage, charge_to_it=charge_to_it)
        except Exception as error:
            self._fail(error)

    def _try(self, call: Function, *args: Any, **kwargs: Any) -> Any:
        """Return the result of `call`, or None after a failure."""
        try:
            return call(*args, **kwargs)
        except Exception as error:
            self._fail(error)
            return None

    def _fail(self, error: Exception) -> None:
        """Stop observing, and say so in a record if that is still possible."""
        if not self.timer.is_on:
            return
        self.timer.is_on = False
        try:
            self._note(f"the observer stopped after an error: {error!r}")
            self._writer.flush()
        except Exception:
            return

    # Records

    def _write_step(self, step: Step) -> None:
        if not self._is_known_process:
            self._is_known_process = True
            self._writer.add(self._describe_process())
            self._add_setup(step)
            self._add_first_notes(step)
            if multiprocessing.parent_process() is None:
                atexit.register(self._finish, self._writer)
            else:  # a forked child of multiprocessing skips atexit
                multiprocessing.util.Finalize(None, self._finish, (self._writer,), exitpriority=100)
        self._add_pauses(step.pauses)
        is_due = self._writer.is_due
        self._writer.add(
            {
                "kind": "step",
                "n": step.n,
                "start_s": step.start_s,
                "end_s": step.end_s,
                "stages": step.stages,
                "samples": step.samples or None,
                "micro_batches": step.micro_batches,
                "memory": self._torch.cuda.max_memory_allocated() if is_due and self._device is not None else None,
                "loader": step.loader,
            }
        )
        self._add_device_stages()
        outcomes = self._patches.outcomes
        if outcomes != self._written_outcomes:
            self._writer.add({"kind": "patches", "outcomes": outcomes})
            self._written_outcomes = outcomes
        if self._losses is not None:
            self._losses.end_step(step.n)
            self._add_losses(self._losses)
        if is_due:
            self._writer.flush()

    def _add_pauses(self, pauses: list[tuple[str, float, float]]) -> None:
        for name, start_s, end_s in pauses:
            self._writer.add({"kind": "pause", "name": name, "start_s": start_s, "end_s": end_s})

    def _add_device_stages(self) -> None:
        if self._device is not None:
            for n, stages in self._device.read_completed():
                self._writer.add({"kind": "device", "n": n, "stages": stages})

    def _add_losses(self, losses: LossRecorder) -> None:
        for n, loss in losses.read_completed():
            self._writer.add({"kind": "loss", "n": n, "loss": loss})  # JSON has all digits of a float

    def _note(self, text: str) -> None:
        self._writer.add({"kind": "note", "text": text})

    def _add_setup(self, first: Step) -> None:
        loaders = [each for each in list(self._numbers) if isinstance(each, self._torch.utils.data.DataLoader)]
        loaders.sort(key=lambda each: self._numbers[each] != first.loader)
        with contextlib.suppress(Exception):  # the times count without it
            values = self._setup.describe(
                self._torch, os.environ, loaders, list(self._known), micro_batches=first.micro_batches
            )
            self._writer.add({"kind": "setup", "values": values})

    def _describe_process(self) -> dict[str, Any]:
        torch = self._torch
        rank, world_size = (_integer(os.environ.get(name)) for name in ("RANK", "WORLD_SIZE"))
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        return {
            "kind": "process",
            "format": FORMAT,
            "pid": os.getpid(),
            "ppid": os.getppid(),
            "host": socket.gethostname(),
            "rank": rank,
            "local_rank": _integer(os.environ.get("LOCAL_RANK")),
            "world_size": world_size,
            "python": sys.version.split()[0],
            "torch": str(torch.__version__),
            "unix_s": time.time(),
            "clock_s": time.perf_counter(),
            "started_s": self._started_s,
            "framework": self._framework or "",
            "threads": torch.get_num_threads(),
        }

    def _add_first_notes(self, first: Step) -> None:
        # FSDP may wrap parts of the module that is called.
        kinds = {type(each).__name__ for module in list(self._known) for each in module.modules()}
        if any("FullyShardedDataParallel" in kind or kind.startswith("FSDP") for kind in kinds):
            self._note("FSDP: the waits for all-gathers and reduce-scatters are part of forward and backward")
        if self._framework == "transformers" or (self._framework == "lightning" and "DistributedDataParallel" in kinds):
            self._note("the model computes its loss, which is part of forward")
        if not self.timer.has_seen_backward:
            self._note("no backward seen: it is part of other stages")
        if not self._num_loaders and DATA_WAIT not in first.stages:
            self._note("no DataLoader seen: the wait for data is part of other")
        if not self._known:
            self._note("no forward of a module seen: it is part of other stages")

    def _finish(self, writer: RecordWriter) -> None:
        """Write what is left when the process ends."""
        if writer is not self._writer:  # another process inherited this by a fork
            return
        try:
            if self.timer.is_on:
                self._add_pauses(self.timer.finish())
                self._add_device_stages()
                if self._losses is not None:
                    self._add_losses(self._losses)
            self._writer.add({"kind": "end", "end_s": time.perf_counter(), "steps": self.timer.num_steps})
            self._writer.flush()
        except Exception as error:
            self._fail(error)


def _find_skip_code(eval_frame: Any) -> Callable[[CodeType], None]:
    """Return the function that makes torch.compile skip a frame, but not those it calls, without importing Dynamo."""
    if hasattr(eval_frame, "skip_code"):  # before torch 2.7
        return cast(Callable[[CodeType], None], eval_frame.skip_code)
    actions = eval_frame._FrameAction
    strategy = eval_frame._FrameExecStrategy(actions.SKIP, actions.DEFAULT)
    return lambda code: eval_frame.set_code_exec_strategy(code, strategy)


def _own_code() -> Iterator[CodeType]:
    """Yield the code of all functions that run within the replaced ones."""
    for owner in (sys.modules[__name__], Observer, StepTimer, DeviceEvents, LossRecorder, RecordWriter, SetupRecorder):
        for value in vars(owner).values():
            function = value.fget if isinstance(value, property) else value
            if isinstance(function, FunctionType):
                yield function.__code__


def _has_parameters(module: Any) -> bool:
    """Return whether a module has parameters; others, as losses and transforms, are no models."""
    try:
        return next(iter(module.parameters()), None) is not None
    except Exception:  # it may define `parameters` in another way
        return True


def _find_shape(batch: Any, depth: int = _BATCH_DEPTH) -> tuple[int, ...]:
    """Return the shape of the first tensor of a batch that is not empty; () without one or of another kind."""
    try:
        shape = getattr(batch, "shape", None)
        if shape is not None:
            return tuple(map(int, shape)) if len(shape) and shape[0] else ()
        parts = batch.values() if isinstance(batch, Mapping) else batch
        if depth == 0 or not isinstance(parts, list | tuple | ValuesView):
            return ()
        return next((found for each in parts if (found := _find_shape(each, depth - 1))), ())
    except Exception:
        return ()


def _find_framework() -> str:
    """Return the framework among the callers of the first optimizer step, "" for plain PyTorch."""
    names = set()
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        names.add(str(frame.f_globals.get("__name__", "")))
        frame = frame.f_back
    for start, framework in FRAMEWORKS.items():
        if any(name == start or name.startswith(f"{start}.") for name in names):
            return framework
    script = sys.modules.get("__main__")
    uses_timm = "timm" in sys.modules and any(
        # By type alone: asking another object for an attribute may run code of the script.
        type(value) is FunctionType and str(value.__module__).startswith("timm.data")
        for value in list(vars(script).values())
    )
    return "timm" if uses_timm else ""


def _integer(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None


def _process_start_s() -> float:
    """Return when this process started, as seconds of `time.perf_counter`; now where /proc does not tell."""
    now_s = time.perf_counter()
    try:
        # proc(5): field 22 is the start in ticks since boot; field 2, in parentheses, may contain spaces.
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return now_s
    return now_s - max(0.0, age_s)
