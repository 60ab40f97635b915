"""ONNX files: what is in them, and that onnxruntime answers as the run does."""

import json
import sys
from pathlib import Path

import pytest
import torch

import paceline
from paceline.core.errors import RecipeError
from paceline.inference.classifier import load_classifier
from paceline.inference.export import export_classifier
from paceline.inference.formats import OPSET, OnnxFormat

from . import made_run

for needed in ("onnx", "onnxruntime", "onnxscript"):
    pytest.importorskip(needed, reason=f"ONNX needs {needed} (pip install 'paceline[export]')")


@pytest.fixture(scope="module")
def exported_run(tmp_path_factory):
    """Return a classifier, and its file, which normalizes."""
    folder = tmp_path_factory.mktemp("onnx")
    classifier = load_classifier(made_run.write(folder / "run"), device="cpu")
    exported = export_classifier(classifier, OnnxFormat(), folder / "a.onnx", with_preprocessing=True)
    return classifier, exported


def test_onnxruntime_gives_the_runs_probabilities_for_pixels(exported_run):
    classifier, exported = exported_run
    images = torch.randint(256, (5, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    logits = OnnxFormat().open(exported.path)(images.permute(0, 2, 3, 1).contiguous())
    # Two libraries' float32 sums, of logits that are near 1.
    torch.testing.assert_close(logits.softmax(dim=1), classifier.probabilities(images), rtol=1e-5, atol=1e-6)


def test_parity_is_measured_on_the_runs_own_validation_images(exported_run):
    parity = exported_run[1].parity
    assert parity.of == "validation images" and parity.num_images == 32
    assert 0 < parity.difference <= 1e-5 and parity.top5 == 32  # 0 would mean that nothing was compared


def test_names_batch_and_opset_are_what_is_promised(exported_run):
    import onnx

    model = onnx.load(exported_run[1].path)
    onnx.checker.check_model(model, full_check=True)
    (images,), (logits,) = model.graph.input, model.graph.output
    assert (images.name, logits.name) == ("images", "logits")
    sizes = [[each.dim_param or each.dim_value for each in end.type.tensor_type.shape.dim] for end in (images, logits)]
    assert sizes == [["batch", 16, 16, 3], ["batch", 4]]
    assert images.type.tensor_type.elem_type == onnx.TensorProto.UINT8
    assert [each.version for each in model.opset_import if not each.domain] == [OPSET]
    assert (model.ir_version, model.producer_name) == (10, "paceline")  # IR 10: onnxruntime 1.18 and later


def test_metadata_have_classes_and_preprocessing(exported_run):
    import onnxruntime

    classifier, exported = exported_run
    metadata = onnxruntime.InferenceSession(str(exported.path)).get_modelmeta().custom_metadata_map
    assert tuple(json.loads(metadata["classes"])) == classifier.classes
    preprocessing = json.loads(metadata["preprocessing"])
    assert preprocessing["image_size"] == 16 and preprocessing["input"] == "uint8 NHWC"
    assert tuple(preprocessing["mean"]) == classifier.preprocessing.mean
    assert json.loads(metadata["paceline"])["recipe"] == classifier.recipe.hash


def test_no_path_of_this_machine_is_in_the_file(exported_run):
    content = exported_run[1].path.read_bytes()
    for path in (Path(paceline.__file__).parent, Path(torch.__file__).parent, exported_run[0].run):
        assert str(path).encode() not in content


def test_a_grey_network_takes_normalised_images(tmp_path):
    run = made_run.write(tmp_path / "run", "speednet94", image_size=28, channels=1)
    exported = export_classifier(load_classifier(run, device="cpu"), OnnxFormat(), tmp_path / "a.onnx",
                                 with_preprocessing=False)  # fmt: skip
    assert dict(exported.facts)["images"].startswith("float32 [batch, 1, 28, 28]")
    assert 0 < exported.parity.difference <= 1e-5


@pytest.mark.parametrize("missing", ["onnx", "onnxruntime", "onnxscript"])
def test_what_is_not_installed_is_one_line_with_the_fix(monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(RecipeError, match=rf"^--format: onnx needs {missing} \(pip install 'paceline\[export\]'\)$"):
        OnnxFormat()
