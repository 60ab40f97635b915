"""Export formats: state_dict, torch.export, ONNX and Hugging Face Hub folders."""

import contextlib
import copy
import io
import json
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import paceline
from paceline.core.errors import PacelineError, RecipeError
from paceline.core.files import write_new
from paceline.core.pixels import FULL_SCALE
from paceline.core.results import printable_class_name
from paceline.data.batch import batch_dtype
from paceline.inference.classifier import Classifier, Preprocessing
from paceline.models.build import build_model
from paceline.models.pretrained import read_weights
from paceline.recipe.schema.model import Model

OUTPUT_NAME = "logits"
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
    (
        *("resnet18", "resnet34", "resnet50", "resnet101", "resnet152"),
        *("resnext50_32x4d", "resnext101_32x8d", "wide_resnet50_2", "wide_resnet101_2"),
    )
)
_NOT_THE_MODEL = {"weights", "weights_sha256", "memory_format"}
# From a model's input to its logits, float32 [n, classes].
LogitsFunction = Callable[[Tensor], Tensor]


class ExportModel:
    """The model to export: from its single input `images` to logits, float32 [n, classes].

    `images` are normalized, float32 [n, c, h, w], or with `with_preprocessing` pixels as an image library returns them,
    uint8 [n, h, w, c], or for wider pixels float32, divided by their full scale. `module` is a copy in float32 on the
    CPU, in eval mode. With `is_calibrated` it divides the logits by the classifier's temperature, if it has one.
    """

    def __init__(self, classifier: Classifier, *, with_preprocessing: bool, is_calibrated: bool = True) -> None:
        self.classifier = classifier
        self.temperature = (is_calibrated and classifier.temperature) or 1.0
        self.has_preprocessing = with_preprocessing
        is_wide = classifier.preprocessing.pixel_format.is_wide
        self.layout = f"{'float32' if is_wide else 'uint8'} NHWC" if with_preprocessing else "float32 NCHW"
        # An exported file computes in float32 and runs anywhere, whatever the precision and device of the run.
        portable = copy.deepcopy(classifier.model).to("cpu", torch.float32).to(memory_format=torch.contiguous_format)
        self._pixels = _PixelNormalization(classifier.preprocessing, is_last=with_preprocessing)
        self.module = _NamedInput(
            portable.requires_grad_(False), self._pixels if with_preprocessing else nn.Identity(), self.temperature
        )

    @property
    def input_description(self) -> str:
        """Describe `images` in a sentence."""
        preprocessing = self.classifier.preprocessing
        channels, size, divided = preprocessing.channels, preprocessing.image_size, divide_pixels(preprocessing)
        if self.has_preprocessing:
            kind, values = ("float32", divided) if preprocessing.pixel_format.is_wide else ("uint8", "pixels 0 to 255")
            return f"{kind} [batch, {size}, {size}, {channels}], {values}"
        return f"float32 [batch, {channels}, {size}, {size}], ({divided} - mean) / std"

    def prepare_inputs(self, images: Tensor) -> Tensor:
        """Return the module's input for images [n, c, h, w] as in a batch."""
        if self.has_preprocessing:
            return images.permute(0, 2, 3, 1).contiguous()
        normalized: Tensor = self._pixels(images)
        return normalized

    def weights(self) -> dict[str, Tensor]:
        """Return the trained model's complete state_dict; floating tensors are float32."""
        tensors = self.module.network.state_dict()
        return {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}

    def metadata(self) -> dict[str, Any]:
        """Return the metadata of a file: `classes` by logit, `activation`, `preprocessing` and `paceline`.

        `activation` turns logits into probabilities: softmax, or sigmoid for several labels, with their `threshold`.
        `temperature` in `paceline` is that which the logits are divided by.

        In `preprocessing`, `resize` is the short side before the center crop to `image_size` pixels squared (None
        without crop), and `mean` and `std` are of pixels in [0, 1].
        """
        classifier, preprocessing = self.classifier, self.classifier.preprocessing
        return {
            "classes": [printable_class_name(each) for each in classifier.classes],
            **_describe_activation(classifier),
            "preprocessing": {
                "image_size": preprocessing.image_size,
                "resize": preprocessing.resize,
                "interpolation": f"{preprocessing.interpolation}, antialiased",
                "channels": preprocessing.channels,
                "pixels": preprocessing.pixels,
                "mean": list(preprocessing.mean),
                "std": list(preprocessing.std),
                "input": self.layout,
            },
            "paceline": {
                "version": paceline.__version__,
                "recipe": classifier.recipe.hash,
                "model": classifier.recipe.model.name,
                "checkpoint": classifier.checkpoint.name,
                **({"temperature": classifier.temperature} if classifier.temperature else {}),
            },
        }

    def trace(self) -> torch.export.ExportedProgram:
        """Return the module as a graph for any batch size, without source paths.

        Raise `PacelineError` if it cannot be traced.
        """
        preprocessing = self.classifier.preprocessing
        channels, size = preprocessing.channels, preprocessing.image_size
        # Two images: with one, torch.export would specialize the batch size to 1.
        black = self.prepare_inputs(torch.zeros(2, channels, size, size, dtype=batch_dtype(preprocessing.pixels)))
        try:
            batch = torch.export.Dim("batch", min=1)
            program = torch.export.export(self.module, (black,), dynamic_shapes={"images": {0: batch}})
        except Exception as error:  # the tracer raises anything that the model's Python code does
            first = " ".join(str(error).split())[:150]
            raise PacelineError(
                f"model.name: {self.classifier.recipe.model.name} cannot be traced for a batch of any size: {first} "
                "(use --format safetensors)"
            ) from error
        for node in program.graph.nodes:
            node.meta.pop("stack_trace", None)  # it has paths of this machine
        return program


def divide_pixels(preprocessing: Preprocessing) -> str:
    """Return the formula of pixels in the scale of mean and std: `pixel / 255`."""
    return "pixel" if preprocessing.pixels == "float32" else f"pixel / {FULL_SCALE[preprocessing.pixels]}"


class _PixelNormalization(nn.Module):
    """Normalize images [n, c, h, w], or [n, h, w, c] with `is_last`, to float32 [n, c, h, w]."""

    mean: Tensor
    scale: Tensor

    def __init__(self, preprocessing: Preprocessing, *, is_last: bool = False) -> None:
        super().__init__()
        self._is_last = is_last
        shape = (1, preprocessing.channels, 1, 1)
        full = 1 if preprocessing.pixel_format.is_wide else 255
        mean = torch.tensor(preprocessing.mean, dtype=torch.float32).mul_(full).view(shape)
        scale = torch.tensor(preprocessing.std, dtype=torch.float32).mul_(full).reciprocal_().view(shape)
        self.register_buffer("mean", mean, persistent=False)
        self.register_buffer("scale", scale, persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Return the normalized images."""
        planes = images.permute(0, 3, 1, 2) if self._is_last else images
        # Same order of operations as `DeviceTransfer.normalize`, so that the results are bit-identical.
        return (planes.to(torch.float32) - self.mean) * self.scale


class _NamedInput(nn.Module):
    """Call a model through an argument with the name of the file's input."""

    def __init__(self, network: nn.Module, before: nn.Module, temperature: float) -> None:
        super().__init__()
        self.before = before
        self.network = network
        self._temperature = temperature
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        """Return float32 logits."""
        logits: Tensor = self.network(self.before(images))
        return logits if self._temperature == 1.0 else logits / self._temperature


class ExportFormat(ABC):
    """A kind of exported file or folder.

    `suffix` is that of the file, empty for a folder; `library` is its name for the Hugging Face Hub; `facts` are facts
    about files of this format as (name, text). `has_graph` is whether it computes logits, or holds only weights.
    """

    suffix: str
    library: str
    has_graph: bool = True
    facts: tuple[tuple[str, str], ...] = ()

    @abstractmethod
    def write(self, model: ExportModel, path: Path) -> None:
        """Write `model` to `path`. Raise `PacelineError` if that is impossible."""

    @abstractmethod
    def open(self, path: Path) -> LogitsFunction:
        """Return a function that computes logits with the file at `path`, loaded as users load it."""

    @abstractmethod
    def usage(self, name: str, threshold: float | None = None) -> str:
        """Return Python code that loads the file `name` and computes logits; `threshold` as `Classifier`."""


class StateDictFormat(ExportFormat):
    """Write a state_dict with the names of the model's own library; load it into a new model of `section`."""

    suffix = ".pth"
    library = "pytorch"
    has_graph = False
    facts = (("reads", "torch.load(..., weights_only=True)"),)

    def __init__(self, section: Model) -> None:
        self._section = _without_sync_batch_norm(section)
        self._num_classes, self._channels, self._image_size = 0, 3, 0

    def write(self, model: ExportModel, path: Path) -> None:
        """Write the tensors by name."""
        assert not model.has_preprocessing, "a state_dict holds only weights"
        self._num_classes, self._channels = len(model.classifier.classes), model.classifier.preprocessing.channels
        self._image_size = model.classifier.model_image_size
        torch.save(model.weights(), path)

    def open(self, path: Path) -> LogitsFunction:
        """Load the tensors into a new model."""
        model = build_model(
            self._section, num_classes=self._num_classes, channels=self._channels, image_size=self._image_size
        )
        model.load_state_dict(read_weights(str(path)))
        return model.eval()

    def usage(self, name: str, threshold: float | None = None) -> str:
        """Return code that loads the file."""
        section = self._section.model_dump(mode="json", exclude_defaults=True, exclude=_NOT_THE_MODEL)
        library, colon, network = self._section.name.partition(":")
        if library == "torchvision" and colon and self._channels == 3:
            args = "".join(f", {key}={value!r}" for key, value in self._section.args.items())
            if network.startswith("vit_"):
                args = f"{args}, image_size={self._image_size}"
            return f"""\
import torch
from torchvision.models import get_model

model = get_model({_quote_python(network)}, num_classes={self._num_classes}{args})
model.load_state_dict(torch.load({_quote_python(name)}, weights_only=True))
logits = model.eval()(images)
"""
        return f"""\
import torch

from paceline.models.build import build_model
from paceline.recipe.schema.model import Model

sizes = dict(num_classes={self._num_classes}, channels={self._channels}, image_size={self._image_size})
model = build_model(Model(**{section!r}), **sizes)
model.load_state_dict(torch.load({_quote_python(name)}, weights_only=True))
logits = model.eval()(images)
"""


class TorchExportFormat(ExportFormat):
    """Write a torch.export program."""

    suffix = ".pt2"
    library = "pytorch"
    facts = (("torch", torch.__version__),)

    def write(self, model: ExportModel, path: Path) -> None:
        """Write the program, with class names and preprocessing in `paceline.json` beside the graph."""
        program = model.trace()
        # Example inputs would be the only pickle in the archive. torch.export.load reads it with weights_only, and
        # without if that fails, so that an untrusted .pt2 can run code.
        program.example_inputs = None
        torch.export.save(program, str(path), extra_files={METADATA_FILE: json.dumps(model.metadata())})

    def open(self, path: Path) -> LogitsFunction:
        """Return the program as a module."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch 2.11 warns about buffers that it reads itself
            return torch.export.load(str(path)).module()

    def usage(self, name: str, threshold: float | None = None) -> str:
        """Return code that loads the program and computes logits."""
        return f"""\
import json
import warnings

import torch

extra = {{"{METADATA_FILE}": ""}}
program = torch.export.load({_quote_python(name)}, extra_files=extra).module()
classes = json.loads(extra["{METADATA_FILE}"])["classes"]
logits = program(images)
{_print_code("classes", threshold)}"""


class OnnxFormat(ExportFormat):
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

    def write(self, model: ExportModel, path: Path) -> None:
        """Write the file, with class names and preprocessing in its metadata."""
        num_bytes = sum(tensor.nbytes for tensor in model.weights().values())
        if num_bytes >= _MAX_PROTOBUF_BYTES:
            raise PacelineError(
                f"model.name: {model.classifier.recipe.model.name} has {num_bytes / 1e9:.1f} GB of weights, and an "
                "ONNX file holds at most 2.1 GB (use --format torch)"
            )
        program = model.trace()
        # torch's exporter prints its progress and warns about its own code.
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
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
            texts = {name: json.dumps(value) for name, value in model.metadata().items()}
            exported.model.metadata_props.update(texts)
            exported.save(path, external_data=False)

    def open(self, path: Path) -> LogitsFunction:
        """Return an onnxruntime session on the CPU as a function."""
        import onnxruntime

        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        return lambda images: torch.from_numpy(session.run([OUTPUT_NAME], {"images": images.numpy()})[0])

    def usage(self, name: str, threshold: float | None = None) -> str:
        """Return code that runs the file with onnxruntime."""
        return f"""\
import json

import onnxruntime

session = onnxruntime.InferenceSession({_quote_python(name)})
classes = json.loads(session.get_modelmeta().custom_metadata_map["classes"])
(logits,) = session.run(["{OUTPUT_NAME}"], {{"images": images}})
{_print_code("classes", threshold, "axis=1")}"""


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


class HubFormat(ExportFormat):
    """Write a folder for the Hugging Face Hub; load it with timm or `build_model`."""

    suffix = ""
    has_graph = False

    def __init__(self, model_name: str) -> None:
        self.library = find_architecture(model_name).library

    def write(self, model: ExportModel, path: Path) -> None:
        """Create the folder `path`."""
        assert not model.has_preprocessing, "safetensors hold only weights"
        path.mkdir()
        write_new(path / CONFIG_FILE, json.dumps(build_config(model.classifier), indent=2) + "\n")
        save_file(model.weights(), path / WEIGHTS_FILE, metadata={"format": "pt"})
        # safetensors creates a file that only its owner can read.
        (path / WEIGHTS_FILE).chmod((path / CONFIG_FILE).stat().st_mode & 0o777)

    def open(self, path: Path) -> LogitsFunction:
        """Return the model loaded from the folder."""
        if self.library == "timm":
            import timm

            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # in timm's own code
                loaded: nn.Module = timm.create_model(f"local-dir:{path}", pretrained=True)
            return loaded.eval()
        config = json.loads((path / CONFIG_FILE).read_text(encoding="utf-8"))
        channels, size = config["pretrained_cfg"]["input_size"][:2]
        section = Model(**config["paceline"]["model"])
        model = build_model(section, num_classes=config["num_classes"], channels=channels, image_size=size)
        model.load_state_dict(load_file(path / WEIGHTS_FILE))
        return model.eval()

    def usage(self, name: str, threshold: float | None = None) -> str:
        """Return code that loads the folder."""
        if self.library == "timm":
            return f"""\
import timm

# "hf-hub:YOU/NAME" once it is there
model = timm.create_model({_quote_python(f"local-dir:{name}")}, pretrained=True).eval()
logits = model(images)
{_print_code('model.pretrained_cfg["label_names"]', threshold)}"""
        return f"""\
import json
from pathlib import Path

from safetensors.torch import load_file

from paceline.models.build import build_model
from paceline.recipe.schema.model import Model

config = json.loads(Path({_quote_python(f"{name}/{CONFIG_FILE}")}).read_text())
channels, size, _ = config["pretrained_cfg"]["input_size"]
sizes = dict(num_classes=config["num_classes"], channels=channels, image_size=size)
model = build_model(Model(**config["paceline"]["model"]), **sizes)
model.load_state_dict(load_file({_quote_python(f"{name}/{WEIGHTS_FILE}")}))
logits = model.eval()(images)
{_print_code('config["label_names"]', threshold)}"""


def _print_code(names: str, threshold: float | None, dim: str = "dim=1") -> str:
    """Return code that prints the class of each row of `logits`, or with `threshold` its classes."""
    if threshold is None:
        return f"print([{names}[index] for index in logits.argmax({dim})])\n"
    # The logit whose sigmoid is the threshold.
    least = math.log(threshold / (1 - threshold))
    return f"print([[name for name, logit in zip({names}, row) if logit > {least:g}] for row in logits])\n"


def _describe_activation(classifier: Classifier) -> dict[str, Any]:
    threshold = {} if classifier.threshold is None else {"threshold": classifier.threshold}
    return {"activation": classifier.activation, **threshold}


def build_config(classifier: Classifier) -> dict[str, Any]:
    """Return the content of `config.json`: timm's keys, and under `paceline` the arguments of `build_model`."""
    recipe, preprocessing = classifier.recipe, classifier.preprocessing
    architecture = find_architecture(recipe.model.name)
    size = [preprocessing.channels, preprocessing.image_size, preprocessing.image_size]
    pretrained = {
        **(_timm_pretrained_cfg(architecture.name) if architecture.library == "timm" else {}),
        "custom_load": False,
        "input_size": size,
        "interpolation": preprocessing.interpolation,
        "crop_pct": timm_crop_pct(preprocessing),
        "crop_mode": "squash" if preprocessing.resize is None else "center",
        "mean": list(preprocessing.mean),
        "std": list(preprocessing.std),
        "num_classes": len(classifier.classes),
    }
    section = _without_sync_batch_norm(recipe.model)
    model = section.model_dump(mode="json", exclude=_NOT_THE_MODEL)
    args = {
        **(section.args if section.name.startswith("timm:") else {}),
        **({"in_chans": preprocessing.channels} if preprocessing.channels != 3 else {}),
    }
    if architecture.library == "timm" and _has_other_size(architecture.name, classifier.model_image_size):
        args["img_size"] = classifier.model_image_size
    return {
        "architecture": str(architecture),
        "num_classes": len(classifier.classes),
        "label_names": [printable_class_name(each) for each in classifier.classes],
        **({"model_args": args} if args else {}),
        "pretrained_cfg": pretrained,
        "paceline": {
            "version": paceline.__version__,
            "recipe": recipe.hash,
            "model": model,
            **({"temperature": classifier.temperature} if classifier.temperature else {}),
            **_describe_activation(classifier),
        },
    }


def timm_crop_pct(preprocessing: Preprocessing) -> float:
    """Return timm's crop_pct for which timm resizes as paceline does.

    timm's short side is floor(image_size / crop_pct) (timm.data.transforms_factory), paceline's is rounded.
    """
    if preprocessing.resize is None:
        return 1.0
    size, resize = preprocessing.image_size, preprocessing.resize
    return next(share for share in (size / resize, size / (resize + 0.5)) if math.floor(size / share) == resize)


def _has_other_size(name: str, image_size: int) -> bool:
    """Return whether timm's model `name` takes images of one size, and that is not `image_size` by default."""
    import timm

    config = timm.get_pretrained_cfg(name)
    return config is not None and config.fixed_input_size and config.input_size[-1] != image_size


def _timm_pretrained_cfg(name: str) -> dict[str, Any]:
    # timm needs the names of the first convolution and the classifier to replace them.
    import timm

    config = timm.get_pretrained_cfg(name)
    values = asdict(config) if config else {}
    return {key: values[key] for key in ("first_conv", "classifier") if values.get(key)}


def _without_sync_batch_norm(section: Model) -> Model:
    # Same tensors as BatchNorm; only training on several ranks needs it.
    return section.model_copy(update={"norm": "batch"}) if section.norm == "sync_batch" else section


def _quote_python(text: str) -> str:
    """Return `text` as a Python string literal in double quotes."""
    return json.dumps(text, ensure_ascii=not text.isprintable())
