"""Build the model to export, with or without pixel normalization."""

import copy
from typing import Protocol

import torch
from torch import Tensor, nn

from paceline.inference.classifier import Classifier, Preprocessing


class ExportModel(Protocol):
    """A model to export: from its single input `images` to logits, float32 [n, classes]."""

    @property
    def module(self) -> nn.Module:
        """Return the module to export, in eval mode; its argument is named `images`."""
        ...

    @property
    def input_description(self) -> str:
        """Return a description of `images`."""
        ...

    @property
    def layout(self) -> str:
        """Return dtype and axis order of `images`, for programs."""
        ...

    def prepare_inputs(self, images: Tensor) -> Tensor:
        """Return the module's input for uint8 images [n, c, h, w]."""
        ...

    def weights(self) -> dict[str, Tensor]:
        """Return the trained model's complete state_dict; floating tensors are float32."""
        ...


class BareModel:
    """The trained model alone; its caller normalizes the pixels."""

    layout = "float32 NCHW"

    def __init__(self, classifier: Classifier) -> None:
        self.module = _NamedInput(_to_float32_cpu(classifier.model))
        self._preprocessing = classifier.preprocessing
        self._pixels = _PixelNormalization(self._preprocessing)

    @property
    def input_description(self) -> str:
        """Return a description of `images`."""
        size = self._preprocessing.image_size
        return f"float32 [batch, {self._preprocessing.channels}, {size}, {size}], (pixel / 255 - mean) / std"

    def prepare_inputs(self, images: Tensor) -> Tensor:
        """Return float32 [n, c, h, w]."""
        normalised: Tensor = self._pixels(images)
        return normalised

    def weights(self) -> dict[str, Tensor]:
        """Return the model's tensors."""
        return _copy_tensors(self.module.network)


class ModelWithPreprocessing:
    """The trained model behind pixel normalization; its input is as an image library returns it."""

    layout = "uint8 NHWC"

    def __init__(self, classifier: Classifier) -> None:
        self.module = _NamedInput(
            _to_float32_cpu(classifier.model), _PixelNormalization(classifier.preprocessing, is_last=True)
        )
        self._preprocessing = classifier.preprocessing

    @property
    def input_description(self) -> str:
        """Return a description of `images`."""
        size = self._preprocessing.image_size
        return f"uint8 [batch, {size}, {size}, {self._preprocessing.channels}], pixels 0 to 255"

    def prepare_inputs(self, images: Tensor) -> Tensor:
        """Return uint8 [n, h, w, c]."""
        return images.permute(0, 2, 3, 1).contiguous()

    def weights(self) -> dict[str, Tensor]:
        """Return the model's tensors."""
        return _copy_tensors(self.module.network)


def build_export_model(classifier: Classifier, *, with_preprocessing: bool) -> ExportModel:
    """Return the model to export of `classifier`."""
    return ModelWithPreprocessing(classifier) if with_preprocessing else BareModel(classifier)


class _PixelNormalization(nn.Module):
    """Normalize uint8 images [n, c, h, w], or [n, h, w, c] with `is_last`, to float32 [n, c, h, w]."""

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
        """Return the normalized images."""
        planes = images.permute(0, 3, 1, 2) if self._is_last else images
        # Same order of operations as `data.placement`, so that the results are bit-identical.
        return (planes.to(torch.float32) - self.mean) * self.scale


class _NamedInput(nn.Module):
    """Call a model through an argument with the name of the file's input."""

    def __init__(self, network: nn.Module, before: nn.Module | None = None) -> None:
        super().__init__()
        self.before = before or nn.Identity()
        self.network = network
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        """Return float32 logits."""
        logits: Tensor = self.network(self.before(images))
        return logits


def _to_float32_cpu(model: nn.Module) -> nn.Module:
    """# Files compute in float32 and run anywhere, whatever the precision and device of the run."""
    portable = copy.deepcopy(model).to("cpu", torch.float32).to(memory_format=torch.contiguous_format)
    return portable.eval().requires_grad_(False)


def _copy_tensors(network: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone().contiguous() for name, tensor in network.state_dict().items()}
