"""`paceline predict`: rows for programs, a table for a person, and what becomes of an image that cannot be read."""

import csv
import hashlib
import io
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from paceline.cli.options import PredictOptions
from paceline.cli.predict import predict
from paceline.core.csv_cells import from_cell
from paceline.core.errors import CheckpointError, PacelineError, RecipeError
from paceline.data.sources.builtin import load_digits
from paceline.models.build import build_model
from paceline.recipe.load import Patch, load
from paceline.recipe.yaml import to_yaml_text
from paceline.training.checkpoint import CheckpointStorage, KeepPolicy, Snapshot, model_tensors
from paceline.training.trained_dataset import TrainedDataset

OPTIONS = {"top": 3, "checkpoint": "last", "batch_size": 4, "format": "auto", "device": "cpu", "as_json": False}
NAMES = ("0.png", "1.png", "2.png")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of the digits whose network is as it was drawn."""
    folder = tmp_path_factory.mktemp("runs") / "digits-1"
    folder.mkdir()
    recipe = load("digits", Patch.parse(["model.width=0.125", "parallel.device=cpu", "parallel.threads=1"])).recipe
    (folder / "plan.json").touch()
    (folder / "recipe.yaml").write_text(to_yaml_text(recipe.to_dict()))
    (folder / "dataset.json").write_text(json.dumps(TrainedDataset.from_source(load_digits().train).to_dict()))
    torch.manual_seed(0)
    network = build_model(recipe.model, num_classes=10, channels=1)
    snapshot = Snapshot({"model": model_tensors(network), "optimizer": {}}, {"train": {"best_step": -1}})
    CheckpointStorage(folder / "checkpoints", KeepPolicy(1)).save(8, -1, snapshot)
    return folder


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Return a folder of three digits as 8x8 gray files."""
    for name, pixels in zip(NAMES, load_digits().val.images, strict=False):
        Image.fromarray(pixels[..., 0]).save(tmp_path / name)
    return tmp_path


def test_csv_has_a_row_an_image(run: Path, images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert predict(PredictOptions(run=run, images=[str(images)], **OPTIONS)) == 0
    rows = list(csv.reader(io.StringIO(capsys.readouterr().out)))
    assert rows[0] == [
        "image",
        "class_1",
        "probability_1",
        "class_2",
        "probability_2",
        "class_3",
        "probability_3",
        "error",
    ]
    assert [row[0] for row in rows[1:]] == [f"{images}/{name}" for name in NAMES]
    for row in rows[1:]:
        shares = [float(row[column]) for column in (2, 4, 6)]
        assert {row[1], row[3], row[5]} <= set("0123456789") and len(row) == 8 and row[-1] == ""
        assert shares == sorted(shares, reverse=True) and shares[0] >= 0.1 and sum(shares) <= 1


def test_json_lines_and_one_document_have_the_same_rows(run, images, capsys) -> None:
    words = [f"{images}/{name}" for name in NAMES]
    assert predict(PredictOptions(run=run, images=words, **{**OPTIONS, "format": "jsonl"})) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert predict(PredictOptions(run=run, images=words, **{**OPTIONS, "as_json": True})) == 0
    document = json.loads(capsys.readouterr().out)
    assert document.pop("rows") == lines
    assert document == {"run": str(run), "checkpoint": "step-00000008", "images": 3, "errors": 0}
    assert [row["image"] for row in lines] == words
    assert [sorted(guess) for row in lines for guess in row["predictions"]] == [["class", "probability"]] * 9


@pytest.mark.parametrize("format", ["csv", "jsonl", "json", "table"])
def test_a_bad_image_is_one_line_and_the_others_are_answered(run, images, capsys, monkeypatch, format) -> None:
    monkeypatch.chdir(images)
    (images / "1.png").write_bytes(b"GIF89a and no more")
    missing = "no.png"
    requested = {**OPTIONS, "format": "auto" if format == "json" else format, "as_json": format == "json"}
    assert predict(PredictOptions(run=run, images=[".", missing], **requested)) == 1
    out, err = capsys.readouterr()
    first, second = err.splitlines()
    assert first.startswith("error: 1.png: cannot be decoded: ") and "remove it or replace it" in first
    assert second.startswith(f"error: {missing}: cannot be read: No such file or directory")
    match format:
        case "csv":
            rows = list(csv.DictReader(io.StringIO(out)))
            assert [bool(row["class_1"]) for row in rows] == [True, False, True, False]
            assert f"error: {rows[1]['image']}: {rows[1]['error']}" == first
        case "jsonl":
            assert ["error" in json.loads(line) for line in out.splitlines()] == [False, True, False, True]
        case "json":
            document = json.loads(out)
            assert (document["images"], document["errors"]) == (2, 2)
            assert ["error" in row for row in document["rows"]] == [False, True, False, True]
        case "table":
            assert "2 images (digits-1, step-00000008)" in out and "0.png" in out and "1.png" not in out


def test_one_image_has_a_table_of_its_classes(run, images, capsys) -> None:
    assert predict(PredictOptions(run=run, images=[f"{images}/2.png"], **{**OPTIONS, "format": "table"})) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0] == f"{images}/2.png (digits-1, step-00000008)"
    assert sum(" %" in line for line in out.splitlines()) == 3


def test_paths_come_from_stdin(run, images, capsys, monkeypatch) -> None:
    lines = f"{images}/2.png\n{images}/0.png\n".encode()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(lines)))
    assert (
        predict(PredictOptions(run=run, images=["-"], **{**OPTIONS, "format": "jsonl", "top": 1, "batch_size": 1})) == 0
    )
    found = [json.loads(line)["image"] for line in capsys.readouterr().out.splitlines()]
    assert found == [f"{images}/2.png", f"{images}/0.png"]


@pytest.mark.parametrize("name", ["Shot 3.04\u202fPM.png", "a\nb.png", "caf\udce9.png"])
def test_programs_get_the_name_of_the_file_as_it_is(run, images, capsys, name) -> None:
    (images / "0.png").rename(images / name)
    predict(PredictOptions(run=run, images=[f"{images}/{name}"], **{**OPTIONS, "format": "jsonl"}))
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["image"] == f"{images}/{name}"
    predict(PredictOptions(run=run, images=[f"{images}/{name}"], **{**OPTIONS, "as_json": True}))
    assert json.loads(capsys.readouterr().out)["rows"][0]["image"] == f"{images}/{name}"
    predict(PredictOptions(run=run, images=[f"{images}/{name}"], **{**OPTIONS, "format": "csv"}))
    (row,) = csv.DictReader(io.StringIO(capsys.readouterr().out, newline=""))
    assert from_cell(row["image"]) == f"{images}/{name}" and "\n" not in row["image"]
    predict(PredictOptions(run=run, images=[f"{images}/{name}"], **{**OPTIONS, "format": "table"}))
    shown = capsys.readouterr().out.splitlines()[0]
    assert shown.isprintable() and shown.endswith("(digits-1, step-00000008)")


@pytest.mark.parametrize(
    "name", ["=HYPERLINK(1).png", "+1+cmd.png", "-2+3.png", "@SUM(1).png", "\t=1.png", "\x1b[2J.png"]
)
def test_no_cell_of_csv_is_a_formula_or_moves_the_cursor(run, images, capsys, monkeypatch, name) -> None:
    monkeypatch.chdir(images)
    (images / "0.png").rename(name)
    predict(PredictOptions(run=run, images=[name], **{**OPTIONS, "format": "csv"}))
    (row,) = csv.DictReader(io.StringIO(capsys.readouterr().out, newline=""))
    assert row["image"].startswith("'") and row["image"].isprintable() and from_cell(row["image"]) == name


def test_an_error_about_a_url_hides_its_password(run, images, capsys) -> None:
    urls = ["https://example.com/x.jpg", "https://me:S3CRET@example.com/y.jpg?sig=S3CRET"]
    assert predict(PredictOptions(run=run, images=[*urls, f"{images}/0.png"], **{**OPTIONS, "format": "csv"})) == 1
    printed = capsys.readouterr()
    rows = list(csv.DictReader(io.StringIO(printed.out)))
    assert [row["image"] for row in rows[:2]] == ["https://example.com/x.jpg", "https://example.com/y.jpg"]
    assert all("URLs are not supported" in row["error"] for row in rows[:2]) and not rows[2]["error"]
    assert "error: https://example.com/x.jpg: URLs are not supported" in printed.err
    assert "S3CRET" not in printed.out + printed.err


CRAFTED = {
    "nested": lambda text: "[" * 100_000,
    "an object nested": lambda text: '{"a": ' * 100_000,
    "a number too large": lambda text: text.replace('"num_images": ', '"num_images": 1e999, "x": '),
    "infinity": lambda text: text.replace('"num_images": ', '"num_images": Infinity, "x": '),
}


@pytest.mark.parametrize("change", CRAFTED.values(), ids=CRAFTED)
def test_a_crafted_record_of_the_data_is_one_line(run, images, tmp_path, change) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    (copy / "dataset.json").write_text(change((run / "dataset.json").read_text()))
    with pytest.raises(PacelineError, match=r"^\S+/dataset\.json: cannot be read: ") as raised:
        predict(PredictOptions(run=copy, images=[str(images)], **OPTIONS))
    assert len(str(raised.value).splitlines()) == 1 and raised.value.exit_code == 2


@pytest.mark.parametrize("train", ["x", ["best_step"], {"best_step": "x"}, {"best_step": None}, {}])
def test_a_crafted_state_of_a_checkpoint_is_one_line(run, images, tmp_path, train) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    (step,) = (copy / "checkpoints").glob("step-*")
    text = json.dumps(json.loads((step / "state.json").read_text()) | {"train": train})
    (step / "state.json").write_text(text)
    manifest = json.loads((step / "manifest.json").read_text())
    manifest["state.json"] = hashlib.sha256(text.encode()).hexdigest()
    (step / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"(train|best_step): ") as raised:
        predict(PredictOptions(run=copy, images=[str(images)], **{**OPTIONS, "checkpoint": "best"}))
    assert len(str(raised.value).splitlines()) == 1


def test_a_closed_stdin_is_an_error_in_one_line(run, monkeypatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(RecipeError, match=r"^-: reads paths from stdin, which is closed \(name files or folders\)$"):
        predict(PredictOptions(run=run, images=["-"], **OPTIONS))


def test_an_unknown_home_folder_is_no_run(run) -> None:
    with pytest.raises(RecipeError, match=r"^~nobody-here/run: is not a run directory"):
        predict(PredictOptions(run=Path("~nobody-here/run"), images=["a.png"], **OPTIONS))


def test_there_are_at_most_as_many_columns_as_classes(run, images, capsys) -> None:
    predict(PredictOptions(run=run, images=[str(images)], **{**OPTIONS, "top": 99, "format": "csv"}))
    rows = list(csv.reader(io.StringIO(capsys.readouterr().out)))
    assert {len(row) for row in rows} == {22}
    assert all(sorted(row[1:21:2]) == list("0123456789") for row in rows[1:])


@pytest.mark.parametrize(
    ("words", "requested", "message"),
    [
        ([], {}, "no image was named"),
        (["a.png"], {"format": "csv", "as_json": True}, "--format: csv has no effect with --json"),
        (["a.png"], {"format": "cvs"}, "--format: 'cvs' is not known (did you mean 'csv'?)"),
    ],
)
def test_a_question_that_makes_no_sense_is_one_line(run, words, requested, message) -> None:
    with pytest.raises(RecipeError) as caught:
        predict(PredictOptions(run=run, images=words, **{**OPTIONS, **requested}))
    assert message in str(caught.value) and len(str(caught.value).splitlines()) == 1


def test_a_network_of_two_channels_takes_files_of_two(run: Path, tmp_path: Path, capsys) -> None:
    for path in run.iterdir():
        if path.name != "dataset.json":
            (tmp_path / path.name).symlink_to(path)
    info = replace(load_digits().train.info, channels=2, mean=(0.5, 0.5), std=(0.5, 0.5))
    (tmp_path / "dataset.json").write_text(json.dumps(TrainedDataset(info, is_pixels=True).to_dict()))
    recipe = load(str(run)).recipe
    network = build_model(recipe.model, num_classes=10, channels=2)
    (tmp_path / "checkpoints").unlink()
    snapshot = Snapshot({"model": model_tensors(network), "optimizer": {}}, {"train": {"best_step": -1}})
    CheckpointStorage(tmp_path / "checkpoints", KeepPolicy(1)).save(8, -1, snapshot)
    images = tmp_path / "images"
    images.mkdir()
    np.save(images / "two.npy", np.full((8, 8, 2), 100, np.uint8))
    np.save(images / "three.npy", np.full((8, 8, 3), 100, np.uint8))
    assert predict(PredictOptions(run=tmp_path, images=[str(images)], **OPTIONS)) == 1
    output = capsys.readouterr()
    assert "two.npy" in output.out and "two.npy" not in output.err
    assert "it has 3 channels, and data.source.channels is 2" in output.err
