"""Count the FLOPs, parameters, kernels and memory traffic of a model per image, on the meta device.

`count_cost` counts the traffic that kernels have if a compiler fuses them as well as it can, and `count_kernels` that
of each operation as torch runs it without a compiler, under autocast or not.
"""

import contextlib
import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from paceline.models.meta_gpu import MetaGpu

aten = torch.ops.aten
# FLOPs are by torch's formulas (`flop_registry`: matrix products, convolutions and attention, 2 FLOP per multiply-add).
# Memory traffic is modeled for fused kernels:
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
_COPY_OPS = (
    aten.clone,
    aten._to_copy,
    aten.copy_,
    aten.cat,
    aten.roll,
    aten.constant_pad_nd,
    aten.slice_backward,
    aten.select_backward,
)
_DROPOUT_OPS = (aten.native_dropout, aten.native_dropout_backward)
_ROW_NORM_OPS = (aten._softmax, aten._softmax_backward_data)
_FUSED_ATTENTION_OPS = (
    aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_efficient_attention_backward,
)
# Position of the first of the two factors of a matrix product.
_PRODUCTS = {aten.mm: 0, aten.addmm: 1, aten.bmm: 0, aten.baddbmm: 1}
_BATCHES: Final = (2, 3)
Kind = Literal[
    "convolution",
    "convolution_weights",
    "grouped",
    "grouped_weights",
    "narrow",
    "narrow_weights",
    "depthwise",
    "depthwise_weights",
    "product",
    "attention",
    "batch_norm",
    "row_norm",
    "elementwise",
    "copy",
    "other",
]
"""Classes of kernels: `_weights` are the gradients of a convolution's weights, `narrow` is a grouped convolution of a
shape that cuDNN has kernels for in NHWC and `grouped` of any other, `product` a matrix product, `attention` a batch of
matrix products or fused attention, `row_norm` a layer or group norm or a softmax, and `copy` a conversion,
concatenation, padding or reordering.
"""
_NARROW_WIDTHS: Final = (4, 8, 16, 32)
_NARROW_CHANNELS: Final = 64
"""Channels of a group, and the number that the channels are multiples of, of convolutions that are as fast in NHWC as
others without groups: found in timm's tables of training (benchmarks/quote.py)."""

_WEIGHT_KINDS: Final[dict[Kind, Kind]] = {
    "convolution": "convolution_weights",
    "grouped": "grouped_weights",
    "narrow": "narrow_weights",
    "depthwise": "depthwise_weights",
}


class KernelCost(NamedTuple):
    """FLOPs of one kernel, and the elements it reads and writes, per image: of 2 bytes in bf16 or 4 in fp32."""

    flops: float
    elements: float


class Kernel(NamedTuple):
    """A kernel as torch runs it: `flops` and `num_bytes` moved per image, and `batch_bytes`, mostly weights, per batch.

    `sides` are the sizes of a matrix product, or of the one that a convolution is, that do not grow with the batch.
    """

    kind: Kind
    flops: float
    num_bytes: float
    batch_bytes: float
    sides: tuple[int, ...]


@dataclass(frozen=True)
class StepKernels:
    """Kernels of the `forward` and the `backward` pass, in order; `backward` is empty for inference.

    `params` are numbers in `tensors` parameters, of which `frozen_params` in `frozen_tensors` are not trained.
    """

    params: int
    tensors: int
    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]
    frozen_params: int = 0
    frozen_tensors: int = 0

    @property
    def trained_params(self) -> int:
        """Numbers that have gradients, and that the optimizer updates."""
        return self.params - self.frozen_params

    @property
    def trained_tensors(self) -> int:
        """Parameters that these are in."""
        return self.tensors - self.frozen_tensors


@dataclass(frozen=True)
class ModelCost:
    """Parameters of a model, and its kernels per image: `forward`, and `training` (forward and backward)."""

    params: int
    forward: tuple[KernelCost, ...]
    training: tuple[KernelCost, ...]

    @property
    def training_flops(self) -> float:
        """FLOPs of the forward and backward pass."""
        return math.fsum(kernel.flops for kernel in self.training)


def count_cost(model: nn.Module, channels: int, height: int, width: int) -> ModelCost:
    """Return the cost of `model` in training for an image of `height` x `width` pixels; `model` is unchanged.

    Call it before conversion to SyncBatchNorm or sharding.
    """
    on_meta = _copy_to_meta(model).train()  # the images need no gradient, so the first layer has no input gradient
    few, more = (_record_training(on_meta, images) for images in _two_batches(channels, height, width))
    forward, backward = (
        tuple(cost for a, b in _pair(*each) if (cost := KernelCost(*_subtract(a.cost, b.cost))) != (0, 0))
        for each in zip(few, more, strict=True)
    )
    params = sum(parameter.numel() for parameter in model.parameters())
    return ModelCost(params, forward, forward + backward)


def count_kernels(
    model: nn.Module,
    channels: int,
    height: int,
    width: int,
    *,
    training: bool = True,
    autocast: torch.dtype | None = None,
    fused_attention: bool = True,
) -> StepKernels:
    """Return the kernels of a step of training, or of inference, without a compiler; `model` is unchanged.

    `autocast` is a dtype of 16 bits or None. `fused_attention` is the single kernel of
    `scaled_dot_product_attention`, else its products and its softmax are apart.
    """
    on_meta = _copy_to_meta(model).train(training)
    record = _record_training if training else _record_inference
    gpu = MetaGpu(fused_attention=fused_attention)
    with gpu:
        runs = [record(on_meta, images, gpu, autocast) for images in _two_batches(channels, height, width)]
    forward, backward = (
        tuple(kernel for a, b in _pair(*each) if (kernel := _per_image(a, b))[1:4] != (0, 0, 0))
        for each in zip(*runs, strict=True)
    )
    parameters = [*model.parameters()]
    frozen = [each for each in parameters if not each.requires_grad]
    return StepKernels(
        params=sum(each.numel() for each in parameters),
        tensors=len(parameters),
        forward=forward,
        backward=backward,
        frozen_params=sum(each.numel() for each in frozen),
        frozen_tensors=len(frozen),
    )


class _Recorded(NamedTuple):
    """A kernel of a batch: its cost if fused, the bytes it moves if not, and the sizes of its matrix product."""

    kind: Kind
    cost: KernelCost
    num_bytes: int
    sides: tuple[int, ...] = ()


def _two_batches(channels: int, height: int, width: int) -> Iterator[Tensor]:
    # Cost that does not grow with the batch is of the weights, so an image costs the difference of two batch sizes.
    return (torch.empty(number, channels, height, width, device="meta") for number in _BATCHES)


def _pair(few: list[_Recorded], more: list[_Recorded]) -> Iterator[tuple[_Recorded, _Recorded]]:
    assert len(few) == len(more), "the operations depend on the size of the batch"
    return zip(few, more, strict=True)


def _subtract(few: KernelCost, more: KernelCost) -> tuple[float, float]:
    return more.flops - few.flops, more.elements - few.elements


def _per_image(few: _Recorded, more: _Recorded) -> Kernel:
    flops, _ = _subtract(few.cost, more.cost)
    num_bytes = more.num_bytes - few.num_bytes
    sides = tuple(a for a, b in zip(few.sides, more.sides, strict=True) if a == b)
    return Kernel(few.kind, flops, num_bytes, few.num_bytes - _BATCHES[0] * num_bytes, sides)


def _copy_to_meta(model: nn.Module) -> nn.Module:
    """Return a copy on the meta device, without copying data."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(model, memo)


def _record_training(
    model: nn.Module, images: Tensor, gpu: MetaGpu | None = None, autocast: torch.dtype | None = None
) -> tuple[list[_Recorded], list[_Recorded]]:
    """Return the kernels of the forward and of the backward pass of a batch, on a GPU or on any device."""
    model.zero_grad()  # adding to existing gradients would be counted
    with torch.random.fork_rng(devices=[]):
        with gpu.autocast(autocast) if gpu else contextlib.nullcontext(), _KernelRecorder() as forward:
            logits = model(images)
        with gpu.repeating(autocast) if gpu else contextlib.nullcontext(), _KernelRecorder() as backward:
            # `logits.backward` turns function modes off, but checkpointed blocks need theirs when they run again.
            _engine_run_backward(
                (logits,), (torch.empty_like(logits),), False, False, (), allow_unreachable=True, accumulate_grad=True
            )
    return forward.kernels, backward.kernels


def _record_inference(
    model: nn.Module, images: Tensor, gpu: MetaGpu, autocast: torch.dtype | None
) -> tuple[list[_Recorded], list[_Recorded]]:
    """Return the kernels of the forward pass of a batch, and no others."""
    with torch.no_grad(), gpu.autocast(autocast), _KernelRecorder() as forward:
        model(images)
    return forward.kernels, []


class _KernelRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record the kernels of each operation below autograd."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels: list[_Recorded] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        count_flops = flop_registry.get(func._overloadpacket)
        flops = count_flops(*args, **kwargs, out_val=out) if count_flops else 0
        self.kernels += _list_kernels(func, args, out, flops)
        return out


def _list_kernels(func: Any, args: Any, out: Any, flops: float) -> list[_Recorded]:
    packet = func._overloadpacket
    if packet is aten.convolution_backward:
        return _list_convolution_backward_kernels(args, out)
    reads, writes = _list_tensor_sizes(args), _list_tensor_sizes(out)
    if func.is_view or packet in _NO_TRAFFIC_OPS:
        return [_Recorded("other", KernelCost(flops, 0), 0)]
    kind, sides = _classify(func, args)
    num_bytes = _sum_bytes(args) + _sum_bytes(out)
    if packet in _NORM_PASSES:
        elements = _NORM_PASSES[packet] * max(reads)
        # With statistics at hand, a norm reads once.
        is_evaluation = packet in (aten.native_batch_norm, aten._native_batch_norm_legit) and args[5] is False
        if not is_evaluation:
            num_bytes = _NORM_PASSES[packet] * max(_bytes(each) for each in args if isinstance(each, Tensor))
    elif torch.Tag.pointwise in func.tags:
        is_backward = func.__name__.partition(".")[0].endswith("_backward")
        elements = 0 if is_backward else sum(reads) - max(reads, default=0)
    else:
        elements = sum(reads) + sum(writes)
    return [_Recorded(kind, KernelCost(flops, elements), num_bytes, sides)]


def _classify(func: Any, args: Any) -> tuple[Kind, tuple[int, ...]]:
    """Return the class of an operation, and the sizes of its matrix product."""
    packet = func._overloadpacket
    if packet is aten.convolution:
        weight, is_transposed, groups = args[1], args[6], args[8]
        kind, (outputs, depth) = _convolution_kind(weight, groups), _convolution_sides(weight, groups)
        return kind, _other_way(weight, groups) if is_transposed else (outputs, depth)
    if packet in _PRODUCTS:
        left, right = args[_PRODUCTS[packet] :][:2]
        kind = "product" if packet in (aten.mm, aten.addmm) else "attention"
        return kind, (left.shape[-2], left.shape[-1], right.shape[-1])
    if packet in _FUSED_ATTENTION_OPS:
        query, key = args[:2] if packet is _FUSED_ATTENTION_OPS[0] else args[1:3]
        return "attention", (query.shape[-2], key.shape[-2], query.shape[-1])
    if packet in _NORM_PASSES:
        return ("batch_norm" if "batch_norm" in func.__name__ else "row_norm"), ()
    if packet in _ROW_NORM_OPS:
        return "row_norm", ()
    if packet in _COPY_OPS:
        return "copy", ()
    is_elementwise = torch.Tag.pointwise in func.tags or packet in _DROPOUT_OPS
    return ("elementwise" if is_elementwise else "other"), ()


def _convolution_kind(weight: Tensor, groups: int) -> Kind:
    if groups == 1:
        return "convolution"
    outputs, width = weight.shape[:2]
    if width == 1:
        return "depthwise"
    is_narrow = width in _NARROW_WIDTHS and outputs == width * groups and outputs % _NARROW_CHANNELS == 0
    return "narrow" if is_narrow else "grouped"


def _convolution_sides(weight: Tensor, groups: int) -> tuple[int, int]:
    """Return the sizes of a convolution as a matrix product: outputs of a group, and numbers summed for each."""
    return weight.shape[0] // groups, math.prod(weight.shape[1:])


def _other_way(weight: Tensor, groups: int) -> tuple[int, int]:
    """Return the same for the gradient of the images."""
    return weight.shape[1], weight.shape[0] // groups * math.prod(weight.shape[2:])


def _list_convolution_backward_kernels(args: Any, out: Any) -> list[_Recorded]:
    """Return the kernels of the requested gradients; each costs as much as forward."""
    # Torch's count ignores groups in backward, which is 40 times too much for EfficientNet.
    gradient, images, weight, is_transposed, groups = args[0], args[1], args[2], args[7], args[9]
    output_side = images if is_transposed else gradient
    cost = KernelCost(2 * output_side.numel() * math.prod(weight.shape[1:]), gradient.numel() + images.numel())
    kind = _convolution_kind(weight, groups)
    sides = _convolution_sides(weight, groups)
    num_bytes = sum(map(_bytes, (gradient, images, weight)))
    kinds: tuple[Kind, Kind] = (kind, _WEIGHT_KINDS[kind])
    shapes = (sides if is_transposed else _other_way(weight, groups), sides)
    return [
        _Recorded(kind, cost, num_bytes, shape)
        for kind, shape, requested in zip(kinds, shapes, out[:2], strict=True)
        if requested is not None
    ]


def _list_tensor_sizes(values: Any) -> list[int]:
    return [leaf.numel() for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _sum_bytes(values: Any) -> int:
    return sum(_bytes(leaf) for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


def _bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor; an expanded one has those that it repeats once."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
