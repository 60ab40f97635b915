"""Export ONNX, for onnxruntime and most other runtimes: one file, for any batch size."""

import contextlib
import io
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import paceline
from paceline.core.errors import PacelineError, RecipeError
from paceline.inference.classifier import Classifier
from paceline.inference.form import OUTPUT_NAME, export_metadata, quote_python, trace_program
from paceline.inference.network import ExportModel
from paceline.inference.parity import LogitsFunction

# Native opset of torch's exporter; for any other it converts, which can fail
# (torch.onnx._internal.exporter._constants.TORCHLIB_OPSET). The file's format is IR 10, supported by onnxruntime 1.18
# and later (https://onnxruntime.ai/docs/reference/compatibility.html).
OPSET = 18
# Maximum length of a protocol buffer (https://protobuf.dev/programming-guides/proto-limits).
_MAX_PROTOBUF_BYTES = 2**31


class OnnxFormat:
    """Write ONNX, and run it with onnxruntime. Raise `RecipeError` if either is not installed."""

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
    """Compute logits with an onnxruntime session."""

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
