"""Every export format of a classifier ranks the same five classes of real images first as the run does."""

import importlib.util
from pathlib import Path

import pytest
import torch

from paceline.inference.classifier import load_classifier
from paceline.inference.export import build_export_format, export_classifier
from paceline.inference.formats import ExportModel

pytestmark = pytest.mark.real_data
MADE_RUN = Path(__file__).parents[1] / "unit" / "inference" / "made_run.py"
NUM_IMAGES = 200
FORMATS = {"onnx": ("onnxruntime", "a.onnx"), "torch": ("torch", "a.pt2"), "safetensors": ("timm", "a")}


@pytest.fixture
def made_run():
    spec = importlib.util.spec_from_file_location("made_run", MADE_RUN)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check_top5(run: Path, files: list[Path], out: Path) -> None:
    """Assert that `run` and its export in each format rank the same five classes first for `files`."""
    classifier = load_classifier(run, device="cpu")
    images = torch.stack([classifier.image(each.read_bytes(), each.name) for each in files])
    expected = classifier.log_probabilities(images).topk(5).indices
    assert len({tuple(each) for each in expected.tolist()}) > 1, "the model distinguishes images"
    for name, (needed, file) in FORMATS.items():
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{name} needs {needed} (pip install 'paceline[export]')")
        form = build_export_format(name, classifier.recipe.model)
        exported = export_classifier(classifier, form, out / file, with_preprocessing=False)
        assert exported.parity.of == "validation images"
        inputs = ExportModel(classifier, with_preprocessing=False).prepare_inputs(images)
        assert torch.equal(form.open(exported.path)(inputs).topk(5).indices, expected), name


def test_exports_of_a_resnet_18_agree_on_imagenet_photographs(made_run, real_data, tmp_path):
    photographs = real_data("imagenet-sample") / "train"
    roots = ("data.source.name=folder", f"data.source.train_root={photographs}", f"data.source.val_root={photographs}")
    run = made_run.write_of(tmp_path / "run", *roots, "model.name=torchvision:resnet18", "model.width=1",
                            "data.image_size=64")  # fmt: skip
    files = sorted(each for each in photographs.rglob("*") if each.is_file())[:NUM_IMAGES]
    assert len(files) == NUM_IMAGES
    check_top5(run, files, tmp_path)


@pytest.mark.parametrize("model", [pytest.param("resnet18_cifar", marks=pytest.mark.long), "speednet94"])
def test_exports_of_cifar_models_agree_on_cifar_10(made_run, real_data, tmp_path, model):
    cifar = real_data("cifar10")
    # As a folder: as dataset cifar10, all 60,000 images would be decoded first.
    source = ("data.source.name=folder", f"data.source.train_root={cifar / 'test'}",
              f"data.source.val_root={cifar / 'test'}", "data.eval_crop=1")  # fmt: skip
    run = made_run.write_of(tmp_path / "run", *source, f"model.name={model}", "model.width=0.25",
                            "data.image_size=32")  # fmt: skip
    files = sorted(each for folder in (cifar / "test").iterdir() for each in list(folder.iterdir())[:20])
    assert len(files) == NUM_IMAGES
    check_top5(run, files, tmp_path)
