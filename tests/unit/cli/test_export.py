"""`paceline export`: its output and errors, and the code of its page."""

import asyncio
import importlib.util
import json
import re
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from paceline.cli.export import export
from paceline.cli.options import ExportOptions
from paceline.core.errors import RecipeError

MADE = Path(__file__).parents[1] / "inference" / "made_run.py"
PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "export.md"


@pytest.fixture(scope="module")
def made_run():
    spec = importlib.util.spec_from_file_location("made_run", MADE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def run(made_run, tmp_path_factory):
    return made_run.write(tmp_path_factory.mktemp("export") / "run")


def work(run, out, format="safetensors", **more):
    return export(ExportOptions(run=run, out=out, format=format, **more))


def test_the_export_is_printed_with_its_parity(run, tmp_path, capsys):
    assert work(run, tmp_path / "a") == 0
    printed = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "run, step-00000012 as safetensors" in printed and f"exported: {tmp_path / 'a'}" in printed
    assert "of the largest logit (limit 0.0001) on 32 validation images" in printed and "a/README.md" in printed


def test_json_is_the_only_output_on_stdout(run, tmp_path, capsys):
    assert work(run, tmp_path / "a", as_json=True, checkpoint="12") == 0
    reported = json.loads(capsys.readouterr().out)
    assert reported["path"] == str(tmp_path / "a") and reported["checkpoint"] == "step-00000012"
    assert 0 <= reported["parity"]["difference"] <= 1e-6 and reported["parity"]["tolerance"] == 1e-4
    assert reported["bytes"] == sum(each.stat().st_size for each in (tmp_path / "a").iterdir())


def test_another_image_size_is_exported(run, tmp_path, capsys):
    assert work(run, tmp_path / "a", image_size=20, as_json=True) == 0
    assert "[batch, 3, 20, 20]" in json.loads(capsys.readouterr().out)["images"]
    assert json.loads((tmp_path / "a" / "config.json").read_text())["pretrained_cfg"]["input_size"] == [3, 20, 20]


@pytest.mark.parametrize(
    "options, printed",
    [
        ({"format": "onxn"}, r"^--format: 'onxn' is not known \(did you mean 'onnx'\?\) \(use onnx, torch, safetens"),
        ({"with_preprocessing": True}, r"^--preprocessing: has no effect on safetensors.* \(leave it out\)$"),
        ({"format": "torch"}, r"^--out: .*/a does not match --format \(name a file ending in .pt2\)$"),
    ],
)
def test_invalid_options_are_refused_before_loading(run, tmp_path, options, printed):
    with pytest.raises(RecipeError, match=printed):
        work(run, tmp_path / "a", **options)
    assert list(tmp_path.iterdir()) == []


def test_an_invalid_run_is_refused(tmp_path):
    with pytest.raises(RecipeError, match=r"is not a run directory \(it has no recipe.yaml; see runs/\)$"):
        work(tmp_path, tmp_path / "a")


def programs():
    """Return the Python code of the page by file name."""
    found = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return {"classify": next(each for each in found if "onnxruntime" in each),
            "serve": next(each for each in found if "fastapi" in each)}  # fmt: skip


@pytest.mark.parametrize("interpolation", [pytest.param("bilinear", marks=pytest.mark.long), "bicubic"])
def test_the_pages_onnxruntime_and_fastapi_answer_as_the_run_does(made_run, tmp_path, monkeypatch, interpolation):
    for needed in ("onnx", "onnxruntime", "onnxscript"):
        pytest.importorskip(needed, reason=f"ONNX needs {needed} (pip install 'paceline[export]')")
    from paceline.inference.classifier import load_classifier

    run = made_run.write(tmp_path / "run", "resnet18_cifar", f"data.interpolation={interpolation}", image_size=32)
    # Pictures of files, as of a folder: scaled and cut by Pillow.
    facts = json.loads((run / "dataset.json").read_text())
    (run / "dataset.json").write_text(json.dumps(facts | {"is_pixels": False}))
    assert work(run, tmp_path / "photos.onnx", "onnx", with_preprocessing=True) == 0
    blocks = np.random.default_rng(0).integers(256, size=(9, 13, 3), dtype=np.uint8)
    Image.fromarray(blocks).resize((131, 77), Image.Resampling.BICUBIC).save(tmp_path / "cat.jpg", quality=95)
    for name, text in programs().items():
        (tmp_path / f"{name}.py").write_text(text)

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("classify", "serve"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    classify = importlib.import_module("classify")
    monkeypatch.setitem(sys.modules, "classify", classify)
    classifier = load_classifier(run, device="cpu")
    image = classifier.image((tmp_path / "cat.jpg").read_bytes(), "cat.jpg")
    assert torch.equal(torch.from_numpy(classify.read("cat.jpg").copy()).permute(2, 0, 1), image)
    found, expected = classify.classify("cat.jpg"), classifier.probabilities(image[None])[0].tolist()
    assert list(found) == [classifier.classes[index] for index in np.argsort(-np.array(expected))]
    # Two libraries' float32 sums.
    assert found == pytest.approx(dict(zip(classifier.classes, expected, strict=True)), abs=1e-6)

    if importlib.util.find_spec("fastapi") is None:  # then what the page uses of it stands in
        monkeypatch.setitem(sys.modules, "fastapi", types.SimpleNamespace(FastAPI=FastAPI, Request=Request))
    serve = importlib.import_module("serve")
    monkeypatch.setitem(sys.modules, "serve", serve)
    assert asyncio.run(serve.predict(Request((tmp_path / "cat.jpg").read_bytes()))) == found


class FastAPI:
    def post(self, path):
        assert path == "/predict"
        return lambda function: function


class Request:
    def __init__(self, content):
        self._content = content

    async def body(self):
        return self._content
