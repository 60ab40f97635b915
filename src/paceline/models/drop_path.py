"""Stochastic depth: skip the residual branch of random samples during training.

Huang et al. 2016, Deep Networks with Stochastic Depth (arXiv 1603.09382), per sample.
"""

from torch import Tensor, nn


class DropPath(nn.Module):
    """Zero each sample with `probability`, below 1, and divide the others by 1 - `probability`; identity in evaluation.

    [N, ...] to the same shape and dtype. Draws one number per sample from torch's global generator.
    """

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` with dropped samples, or `x` itself in evaluation."""
        if not self.training:
            return x
        keep_probability = 1 - self.probability
        factors = x.new_empty((x.shape[0], *[1] * (x.ndim - 1))).bernoulli_(keep_probability).div_(keep_probability)
        return x * factors

    def extra_repr(self) -> str:
        """Return what `repr` shows of the layer."""
        return f"probability={self.probability:g}"


def build_drop_path(probability: float) -> nn.Module:
    """Return a `DropPath`, or an identity that draws no random numbers if `probability` is 0."""
    return DropPath(probability) if probability else nn.Identity()


def append_drop_path(branch: nn.Sequential, probability: float) -> nn.Sequential:
    """Append a `DropPath` to `branch`, in place; names of tensors do not change."""
    return branch.append(DropPath(probability)) if probability else branch


def linear_drop_rates(drop_path: float, num_blocks: int) -> list[float]:
    """Return the drop probability of each block: `drop_path` * l / L for block l of L, counted from 1 (section 3.2)."""
    return [drop_path * block / num_blocks for block in range(1, num_blocks + 1)]
