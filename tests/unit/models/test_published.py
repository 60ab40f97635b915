"""Published weights are found by name for every model that has some, and downloaded into torch's cache once."""

import hashlib
import json
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Semaphore, get_ident

import pytest
import timm
import torch
from torchvision import models

from paceline.core.errors import RecipeError
from paceline.models import published
from paceline.models.catalog import describe_models, list_model_names
from paceline.models.published import (
    HubFile,
    NotCachedError,
    PublishedWeights,
    expected_sha256,
    fetch_hub_file,
    fetch_weights,
    find_published_weights,
    hub_commit,
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


COMMIT, OLD_COMMIT = "0123456789abcdef0123456789abcdef01234567", "f" * 40


def fill_hub_cache(cache: Path, repo: str, files: dict[str, bytes], commit: str = COMMIT) -> Path:
    """Write `files` into the Hub's cache as its client does, and return the folder of the snapshot."""
    folder = cache / f"models--{repo.replace('/', '--')}"
    snapshot = folder / "snapshots" / commit
    for each in (snapshot, folder / "blobs", folder / "refs"):
        each.mkdir(parents=True, exist_ok=True)
    (folder / "refs/main").write_text(commit)
    for name, content in files.items():
        blob = folder / "blobs" / hashlib.sha256(content).hexdigest()
        blob.write_bytes(content)
        (snapshot / name).unlink(missing_ok=True)
        (snapshot / name).symlink_to(f"../../blobs/{blob.name}")
    return snapshot


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty cache of the Hub, of which there is no server."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.file_download.HF_HUB_CACHE", str(tmp_path / "hub"), raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


@pytest.mark.parametrize("by", ["hand", "client"])
def test_the_digest_of_a_file_in_the_store_that_repositories_share_is_that_of_the_file(
    hub_cache: Path, by: str
) -> None:
    """Files that the Hub serves from Xet: the blob is a link to the store, by another hash of as many digits."""
    content, xet_hash = b"weights", "ab" + "0" * 62
    digest = hashlib.sha256(content).hexdigest()
    path = fill_hub_cache(hub_cache, "me/mine", {"model.safetensors": content}) / "model.safetensors"
    blob = hub_cache / "models--me--mine/blobs" / digest
    if by == "client":
        store = pytest.importorskip("huggingface_hub.utils._shared_blobs")  # of huggingface_hub 2.4 and later
        assert store.publish_blob_to_shared_store(
            blob_path=str(blob), xet_hash=xet_hash, cache_dir=hub_cache, expected_size=len(content)
        )
    else:
        (hub_cache / "blobs/ab").mkdir(parents=True)
        blob.rename(hub_cache / "blobs/ab" / xet_hash)
        blob.symlink_to(f"../../blobs/ab/{xet_hash}")
    assert path.resolve().name == xet_hash and path.read_bytes() == content
    assert expected_sha256(path) == digest


def test_the_weights_of_a_repository_are_of_the_commit_of_its_config(hub_cache: Path) -> None:
    config = json.dumps({"architecture": "test_resnet", "pretrained_cfg": {"mean": [0.5] * 3}}).encode()
    old = fill_hub_cache(hub_cache, "me/mine", {"config.json": config, "model.safetensors": b"old"}, OLD_COMMIT)
    fill_hub_cache(hub_cache, "me/mine", {"model.safetensors": b"new"})
    (hub_cache / "models--me--mine/refs/main").write_text(OLD_COMMIT)
    section = Model(name="timm:test_resnet", weights="hf-hub:me/mine")
    weights = find_published_weights(section)
    (hub_cache / "models--me--mine/refs/main").write_text(COMMIT)  # the repository changes between the two requests
    path = fetch_weights(weights, section.weights)
    assert path == old / "model.safetensors" and hub_commit(weights, path) == OLD_COMMIT
    with pytest.raises(
        NotCachedError, match=r"`hf download me/other config.json model.safetensors`, and copy .*cp -rL"
    ):
        find_published_weights(Model(name="timm:test_resnet", weights="hf-hub:me/other"), may_download=False)


@pytest.mark.parametrize("succeeds", [True, False])
def test_of_several_processes_one_downloads_and_the_others_wait_for_it(
    hub_cache: Path, monkeypatch: pytest.MonkeyPatch, *, succeeds: bool
) -> None:
    """Threads, between which `flock` excludes as between processes."""
    file, downloads, has_looked, may_end = HubFile("me/mine", ("config.json",)), [], Semaphore(0), Event()
    find = published._find_in_hub_cache

    def look(file: HubFile) -> Path | None:
        found = find(file)
        has_looked.release()
        return found

    def download(*_: object) -> Path:
        downloads.append(get_ident())
        assert may_end.wait(10)
        if not succeeds:
            raise RecipeError("no network")
        return fill_hub_cache(hub_cache, "me/mine", {"config.json": b"{}"}) / "config.json"

    monkeypatch.setattr(published, "_find_in_hub_cache", look)
    monkeypatch.setattr(published, "_download_hub_file", download)
    with ThreadPoolExecutor(4) as threads:
        results = [threads.submit(fetch_hub_file, file, "hf-hub:me/mine") for _ in range(4)]
        try:
            assert all(has_looked.acquire(timeout=10) for _ in range(4))
        finally:
            may_end.set()
        errors = [each.exception(timeout=10) for each in results]
    assert len(downloads) == (1 if succeeds else 4)
    assert [str(each) for each in errors if each] == ([] if succeeds else ["no network"] * 4)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"pretrained_cfg": {"input_size": 5}}, "input_size 5, which is not a list of channels, height and width"),
        ({"pretrained_cfg": {"input_size": [3, 0, 1]}}, "input_size [3, 0, 1], which is not a list of channels, "),
        ({"pretrained_cfg": {"mean": 5}}, "mean 5, which is not a list of numbers"),
        ({"pretrained_cfg": {"std": [True]}}, "std [true], which is not a list of numbers"),
        ({"pretrained_cfg": {"crop_pct": "a"}}, 'crop_pct "a", which is not a positive number'),
        ({"pretrained_cfg": {"crop_pct": -1}}, "crop_pct -1, which is not a positive number"),
        ({"pretrained_cfg": {"interpolation": ["\n"]}}, 'interpolation ["\\n"], which is not a name'),
        ({"pretrained_cfg": {"hf_hub_filename": 3}}, "hf_hub_filename 3, which is not the name of a file"),
        ({"pretrained_cfg": {"hf_hub_filename": "../../x"}}, 'hf_hub_filename "../../x", which is not the name of'),
        ({"pretrained_cfg": {"hf_hub_filename": "/x.bin"}}, 'hf_hub_filename "/x.bin", which is not the name of'),
        ({"architecture": "a\nb"}, "its config.json names no architecture of timm"),
        ({"architecture": 5}, "its config.json names no architecture of timm"),
        ({"model_args": [1]}, "its config.json names no architecture of timm"),
    ],
)
def test_a_config_of_other_types_is_one_line(hub_cache: Path, config: dict[str, object], message: str) -> None:
    content = json.dumps({"architecture": "test_resnet", **config}).encode()
    fill_hub_cache(hub_cache, "me/mine", {"config.json": content})
    with pytest.raises(RecipeError, match=r"^model.weights: hf-hub:me/mine: ") as caught:
        find_published_weights(Model(name="timm:test_resnet", weights="hf-hub:me/mine"))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_few_digits_in_a_name_are_no_digest_and_a_short_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: str
) -> None:
    """Names of I-JEPA's files have the number of epochs where torch.hub expects a digest."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    name = "IN1K-vit.h.14-300e.pth.tar"
    (tmp_path / "www" / name).write_bytes(bytes(100))
    weights = PublishedWeights("timm:X", f"{server}/{name}", {})
    download = torch.hub.download_url_to_file

    def lose_connection(url: str, path: str, *args: object, **options: object) -> None:
        download(url, path, *args, **options)
        os.truncate(path, 60)

    with monkeypatch.context() as patch:
        patch.setattr(torch.hub, "download_url_to_file", lose_connection)
        with pytest.raises(RecipeError, match="cannot be downloaded: OSError: got 60 bytes of 100 "):
            fetch_weights(weights, "default")
    assert not list((tmp_path / "torch/hub/checkpoints").iterdir())
    path = fetch_weights(weights, "default")
    assert path.stat().st_size == 100 and expected_sha256(path) == ""


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
