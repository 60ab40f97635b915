"""Weights by name: downloaded once, then used without a network, checked by their digest, and not needed to resume."""

import hashlib
import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file, save

TAG = "timm/test_resnet.r160_in1k"
ARGS = (
    *("train", "synthetic", "model.name=timm:test_resnet", "model.width=1"),
    *("data.source.num_images=16", "data.source.num_val_images=8"),
    *("data.batch_size=8", "data.workers=0", "train.steps=2", "checkpoint.every=1st", "parallel.threads=1"),
    *("log.tensorboard=off", "log.report=off", "measure.telemetry=off"),
)
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """A server that speaks the Hugging Face Hub's protocol for files, and counts requests.

    Files by `REPO/FILE`; `refused` has the status and the Hub's error code of a repository that answers with these.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    refused: dict[str, tuple[int, str]] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)
    port: int = 0

    @property
    def url(self) -> str:
        """The address, for `HF_ENDPOINT`."""
        return f"http://127.0.0.1:{self.port}"

    def environ(self, folder: Path) -> dict[str, str]:
        """Return the environment of a program whose Hub is this one, with caches in `folder`."""
        return {
            "HF_ENDPOINT": self.url, "HF_HOME": str(folder / "hf"), "TORCH_HOME": str(folder / "torch"),
            "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1",
        }  # fmt: skip

    def count(self, method: str) -> int:
        """Return the number of requests with `method`."""
        return sum(each == method for each, _ in self.requests)


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Serve the files of `hub` at a free port."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(has_body=False)

        def do_GET(self) -> None:
            self._answer(has_body=True)

        def _answer(self, *, has_body: bool) -> None:
            repo, resolve, rest = self.path.lstrip("/").partition("/resolve/")
            file = f"{repo}/{rest.partition('/')[2]}" if resolve else self.path.lstrip("/")
            hub.requests.append((self.command, file))
            status, code = hub.refused.get(repo, (200, ""))
            if status == 200 and file not in hub.files:
                status, code = 404, "EntryNotFound"
            body = hub.files.get(file, b"") if status == 200 else b""
            self.send_response(status)
            if code:
                self.send_header("X-Error-Code", code)
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if has_body:
                self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.port = server.server_port
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def weights_of(name: str, **options: object) -> bytes:
    torch.manual_seed(3)
    return save(timm.create_model(name, **options).state_dict())


@pytest.fixture(scope="module")
def resnet() -> bytes:
    return weights_of("test_resnet")


def test_two_ranks_download_once_then_nothing_is_requested_and_all_ways_have_equal_bits(
    paceline, tmp_path: Path, cut, resnet: bytes
) -> None:
    hub = Hub({f"{TAG}/model.safetensors": resnet})
    args = (*ARGS, "model.weights=default", "model.norm=sync_batch", "optim.lr=0.001")
    with serving(hub):
        environ = hub.environ(tmp_path)
        two = paceline(*args, "--ranks", "2", "--run-dir", "two", "--json", **environ).result
    # Newer clients also ask for `api/...`, about themselves.
    assert [each for each in hub.requests if "api/" not in each[1]] == [
        (method, f"{TAG}/model.safetensors") for method in ("HEAD", "HEAD", "GET")
    ]
    origin = two["provenance"]["started_from"]
    assert origin["sha256"] == hashlib.sha256(resnet).hexdigest()
    assert (origin["path"], origin["name"]) == ("default", "timm:test_resnet.r160_in1k")
    one = paceline(*args, "--run-dir", "one", "--json", **environ).result  # the server is down
    named = paceline(*args, "model.weights=timm:r160_in1k", "--run-dir", "named", "--json", **environ).result
    assert one["weights_sha256"] == named["weights_sha256"]
    (tmp_path / "weights.safetensors").write_bytes(resnet)
    config = timm.get_pretrained_cfg("test_resnet")  # a file brings no preprocessing
    data = (f"data.mean={[*config.mean]}", f"data.std={[*config.std]}", f"data.interpolation={config.interpolation}")
    file = paceline(*args, "model.weights=weights.safetensors", *data, "--run-dir", "file", "--json", **environ)
    assert file.result["weights_sha256"] == one["weights_sha256"]
    # Two ranks sum gradients in another order, in float32.
    one_rank, two_ranks = (tmp_path / name / "checkpoints/step-00000002/model.safetensors" for name in ("one", "two"))
    torch.testing.assert_close(load_file(one_rank), load_file(two_ranks), rtol=1e-4, atol=1e-5)
    shutil.rmtree(tmp_path / "hf")  # neither resuming nor evaluating needs the weights
    cut(tmp_path / "one", tmp_path / "cut", 1)
    resumed = paceline("train", "cut", "--resume", "--json", **environ).result
    assert resumed["weights_sha256"] == one["weights_sha256"]
    assert resumed["provenance"]["started_from"] == one["provenance"]["started_from"]
    assert paceline("eval", "one", "--json", **environ).code == 0
    assert paceline("export", "one", "--format", "state_dict", "--out", "one.pth", **environ).code == 0


VIT = "timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k"


def test_a_transformer_at_another_size_trains_the_same_on_two_ranks_and_resumed(paceline, tmp_path: Path, cut) -> None:
    hub = Hub({f"{VIT}/model.safetensors": weights_of("vit_tiny_patch16_224")})
    args = (*ARGS, "model.name=timm:vit_tiny_patch16_224", "model.weights=default", "data.image_size=96")
    args = (*args, "optim.lr=0.001", "model.args={proj_drop_rate: 0.0}")
    with serving(hub):
        environ = hub.environ(tmp_path)
        one = paceline(*args, "--run-dir", "one", "--json", **environ).result
    notes = json.loads((tmp_path / "one/plan.json").read_text())["notes"]
    assert any("images of 96 px, bicubic, whole images, mean [0.5, 0.5, 0.5]" in note for note in notes)
    assert any("loaded 150 of 152 tensors; the classifier starts fresh (1000 -> 10 classes)" in note for note in notes)
    last = "checkpoints/step-00000002/model.safetensors"
    assert load_file(tmp_path / "one" / last)["pos_embed"].shape == (1, 1 + 36, 192)
    assert paceline(*args, "--ranks", "2", "--run-dir", "two", **environ).code == 0
    one_rank, two_ranks = (load_file(tmp_path / name / last) for name in ("one", "two"))
    torch.testing.assert_close(one_rank, two_ranks, rtol=1e-3, atol=1e-5)
    less = paceline(*args, "model.checkpoint_activations=true", "--run-dir", "less", "--json", **environ).result
    assert less["weights_sha256"] == one["weights_sha256"]
    shutil.rmtree(tmp_path / "hf")
    cut(tmp_path / "one", tmp_path / "cut", 1)
    assert paceline("train", "cut", "--resume", "--json", **environ).result["weights_sha256"] == one["weights_sha256"]
    # A run of another size: from 96 pixels to 64.
    small = paceline(*args, "model.weights=one", "data.image_size=64", "train.steps=1", "--json", **environ)
    assert small.code == 0, small.err
    for form, out in (("safetensors", "folder"), ("state_dict", "one.pth")):  # loaded again, with equal outputs
        exported = paceline("export", "one", "--format", form, "--out", out, **environ)
        assert exported.code == 0, exported.err


def test_a_repository_is_asked_only_by_runs_and_its_description_is_not_needed_to_resume(
    paceline, tmp_path: Path, resnet: bytes
) -> None:
    preprocessing = {"input_size": [3, 32, 32], "mean": [0.5] * 3, "std": [0.5] * 3}
    config = {"architecture": "test_resnet", "pretrained_cfg": preprocessing}
    hub = Hub({"me/mine/config.json": json.dumps(config).encode(), "me/mine/model.safetensors": resnet})
    args = (*ARGS, "model.weights=hf-hub:me/mine")
    with serving(hub):
        environ = hub.environ(tmp_path)
        dry = paceline(*args, "--dry-run", **environ)
        shown = paceline("recipes", *args[1:], **environ)
        assert dry.code == shown.code == 0 and not hub.requests
        note = "note: model.weights: the preprocessing of hf-hub:me/mine is not known yet, because it is not downloaded"
        assert note in dry.out and note in shown.err and "mean: auto" in shown.out
        assert "the run will download hf-hub:me/mine" in dry.out and "gets images of" not in dry.out
        downloaded = paceline("models", "hf-hub:me/mine", "--download", **environ)
        assert "paceline train RECIPE model.name=timm:test_resnet model.weights=hf-hub:me/mine" in downloaded.out
    # The server is down.
    assert paceline(*args, "--run-dir", "one", **environ).code == 0
    one = json.loads((tmp_path / "one/result.json").read_text())
    shutil.rmtree(tmp_path / "hf")
    (tmp_path / "one/result.json").unlink()
    shutil.rmtree(tmp_path / "one/checkpoints/step-00000002")
    resumed = paceline(*args, "--run-dir", "one", "--resume", "--json", **environ).result
    assert resumed["weights_sha256"] == one["weights_sha256"]
    paceline(*args, "data.mean=[0.1, 0.1, 0.1]", "--run-dir", "one", "--resume", **environ).assert_error(
        "was started with data.mean=[0.5, 0.5, 0.5] (now [0.1, 0.1, 0.1])"
    )


def test_errors_are_one_line_each(paceline, tmp_path: Path, resnet: bytes) -> None:
    hub = Hub({f"{TAG}/model.safetensors": resnet})
    args = (*ARGS, "model.weights=default")
    with serving(hub):
        environ = hub.environ(tmp_path)
        paceline(*args, "model.weights_sha256='00000000'", **environ).assert_error(
            "model.weights: default: its SHA-256 is ", f"{hashlib.sha256(resnet).hexdigest()}, not 00000000"
        )
        hub.refused[TAG] = (401, "RepoNotFound")
        shutil.rmtree(tmp_path / "hf")
        paceline(*args, **environ).assert_error(
            f"there is no repository {TAG} on the Hub, or it is private", "hf auth login"
        )
        hub.refused[TAG] = (403, "GatedRepo")
        paceline(*args, **environ).assert_error(f"{TAG} is gated (accept its terms")
        hub.refused.clear()
        hub.files.clear()
        paceline(*args, **environ).assert_error(f"{TAG} has no model.safetensors or pytorch_model.bin")
        paceline(*args, "model.weights=timm:r160", **environ).assert_error(
            "no weights 'r160' (did you mean 'r160_in1k'?)"
        )
        paceline(*args, "model.weights=torchvision:DEFAULT", **environ).assert_error("is not for timm:test_resnet")
        paceline(*args, "model.weights=hf-hub:a/b/c", **environ).assert_error("'a/b/c' is not the name of a repository")
    paceline(*args, "--ranks", "2", **environ).assert_error(
        f"on a machine with a network run `hf download {TAG} model.safetensors`",
        f"copy the folder models--timm--test_resnet.r160_in1k of its cache to {tmp_path}/hf/hub with `cp -rL`)",
    )
    assert not list((tmp_path / "runs").glob("*/result.json"))


def test_a_changed_file_in_the_cache_is_refused(paceline, tmp_path: Path, resnet: bytes) -> None:
    hub = Hub({f"{TAG}/model.safetensors": resnet})
    with serving(hub):
        environ = hub.environ(tmp_path)
        assert paceline(*ARGS, "model.weights=default", "--dry-run", **environ).code == 0
        assert paceline(*ARGS, "model.weights=default", "--run-dir", "one", **environ).code == 0
    (blob,) = (path for path in tmp_path.rglob("blobs/*") if path.is_file())
    blob.write_bytes(weights_of("test_resnet", num_classes=5))
    paceline(*ARGS, "model.weights=default", **environ).assert_error(
        "its SHA-256 is ", f"not {blob.name} (", "remove it"
    )


def test_a_repository_of_a_timm_model_is_read_by_its_config(paceline, tmp_path: Path, resnet: bytes) -> None:
    config = {"architecture": "test_resnet", "pretrained_cfg": {"input_size": [3, 32, 32], "mean": [0.5] * 3}}
    hub = Hub({"me/mine/config.json": json.dumps(config).encode(), "me/mine/pytorch_model.bin": b"not a pickle"})
    hub.files["me/safe/config.json"], hub.files["me/safe/model.safetensors"] = json.dumps(config).encode(), resnet
    hub.files["me/other/config.json"] = b'{"model_type": "bert"}'
    with serving(hub):
        environ = hub.environ(tmp_path)
        result = paceline(*ARGS, "model.weights=hf-hub:me/safe", "--json", **environ).result
        origin = result["provenance"]["started_from"]
        assert (origin["sha256"], origin["commit"]) == (hashlib.sha256(resnet).hexdigest(), COMMIT)
        paceline(*ARGS, "model.weights=hf-hub:me/other", **environ).assert_error("names no architecture of timm")
        paceline(*ARGS, "model.weights=hf-hub:me/mine", **environ).assert_error(
            "pytorch_model.bin: cannot be read as weights, UnpicklingError"
        )
        paceline(*ARGS, "model.name=timm:test_vit", "model.weights=hf-hub:me/safe", **environ).assert_error(
            "is of timm:test_resnet, not timm:test_vit (set model.name=timm:test_resnet)"
        )
