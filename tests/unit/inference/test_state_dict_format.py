"""A `.pth` of the network's tensors: what the library that has the network, and the lines of its card, make of it."""

import pytest
import torch

from paceline.inference.classifier import load_classifier
from paceline.inference.export import build_export_format, export_classifier
from paceline.inference.formats import ExportModel

from . import made_run


@pytest.mark.parametrize("name", ["torchvision:squeezenet1_1", "resnet18_cifar"])
def test_the_file_is_loaded_by_the_lines_of_its_card(tmp_path, monkeypatch, name):
    classifier = load_classifier(made_run.write(tmp_path / "run", name, image_size=32), device="cpu")
    form = build_export_format("state_dict", classifier.recipe.model)
    exported = export_classifier(classifier, form, tmp_path / "net.pth", with_preprocessing=False)
    assert exported.parity.difference <= 1e-6
    usage = exported.card.read_text().partition("```python\n")[2].partition("```")[0]
    assert ("paceline" in usage) == (name == "resnet18_cifar"), "torchvision loads its own networks"
    monkeypatch.chdir(tmp_path)
    images = torch.randn(2, 3, 32, 32)
    found = {"images": images}
    exec(usage, found)
    with torch.inference_mode():
        assert torch.equal(found["logits"], ExportModel(classifier, with_preprocessing=False).module(images))


def test_batch_norms_of_several_ranks_are_plain_ones_for_others(tmp_path):
    run = made_run.write(tmp_path / "run", "resnet18_cifar", "model.norm=sync_batch")
    classifier = load_classifier(run, device="cpu")
    form = build_export_format("state_dict", classifier.recipe.model)
    exported = export_classifier(classifier, form, tmp_path / "net.pth", with_preprocessing=False)
    assert "sync_batch" not in exported.card.read_text().partition("```python\n")[2].partition("```")[0]
