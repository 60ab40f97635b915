"""Run a model on the meta device by the operations that a GPU would run: autocast, fused dropout, fused attention.

The meta device computes shapes and nothing else, and `torch.autocast` ignores it. Operations that GPUs have and other
devices lack save other tensors for backward, such as dropout's mask of one byte instead of four.
"""

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

aten = torch.ops.aten
# The lists of https://docs.pytorch.org/docs/stable/amp.html, as far as classifiers use them.
_LOW_PRECISION: Final = frozenset(
    (
        *("linear", "conv1d", "conv2d", "conv3d", "conv_transpose2d", "matmul", "__matmul__", "__rmatmul__", "bmm"),
        *("mm", "addmm", "baddbmm", "einsum", "prelu", "scaled_dot_product_attention"),
    )
)
_FULL_PRECISION: Final = frozenset(
    (
        *("layer_norm", "group_norm", "softmax", "log_softmax", "norm", "normalize", "softplus", "exp", "log", "pow"),
        *("__pow__", "__rpow__", "__rdiv__", "__rtruediv__", "cumsum", "cumprod", "prod", "sum", "rsqrt", "reciprocal"),
        *("acos", "asin", "cosh", "sinh", "tan", "erfinv", "expm1", "log10", "log1p", "log2", "renorm", "softmin"),
        *("cdist", "dist", "pdist", "cosine_similarity", "cross_entropy", "nll_loss", "mse_loss", "l1_loss"),
        *("smooth_l1_loss", "kl_div", "binary_cross_entropy_with_logits", "poisson_nll_loss", "soft_margin_loss"),
        *("cosine_embedding_loss", "hinge_embedding_loss", "margin_ranking_loss", "multi_margin_loss"),
        *("multilabel_margin_loss", "triplet_margin_loss"),
    )
)
_TO_FLOAT32_OUTPUT = ("sum", "prod", "cumsum", "cumprod")
"""Functions that read 16 bits under autocast, and of which only the result is in float32."""
_MULTI_HEAD_ATTENTION = "multi_head_attention_forward"


class MetaGpu(TorchFunctionMode):
    """While active, functions on meta tensors run as on a GPU.

    Without `fused_attention` the products and the softmax of attention are operations of their own.
    """

    def __init__(self, *, fused_attention: bool = True) -> None:
        super().__init__()
        self._has_fused_attention = fused_attention
        self._dtype: torch.dtype | None = None
        self._cache: dict[int, tuple[Tensor, Tensor]] | None = None
        # Python functions hand themselves to the mode as a whole; these copies do not, so their operations are seen.
        self._attend = _copy_without_override(functional.multi_head_attention_forward)
        self._run_backward = _copy_without_override(torch.autograd.backward)

    @contextlib.contextmanager
    def autocast(self, dtype: torch.dtype | None) -> Iterator[None]:
        """Cast as `torch.autocast("cuda", dtype)` does, and keep the cast weights until the end; None casts nothing."""
        with self._casting(dtype, {}):
            yield

    @contextlib.contextmanager
    def repeating(self, dtype: torch.dtype | None) -> Iterator[None]:
        """Cast likewise in backward, where checkpointed blocks repeat their forward pass."""
        # torch empties its cache at the end of each block, so that hardly anything is cast once for several uses.
        with self._casting(dtype, None):
            yield

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func` as on a GPU."""
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if func is Tensor.backward:
            with self:
                return _call_backward(*args, **kwargs)
        if (
            func is torch.autograd.backward
        ):  # the mode is off within a function, and checkpointed blocks run in this one
            with self:
                return self._run_backward(*args, **kwargs)
        if name == _MULTI_HEAD_ATTENTION:
            with self:
                return self._attend(*args, **kwargs)
        if self._dtype is not None:
            args, kwargs = self._cast_arguments(name, args, kwargs)
        if (
            name in ("softmax", "log_softmax")
            and self._dtype is not None
            and (found := _fuse_softmax(name, args, kwargs))
        ):
            return found[0]
        if name == "one_hot":  # which elsewhere than on a GPU reads the largest class
            return _one_hot(*args, **kwargs)
        if name == "dropout" and (found := _fuse_dropout(*args, **kwargs)):
            return found[0]
        if (
            name == "scaled_dot_product_attention"
            and self._has_fused_attention
            and (found := _fuse_attention(*args, **kwargs))
        ):
            return found[0]
        return func(*args, **kwargs)

    @contextlib.contextmanager
    def _casting(self, dtype: torch.dtype | None, cache: dict[int, tuple[Tensor, Tensor]] | None) -> Iterator[None]:
        before = self._dtype, self._cache
        self._dtype, self._cache = dtype, cache
        try:
            yield
        finally:
            self._dtype, self._cache = before

    def _cast_arguments(self, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        assert self._dtype is not None
        if name in _LOW_PRECISION:
            cast: tuple[Any, Any] = tree_map(self._to_16_bits, (args, kwargs))
            return cast
        if name in ("softmax", "log_softmax"):
            return args, kwargs
        if name in _TO_FLOAT32_OUTPUT:
            is_half = _is_half(_first(args, kwargs))
            return args, {**kwargs, "dtype": torch.float32} if is_half and kwargs.get("dtype") is None else kwargs
        if name in _FULL_PRECISION:
            wide: tuple[Any, Any] = tree_map(_to_float32, (args, kwargs))
            return wide
        return args, kwargs

    def _to_16_bits(self, value: Any) -> Any:
        assert self._dtype is not None
        if not (isinstance(value, Tensor) and value.is_floating_point() and value.dtype != self._dtype):
            return value
        if value.dtype == torch.float64:
            return value
        # As torch: only weights are kept, and not views of them.
        is_kept = value.dtype == torch.float32 and value.requires_grad and value.is_leaf and not value._is_view()
        if not is_kept or self._cache is None:
            return value.to(self._dtype)
        if id(value) not in self._cache:
            self._cache[id(value)] = value, value.to(self._dtype)
        return self._cache[id(value)][1]


def _copy_without_override(function: Callable[..., Any]) -> Callable[..., Any]:
    names = {**function.__globals__, "has_torch_function": lambda _: False}
    copied = types.FunctionType(function.__code__, names, argdefs=function.__defaults__)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


def _call_backward(tensor: Tensor, gradient: Tensor | None = None, **options: Any) -> None:
    torch.autograd.backward(tensor, gradient, **options)


def _to_float32(value: Any) -> Any:
    return value.float() if _is_half(value) else value


def _is_half(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype.itemsize == 2


def _first(args: Any, kwargs: Any) -> Any:
    """Return the first argument of a function, whose name is `input` if it is not given by position."""
    return args[0] if args else kwargs.get("input")


def _fuse_softmax(name: str, args: Any, kwargs: Any) -> tuple[Tensor] | None:
    """Return the float32 softmax of 16 bits, which one kernel of a GPU computes; None if it is another one."""
    values, dim = _first(args, kwargs), kwargs.get("dim", args[1] if len(args) > 1 else None)
    if not _is_half(values) or dim is None:
        return None
    if kwargs.get("dtype") is not None or any(isinstance(each, torch.dtype) for each in args):
        return None
    # float16 to float32 is one kernel; other formats are converted before.
    if values.dtype == torch.float16:
        return ((aten._softmax if name == "softmax" else aten._log_softmax)(values, dim, True),)
    return ((torch.softmax if name == "softmax" else torch.log_softmax)(values.float(), dim),)


def _one_hot(input: Tensor, num_classes: int = -1) -> Tensor:
    if num_classes < 0:
        raise NotImplementedError("one_hot without num_classes depends on the values of a tensor")
    return input.new_zeros(*input.shape, num_classes).scatter_(-1, input[..., None], 1)


def _fuse_dropout(
    input: Tensor,  # as torch names it
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    train: bool | None = None,
) -> tuple[Tensor] | None:
    """Return the output of the kernel that GPUs have for dropout; None where they have none."""
    training = training if train is None else train
    if not training or inplace or not 0 < p < 1:
        return None
    return (torch.native_dropout(input, p, True)[0],)


def _fuse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Tensor] | None:
    """Return the output of the fused kernel; None for what torch computes by products and a softmax."""
    if query.dim() != 4 or enable_gqa or (attn_mask is not None and attn_mask.requires_grad):
        return None
    bias = attn_mask
    if bias is not None and bias.dtype == torch.bool:
        bias = torch.zeros_like(bias, dtype=query.dtype)
    if bias is not None:
        bias = bias.to(query.dtype).expand(*query.shape[:2], query.shape[2], key.shape[2])
    saves = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
    out: Tensor = aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, saves, dropout_p, is_causal, scale=scale
    )[0]
    return (out,)
