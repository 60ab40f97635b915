"""How one model is trained on all ranks: the base class of strategies, and those of one process."""

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import final

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from paceline.parallel.collectives import all_gather_rows, gather_rows_on_rank_0, mean_over_ranks, sum_over_ranks
from paceline.parallel.comm_hooks import CommHook, PowerSGD

SwitchStage = Callable[[str], None]
"""Attributes the time that follows to a stage. On a GPU, backward calls it from one of autograd's threads."""


class Strategy:
    """Train one model on `world_size` ranks, and reduce values over them.

    The base class trains on one device in one process, where nothing is exchanged.
    """

    world_size = 1
    comm_hook: CommHook | None = None

    def prepare(self, model: nn.Module) -> nn.Module:
        """Return the module to call in training, with equal weights on all ranks. May change `model` in place.

        Create the optimizer from `model` afterwards.
        """
        return model

    def unfreeze(self, model: nn.Module, set_trained: Callable[[], None]) -> nn.Module:
        """Let `set_trained` make more parameters of a prepared `model` require gradients; return the module to call.

        Call `warm_up_buckets` and `on_comm_wait` again afterwards. Collective.
        """
        set_trained()
        return self.prepare(model)

    def warm_up_buckets(self, step: Callable[[], None]) -> None:
        """Call `step`, a forward and backward pass without side effects, if the first passes of a process differ.

        Call it before the first step, after all other warm-up passes. Resets the communication hook. Collective.
        """

    def on_comm_wait(self, switch_stage: SwitchStage, *, compiled: bool = False) -> None:
        """Call `switch_stage("exposed_communication")` from now on whenever a step starts to wait for other ranks.

        That is after this rank's last gradient of a step; while buffers are received, then `switch_stage("forward")`;
        and in `clip` if each rank trains alone, then `switch_stage("optimizer")`. Call it once, after `prepare`;
        `compiled` says whether torch compiles the returned module.
        """

    def accumulate(self, *, final: bool) -> contextlib.AbstractContextManager[None]:
        """Return the context of a micro-batch; the final one of a step averages gradients over the ranks."""
        return contextlib.nullcontext()

    def clip(self, parameters: Sequence[Tensor], max_norm: float) -> Tensor:
        """Clip the gradient in place to L2 norm `max_norm`; return its norm before, float32 [], the same on all ranks.

        An infinite `max_norm` only measures. If each rank trains alone, return the mean of their norms. Collective.
        """
        norm = gradient_norm([each.grad for each in parameters if each.grad is not None])
        return clip_to_norm(parameters, norm, max_norm)

    def evaluating(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Return a context for forward passes of the unwrapped `model` without gradients.

        Their number may differ between ranks: inside, every rank has rank 0's buffers and none waits for another.
        Collective at both ends.
        """
        return contextlib.nullcontext()

    def gather(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return whole tensors; those that are not sharded are this rank's own. Collective."""
        return dict(tensors)

    def shard_like(self, full: Tensor, like: Tensor) -> Tensor:
        """Return this rank's shard of `full`, equal on all ranks, in the layout of `like`."""
        return full

    @property
    def powersgd(self) -> PowerSGD | None:
        """The gradient compression with state between steps, which checkpoints save; None without it."""
        return None

    @final
    def sum(self, value: Tensor) -> Tensor:
        """Return the sum of `value` over the ranks, on each of them."""
        return value if self.world_size == 1 else sum_over_ranks(value)

    @final
    def mean(self, value: Tensor) -> Tensor:
        """Return the mean of `value` over the ranks, on each of them."""
        return value if self.world_size == 1 else mean_over_ranks(value)

    @final
    def all_gather(self, value: Tensor) -> Tensor:
        """Return [world_size, *value.shape] on every rank, whose row r is the `value` of rank r."""
        return value.unsqueeze(0) if self.world_size == 1 else all_gather_rows(value)

    @final
    def gather_on_rank_0(self, row: Tensor, device: torch.device) -> Tensor | None:
        """Return the ranks' `row` [N], in host memory, as [world_size, N] on rank 0; None on the others.

        It is sent in pieces through `device`, that of the process group. Collective.
        """
        return row.unsqueeze(0) if self.world_size == 1 else gather_rows_on_rank_0(row, device)


class SingleDevice(Strategy):
    """Train one rank on one device."""


class DataParallel(Strategy):
    """`nn.DataParallel` over all visible GPUs, for comparison with ddp (arXiv 2006.15704, section 2.2).

    Only the first GPU's batch norms keep statistics. Evaluation uses one GPU.
    """

    def prepare(self, model: nn.Module) -> nn.Module:
        """Return the model wrapped."""
        return nn.DataParallel(model)


def gradient_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the L2 norm of all `gradients` together: [], at least float32."""
    # In 16 bits the norm would overflow (float16) or keep only two digits (bfloat16).
    if any(gradient.dtype.itemsize < 4 for gradient in gradients):
        # The norm of the norms is the norm of all gradients.
        gradients = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
    norm: Tensor = get_total_norm(gradients)
    return norm


def clip_to_norm(parameters: Sequence[Tensor], norm: Tensor, max_norm: float) -> Tensor:
    """Clip the gradients of `parameters`, whose norm is `norm`, in place; return `norm` as float32 [].

    The factor is max_norm / (norm + 1e-6), as in torch (Pascanu et al. 2013, arXiv 1211.5063).
    """
    # An infinite limit only measures: scaling by 1 would read and write every gradient.
    if math.isfinite(max_norm):
        clip_grads_with_norm_(parameters, max_norm, norm)
    return norm.float()
