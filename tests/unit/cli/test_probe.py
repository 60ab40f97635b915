"""`paceline probe` and `predict --reject`: planted faults are found, features are cached, and what it refuses."""

import contextlib
import csv
import io
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from paceline.cli.options import PredictOptions, ProbeOptions
from paceline.cli.predict import predict
from paceline.cli.probe import probe
from paceline.core.errors import PacelineError, RecipeError
from paceline.core.probe_result import ProbeResult
from paceline.core.run_dir import RunDir
from paceline.data.sources.build import build_datasets
from paceline.inference.probe import backbone, classify, learning_curve
from paceline.inference.probe.cache import FeatureCache
from paceline.models.build import build_model
from paceline.models.features import find_feature_layer
from paceline.recipe.load import Patch, load
from paceline.recipe.yaml import to_yaml_text
from paceline.report.probe_page import build_probe_page
from paceline.training.checkpoint import CheckpointStorage, KeepPolicy, Snapshot, model_tensors
from paceline.training.trained_dataset import TrainedDataset

CLASSES = ("blue", "green", "red")
NUM_TRAIN, NUM_VAL, NUM_FLIPPED, SIZE = 180, 60, 9, 32


def draw_image(draws: np.random.Generator, label: int) -> Image.Image:
    """Return a blurred random image with more of the channel `2 - label` than of the others."""
    pixels = draws.integers(0, 180, (6, 6, 3), dtype=np.uint8)
    pixels[..., 2 - label] += 75
    return Image.fromarray(pixels).resize((SIZE, SIZE), Image.Resampling.BICUBIC)


def copy_image(picture: Image.Image, kind: int) -> Image.Image:
    """Return a near duplicate: re-compressed, a crop of 85 % of the area, or its mirror image."""
    if kind:
        picture = picture.crop((1, 1, 31, 31)).resize((SIZE, SIZE))
    if kind == 2:
        picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=75)
    return Image.open(file).convert("RGB")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with 9 flipped labels (`flipped-*`), 3 leaks (`leak-*`) and 3 duplicates (`double-*`)."""
    root, draws = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)

    def save(picture: Image.Image, split: str, label: int, name: str) -> None:
        folder = root / split / CLASSES[label]
        folder.mkdir(parents=True, exist_ok=True)
        picture.save(folder / f"{name}.png")

    for number in range(NUM_TRAIN):
        label, is_flipped = number % 3, number < NUM_FLIPPED
        picture = draw_image(draws, label)
        save(picture, "train", (label + is_flipped) % 3, f"{'flipped-' if is_flipped else ''}{number}")
        kind = number - 20
        if kind in (0, 1, 2):
            save(copy_image(picture, kind), "val", label, f"leak-{number}")
        if kind in (3, 4, 5):
            save(copy_image(picture, kind - 3), "train", label, f"double-{number}")
    for number in range(NUM_VAL):
        save(draw_image(draws, number % 3), "val", number % 3, f"{number}")
    return root


@pytest.fixture(scope="module")
def trained(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run on these images whose weights are random."""
    run = tmp_path_factory.mktemp("runs") / "run"
    run.mkdir()
    args = [f"data.source.root={photos}", f"data.image_size={SIZE}", "data.eval_resize=stretch", "data.workers=0",
            "model.name=resnet18_cifar", "model.width=0.125", "parallel.device=cpu", "parallel.threads=1"]  # fmt: skip
    recipe = load("folder", Patch.parse(args)).recipe
    (run / "plan.json").touch()
    (run / "recipe.yaml").write_text(to_yaml_text(recipe.to_dict()))
    train = build_datasets(recipe.data.source, may_download=False).train
    facts = TrainedDataset.from_source(train).to_dict() | {"mean": [0.5] * 3, "std": [0.25] * 3}
    (run / "dataset.json").write_text(json.dumps(facts))
    write_checkpoint(run, seed=0)
    return run


def write_checkpoint(run: Path, seed: int) -> None:
    """Write a checkpoint of random weights into `run`."""
    recipe = load(str(run)).recipe
    torch.manual_seed(seed)
    model = build_model(recipe.model, num_classes=3, channels=3)
    snapshot = Snapshot({"model": model_tensors(model), "optimizer": {}}, {"train": {"best_step": -1}})
    CheckpointStorage(run / "checkpoints", KeepPolicy(9)).save(8 + seed, -1, snapshot)


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """Return a copy of the run, to write into."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def probe_json(tmp_path: Path, capsys: pytest.CaptureFixture[str], *args: str, name: str = "out", **options) -> dict:
    """Return the result of a probe with a cache in `tmp_path`."""
    values = {"run_dir": tmp_path / name, "cache": tmp_path / "cache", "as_json": True, **options}
    assert probe(ProbeOptions(args=list(args), **values)) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def probed(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return a folder with a run (`run`) that was probed and the results (`out`), to read, and what was printed."""
    folder = tmp_path_factory.mktemp("probed")
    shutil.copytree(trained, folder / "run")
    options = ProbeOptions(args=[str(folder / "run")], run_dir=folder / "out", cache=folder / "cache")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert probe(options) == 0
    return folder, printed.getvalue()


@pytest.fixture
def without_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try one penalty and draw few curves, where the answers themselves are not the point."""
    monkeypatch.setattr(classify, "_PENALTIES", classify._PENALTIES[:1])
    monkeypatch.setattr(learning_curve, "_NUM_DRAWS", 2)


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_planted_faults_are_found(probed: tuple[Path, str]) -> None:
    out = probed[0] / "out"
    found, rows = json.loads((out / "probe.json").read_text()), read_rows(out / "images.csv")
    assert len(rows) == found["train_images"] + found["val_images"] == NUM_TRAIN + NUM_VAL + 6
    suspects = [row["image"] for row in rows[:NUM_FLIPPED]]
    assert sum("flipped" in name for name in suspects) >= NUM_FLIPPED - 1
    assert {"flipped" in each["image"]["name"] for each in found["suspects"][:5]} == {True}
    pairs = {
        tuple(sorted(Path(row[f"image_{number}"]).stem for number in (1, 2)))
        for row in read_rows(out / "duplicates.csv")
    }
    planted = {(str(number), f"leak-{number}") for number in (20, 21, 22)}
    planted |= {(str(number), f"double-{number}") for number in (23, 24, 25)}
    assert planted <= pairs and len(pairs) <= len(planted) + 1
    assert found["num_leaks"] == 3
    assert [each["second"]["split"] for each in found["duplicates"][:3]] == ["val"] * 3  # leaks come first
    assert found["linear_val"]["value"] > 0.8 and found["linear"]["low"] < found["linear"]["value"]
    assert found["current"]["value"] <= found["doubled"]["value"] <= 1
    result, shown = ProbeResult.model_validate(found), []
    for number in (len(rows) // 10, len(rows) // 5):
        page = build_probe_page(result.model_copy(update={"num_suspects": number}), "", {})
        shown.append("labels are probably right" in str(page.summary))
    assert shown == [False, True]


def test_the_page_shows_each_answer_and_its_images(probed: tuple[Path, str]) -> None:
    folder, printed = probed
    assert "linear probe" in printed and str(folder / "cache") in printed
    page = (folder / "out" / "report.html").read_text()
    for heading in ("learned", "wrong", "near duplicates", "more labels", "unlike"):
        assert heading in page
    assert page.count("data:image/png;base64") >= 24
    assert "flipped-" in page and "<svg" in page


@pytest.mark.usefixtures("without_search")
def test_features_are_cached_by_weights_pixels_and_preprocessing(
    run: Path, photos: Path, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = probe_json(tmp_path, capsys, str(run), name="1")
    computed = []
    work = backbone._run_model
    monkeypatch.setattr(backbone, "_run_model", lambda *args: computed.append(1) or work(*args))
    again = probe_json(tmp_path, capsys, str(run), name="2")
    assert not computed and not first["is_cached"] and again["is_cached"]
    same = ("linear", "knn", "suspects", "duplicates", "unusual", "threshold", "doubled")
    assert {key: first[key] for key in same} == {key: again[key] for key in same}

    copied = Path(shutil.copytree(photos, tmp_path / "photos"))
    moved = probe_json(tmp_path, capsys, str(run), f"data.source.root={copied}", name="3")
    assert not computed and moved["is_cached"]  # the same pixels elsewhere
    file = next(copied.glob("val/red/*.png"))
    file.rename(copied / "val" / "blue" / file.name)
    Image.new("RGB", (SIZE, SIZE)).save(next(copied.glob("val/green/*.png")))
    probe_json(tmp_path, capsys, str(run), f"data.source.root={copied}", name="4")
    assert len(computed) == 1  # of the validation images alone

    write_checkpoint(run, seed=1)
    assert not probe_json(tmp_path, capsys, str(run), name="5")["is_cached"]
    assert len(computed) == 3

    for path in (tmp_path / "cache").iterdir():  # a flipped bit
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    assert not probe_json(tmp_path, capsys, str(run), name="6")["is_cached"]
    assert len(computed) == 5


def test_equal_weights_of_other_layers_are_another_model(run: Path) -> None:
    """A layer without weights, such as an activation, changes features as weights do; the classifier does not."""
    recipe = load(str(run)).recipe
    model = build_model(recipe.model, num_classes=3, channels=3)
    layer = find_feature_layer(model, 3, recipe.model.name)
    before = backbone._digest_model(model, layer, recipe)
    model.set_submodule(layer, torch.nn.Linear(model.get_submodule(layer).in_features, 5))
    assert backbone._digest_model(model, layer, recipe) == before
    name = next(name for name, module in model.named_modules() if isinstance(module, torch.nn.ReLU))
    model.set_submodule(name, torch.nn.SiLU())
    assert backbone._digest_model(model, layer, recipe) != before


@pytest.mark.usefixtures("without_search")
def test_an_image_that_is_skipped_is_not_skipped_by_the_cache(
    run: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copied = Path(shutil.copytree(photos, tmp_path / "photos"))
    file = next(copied.glob("train/red/*.png"))
    file.write_bytes(file.read_bytes()[:60])  # its header can be read
    args = [str(run), f"data.source.root={copied}"]
    found = probe_json(tmp_path, capsys, *args, "data.on_bad_image=skip", name="1")
    assert found["train_images"] == found["total_train"] - 1
    with pytest.raises(PacelineError, match=file.name):
        probe_json(tmp_path, capsys, *args, name="2")


def test_a_cached_file_may_vanish_while_others_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two probes with one cache remove its oldest files at once."""
    cache = FeatureCache(tmp_path, max_bytes=1)
    tensors = {"features": torch.zeros(2)}
    keys = [f"{number:064x}" for number in range(3)]
    for key in keys:
        FeatureCache(tmp_path, max_bytes=10**6).write(key, tensors)
    stat = Path.stat

    def vanish(path: Path, **options: bool) -> os.stat_result:
        if path.name.startswith(keys[0]):
            path.unlink(missing_ok=True)
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", vanish)
    cache.write("f" * 64, tensors)
    assert [path.stem for path in cache.list_files()] == ["f" * 64]


@pytest.mark.usefixtures("without_search")
def test_the_cache_keeps_within_its_limit(run: Path, tmp_path: Path, capsys) -> None:
    probe_json(tmp_path, capsys, str(run), name="1", cache_gb=1e-6)
    assert len(list((tmp_path / "cache").iterdir())) == 1
    probe_json(tmp_path, capsys, str(run), name="2", cache_gb=0, cache=tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_a_folder_is_probed_with_published_or_own_weights(run: Path, photos: Path, tmp_path: Path, capsys) -> None:
    args = [str(photos), "model.name=resnet18_cifar", "model.width=0.125", f"data.image_size={SIZE}", "data.workers=0",
            "parallel.device=cpu"]  # fmt: skip
    with pytest.raises(RecipeError, match=r"^model\.weights: off .*\(name a run"):
        probe_json(tmp_path, capsys, *args, name="1")
    found = probe_json(tmp_path, capsys, *args, f"model.weights={run}", "data.eval_resize=stretch", name="2")
    assert found["linear"]["value"] > 0.8 and found["reference"] == ""


@pytest.mark.usefixtures("without_search")
def test_images_limits_what_is_probed(run: Path, tmp_path: Path, capsys) -> None:
    found = probe_json(tmp_path, capsys, str(run), images=100)
    assert (found["train_images"], found["val_images"]) == (75, 25)
    assert (found["total_train"], found["total_val"]) == (NUM_TRAIN + 3, NUM_VAL + 3)
    assert "100 of 246 images" in found["notes"][0]


@pytest.mark.parametrize(
    ("args", "options", "message"),
    [
        (["optim.lr=1"], {}, r"^optim\.lr: has no effect on the features of a run \(leave it out"),
        (["data.mean=[0.5,0.5,0.5]"], {}, r"^data\.mean: has no effect"),
        ([], {"checkpoint": "99"}, r"99"),
        (["data.source.root=/nowhere"], {}, r"/nowhere"),
    ],
)
def test_what_a_run_refuses(run: Path, tmp_path: Path, args: list[str], options: dict, message: str) -> None:
    with pytest.raises(PacelineError, match=message):
        probe(ProbeOptions(args=[str(run), *args], run_dir=tmp_path / "out", cache=tmp_path, **options))


def test_a_folder_with_content_is_refused(run: Path) -> None:
    with pytest.raises(RecipeError, match=r"^--run-dir: .* is not empty \(name a new folder"):
        probe(ProbeOptions(args=[str(run)], run_dir=run))


def test_several_labels_are_refused(tmp_path: Path, photos: Path) -> None:
    first, second, *_ = photos.glob("train/*/*.png")
    (tmp_path / "list.csv").write_text(f"path,label\n{first},a;b\n{second},a\n")
    args = [str(tmp_path / "list.csv"), "data.source.separator=;", "data.source.val=off", "train.loss=bce"]
    with pytest.raises(PacelineError, match=r"^data\.source: .*one class per image \("):
        probe(ProbeOptions(args=args, run_dir=tmp_path / "out", cache=tmp_path))


def test_reject_marks_images_unlike_the_training_images(
    probed: tuple[Path, str], photos: Path, tmp_path: Path, capsys
) -> None:
    run = probed[0] / "run"
    strange = tmp_path / "strange.png"
    Image.new("RGB", (SIZE, SIZE), "white").save(strange)
    usual = [str(path) for path in sorted(photos.glob("val/*/*.png"))]
    options = {"run": run, "images": [*usual, str(strange)], "top": 1, "device": "cpu", "format": "csv"}
    assert predict(PredictOptions(**options, reject="0.1")) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert list(rows[0]) == ["image", "class_1", "probability_1", "rejected", "distance", "error"]
    rejected = [row["image"] for row in rows if row["rejected"] == "1"]
    # Of the held-out images themselves: the conformal quantile of 63 images.
    assert str(strange) in rejected and len(rejected) - 1 == 5
    assert predict(PredictOptions(**{**options, "format": "jsonl"}, reject="0.1")) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["rejected"] for line in lines] == [row["rejected"] == "1" for row in rows]
    assert predict(PredictOptions(**options)) == 0
    assert "rejected" not in capsys.readouterr().out


def test_reject_needs_the_reference_of_these_weights(probed: tuple[Path, str], run: Path) -> None:
    options = PredictOptions(run=run, images=["a.png"], device="cpu", reject="auto")
    with pytest.raises(RecipeError, match=rf"^--reject: .* does not exist \(run `paceline probe {run}`"):
        predict(options)
    shutil.copy(RunDir(probed[0] / "run").reference, RunDir(run).reference)
    with pytest.raises(RecipeError, match=r"^--reject: 0\.001 needs at least 999 held-out images, .* 63 \("):
        predict(PredictOptions(run=run, images=["a.png"], device="cpu", reject="0.001"))
    with pytest.raises(RecipeError, match=r"^--reject: 'all' is not a share"):
        predict(PredictOptions(run=run, images=["a.png"], reject="all"))
    write_checkpoint(run, seed=1)
    with pytest.raises(RecipeError, match=r"^--reject: .* other weights .*paceline probe"):
        predict(options)
    RunDir(run).reference.write_bytes(b"damaged")
    with pytest.raises(PacelineError, match=r"reference\.safetensors: cannot be read: .*paceline probe"):
        predict(options)


@pytest.mark.usefixtures("without_search")
def test_a_run_that_cannot_be_written_is_probed_without_a_reference(run: Path, tmp_path: Path, capsys) -> None:
    RunDir(run).reference.mkdir()
    found = probe_json(tmp_path, capsys, str(run))
    assert found["reference"] == ""
    assert any("reference.safetensors: cannot be written: " in note for note in found["notes"])


@pytest.mark.usefixtures("without_search")
def test_another_dataset_keeps_the_reference(run: Path, photos: Path, tmp_path: Path, capsys) -> None:
    found = probe_json(tmp_path, capsys, str(run), f"data.source.root={photos}/train")
    assert found["reference"] == "" and not RunDir(run).reference.exists()
