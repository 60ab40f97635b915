"""Export a folder with `build_config.json` and `model.safetensors`, in the layout of timm and the Hugging Face Hub."""

import json
import math
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import paceline
from paceline.core.class_table import printable_class_name
from paceline.core.errors import RecipeError
from paceline.core.files import write_new
from paceline.inference.classifier import Classifier, Preprocessing
from paceline.inference.form import quote_python
from paceline.inference.network import BareModel, ExportModel
from paceline.inference.parity import LogitsFunction
from paceline.models.zoo import build_model
from paceline.recipe.schema.model import Model

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
# Models of torchvision that timm has under the same name with the same tensors (a test compares them).
_SAME_IN_TIMM = frozenset(
    {
        "resnet18",
        "resnet34",
        "resnet50",
        "resnet101",
        "resnet152",
        "resnext50_32x4d",
        "resnext101_32x8d",
        "wide_resnet50_2",
        "wide_resnet101_2",
    }
)


@dataclass(frozen=True)
class Architecture:
    """The library that loads a model, and its name there."""

    library: Literal["timm", "torchvision", "paceline"]
    name: str

    def __str__(self) -> str:
        """Return `find_architecture` of `build_config.json`; names without a library are timm's."""
        return self.name if self.library == "timm" else f"{self.library}/{self.name}"


def find_architecture(model_name: str) -> Architecture:
    """Return the library that loads the model `model_name` of a recipe."""
    library, colon, name = model_name.partition(":")
    # timm loads its own models and torchvision's ResNets. Others have the same layout and code in the model card.
    match library, colon:
        case "timm", ":":
            return Architecture("timm", name)
        case "torchvision", ":":
            return Architecture("timm" if name in _SAME_IN_TIMM else "torchvision", name)
    return Architecture("paceline", model_name)


class HubFormat:
    """Write the folder, and load it as users do: with timm or `build_model`. Raise `RecipeError` if timm is missing."""

    suffix = ""
    facts: tuple[tuple[str, str], ...] = ()

    def __init__(self, model_name: str) -> None:
        self.architecture = find_architecture(model_name)
        self.library: str = self.architecture.library
        if self.architecture.library == "timm":
            try:
                import timm  # noqa: F401
            except ImportError:
                raise RecipeError(
                    f"--format: safetensors of {model_name} are loaded by timm, which is not installed "
                    "(pip install 'paceline[export]')"
                ) from None

    def write(self, network: ExportModel, classifier: Classifier, path: Path) -> None:
        """Create the folder `path`."""
        assert network.layout == BareModel.layout, "safetensors hold only weights"
        path.mkdir()
        text = json.dumps(build_config(classifier), indent=2)
        write_new(path / CONFIG_FILE, text + "\n")
        save_file(network.weights(), path / WEIGHTS_FILE, metadata={"format": "pt"})
        (path / WEIGHTS_FILE).chmod(
            (path / CONFIG_FILE).stat().st_mode & 0o777
        )  # safetensors creates a file that only its owner can read

    def open(self, path: Path) -> LogitsFunction:
        """Return the model loaded from the folder."""
        values = json.loads((path / CONFIG_FILE).read_text(encoding="utf-8"))
        is_timm = self.architecture.library == "timm"
        model = _load_timm_model(path) if is_timm else _load_paceline_model(values, path / WEIGHTS_FILE)
        model.eval()

        def answer(images: Tensor) -> Tensor:
            with torch.inference_mode():
                logits: Tensor = model(images)
            return logits

        return answer

    def usage(self, name: str) -> str:
        """Return code that loads the folder."""
        if self.architecture.library == "timm":
            return f"""\
import timm

model = timm.create_model({quote_python(f"local-dir:{name}")}, pretrained=True).eval()  # "hf-hub:YOU/NAME" once it is there
logits = model(images)
print([model.pretrained_cfg["label_names"][index] for index in logits.argmax(dim=1)])
"""
        return f"""\
import json
from pathlib import Path

from safetensors.torch import load_file

from paceline.models.zoo import build_model
from paceline.recipe.schema.model import Model

config = json.loads(Path({quote_python(f"{name}/{CONFIG_FILE}")}).read_text())
channels = config["pretrained_cfg"]["input_size"][0]
model = build_model(Model(**config["paceline"]["model"]), num_classes=config["num_classes"], channels=channels)
model.load_state_dict(load_file({quote_python(f"{name}/{WEIGHTS_FILE}")}))
logits = model.eval()(images)
print([config["label_names"][index] for index in logits.argmax(dim=1)])
"""


def build_config(classifier: Classifier) -> dict[str, Any]:
    """Return `build_config.json`: timm's keys, and under `paceline` the arguments of `build_model`."""
    recipe, preprocessing = classifier.recipe, classifier.preprocessing
    named = find_architecture(recipe.model.name)
    size = [preprocessing.channels, preprocessing.image_size, preprocessing.image_size]
    pretrained = {
        **(_timm_pretrained_cfg(named.name) if named.library == "timm" else {}),
        "custom_load": False,
        "input_size": size,
        "interpolation": "bilinear",
        "crop_pct": timm_crop_pct(preprocessing),
        "crop_mode": "squash" if preprocessing.resize is None else "center",
        "mean": list(preprocessing.mean),
        "std": list(preprocessing.std),
        "num_classes": len(classifier.classes),
    }
    model = recipe.model.model_dump(mode="json", exclude={"weights", "memory_format"})
    if model["norm"] == "sync_batch":  # same tensors; only training on several ranks needs it
        model["norm"] = "batch"
    return {
        "architecture": str(named),
        "num_classes": len(classifier.classes),
        "label_names": [printable_class_name(each) for each in classifier.classes],
        **({"model_args": {"in_chans": preprocessing.channels}} if preprocessing.channels != 3 else {}),
        "pretrained_cfg": pretrained,
        "paceline": {"version": paceline.__version__, "recipe": recipe.hash, "model": model},
    }


def timm_crop_pct(preprocessing: Preprocessing) -> float:
    """Return timm's crop_pct for which timm resizes as paceline does.

    timm's short side is floor(image_size / crop_pct) (timm.data.transforms_factory), paceline's is rounded.
    """
    if preprocessing.resize is None:
        return 1.0
    size, resize = preprocessing.image_size, preprocessing.resize
    return next(share for share in (size / resize, size / (resize + 0.5)) if math.floor(size / share) == resize)


def _timm_pretrained_cfg(name: str) -> dict[str, Any]:
    # timm needs the names of the first convolution and the classifier to replace them.
    import timm

    facts = timm.get_pretrained_cfg(name)
    known = asdict(facts) if facts else {}
    return {key: known[key] for key in ("first_conv", "classifier") if known.get(key)}


def _load_timm_model(folder: Path) -> nn.Module:
    import timm

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # in timm's own code
        model: nn.Module = timm.create_model(f"local-dir:{folder}", pretrained=True)
    return model


def _load_paceline_model(values: dict[str, Any], weights: Path) -> nn.Module:
    channels = values["pretrained_cfg"]["input_size"][0]
    model = build_model(Model(**values["paceline"]["model"]), num_classes=values["num_classes"], channels=channels)
    model.load_state_dict(load_file(weights))
    return model
