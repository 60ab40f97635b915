"""Exports are verified before they are published, and a failed one leaves no file."""

import ast
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors import SafetensorError

from paceline.core.dataset import ArraySource
from paceline.core.errors import PacelineError, RecipeError
from paceline.data.sources.builtin import load_synthetic
from paceline.inference.classifier import load_classifier, with_image_size
from paceline.inference.export import (
    ExportParity,
    ParityImages,
    check_out_path,
    check_parity,
    export_classifier,
    load_parity_images,
    measure_parity,
    model_card_path,
)
from paceline.inference.formats import ExportModel, HubFormat, OnnxFormat, TorchExportFormat
from paceline.recipe.load import Patch, load
from paceline.recipe.schema.source import Synthetic
from paceline.recipe.yaml import to_yaml_text

from . import made_run


class Wrong:
    """A form whose file answers as `answer` does."""

    suffix, library, has_graph, facts = ".pt2", "pytorch", True, ()

    def __init__(self, answer):
        self.answer = answer

    def write(self, network, path):
        path.write_bytes(b"network")
        self.network = network

    def open(self, path):
        return lambda images: self.answer(self.network.module(images))

    def usage(self, name, threshold=None):
        return ""


@pytest.fixture
def classifier(tmp_path):
    return load_classifier(made_run.write(tmp_path / "run"), device="cpu")


def test_a_file_and_its_card_appear_and_nothing_else(classifier, tmp_path):
    out = tmp_path / "new" / "a.pt2"
    exported = export_classifier(classifier, Wrong(lambda logits: logits), out, with_preprocessing=False)
    assert sorted(each.name for each in out.parent.iterdir()) == ["a.pt2", "a.pt2.md"]
    # A batch of one is summed in another order.
    assert exported.num_bytes == 7 and exported.parity.difference <= 1e-6 and exported.card.name == "a.pt2.md"


@pytest.mark.parametrize(
    "answer, message",
    [
        (
            lambda logits: logits + 0.01,
            r"differ from PyTorch's by up to 0\.0\d+ of the largest on 32 validation images",
        ),
        (lambda logits: logits * float("nan"), r"differ from PyTorch's by up to nan"),
    ],
)
def test_an_export_that_differs_is_refused_and_removed(classifier, tmp_path, answer, message):
    with pytest.raises(PacelineError, match=rf"^--format: a.pt2: its logits {message}.* \(use another --format; .*\)$"):
        export_classifier(classifier, Wrong(answer), tmp_path / "new" / "a.pt2", with_preprocessing=False)
    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.parametrize("existing", ["a.pt2", "a.pt2.md"])
def test_existing_files_are_not_overwritten(classifier, tmp_path, existing):
    (tmp_path / existing).write_text("mine")
    with pytest.raises(RecipeError, match=rf"^--out: .*/{existing} already exists \(name another, or remove it\)$"):
        export_classifier(classifier, Wrong(lambda logits: logits), tmp_path / "a.pt2", with_preprocessing=False)
    assert (tmp_path / existing).read_text() == "mine"
    assert {"run", existing} == {each.name for each in tmp_path.iterdir()}


def test_a_folder_is_never_written_into(classifier, tmp_path):
    (tmp_path / "a").mkdir()
    with pytest.raises(RecipeError, match="already exists"):
        export_classifier(classifier, HubFormat("resnet18_cifar"), tmp_path / "a", with_preprocessing=False)
    assert list((tmp_path / "a").iterdir()) == []


@pytest.mark.parametrize("name, suffix", [("a.pt2", ".onnx"), ("a", ".pt2"), ("a.safetensors", ""), ("a.onnx", "")])
def test_a_name_of_another_format_is_refused(name, suffix):
    with pytest.raises(RecipeError, match=r"^--out: .* does not match --format \(name a f"):
        check_out_path(Path(name), suffix)


def test_a_folder_may_have_a_version_in_its_name(tmp_path):
    check_out_path(tmp_path / "photos-v1.5", "")
    assert model_card_path(tmp_path / "photos-v1.5", "").name == "README.md"


def test_a_place_that_cannot_be_written_is_one_line(classifier, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PacelineError, match=r"^--out: .* cannot be written: .* \(name another\)$"):
        export_classifier(classifier, HubFormat("resnet18_cifar"), tmp_path / "file" / "a", with_preprocessing=False)


def test_normalising_in_the_file_is_the_placements_bit_for_bit(classifier):
    images = torch.randint(256, (3, 3, 16, 16), dtype=torch.uint8)
    plain, whole = (ExportModel(classifier, with_preprocessing=each) for each in (False, True))
    assert torch.equal(plain.prepare_inputs(images), classifier.place.normalize(images))
    before = whole.module.before(whole.prepare_inputs(images))
    assert torch.equal(before, plain.prepare_inputs(images))


def test_what_is_exported_is_a_copy_in_float32(classifier):
    classifier.model.double()
    network = ExportModel(classifier, with_preprocessing=True)
    assert {each.dtype for each in network.weights().values()} == {torch.float32, torch.int64}
    assert next(classifier.model.parameters()).dtype == torch.float64
    assert all("before" not in name and "network" not in name for name in network.weights())


def test_a_difference_is_relative_to_the_largest_logit(classifier):
    linear = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 16 * 16, 4))
    with torch.no_grad():
        linear[1].weight.zero_()
        linear[1].bias.copy_(torch.tensor([-8.0, 0.0, 2.0, 1.0]))
    classifier = replace(classifier, model=linear)
    network = ExportModel(classifier, with_preprocessing=False)
    sample = ParityImages(torch.zeros(4, 3, 16, 16, dtype=torch.uint8), "black images")
    found = measure_parity(network, lambda images: network.module(images) + 0.5, sample)
    assert found == ExportParity(difference=0.5 / 8, num_images=4, of="black images", top5=4)


@pytest.mark.parametrize("num_images", [1, 5, 32])
def test_the_file_runs_on_any_number_of_images(classifier, num_images):
    network, batch_sizes = ExportModel(classifier, with_preprocessing=False), []

    def answer(images):
        batch_sizes.append(len(images))
        return network.module(images)

    sample = load_parity_images(classifier)
    found = measure_parity(network, answer, replace(sample, images=sample.images[:num_images]))
    assert batch_sizes == [1, 31] and (found.num_images, found.top5) == (num_images, num_images)


@pytest.mark.parametrize("with_preprocessing", [False, True])
def test_what_normalises_otherwise_than_the_run_is_found(classifier, with_preprocessing):
    wrong = replace(classifier.preprocessing, mean=(0.1, 0.2, 0.3))
    network = ExportModel(replace(classifier, preprocessing=wrong), with_preprocessing=with_preprocessing)
    network.classifier = classifier  # to compare with
    found = measure_parity(network, network.module, load_parity_images(classifier))
    assert found.difference > 0.01
    with pytest.raises(PacelineError, match=r"^a\.onnx: its logits differ"):
        check_parity(found, "a.onnx")


def test_a_network_whose_logits_are_no_numbers_is_named(classifier, tmp_path):
    next(classifier.model.parameters()).fill_(float("nan"))
    message = r"^--checkpoint: step-00000012: the model's logits are NaN or infinite \(use another checkpoint\)$"
    with pytest.raises(PacelineError, match=message):
        export_classifier(classifier, Wrong(lambda logits: logits), tmp_path / "a.pt2", with_preprocessing=False)
    assert [each.name for each in tmp_path.iterdir()] == ["run"]


def of_source(tmp_path, *args):
    """Return a classifier whose run says that it is of the dataset that `args` make of `folder`."""
    run = made_run.write(tmp_path / "run")
    values = load(str(run)).recipe.to_dict()
    source = load("folder", Patch.parse(args)).recipe.to_dict()["data"]["source"]
    (run / "recipe.yaml").write_text(to_yaml_text({**values, "data": {**values["data"], "source": source}}))
    return load_classifier(run, device="cpu")


def test_noise_replaces_missing_data(tmp_path):
    sample = load_parity_images(of_source(tmp_path, "data.source.root=nowhere"))
    assert sample.description.startswith("noise images, as there are no validation images: data.source.root: nowhere")
    assert sample.images.shape == (32, 3, 16, 16)
    check_parity(ExportParity(1e-4, 32, sample.description, 32), "a.onnx")  # what is as large as the tolerance is kept


def test_noise_stands_in_for_a_validation_split_that_is_empty(classifier, monkeypatch):
    val = load_synthetic(Synthetic()).val
    empty = ArraySource(replace(val.info, num_images=0), val.images[:0], val.labels[:0])
    monkeypatch.setattr("paceline.inference.export.build_validation", lambda section, skip_bad: empty)
    sample = load_parity_images(classifier)
    assert sample.description == "noise images, as there are no validation images: the validation split is empty"


def test_a_bad_image_is_left_out_and_training_images_are_not_read(tmp_path):
    for name in "ab":
        (tmp_path / "val" / name).mkdir(parents=True)
        Image.new("RGB", (20, 18), (9, 9, 9)).save(tmp_path / "val" / name / "good.png")
    (tmp_path / "val" / "b" / "bad.png").write_bytes(b"GIF89a and no more")
    classifier = of_source(tmp_path, "data.source.train_root=nowhere", f"data.source.val_root={tmp_path / 'val'}")
    sample = load_parity_images(classifier)
    assert sample.description == "validation images" and sample.images.shape == (2, 3, 16, 16)
    for path in (tmp_path / "val").rglob("good.png"):
        path.write_bytes(b"GIF89a and no more")
    assert load_parity_images(classifier).description.endswith(
        "none of 3 that were drawn can be read (paceline data verify lists all)"
    )


def test_a_plugin_data_set_runs_only_with_consent(tmp_path):
    classifier = of_source(tmp_path, "data.source={name: 'nowhere.parts:Set', args: {root: here}}")
    with pytest.raises(
        RecipeError, match=r"recipe.yaml:\d+: data.source.name: nowhere.parts:Set is custom code.* \(add --trust-code"
    ):
        load_parity_images(classifier)
    sample = load_parity_images(replace(classifier, trust_code=True))
    assert "noise images" in sample.description and "there is no module nowhere" in sample.description


class Broken(Wrong):
    """A form that raises what a library does."""

    def __init__(self, *, write=None, open=None):
        self.raised = write, open

    def write(self, network, path):
        path.write_bytes(b"half")
        if self.raised[0]:
            raise self.raised[0]

    def open(self, path):
        raise self.raised[1]


@pytest.mark.parametrize(
    "form, message",
    [
        (Broken(write=SafetensorError("No space left")), "--out: .*a.pt2 cannot be written: SafetensorError: No space"),
        (Broken(write=OSError(28, "No space left on device")), "--out: .*a.pt2 cannot be written: No space left"),
        (Broken(write=RuntimeError("Writer failed\nat x")), "--out: .* cannot be written: RuntimeError: Writer failed"),
        (Broken(open=KeyError("local-dir")), "--format: a.pt2 cannot be read back: KeyError: 'local-dir'"),
    ],
)  # fmt: skip
def test_errors_of_libraries_are_one_line_and_no_file_remains(classifier, tmp_path, form, message):
    with pytest.raises(PacelineError, match=rf"^{message}.* \(.*use another --format\)$") as caught:
        export_classifier(classifier, form, tmp_path / "a.pt2", with_preprocessing=False)
    assert "\n" not in str(caught.value)
    assert [each.name for each in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("existing", ["a.pt2", "a.pt2.md"])
def test_what_appears_meanwhile_is_not_written_over(classifier, tmp_path, existing):
    class Late(Wrong):
        def usage(self, name, threshold=None):
            (tmp_path / existing).write_text("another's")
            return ""

    with pytest.raises(RecipeError, match=rf"^--out: .*/{existing} already exists"):
        export_classifier(classifier, Late(lambda logits: logits), tmp_path / "a.pt2", with_preprocessing=False)
    assert (tmp_path / existing).read_text() == "another's"
    assert {"run", existing} == {each.name for each in tmp_path.iterdir()}


def test_a_folder_that_appears_meanwhile_is_not_written_into(classifier, tmp_path, monkeypatch):
    usage = HubFormat.usage

    def late(self, name, threshold=None):
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / "mine").write_text("mine")
        return usage(self, name, threshold)

    monkeypatch.setattr(HubFormat, "usage", late)
    with pytest.raises(RecipeError, match="already exists"):
        export_classifier(classifier, HubFormat("resnet18_cifar"), tmp_path / "a", with_preprocessing=False)
    assert [each.name for each in (tmp_path / "a").iterdir()] == ["mine"]
    assert {"run", "a"} == {each.name for each in tmp_path.iterdir()}


def test_who_may_read_the_folder_may_read_the_weights(classifier, tmp_path):
    before = os.umask(0o027)
    try:
        HubFormat("resnet18_cifar").write(ExportModel(classifier, with_preprocessing=False), tmp_path / "a")
    finally:
        os.umask(before)
    assert {each.name: each.stat().st_mode & 0o777 for each in (tmp_path / "a").iterdir()} == {
        "config.json": 0o640, "model.safetensors": 0o640
    }  # fmt: skip


@pytest.mark.parametrize(
    "form",
    [TorchExportFormat(), HubFormat("resnet18_cifar"), OnnxFormat.__new__(OnnxFormat)],
    ids=lambda form: form.library,
)
def test_a_name_is_only_a_name_in_the_lines_of_a_card(form):
    name = 'a"+open("x")+"\n`{}.pt2'
    texts = [each.value for each in ast.walk(ast.parse(form.usage(name))) if isinstance(each, ast.Constant)]
    assert any(isinstance(each, str) and name in each for each in texts)


def test_another_size_is_checked_at_that_size_and_the_card_notes_the_evaluated_size(classifier, tmp_path):
    larger = with_image_size(classifier, 24)
    assert load_parity_images(larger).images.shape == (32, 3, 24, 24)
    exported = export_classifier(larger, TorchExportFormat(), tmp_path / "a.pt2", with_preprocessing=True)
    assert exported.parity.difference <= 1e-6 and exported.parity.of == "validation images"
    assert dict(exported.facts)["images"].startswith("uint8 [batch, 24, 24, 3]")
    images = torch.randint(256, (2, 24, 24, 3), dtype=torch.uint8)
    expected = larger.model(larger.place.normalize(images.permute(0, 3, 1, 2)))
    # float32 sums in another order.
    torch.testing.assert_close(TorchExportFormat().open(exported.path)(images), expected, atol=1e-5, rtol=1e-5)
    message = "Of the weights at 16 x 16 pixels (not measured at the 24 x 24 of this file)"
    assert message in exported.card.read_text() and "resized to 24 x 24 pixels" in exported.card.read_text()


def test_the_runs_own_size_is_no_other(classifier, tmp_path):
    assert with_image_size(classifier, 16) is classifier
    exported = export_classifier(classifier, Wrong(lambda logits: logits), tmp_path / "a.pt2", with_preprocessing=False)
    assert "Of the weights on 200 validation images." in exported.card.read_text()


def test_as_large_a_share_of_a_photograph_is_cut_out_at_another_size(classifier):
    photographs = replace(classifier, preprocessing=replace(classifier.preprocessing, resize=18))
    assert with_image_size(photographs, 64).preprocessing.resize == round(64 / classifier.recipe.data.eval_crop) == 73


def test_a_network_that_cannot_take_a_size_is_one_line(classifier):
    fixed = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 16 * 16, 4))
    message = r"^--image-size: resnet18_cifar cannot take images of 24 x 24 pixels: .*mat1 and mat2 .* \(leave it out: "
    with pytest.raises(RecipeError, match=message) as caught:
        with_image_size(replace(classifier, model=fixed), 24)
    assert "\n" not in str(caught.value) and str(caught.value).endswith("the run's are 16 x 16)")
    maps = torch.nn.Conv2d(3, 4, 16)
    with pytest.raises(
        RecipeError, match=r"24 x 24 pixels, for which it returns shape \[1, 4, 9, 9\] instead of a logit per class"
    ):
        with_image_size(replace(classifier, model=maps), 24)
