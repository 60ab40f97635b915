"""Published weights are found by name for every model that has some, and downloaded into torch's cache once."""

import hashlib
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import timm
import torch
from torchvision import models

from paceline.core.errors import RecipeError
from paceline.models.catalog import describe_models, list_model_names
from paceline.models.published import (
    HubFile,
    PublishedWeights,
    expected_sha256,
    fetch_weights,
    find_published_weights,
    list_tags,
    torch_cache_path,
)
from paceline.recipe.schema.model import Model


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """Serve `tmp_path/www`, and return its URL."""

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

    (tmp_path / "www").mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(tmp_path / "www"))) as httpd:
        thread = threading.Thread(target=httpd.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{httpd.server_port}"
        httpd.shutdown()
        thread.join(10)


def test_every_tag_of_every_model_has_a_location_and_preprocessing() -> None:
    found = 0
    for name in list_model_names("*"):
        for tag in list_tags(name):
            library = name.partition(":")[0]
            weights = find_published_weights(Model(name=name, weights=f"{library}:{tag}"))
            assert tag in weights.name and weights.location
            assert len(weights.config["mean"]) == len(weights.config["std"]) == weights.config["input_size"][0] == 3
            if isinstance(weights.location, HubFile):
                assert weights.location.names[0].endswith((".safetensors", ".pth", ".npz"))
            found += 1
    assert found > 1500


def test_default_is_the_librarys_and_full_names_are_understood() -> None:
    def name_of(model: str, weights: str) -> str:
        return find_published_weights(Model(name=model, weights=weights)).name

    default = models.ResNet50_Weights.DEFAULT
    assert name_of("torchvision:resnet50", "default") == f"torchvision:{default}"
    assert name_of("torchvision:resnet50", f"torchvision:{default}") == f"torchvision:{default}"
    assert find_published_weights(Model(name="torchvision:resnet50", weights="default")).location == default.url
    tag = timm.get_pretrained_cfg("resnet50").tag
    assert name_of("timm:resnet50", "default") == name_of("timm:resnet50", f"timm:resnet50.{tag}")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "torchvision:resnet50", "weights": "torchvision:IMAGENET1K_V3"}, "did you mean 'IMAGENET1K_V"),
        (
            {"name": "timm:resnet50", "weights": "timm:vit.x"},
            "has no weights 'vit.x' (there are a1_in1k, ",
        ),
        (
            {"name": "timm:vit_small_patch16_18x2_224", "weights": "default"},
            "timm publishes no weights for timm:vit",
        ),
    ],
)
def test_other_names_are_one_line_with_those_that_there_are(fields: dict[str, str], message: str) -> None:
    with pytest.raises(RecipeError, match=r"^model.weights: ") as caught:
        find_published_weights(Model(**fields))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_behind_a_url_is_downloaded_once_and_its_digest_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: str
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    torch.save({"weight": torch.ones(2)}, tmp_path / "made.pth")
    content = (tmp_path / "made.pth").read_bytes()
    good, bad = f"net-{hashlib.sha256(content).hexdigest()[:8]}.pth", "net-00000000.pth"
    for name in (good, bad):
        (tmp_path / "www" / name).write_bytes(content)
    weights = PublishedWeights("torchvision:X", f"{server}/{good}", {})
    with pytest.raises(RecipeError, match=r"is missing \(on a machine with a network run `curl -L -o net-") as caught:
        fetch_weights(weights, "default", may_download=False)
    assert f"{server}/{good}`, and copy the file to {tmp_path}/torch/hub/checkpoints/{good})" in str(caught.value)
    path = fetch_weights(weights, "default")
    assert path == torch_cache_path(f"{server}/{good}") and path.read_bytes() == content
    assert hashlib.sha256(content).hexdigest().startswith(expected_sha256(path)) and len(expected_sha256(path)) == 8
    (tmp_path / "www" / good).unlink()
    assert fetch_weights(weights, "default", may_download=False) == path
    for name, reason in ((bad, "invalid hash value"), ("gone-12345678.pth", "HTTP Error 404")):
        with pytest.raises(RecipeError, match=rf"^model.weights: default: cannot be downloaded: .*{reason}") as caught:
            fetch_weights(PublishedWeights("torchvision:X", f"{server}/{name}", {}), "default")
        assert "\n" not in str(caught.value)
        assert not list((tmp_path / "torch/hub/checkpoints").glob(f"{name}*"))


def test_models_are_listed_by_name_by_part_and_by_pattern_and_few_are_built() -> None:
    assert list_model_names("resnet18") == ["torchvision:resnet18", "timm:resnet18"]
    assert list_model_names("timm:resnet18") == ["timm:resnet18"]
    assert "resnet18_cifar" in list_model_names("resnet18_*") and "speednet94" in list_model_names("eedne")
    one, other = describe_models(["torchvision:resnet18", "resnet18_cifar"], max_built=2)
    assert (one.params, one.image_size, one.weights) == (11_689_512, 224, ("IMAGENET1K_V1",))
    assert one.flops == pytest.approx(2 * models.ResNet18_Weights.DEFAULT.meta["_ops"] * 1e9, rel=0.01)
    assert (other.image_size, other.weights) == (32, ())
    assert [each.params for each in describe_models(["torchvision:resnet18", "resnet18_cifar"], max_built=1)] == [
        None
    ] * 2
