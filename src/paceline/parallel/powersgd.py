"""Send gradients as low-rank factors, and keep from step to step what they lack."""

from collections.abc import Mapping
from typing import Any, Final, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future

from paceline.parallel.collective import gather_rows_on_rank_0

POWERSGD_FIRST_STEP: Final = 10
"""Steps sent whole before PowerSGD begins. Torch needs 2, and its default of 1,000 would leave most of our runs
uncompressed."""

_SMALL: Final = 1e-12
_ZERO_LENGTH: Final = 1e-20
"""Added to the length of a factor before it divides, so that one of length 0 stays 0; far below `_SMALL`."""


@final
class PowerSGD:
    """Send factors of `rank` with error feedback and warm start (Vogels et al. 2019, arXiv 1905.13727).

    Of each bucket it keeps what this rank has held back, and both factors, which all ranks have alike. A bucket is
    known to torch by its number and to a checkpoint by the names of its parameters. Torch's generator is not kept: it
    is asked once a bucket, in the first compressed step, and begins from the same seed in every process.
    """

    has_state = True

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._buckets: list[list[Tensor]] = []
        self._noise: dict[int, Tensor] = {}
        self._state = self._new_state()

    def send(self, bucket: GradBucket) -> tuple[Future[Tensor], int]:
        """Return what will be the mean of a bucket's gradients over the ranks, and the bytes that this rank sends."""
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook

        state, number = self._state, bucket.index()
        self._buckets[number:] = [bucket.parameters()]  # those after it are of the pass before, and may be others
        if number in state.q_memory_dict:
            right = state.q_memory_dict[number]
            if number not in self._noise:
                self._noise[number] = _noise_like(right)
            _replace_nonfinite(state.error_dict[number])
            _replace_nonfinite(right).add_(self._noise[number])
        gradients, sent_before = bucket.buffer(), state.total_numel_after_compression
        future = powerSGD_hook(state, bucket)
        if gradients.device.type == "cpu":
            # Torch sends the second factor when the first has come, from a thread of gloo: those of two buckets could
            # go out in another order on another rank. NCCL's order is that of the host, which does not wait.
            future.wait()
        # Before the first compressed step torch counts nothing, and sends all.
        num_sent = state.total_numel_after_compression - sent_before or gradients.numel()
        return future, num_sent * gradients.element_size()

    def reset(self) -> None:
        """Begin anew, with whole steps; which buckets there are stays known."""
        self._noise.clear()
        self._state = self._new_state()

    def num_bytes(self, model: nn.Module) -> int:
        """Return the bytes of a gradient for each rank."""
        return dist.get_world_size() * sum(each.nbytes for each in model.parameters() if each.requires_grad)

    def tensors(self) -> dict[str, Tensor]:
        """Return what is held back as `NUMBER.error` [world_size, N], and the factors [N]; none before they begin."""
        rows = {number: gather_rows_on_rank_0(error) for number, error in sorted(self._state.error_dict.items())}
        found = {f"{number}.error": row for number, row in rows.items() if row is not None}
        if found:
            found |= {f"{number}.left": each for number, each in self._state.p_memory_dict.items()}
            found |= {f"{number}.right": each for number, each in self._state.q_memory_dict.items()}
        return found

    def values(self, model: nn.Module) -> dict[str, Any]:
        """Return the number of ranks, how many steps were sent, and the parameters of each bucket."""
        return {"ranks": dist.get_world_size(), "steps": self._state.iter, "buckets": self._names(model)}

    def load(self, model: nn.Module, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
        """Go on with this rank's part, or say why all ranks begin anew."""
        why = self._mismatch(model, values)
        if why:
            whole = f"it begins anew, with {POWERSGD_FIRST_STEP} whole steps"
            return f"resumed without what PowerSGD had held back: {why}; {whole}"
        state, own = self._state, dist.get_rank()
        state.iter = values["steps"]
        for number, bucket in enumerate(self._buckets if tensors else []):
            # In memory of torch's own, whose alignment the libraries that multiply may go by.
            held, left, right = (
                each.to(bucket[0].device, copy=True)
                for each in (tensors[f"{number}.error"][own], tensors[f"{number}.left"], tensors[f"{number}.right"])
            )
            state.error_dict[number], state.p_memory_dict[number], state.q_memory_dict[number] = held, left, right
        return ""

    def _mismatch(self, model: nn.Module, values: Mapping[str, Any]) -> str:
        """Return why what a checkpoint has does not go with these ranks and buckets; nothing where it does."""
        ranks = dist.get_world_size()
        if not values:
            return "the checkpoint has none of it"
        if values["ranks"] != ranks:
            return f"it was of {values['ranks']} ranks, and these are {ranks}"
        return "" if values["buckets"] == self._names(model) else "other gradients are sent together"

    def _names(self, model: nn.Module) -> list[list[str]]:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        return [[names[id(each)] for each in bucket] for bucket in self._buckets]

    def _new_state(self) -> Any:
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

        return PowerSGDState(
            None,
            matrix_approximation_rank=self._rank,
            start_powerSGD_iter=POWERSGD_FIRST_STEP,
            orthogonalization_epsilon=_ZERO_LENGTH,
        )


def _replace_nonfinite(memory: Tensor) -> Tensor:
    """Forget in place what is no number: a gradient that overflowed once must not be held back for all later steps."""
    return memory.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def _noise_like(right: Tensor) -> Tensor:
    """Return numbers too small to matter beside any but 0, the same on every rank.

    The right factors of a step are the first guess of the next. Those of a layer whose gradient was 0, as behind a
    branch that starts at zero, are 0, and no power iteration would ever leave that.
    """
    noise = torch.randn(right.shape, generator=torch.Generator().manual_seed(0))
    return noise.mul_(_SMALL).to(right.device, right.dtype)
