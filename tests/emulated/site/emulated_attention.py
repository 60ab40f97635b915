"""Fused attention, which torch has for GPUs alone, and the softmax that converts float16 to float32.

Names, arguments and results are those of torch's operations. Dropout within attention is not emulated.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_SEED = torch.zeros((), dtype=torch.int64)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, dropout: float, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Return the output, whose memory is [N, L, heads, E], and the logarithm of the sums [N, heads, L] in float32."""
    if dropout:
        raise NotImplementedError("emulated attention has no dropout")
    scores = _scores(query, key, bias, is_causal, scale)
    out = (torch.softmax(scores, -1) @ value.float()).to(query.dtype)
    return out.transpose(1, 2).contiguous().transpose(1, 2), torch.logsumexp(scores, -1)


def _scores(query: Tensor, key: Tensor, bias: Tensor | None, is_causal: bool, scale: float | None) -> Tensor:
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = query.float() @ key.float().transpose(-2, -1) * factor
    scores = scores if bias is None else scores + bias.float()
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    return scores


def _attend_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of query, key, value and the scores."""
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    weights, upper = torch.softmax(_scores(query, key, bias, is_causal, scale), -1), gradient.float()
    of_weights = upper @ value.float().transpose(-2, -1)
    of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True))
    found = (of_scores @ key.float() * factor, of_scores.transpose(-2, -1) @ query.float() * factor)
    found = (*found, weights.transpose(-2, -1) @ upper)
    of_query, of_key, of_value = (each.to(query.dtype).transpose(1, 2).contiguous().transpose(1, 2) for each in found)
    return of_query, of_key, of_value, of_scores


def _scaled_dot_product_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    out, sums = _attend(query, key, value, None, dropout_p, is_causal, scale)
    state = torch.zeros(2, dtype=torch.uint64)
    return out, sums, None, None, query.shape[2], key.shape[2], state, _SEED.to(torch.uint64), out.new_empty(0)


def _scaled_dot_product_flash_attention_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *others: Any, scale: float | None = None
) -> tuple[Tensor, ...]:
    *_, is_causal, _, _ = others
    return _attend_backward(grad_out, query, key, value, None, is_causal, scale)[:3]


def _scaled_dot_product_efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    out, sums = _attend(query, key, value, attn_bias, dropout_p, is_causal, scale)
    padded = sums.new_zeros(*sums.shape[:2], -(-sums.shape[2] // 32) * 32 if compute_log_sumexp else 0)
    return out, padded, _SEED.clone(), _SEED.clone()


def _scaled_dot_product_efficient_attention_backward(
    grad_out_: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    dropout_p: float,
    grad_input_mask: list[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor | None, ...]:
    *found, of_scores = _attend_backward(grad_out_, query, key, value, attn_bias, is_causal, scale)
    return (*found, of_scores.to(query.dtype) if grad_input_mask[3] else None)


def _scaled_dot_product_cudnn_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    out, sums = _attend(query, key, value, attn_bias, dropout_p, is_causal, scale)
    seeds = _SEED.clone(), _SEED.clone()
    return out, sums[..., None], None, None, query.shape[2], key.shape[2], *seeds, out.new_empty(0)


def _scaled_dot_product_cudnn_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    attn_bias: Tensor | None,
    *others: Any,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    return _attend_backward(grad_out, query, key, value, attn_bias, others[-1], scale)[:3]


def _softmax(values: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return torch.softmax(values.float() if half_to_float else values, dim)


def _log_softmax(values: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return torch.log_softmax(values.float() if half_to_float else values, dim)


SUBSTITUTES: dict[str, Callable[..., Any]] = {
    each.__name__: each
    for each in (
        _scaled_dot_product_flash_attention,
        _scaled_dot_product_flash_attention_backward,
        _scaled_dot_product_efficient_attention,
        _scaled_dot_product_efficient_attention_backward,
        _scaled_dot_product_cudnn_attention,
        _scaled_dot_product_cudnn_attention_backward,
        _softmax,
        _log_softmax,
    )
}
