"""Export a `.pth` file with the model's state_dict, as `torch.save(model.state_dict(), path)` writes it."""

from pathlib import Path

import torch
from torch import Tensor

from paceline.inference.classifier import Classifier
from paceline.inference.form import quote_python
from paceline.inference.network import BareModel, ExportModel
from paceline.inference.parity import LogitsFunction
from paceline.models.pretrained import read_weights
from paceline.models.zoo import build_model
from paceline.recipe.schema.model import Model


class StateDictFormat:
    """Write a state_dict with the names of the model's own library, and load it into a new model of `section`."""

    suffix = ".pth"
    library = "pytorch"
    facts: tuple[tuple[str, str], ...] = (("reads", "torch.load(..., weights_only=True)"),)

    def __init__(self, section: Model) -> None:
        # SyncBatchNorm has the same tensors as BatchNorm.
        self._section = section.model_copy(update={"norm": "batch"}) if section.norm == "sync_batch" else section
        self._num_classes, self._channels = 0, 3

    def write(self, network: ExportModel, classifier: Classifier, path: Path) -> None:
        """Write the tensors by name."""
        assert network.layout == BareModel.layout, "a state_dict holds only weights"
        self._num_classes, self._channels = len(classifier.classes), classifier.preprocessing.channels
        torch.save(network.weights(), path)

    def open(self, path: Path) -> LogitsFunction:
        """Return a new model with the tensors of the file."""
        model = build_model(self._section, num_classes=self._num_classes, channels=self._channels)
        model.load_state_dict(read_weights(str(path)))
        model.eval()

        def answer(images: Tensor) -> Tensor:
            with torch.inference_mode():
                logits: Tensor = model(images)
            return logits

        return answer

    def usage(self, name: str) -> str:
        """Return code that loads the file."""
        section = self._section.model_dump(mode="json", exclude_defaults=True, exclude={"weights", "memory_format"})
        library, colon, network = self._section.name.partition(":")
        if library == "torchvision" and colon and self._channels == 3:
            return f"""\
import torch
from torchvision.models import get_model

model = get_model({quote_python(network)}, num_classes={self._num_classes})
model.load_state_dict(torch.load({quote_python(name)}, weights_only=True))
logits = model.eval()(images)
"""
        return f"""\
import torch

from paceline.models.zoo import build_model
from paceline.recipe.schema.model import Model

model = build_model(Model(**{section!r}), num_classes={self._num_classes}, channels={self._channels})
model.load_state_dict(torch.load({quote_python(name)}, weights_only=True))
logits = model.eval()(images)
"""
