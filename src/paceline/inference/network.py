"""What is exported of a classifier: its network in float32 on the CPU, with or without the normalising of pixels.

Whatever the network was trained in, and on whatever device: a file computes in float32, and runs anywhere.
"""

import copy
from typing import Protocol

import torch
from torch import Tensor, nn

from paceline.inference.classifier import Classifier, Preprocessing


class Network(Protocol):
    """What a file computes: from `images`, its one input, to logits, float32 [n, classes]."""

    @property
    def module(self) -> nn.Module:
        """The module that is exported, in eval mode; its one argument is called `images`."""
        ...

    @property
    def takes(self) -> str:
        """Say what `images` are."""
        ...

    @property
    def layout(self) -> str:
        """Name dtype and order of the axes, for programs."""
        ...

    def inputs(self, images: Tensor) -> Tensor:
        """Return what the module is given for uint8 images [n, c, h, w]."""
        ...

    def weights(self) -> dict[str, Tensor]:
        """Return the tensors of the trained network by its own names, whole, float32 where they are floating."""
        ...


class Plain:
    """The trained network alone: whoever asks it normalises the pixels."""

    layout = "float32 NCHW"

    def __init__(self, classifier: Classifier) -> None:
        self.module = _Named(_portable(classifier.model))
        self._preprocessing = classifier.preprocessing
        self._pixels = _Pixels(self._preprocessing)

    @property
    def takes(self) -> str:
        """Say what `images` are."""
        size = self._preprocessing.image_size
        return f"float32 [batch, {self._preprocessing.channels}, {size}, {size}], (pixel / 255 - mean) / std"

    def inputs(self, images: Tensor) -> Tensor:
        """Return float32 [n, c, h, w]."""
        normalised: Tensor = self._pixels(images)
        return normalised

    def weights(self) -> dict[str, Tensor]:
        """Return the tensors of the network."""
        return _tensors(self.module.network)


class WithPreprocessing:
    """The trained network behind the normalising of pixels, which come as an image library holds them."""

    layout = "uint8 NHWC"

    def __init__(self, classifier: Classifier) -> None:
        self.module = _Named(_portable(classifier.model), _Pixels(classifier.preprocessing, is_last=True))
        self._preprocessing = classifier.preprocessing

    @property
    def takes(self) -> str:
        """Say what `images` are."""
        size = self._preprocessing.image_size
        return f"uint8 [batch, {size}, {size}, {self._preprocessing.channels}], pixels 0 to 255"

    def inputs(self, images: Tensor) -> Tensor:
        """Return uint8 [n, h, w, c]."""
        return images.permute(0, 2, 3, 1).contiguous()

    def weights(self) -> dict[str, Tensor]:
        """Return the tensors of the network."""
        return _tensors(self.module.network)


def build_network(classifier: Classifier, *, with_preprocessing: bool) -> Network:
    """Return what is exported of `classifier`."""
    return WithPreprocessing(classifier) if with_preprocessing else Plain(classifier)


class _Pixels(nn.Module):
    """Normalise uint8 images, [n, c, h, w], or [n, h, w, c] where `is_last`: to float32 [n, c, h, w].

    (pixel - 255 mean) * (1 / (255 std)), in the order in which `data.placement` computes it, so that nothing differs.
    """

    mean: Tensor
    scale: Tensor

    def __init__(self, preprocessing: Preprocessing, *, is_last: bool = False) -> None:
        super().__init__()
        self._is_last = is_last
        shape = (1, preprocessing.channels, 1, 1)
        mean = torch.tensor(preprocessing.mean, dtype=torch.float32).mul_(255).view(shape)
        scale = torch.tensor(preprocessing.std, dtype=torch.float32).mul_(255).reciprocal_().view(shape)
        self.register_buffer("mean", mean, persistent=False)
        self.register_buffer("scale", scale, persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Return the normalised images."""
        planes = images.permute(0, 3, 1, 2) if self._is_last else images
        return (planes.to(torch.float32) - self.mean) * self.scale


class _Named(nn.Module):
    """Call a network through an argument that has the name of the file's input."""

    def __init__(self, network: nn.Module, before: nn.Module | None = None) -> None:
        super().__init__()
        self.before = before or nn.Identity()
        self.network = network
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits, float32."""
        logits: Tensor = self.network(self.before(images))
        return logits


def _portable(model: nn.Module) -> nn.Module:
    """Return a copy of `model` that is float32 on the CPU, with contiguous filters."""
    portable = copy.deepcopy(model).to("cpu", torch.float32).to(memory_format=torch.contiguous_format)
    return portable.eval().requires_grad_(False)


def _tensors(network: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone().contiguous() for name, tensor in network.state_dict().items()}
