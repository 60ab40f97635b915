"""What a step makes small."""

import torch
from torch import Tensor
from torch.nn import functional


class CrossEntropy(torch.nn.Module):
    """Mean cross-entropy over a batch, in float32 at least, whatever the format of the logits.

    `label_smoothing` spreads that probability evenly over all classes (Szegedy et al. 2016, arXiv 1512.00567).
    """

    def __init__(self, label_smoothing: float) -> None:
        super().__init__()
        self._label_smoothing = label_smoothing

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the loss [] of logits [N, C] for `targets`: classes int64 [N], or probabilities float [N, C]."""
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if targets.is_floating_point():
            targets = targets.to(wide.dtype)
        return functional.cross_entropy(wide, targets, label_smoothing=self._label_smoothing)
