"""Stochastic depth: leave a sample's residual branch out of a training step, at random.

Huang et al. 2016, Deep Networks with Stochastic Depth (arXiv 1603.09382), for each sample on its own. A branch that
stays is divided by the probability of staying, so that evaluation needs no change and the expectation is kept.
"""

from torch import Tensor, nn


class DropPath(nn.Module):
    """Replace samples by zeros with `probability`, below 1, and divide the others by 1 - `probability`; in training.

    [N, ...] to the same shape and dtype. Draws one number a sample from torch's global generator.
    """

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` with samples left out, or as it is in evaluation."""
        if not self.training:
            return x
        stays = 1 - self.probability
        factors = x.new_empty((x.shape[0], *[1] * (x.ndim - 1))).bernoulli_(stays).div_(stays)
        return x * factors

    def extra_repr(self) -> str:
        """Return what `print` shows of the layer."""
        return f"probability={self.probability:g}"


def build_drop_path(probability: float) -> nn.Module:
    """Return the layer, or one that does nothing and draws nothing where `probability` is 0."""
    return DropPath(probability) if probability else nn.Identity()


def with_drop_path(branch: nn.Sequential, probability: float) -> nn.Sequential:
    """Append to `branch`, in place, what leaves it out with `probability`; no tensor's name changes."""
    return branch.append(DropPath(probability)) if probability else branch


def linear_rates(drop_path: float, num_blocks: int) -> list[float]:
    """Return the probability of each block: `drop_path` at the last and less before, in proportion to depth.

    drop_path * l / L for block l of L, counted from 1: section 3.2 of the paper.
    """
    return [drop_path * block / num_blocks for block in range(1, num_blocks + 1)]
