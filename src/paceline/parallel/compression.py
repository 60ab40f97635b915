"""Send gradients in fewer bits than they are computed in. Only ddp does; fsdp has number formats of its own."""

from collections.abc import Callable

import torch
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from paceline.recipe.schema.parallel import Parallel

Compression = Callable[[DistributedDataParallel], None]
"""Changes how a wrapped model sends its gradients, once, before the first step."""

POWERSGD_FIRST_STEP = 10
"""Steps sent whole before PowerSGD begins, in this process. Torch needs 2, and its default of 1,000 would leave most
of our runs uncompressed."""

_SMALL = 1e-12
_ZERO_LENGTH = 1e-20
"""Added to the length of a factor before it divides, so that one of length 0 stays 0; far below `_SMALL`."""


def build_compression(section: Parallel) -> Compression:
    """Return what `section.compression` does to a wrapped model."""
    match section.compression:
        case "off":
            return _whole
        case "bf16":
            return _bf16
        case "fp16":
            return _fp16
        case "powersgd":
            rank = 1 if section.powersgd_rank == "auto" else section.powersgd_rank
            return lambda replica: _powersgd(replica, rank)


def _whole(replica: DistributedDataParallel) -> None:
    """Send gradients as they are."""


def _bf16(replica: DistributedDataParallel) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    replica.register_comm_hook(None, bf16_compress_hook)


def _fp16(replica: DistributedDataParallel) -> None:
    """Send float16. A gradient beyond 65,504 becomes infinite on all ranks, which the guard of the run finds."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    replica.register_comm_hook(None, fp16_compress_hook)


def _powersgd(replica: DistributedDataParallel, rank: int) -> None:
    """Send factors of `rank` with error feedback and warm start (Vogels et al. 2019, arXiv 1905.13727).

    What compression has held back is not in a checkpoint: a resumed run begins again with whole gradients.
    """
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    state = PowerSGDState(
        None,
        matrix_approximation_rank=rank,
        start_powerSGD_iter=POWERSGD_FIRST_STEP,
        orthogonalization_epsilon=_ZERO_LENGTH,
    )
    noise: dict[int, torch.Tensor] = {}

    def hook(state: PowerSGDState, bucket: GradBucket) -> Future[torch.Tensor]:
        number = bucket.index()
        if number in state.q_memory_dict:
            right = state.q_memory_dict[number]
            if number not in noise:
                noise[number] = _noise_like(right)
            _finite(state.error_dict[number])
            _finite(right).add_(noise[number])
        return powerSGD_hook(state, bucket)

    replica.register_comm_hook(state, hook)


def _finite(memory: torch.Tensor) -> torch.Tensor:
    """Forget in place what is no number: a gradient that overflowed once must not be held back for all later steps."""
    return memory.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def _noise_like(right: torch.Tensor) -> torch.Tensor:
    """Return numbers too small to matter beside any but 0, the same on every rank.

    The right factors of a step are the first guess of the next. Those of a layer whose gradient was 0, as behind a
    branch that starts at zero, are 0, and no power iteration would ever leave that.
    """
    noise = torch.randn(right.shape, generator=torch.Generator().manual_seed(0))
    return noise.mul_(_SMALL).to(right.device, right.dtype)
