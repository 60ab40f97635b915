"""Export formats: state_dict, torch.export, ONNX and Hugging Face Hub folders."""

import contextlib
import io
import json
import math
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import paceline
from paceline.core.errors import PacelineError, RecipeError
from paceline.core.files import write_new
from paceline.core.results import printable_class_name
from paceline.inference.classifier import Classifier, Preprocessing
from paceline.inference.export_model import (
    OUTPUT_NAME,
    BareModel,
    ExportModel,
    LogitsFunction,
    export_metadata,
    quote_python,
    trace_program,
)
from paceline.models.build import build_model
from paceline.models.pretrained import read_weights
from paceline.recipe.schema.model import Model

# File in the archive with class names and preprocessing.
METADATA_FILE = "paceline.json"
# Native opset of torch's exporter; for any other it converts, which can fail
# (torch.onnx._internal.exporter._constants.TORCHLIB_OPSET). The file's format is IR 10, supported by onnxruntime 1.18
# and later (https://onnxruntime.ai/docs/reference/compatibility.html).
OPSET = 18
# Maximum length of a protocol buffer (https://protobuf.dev/programming-guides/proto-limits).
_MAX_PROTOBUF_BYTES = 2**31
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


class StateDictFormat:
    """Write a state_dict with the names of the model's own library; load it into a new model of `section`."""

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
        """Load the tensors into a new model."""
        model = build_model(self._section, num_classes=self._num_classes, channels=self._channels)
        model.load_state_dict(read_weights(str(path)))
        model.eval()

        def compute_logits(images: Tensor) -> Tensor:
            with torch.inference_mode():
                logits: Tensor = model(images)
            return logits

        return compute_logits

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

from paceline.models.build import build_model
from paceline.recipe.schema.model import Model

model = build_model(Model(**{section!r}), num_classes={self._num_classes}, channels={self._channels})
model.load_state_dict(torch.load({quote_python(name)}, weights_only=True))
logits = model.eval()(images)
"""


class TorchExportFormat:
    """Write a torch.export program."""

    suffix = ".pt2"
    library = "pytorch"
    facts = (("torch", torch.__version__),)

    def write(self, network: ExportModel, classifier: Classifier, path: Path) -> None:
        """Write the program, with class names and preprocessing in `paceline.json` beside the graph."""
        program = trace_program(classifier, network)
        # Example inputs would be the only pickle in the archive. torch.export.load reads it with weights_only, and
        # without if that fails, so that an untrusted .pt2 can run code.
        program.example_inputs = None
        values = {name: json.loads(value) for name, value in export_metadata(classifier, network).items()}
        torch.export.save(program, str(path), extra_files={METADATA_FILE: json.dumps(values)})

    def open(self, path: Path) -> LogitsFunction:
        """Return the program as a module."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch 2.11 warns about buffers that it reads itself
            module = torch.export.load(str(path)).module()

        def compute_logits(images: Tensor) -> Tensor:
            logits: Tensor = module(images)
            return logits

        return compute_logits

    def usage(self, name: str) -> str:
        """Return code that loads the program and computes logits."""
        return f"""\
import json
import warnings

import torch

extra = {{"{METADATA_FILE}": ""}}
program = torch.export.load({quote_python(name)}, extra_files=extra).module()
classes = json.loads(extra["{METADATA_FILE}"])["classes"]
logits = program(images)
print([classes[index] for index in logits.argmax(dim=1)])
"""


class OnnxFormat:
    """Write ONNX, and run it with onnxruntime. Raise `RecipeError` if one of them is not installed."""

    suffix = ".onnx"
    library = "onnx"
    facts = (("opset", str(OPSET)),)

    def __init__(self) -> None:
        try:
            import onnx  # noqa: F401
            import onnxruntime  # noqa: F401
            import onnxscript  # noqa: F401
        except ImportError as error:
            raise RecipeError(f"--format: onnx needs {error.name} (pip install 'paceline[export]')") from None

    def write(self, network: ExportModel, classifier: Classifier, path: Path) -> None:
        """Write the file, with class names and preprocessing in its metadata."""
        num_bytes = sum(tensor.nbytes for tensor in network.weights().values())
        if num_bytes >= _MAX_PROTOBUF_BYTES:
            raise PacelineError(
                f"model.name: {classifier.recipe.model.name} has {num_bytes / 1e9:.1f} GB of weights, and an ONNX file "
                "holds at most 2.1 GB (use --format torch)"
            )
        program = trace_program(classifier, network)
        # torch's exporter prints its progress and warns about its own code.
        with _suppress_output():
            exported = torch.onnx.export(
                program,
                dynamo=True,
                opset_version=OPSET,
                input_names=["images"],
                output_names=[OUTPUT_NAME],
                dynamic_shapes={"images": {0: "batch"}},
                verbose=False,
            )
            assert exported is not None, "torch's exporter returns a program unless it is given a file"
            exported.model.producer_name, exported.model.producer_version = "paceline", paceline.__version__
            exported.model.metadata_props.update(export_metadata(classifier, network))
            exported.save(path, external_data=False)

    def open(self, path: Path) -> LogitsFunction:
        """Return an onnxruntime session on the CPU as a function."""
        import onnxruntime

        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        return _OnnxSession(session)

    def usage(self, name: str) -> str:
        """Return code that runs the file with onnxruntime."""
        return f"""\
import json

import onnxruntime

session = onnxruntime.InferenceSession({quote_python(name)})
classes = json.loads(session.get_modelmeta().custom_metadata_map["classes"])
(logits,) = session.run(["{OUTPUT_NAME}"], {{"images": images}})
print([classes[index] for index in logits.argmax(axis=1)])
"""


class _OnnxSession:
    def __init__(self, session: Any) -> None:
        self._session = session

    def __call__(self, images: Tensor) -> Tensor:
        (logits,) = self._session.run([OUTPUT_NAME], {"images": images.numpy()})
        return torch.from_numpy(logits)


@contextlib.contextmanager
def _suppress_output() -> Iterator[None]:
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


@dataclass(frozen=True)
class Architecture:
    """The library that loads a model, and its name there."""

    library: Literal["timm", "torchvision", "paceline"]
    name: str

    def __str__(self) -> str:
        """Return `architecture` of `config.json`; names without a library are timm's."""
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
    """Write a folder for the Hugging Face Hub; load it with timm or `build_model`. Raise `RecipeError` without timm."""

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
        # safetensors creates a file that only its owner can read.
        (path / WEIGHTS_FILE).chmod((path / CONFIG_FILE).stat().st_mode & 0o777)

    def open(self, path: Path) -> LogitsFunction:
        """Return the model loaded from the folder."""
        values = json.loads((path / CONFIG_FILE).read_text(encoding="utf-8"))
        is_timm = self.architecture.library == "timm"
        model = _load_timm_model(path) if is_timm else _load_paceline_model(values, path / WEIGHTS_FILE)
        model.eval()

        def compute_logits(images: Tensor) -> Tensor:
            with torch.inference_mode():
                logits: Tensor = model(images)
            return logits

        return compute_logits

    def usage(self, name: str) -> str:
        """Return code that loads the folder."""
        if self.architecture.library == "timm":
            return f"""\
import timm

# "hf-hub:YOU/NAME" once it is there
model = timm.create_model({quote_python(f"local-dir:{name}")}, pretrained=True).eval()
logits = model(images)
print([model.pretrained_cfg["label_names"][index] for index in logits.argmax(dim=1)])
"""
        return f"""\
import json
from pathlib import Path

from safetensors.torch import load_file

from paceline.models.build import build_model
from paceline.recipe.schema.model import Model

config = json.loads(Path({quote_python(f"{name}/{CONFIG_FILE}")}).read_text())
channels = config["pretrained_cfg"]["input_size"][0]
model = build_model(Model(**config["paceline"]["model"]), num_classes=config["num_classes"], channels=channels)
model.load_state_dict(load_file({quote_python(f"{name}/{WEIGHTS_FILE}")}))
logits = model.eval()(images)
print([config["label_names"][index] for index in logits.argmax(dim=1)])
"""


def build_config(classifier: Classifier) -> dict[str, Any]:
    """Return the content of `config.json`: timm's keys, and under `paceline` the arguments of `build_model`."""
    recipe, preprocessing = classifier.recipe, classifier.preprocessing
    architecture = find_architecture(recipe.model.name)
    size = [preprocessing.channels, preprocessing.image_size, preprocessing.image_size]
    pretrained = {
        **(_timm_pretrained_cfg(architecture.name) if architecture.library == "timm" else {}),
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
        "architecture": str(architecture),
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

    config = timm.get_pretrained_cfg(name)
    values = asdict(config) if config else {}
    return {key: values[key] for key in ("first_conv", "classifier") if values.get(key)}


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
