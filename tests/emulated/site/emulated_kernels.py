"""Kernels for a device in host memory: each computes with torch's CPU kernels, on the memory of the device.

A device tensor is viewed as a host tensor at the same address. During capture nothing is computed: sizes come from
torch's meta device, and the work is recorded for replays (runtime.cpp). Tensors of two devices in one kernel fail like
on a GPU, and so does synchronization within a capture.
"""

import atexit
import ctypes
import os
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from emulated_attention import SUBSTITUTES as ATTENTION
from emulated_batch_norm import SUBSTITUTES as BATCH_NORM
from torch import Tensor

SUBSTITUTES = {**ATTENTION, **BATCH_NORM}
LAYOUT = {
    *("empty.memory_format", "empty_strided", "as_strided", "view", "view.dtype", "_reshape_alias", "resize_"),
    *("unfold", "record_stream", "is_pinned", "_pin_memory", "_local_scalar_dense", "view_as_real", "view_as_complex"),
}
"""Operations that torch implements without a kernel, or by a copy alone."""
ALSO = ("aten::convolution", "aten::convolution_backward", "aten::copy_", "aten::embedding_dense_backward")
ELSEWHERE = ("set_", "cudnn", "_cudnn", "miopen")
WAITING = (
    *("nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount", "equal"),
    "repeat_interleave",
)
INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index")
"""With a mask, these first count its elements. Their indices may be on the host."""

_runtime: Any = None
_recorded: dict[int, Callable[[], None]] = {}
_library: Any = None
real_compile = torch.compile


def install() -> None:
    """Replace CUDA's kernels by those of the emulated device in this process."""
    global _runtime, _library
    _runtime = ctypes.CDLL(Path(os.environ["LD_PRELOAD"].partition(":")[0]).name)
    _runtime.emulated_replay_with(_replay)
    torch.backends.cudnn.enabled = False
    _library = torch.library.Library("aten", "IMPL")
    for full in sorted({*torch._C._dispatch_get_registrations_for_dispatch_key("CUDA"), *ALSO}):
        name = full.removeprefix("aten::")
        if name == full or name in LAYOUT or name.startswith(ELSEWHERE) or "sparse" in name or "nested" in name:
            continue
        packet, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
        op = SUBSTITUTES.get(name, op)
        if op is not None:
            _register(name, _copy if name == "copy_" else partial(_run, op))
    _compile_without_kernels()
    atexit.register(_runtime.emulated_ignored)


def _register(name: str, kernel: Callable[..., Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.11 warns of kernels that replace others
        _library.impl(name, kernel, "CUDA", allow_override=True)


def _compile_without_kernels() -> None:
    """Let torch.compile trace and check without generating code, because Triton's kernels would need the device."""

    def traced(model: Any = None, **options: Any) -> Any:
        return real_compile(model, **{**options, "backend": "aot_eager", "mode": None, "options": None})

    torch.compile = traced


class _Call:
    """One call of a kernel: its arguments as host tensors, and the conversion of its results."""

    def __init__(self, op: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.op = op
        self.origin: dict[int, Tensor] = {}
        self._kept: list[Tensor] = []
        self._devices: set[str] = set()
        name = _name(op)
        free = name == "copy_"
        self.args = [self._down(each, free=free or (name in INDEXING and isinstance(each, list))) for each in args]
        self.options = {key: self._down(each, free=free) for key, each in options.items() if key != "pin_memory"}
        if len(self._devices) > 1:
            raise RuntimeError(f"Expected all tensors to be on the same device, but {name} got {self._devices}")

    def _down(self, value: Any, *, free: bool) -> Any:
        """Return `value` for the host; tensors of any device are allowed if `free`."""
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if isinstance(value, torch.Generator):
            return None
        return _each(partial(self._tensor_down, free=free), value)

    def _tensor_down(self, tensor: Tensor, *, free: bool) -> Tensor:
        if tensor.dim() and tensor.numel() and not free:
            self._devices.add(tensor.device.type)
        if not tensor.is_cuda:
            return tensor
        return self.stands_for(_seen_by_host(tensor), tensor)

    def stands_for(self, tensor: Tensor, origin: Tensor) -> Tensor:
        """Record that `tensor` represents `origin` in results."""
        self.origin[id(tensor)] = origin
        self._kept.append(tensor)
        return tensor

    def compute(self) -> Any:
        """Compute on the host, in place."""
        return self.op(*self.args, **self.options)

    def sizes(self) -> Any:
        """Return the results without computing them, and leave the arguments unchanged."""
        metas: dict[int, Tensor] = {}

        def meta(tensor: Tensor) -> Tensor:
            if id(tensor) not in metas:
                made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
                origin = self.origin.get(id(tensor))
                metas[id(tensor)] = made if origin is None else self.stands_for(made, origin)
            return metas[id(tensor)]

        def moved(value: Any) -> Any:
            return torch.device("meta") if isinstance(value, torch.device) else _each(meta, value)

        try:
            return self.op(*map(moved, self.args), **{key: moved(each) for key, each in self.options.items()})
        except NotImplementedError:  # fused optimizers run on zeros, which no numeric argument can make fail
            zeros: dict[int, Tensor] = {}

            def zero(tensor: Tensor) -> Tensor:
                if id(tensor) not in zeros:
                    made = torch.zeros_like(tensor)
                    origin = self.origin.get(id(tensor))
                    zeros[id(tensor)] = made if origin is None else self.stands_for(made, origin)
                return zeros[id(tensor)]

            return self.op(*(_each(zero, each) for each in self.args), **_each_value(zero, self.options))


def _run(op: Any, *args: Any, **options: Any) -> Any:
    """Run a kernel, or record it if the current stream is captured."""
    name = _name(op)
    if name in WAITING or (name in INDEXING and any(_is_mask(each) for each in args[1])):
        torch.cuda.current_stream().synchronize()
    stream = ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(torch.cuda.current_device()))
    call = _Call(op, _as_declared(op, args), options)
    if not _runtime.emulated_captures(stream):
        _runtime.emulated_finish(stream)
        return _each(lambda tensor: _up(tensor, call, fills=True), call.compute())
    is_old: list[bool] = []

    def made(tensor: Tensor) -> Tensor:
        origin = call.origin.get(id(tensor))
        is_old.append(origin is not None and origin.shape == tensor.shape)
        return _up(tensor, call, fills=False)

    outputs = _each(made, call.sizes())
    targets = [None if old else _seen_by_host(tensor) for old, tensor in zip(is_old, _tensors(outputs), strict=True)]
    positions = [each is not None for each in _flat(outputs)]

    def again() -> None:
        computed = [each for each, holds in zip(_flat(call.compute()), positions, strict=True) if holds]
        for target, result in zip(targets, computed, strict=True):
            if target is not None:
                target.copy_(result)

    number = len(_recorded) + 1
    _recorded[number] = again
    _runtime.emulated_record(stream, ctypes.c_long(number))
    return outputs


def _as_declared(op: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return `args` with tensors in place of numbers that torch has converted for Python kernels."""
    kinds = [str(each.type) for each in op._schema.arguments] if hasattr(op, "_schema") else []
    numbers = [kind == "Tensor" and isinstance(each, int | float) for each, kind in zip(args, kinds, strict=False)]
    if not any(numbers):
        return args
    return tuple(torch.tensor(each) if number else each for each, number in zip_longest(args, numbers, fillvalue=False))


def _up(tensor: Tensor, call: _Call, *, fills: bool) -> Tensor:
    """Return the device tensor that `tensor` represents, or a new one."""
    made = call.origin.get(id(tensor))
    if made is not None and made.shape == tensor.shape:
        return made
    if made is None:
        made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cuda")
    else:
        made.resize_(tensor.shape)  # an `out` that the kernel has resized
    if fills:
        _seen_by_host(made).copy_(tensor)
    return made


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy like CUDA: by the runtime if layouts agree, otherwise by a kernel on the device."""
    op = torch.ops.aten.copy_.default
    if target.is_cuda and source.is_cuda:
        _run(op, target, source, non_blocking)
    elif target.dtype == source.dtype and target.shape == source.shape and _lie_alike(target, source):
        stream = torch.cuda.current_stream()
        size = ctypes.c_size_t(source.numel() * source.element_size())
        addresses = ctypes.c_void_p(target.data_ptr()), ctypes.c_void_p(source.data_ptr())
        error = _runtime.cudaMemcpyAsync(*addresses, size, 4, ctypes.c_void_p(stream.cuda_stream))
        if error:
            raise RuntimeError(f"CUDA error: a copy failed ({error})")
        if not non_blocking:
            stream.synchronize()
    elif target.is_cuda:
        there = torch.empty(source.shape, dtype=source.dtype, device="cuda")
        _copy(there, source.contiguous())
        _run(op, target, there, False)
    else:
        there = torch.empty(source.shape, dtype=source.dtype, device="cuda")
        _run(op, there, source, False)
        here = torch.empty(source.shape, dtype=source.dtype)
        _copy(here, there)
        target.copy_(here)
    return target


def _name(op: Any) -> str:
    """Return the name of an operation, without its overload."""
    return str(op._schema.name).removeprefix("aten::") if hasattr(op, "_schema") else str(op.__name__)


def _lie_alike(one: Tensor, other: Tensor) -> bool:
    return (one.is_contiguous() and other.is_contiguous()) or (one.stride() == other.stride() and _is_dense(one))


def _is_dense(tensor: Tensor) -> bool:
    size = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if length != 1 and stride != size:
            return False
        size *= length
    return True


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.is_cuda and index.dtype in (torch.bool, torch.uint8)


def _seen_by_host(tensor: Tensor) -> Tensor:
    """Return the host's view of a device tensor: the same bytes."""
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return torch.empty(0, dtype=tensor.dtype).as_strided(tensor.size(), tensor.stride())
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    same = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=tensor.dtype).set_(same, tensor.storage_offset(), tensor.size(), tensor.stride())


def _each(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)(_each(change, each) for each in value)
    return value


def _each_value(change: Callable[[Tensor], Tensor], values: dict[str, Any]) -> dict[str, Any]:
    return {key: _each(change, each) for key, each in values.items()}


def _flat(value: Any) -> Iterator[Tensor | None]:
    """Yield tensors, and None for each omitted argument."""
    if isinstance(value, list | tuple):
        for each in value:
            yield from _flat(each)
    elif value is None or isinstance(value, Tensor):
        yield value


def _tensors(value: Any) -> Iterator[Tensor]:
    yield from (each for each in _flat(value) if each is not None)


@ctypes.CFUNCTYPE(None, ctypes.c_long)
def _replay(number: int) -> None:
    try:
        with torch.no_grad():
            _recorded[number]()
    except BaseException:
        traceback.print_exc()
        os._exit(70)  # exceptions cannot propagate through the runtime
