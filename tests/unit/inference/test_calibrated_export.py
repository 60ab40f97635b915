"""A calibrated checkpoint: graphs divide their logits by the temperature, and weights alone come with it."""

import json
from collections.abc import Callable
from functools import cache

import pytest
import torch

from paceline.core.results import Calibration
from paceline.core.run_dir import RunDir
from paceline.inference.classifier import Classifier, load_classifier
from paceline.inference.export import ExportFormatName, ExportResult, build_export_format, export_classifier
from paceline.inference.formats import ExportFormat
from paceline.training.calibration import write_temperature

from . import made_run

T = 2.5
Exported = Callable[[bool, ExportFormatName], tuple[ExportFormat, ExportResult]]


@pytest.fixture(scope="module")
def classifiers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Classifier, Classifier]:
    """Return the classifier of a run before and after its calibration."""
    run = made_run.write(tmp_path_factory.mktemp("calibrated") / "run")
    before = load_classifier(run, device="cpu")
    found = Calibration(temperature=T, images=40, loss=1, ece=0.2, calibrated_loss=0.8, calibrated_ece=0.1)
    write_temperature(RunDir(run), before.checkpoint, found, [])
    return before, load_classifier(run, device="cpu")


@pytest.fixture(scope="module")
def exported(classifiers: tuple[Classifier, Classifier], tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """Return a function that exports the calibrated classifier, or the one before, in a format."""

    @cache
    def export(is_calibrated: bool, name: ExportFormatName) -> tuple[ExportFormat, ExportResult]:
        classifier = classifiers[is_calibrated]
        form = build_export_format(name, classifier.recipe.model)
        out = tmp_path_factory.mktemp("exported") / f"file{form.suffix}"
        return form, export_classifier(classifier, form, out, with_preprocessing=False)

    return export


def images(number: int = 5) -> torch.Tensor:
    return torch.randint(256, (number, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def test_probabilities_are_those_of_the_divided_logits(classifiers: tuple[Classifier, Classifier]) -> None:
    before, after = classifiers
    expected = (before.log_probabilities(images()) / T).softmax(dim=1)
    torch.testing.assert_close(after.log_probabilities(images()).exp(), expected, rtol=1e-12, atol=0)
    assert (before.temperature, after.temperature) == (None, T)


@pytest.mark.parametrize("name", ["torch", "onnx", "state_dict", "safetensors"])
def test_a_graph_divides_and_weights_name_the_temperature(
    classifiers: tuple[Classifier, Classifier],
    exported: Exported,
    name: ExportFormatName,
) -> None:
    before, after = classifiers
    form, found = exported(True, name)
    assert 0 < found.parity.difference <= 1e-5 or name in ("state_dict", "safetensors")
    logits = form.open(found.path)(after.place.normalize(images()))
    expected = before.log_probabilities(images()) if form.suffix in ("", ".pth") else after.log_probabilities(images())
    torch.testing.assert_close(logits.double().log_softmax(dim=1), expected, rtol=1e-5, atol=1e-5)
    assert ("divided by the temperature 2.5" if form.has_graph else "`logits / 2.5`") in found.card.read_text()
    if name == "safetensors":
        assert json.loads((found.path / "config.json").read_text())["paceline"]["temperature"] == T


def test_the_metadata_of_a_graph_has_the_temperature(
    exported: Exported,
) -> None:
    for is_calibrated, expected in ((False, None), (True, T)):
        extra = {"paceline.json": ""}
        _, found = exported(is_calibrated, "torch")
        torch.export.load(str(found.path), extra_files=extra)
        assert json.loads(extra["paceline.json"])["paceline"].get("temperature") == expected
