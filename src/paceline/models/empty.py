"""A probe that replaces the model: next to no computation, with the rest of the step unchanged."""

from torch import Tensor, nn


class EmptyModel(nn.Module):
    """Average each channel over the image and classify the averages by one linear layer.

    Maps images, float [N, channels, H, W], to logits, float [N, num_classes]. Its weights give the optimizer, DDP and
    checkpoints something to process.
    """

    def __init__(self, *, num_classes: int, channels: int) -> None:
        super().__init__()
        self.classifier = nn.Linear(channels, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of `images`."""
        logits: Tensor = self.classifier(images.mean(dim=(2, 3)))
        return logits
