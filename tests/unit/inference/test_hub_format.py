"""Folders of safetensors: what timm and paceline make of them."""

import json
import re
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torchvision import models

from paceline.data.resize import CenterCropResizer, StretchResizer
from paceline.inference.classifier import Preprocessing, load_classifier
from paceline.inference.export import export_classifier
from paceline.inference.formats import _SAME_IN_TIMM, ExportModel, HubFormat, find_architecture, timm_crop_pct

from . import made_run

RESNET = "torchvision:resnet18"
PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "export.md"


@pytest.fixture(scope="module")
def resnet(tmp_path_factory):
    """Return a classifier that timm has too, and its folder."""
    folder = tmp_path_factory.mktemp("hub")
    classifier = load_classifier(made_run.write(folder / "run", RESNET, image_size=32), device="cpu")
    classifier = replace(classifier, classes=("cat", "dog", "owl", "été"))
    return classifier, export_classifier(classifier, HubFormat(RESNET), folder / "a", with_preprocessing=False)


def photograph(height, width):
    pixels = np.random.default_rng(0).integers(256, size=(height // 4, width // 4, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC)


def test_timm_loads_the_folder_with_the_same_logits(resnet):
    classifier, exported = resnet
    assert exported.parity.difference <= 1e-6 and exported.parity.top5 == 32  # the same operations on the same floats
    assert sorted(each.name for each in exported.path.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    assert json.loads((exported.path / "config.json").read_text())["label_names"] == list(classifier.classes)


@pytest.mark.parametrize("resize", [32, 37, 43, None])
def test_timm_brings_a_photograph_to_the_same_pixels(resnet, tmp_path, resize):
    import timm

    classifier, _ = resnet
    # As of a folder of photographs, whose evaluation sizes them by Pillow.
    sized = replace(classifier.preprocessing, resize=resize, is_pixels=False)
    sizing = StretchResizer() if resize is None else CenterCropResizer(32 / resize)
    classifier = replace(classifier, preprocessing=sized, sizing=sizing)
    HubFormat(RESNET).write(_network(classifier), tmp_path / "a")
    model = timm.create_model(f"local-dir:{tmp_path / 'a'}", pretrained=True)
    transform = timm.data.create_transform(**timm.data.resolve_data_config(model=model))
    stored = BytesIO()
    photograph(60, 91).save(stored, "PNG")
    image = classifier.image(stored.getvalue(), "photograph")
    # timm divides by 255 before it takes the mean off, which rounds otherwise: the last bit of values near 1.
    torch.testing.assert_close(transform(photograph(60, 91)), classifier.place.normalize(image[None])[0],
                               rtol=0, atol=2e-6)  # fmt: skip


@pytest.mark.parametrize("channels", [1, 3])
def test_the_lines_of_the_page_show_timm_a_turned_photograph_as_the_run_sees_it(
    tmp_path, monkeypatch, capsys, channels
):
    name = "timm:resnet18"
    run = made_run.write(tmp_path / "run", name, image_size=32, channels=channels)
    classifier = load_classifier(run, device="cpu")
    sized = replace(classifier.preprocessing, resize=37, is_pixels=False)
    classifier = replace(classifier, preprocessing=sized, sizing=CenterCropResizer(32 / 37))
    monkeypatch.chdir(tmp_path)
    HubFormat(name).write(_network(classifier), tmp_path / "photos")
    exif = Image.Exif()
    exif[0x0112] = 6
    photograph(60, 91).save("cat.jpg", "PNG", exif=exif)  # of which nothing is lost
    (lines,) = (each for each in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S) if "timm" in each)
    found: dict[str, Tensor] = {}
    exec(lines, found)
    image = classifier.image((tmp_path / "cat.jpg").read_bytes(), "cat.jpg")
    expected = classifier.model(classifier.place.normalize(image[None]))
    # Pixels differ in the last bit, as above, and 18 layers sum them in another order.
    torch.testing.assert_close(found["logits"], expected, rtol=0, atol=1e-4)
    assert capsys.readouterr().out.strip() in classifier.classes


def _network(classifier):
    return ExportModel(classifier, with_preprocessing=False)


def test_timms_short_side_is_ours_for_every_size_and_crop():
    preprocessing = Preprocessing(image_size=224, resize=256, channels=3, mean=(0,), std=(1,))
    assert timm_crop_pct(preprocessing) == 0.875
    assert timm_crop_pct(replace(preprocessing, resize=None)) == 1
    for size in (16, 32, 96, 160, 176, 224, 299, 384):
        for resize in range(size, 2 * size):
            share = timm_crop_pct(replace(preprocessing, image_size=size, resize=resize))
            assert int(size / share) == resize  # timm.data.transforms_factory


def test_torchvisions_resnets_have_timms_tensors():
    import timm

    assert len(_SAME_IN_TIMM) == 9
    with torch.device("meta"):
        for name in sorted(_SAME_IN_TIMM):
            shapes = [{key: tensor.shape for key, tensor in network.state_dict().items()}
                      for network in (timm.create_model(name), models.get_model(name))]  # fmt: skip
            assert shapes[0] == shapes[1], name


def test_a_grey_network_of_timm_is_loaded_grey(tmp_path):
    name = "timm:resnet18"
    classifier = load_classifier(made_run.write(tmp_path / "run", name, image_size=32, channels=1), device="cpu")
    exported = export_classifier(classifier, HubFormat(name), tmp_path / "a", with_preprocessing=False)
    assert exported.parity.difference <= 1e-6
    config = json.loads((exported.path / "config.json").read_text())
    assert config["architecture"] == "resnet18" and config["pretrained_cfg"]["input_size"] == [1, 32, 32]
    assert config["pretrained_cfg"]["classifier"] == "fc", "so that timm can give it other classes"


@pytest.mark.parametrize("name", ["wideresnet_course", "speednet96", "torchvision:squeezenet1_1"])
def test_what_timm_has_not_is_loaded_by_the_lines_of_the_card(tmp_path, name):
    classifier = load_classifier(made_run.write(tmp_path / "run", name, image_size=32), device="cpu")
    exported = export_classifier(classifier, HubFormat(name), tmp_path / "a", with_preprocessing=False)
    assert exported.parity.difference <= 1e-6
    library = "torchvision" if ":" in name else "paceline"
    config = json.loads((exported.path / "config.json").read_text())
    assert config["architecture"] == f"{library}/{name.removeprefix('torchvision:')}"
    usage = (exported.path / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    assert 'Path("a/config.json")' in usage
    found = {"images": torch.zeros(2, 3, 32, 32)}
    exec(usage.replace('"a/', f'"{exported.path}/'), found)
    assert found["logits"].shape == (2, 4)


def test_a_synchronised_batch_norm_is_a_plain_one_for_others(tmp_path):
    run = made_run.write(tmp_path / "run", "resnet18_cifar", "model.norm=sync_batch")
    exported = export_classifier(load_classifier(run, device="cpu"), HubFormat("resnet18_cifar"), tmp_path / "a",
                                 with_preprocessing=False)  # fmt: skip
    assert json.loads((exported.path / "config.json").read_text())["paceline"]["model"]["norm"] == "batch"


def test_who_loads_a_network_is_known_by_its_name():
    assert str(find_architecture("timm:vit_tiny_patch16_224")) == "vit_tiny_patch16_224"
    assert str(find_architecture("torchvision:resnet50")) == "resnet50"
    assert str(find_architecture("torchvision:vgg11")) == "torchvision/vgg11"
    assert str(find_architecture("resnet18_cifar")) == "paceline/resnet18_cifar"
