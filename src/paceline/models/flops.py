"""Count the FLOPs, parameters and memory traffic of a model per image, on the meta device."""

import copy
from dataclasses import dataclass
from math import fsum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

aten = torch.ops.aten
# Torch counts FLOPs (`FlopCounterMode`: matrix products, convolutions and attention, 2 FLOP per multiply-add). Memory
# traffic is modeled for fused kernels:
# - A product or convolution reads its inputs and writes its output; its backward does so twice, for the gradients of
#   input and weights.
# - A norm takes two passes each way, as its statistics need the whole batch (Ioffe and Szegedy 2015, arXiv 1502.03167):
#   forward reads twice and writes once, backward reads two tensors twice and writes once.
# - Pointwise operations (ReLU, GELU, scaling) are fused into their neighbors; a sum or product of two activations reads
#   the smaller one once more, and so does gradient accumulation.
# - Views move nothing; everything else (pooling, concatenation, softmax) reads its inputs and writes its outputs.
# Weights and the optimizer are left out: they are moved once per batch, not per image. No data stays in a cache between
# two kernels.
_NORM_PASSES = {
    aten.native_batch_norm: 3,
    aten._native_batch_norm_legit: 3,
    aten._batch_norm_with_update: 3,
    aten.native_group_norm: 3,
    aten.native_layer_norm: 3,
    aten.native_batch_norm_backward: 5,
    aten.batch_norm_backward: 5,
    aten.native_group_norm_backward: 5,
    aten.native_layer_norm_backward: 5,
}
_NO_TRAFFIC_OPS = (aten._unsafe_view, aten.empty_like, aten.empty, aten.new_empty)


class KernelCost(NamedTuple):
    """FLOPs of one kernel, and the elements it reads and writes, per image."""

    flops: float
    elements: float


@dataclass(frozen=True)
class ModelCost:
    """Parameters of a model, and its kernels per image: `forward`, and `training` (forward and backward)."""

    params: int
    forward: tuple[KernelCost, ...]
    training: tuple[KernelCost, ...]

    @property
    def forward_flops(self) -> float:
        """FLOPs of the forward pass."""
        return fsum(kernel.flops for kernel in self.forward)

    @property
    def training_flops(self) -> float:
        """FLOPs of the forward and backward pass."""
        return fsum(kernel.flops for kernel in self.training)

    @property
    def training_elements(self) -> float:
        """Elements moved in forward and backward; multiply by 2 bytes in bf16 or 4 in fp32."""
        return fsum(kernel.elements for kernel in self.training)


def count_cost(model: nn.Module, channels: int, height: int, width: int) -> ModelCost:
    """Return the cost of `model` in training for an image of `height` x `width` pixels; `model` is unchanged.

    Call it before conversion to SyncBatchNorm or sharding.
    """
    on_meta = _copy_to_meta(model).train()  # the images need no gradient, so the first layer has no input gradient
    # Cost that does not grow with the batch is of the weights, so an image costs the difference of two batch sizes.
    few, more = (
        _record_kernels(on_meta, torch.empty(number, channels, height, width, device="meta")) for number in (2, 3)
    )
    assert [len(each) for each in few] == [len(each) for each in more], "the operations depend on the size of the batch"
    forward, backward = (_subtract_kernels(*each) for each in zip(few, more, strict=True))
    params = sum(parameter.numel() for parameter in model.parameters())
    return ModelCost(params, forward, forward + backward)


def _subtract_kernels(few: list[KernelCost], more: list[KernelCost]) -> tuple[KernelCost, ...]:
    added = (KernelCost(b.flops - a.flops, b.elements - a.elements) for a, b in zip(few, more, strict=True))
    return tuple(kernel for kernel in added if kernel != (0, 0))


def _copy_to_meta(model: nn.Module) -> nn.Module:
    """Return a copy on the meta device, without copying data."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(model, memo)


def _record_kernels(model: nn.Module, images: Tensor) -> tuple[list[KernelCost], list[KernelCost]]:
    """Return the kernels of the forward and of the backward pass of a batch."""
    model.zero_grad()  # adding to existing gradients would be counted
    with torch.random.fork_rng(devices=[]), FlopCounterMode(display=False) as counter:
        with _KernelRecorder(counter) as forward:
            logits = model(images)
        with _KernelRecorder(counter) as backward:
            logits.backward(torch.empty_like(logits))
    return forward.kernels, backward.kernels


class _KernelRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record the kernels of each operation below autograd."""

    def __init__(self, counter: FlopCounterMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counter = counter
        self.kernels: list[KernelCost] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self._counter.get_total_flops()
        out = func(*args, **(kwargs or {}))
        self.kernels += _list_kernels(func, args, out, self._counter.get_total_flops() - before)
        return out


def _list_kernels(func: Any, args: Any, out: Any, flops: float) -> list[KernelCost]:
    packet = func._overloadpacket
    reads, writes = _list_tensor_sizes(args), _list_tensor_sizes(out)
    if packet in _NORM_PASSES:
        return [KernelCost(flops, _NORM_PASSES[packet] * max(reads))]
    if packet is aten.convolution_backward:
        return _list_convolution_backward_kernels(args, out)
    if func.is_view or packet in _NO_TRAFFIC_OPS:
        return [KernelCost(flops, 0)]
    if torch.Tag.pointwise in func.tags:
        is_backward = func.__name__.partition(".")[0].endswith("_backward")
        return [KernelCost(flops, 0 if is_backward else sum(reads) - max(reads, default=0))]
    return [KernelCost(flops, sum(reads) + sum(writes))]


def _list_convolution_backward_kernels(args: Any, out: Any) -> list[KernelCost]:
    """Return the kernels of the requested gradients; each costs as much as forward."""
    # Torch's count ignores groups in backward, which is 40 times too much for EfficientNet.
    gradient, images, weight, is_transposed = args[0], args[1], args[2], args[7]
    output_side = images if is_transposed else gradient
    kernel = KernelCost(2 * output_side.numel() * weight[0].numel(), gradient.numel() + images.numel())
    return [kernel for requested in out[:2] if requested is not None]


def _list_tensor_sizes(values: Any) -> list[int]:
    return [leaf.numel() for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
