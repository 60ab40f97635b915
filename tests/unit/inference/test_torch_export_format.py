"""Programs of torch.export: that they answer as the run does, and hold no pickle."""

import json
import zipfile
from pathlib import Path

import pytest
import torch

import paceline
from paceline.core.errors import PacelineError
from paceline.inference.classifier import load_classifier
from paceline.inference.export import export_classifier
from paceline.inference.formats import METADATA_FILE, ExportModel, TorchExportFormat

from . import made_run


@pytest.fixture(scope="module")
def exported_run(tmp_path_factory):
    """Return a classifier, and its file, which normalizes."""
    folder = tmp_path_factory.mktemp("program")
    classifier = load_classifier(made_run.write(folder / "run"), device="cpu")
    exported = export_classifier(classifier, TorchExportFormat(), folder / "a.pt2", with_preprocessing=True)
    return classifier, exported


def test_the_program_gives_the_runs_probabilities_for_batches_of_any_size(exported_run):
    classifier, exported = exported_run
    answer = TorchExportFormat().open(exported.path)
    for number in (1, 2, 7):
        images = torch.randint(256, (number, 3, 16, 16), dtype=torch.uint8)
        logits = answer(images.permute(0, 2, 3, 1).contiguous())
        # The run's network has its channels last: another order of the same float32 sums.
        torch.testing.assert_close(logits.softmax(dim=1), classifier.probabilities(images), rtol=1e-5, atol=1e-6)


def test_the_archive_holds_no_pickle_and_no_path_of_this_machine(exported_run):
    with zipfile.ZipFile(exported_run[1].path) as archive:
        members = {each.filename: archive.read(each) for each in archive.infolist()}
    assert any("weight" in name for name in members), "looked at what holds the weights"
    (inputs,) = (content for name, content in members.items() if "sample_inputs" in name)
    assert inputs == b"", "the one member that torch writes as a pickle"
    payloads = [json.loads(content) for name, content in members.items() if name.endswith("_config.json")]
    assert payloads and not any(each["use_pickle"] for payload in payloads for each in payload["config"].values())
    for content in members.values():
        assert not content.startswith(b"PK"), "torch.save makes a zip in the zip"
        for path in (Path(paceline.__file__).parent, Path(torch.__file__).parent, exported_run[0].run):
            assert str(path).encode() not in content


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # torch 2.11, of its own reading
def test_classes_and_preprocessing_are_beside_the_graph(exported_run):
    extra = {METADATA_FILE: ""}
    torch.export.load(str(exported_run[1].path), extra_files=extra)
    metadata = json.loads(extra[METADATA_FILE])
    assert tuple(metadata["classes"]) == exported_run[0].classes and metadata["preprocessing"]["input"] == "uint8 NHWC"


def test_a_network_that_cannot_be_traced_is_one_line(exported_run):
    class Stubborn(torch.nn.Module):
        def forward(self, images):
            return images.mean(dim=(1, 2, 3))[:, None] * (2 if images.sum().item() > 0 else 1)

    network = ExportModel(exported_run[0], with_preprocessing=False)
    network.module.network = Stubborn()
    with pytest.raises(PacelineError, match=r"^model.name: resnet18_cifar cannot be traced .* --format safetensors\)$"):
        network.trace()
