"""Every command takes a folder of 16-bit images with five channels, and refuses in one line what it cannot do."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

SOURCE = "data.source={name: folder, root: data, channels: 5, pixels: uint16}"
SOURCE_FIELDS = ("data.source.channels=5", "data.source.pixels=uint16")
TRAIN = ("train", "digits", SOURCE, "data.image_size=12", "data.batch_size=8", "train.epochs=1")
SMALL = ("model.width=0.1", "parallel.threads=1", "log.tensorboard=off", "log.worst=4", "log.report=off")


@pytest.fixture(scope="module")
def trained(paceline_in, tmp_path_factory):
    """Return the program in a folder with `data` and a finished run `run`."""
    folder = tmp_path_factory.mktemp("wide")
    for number in range(32):
        path = folder / "data" / ("train" if number < 24 else "val") / "ab"[number % 2] / f"{number:02}.npy"
        path.parent.mkdir(parents=True, exist_ok=True)
        draws = np.random.default_rng(number).random((16, 14, 5)) * (0.4 + 0.6 * (number % 2))
        np.save(path, (draws * 65535).astype(np.uint16))
    program = paceline_in(folder)
    result = program(*TRAIN, *SMALL, "data.augment=[flip]", "--run-dir", "run", "--json").result
    assert result["status"] == "completed"
    return program


def test_a_run_records_its_pixels_and_shows_its_images(trained):
    run = trained.folder / "run"
    dataset = json.loads((run / "dataset.json").read_text())
    assert (dataset["channels"], dataset["pixels"]) == (5, "uint16")
    saved = np.stack([np.load(path) for path in (trained.folder / "data/train").rglob("*.npy")]) / 65535
    assert dataset["mean"] == pytest.approx(saved.mean((0, 1, 2)), rel=1e-4)
    assert dataset["std"] == pytest.approx(saved.std((0, 1, 2)), rel=1e-4)
    thumbnails = [path for path in run.rglob("*.png") if not path.stem.endswith(("predicted", "true"))]  # no maps
    assert len(list((run / "inputs").glob("*.png"))) >= 8
    for path in thumbnails:
        pixels = np.asarray(Image.open(path))
        assert pixels.shape[2] == 3 and pixels.min() == 0 and pixels.max() == 255  # stretched to the whole range
    assert not list((trained.folder / "run").glob("*error*"))


def test_predict_and_eval_see_what_training_sees(trained):
    rows = trained("predict", "run", "data/val", "--json").result["rows"]
    assert len(rows) == 8
    correct = sum(Path(row["image"]).parent.name == row["predictions"][0]["class"] for row in rows)
    evaluated = trained("eval", "run", "--json").result
    assert evaluated["images"] == 8 and evaluated["top1"] == pytest.approx(correct / 8)
    other = trained("eval", "run", "data.source.root=data/val", "--json")
    assert other.code == 0, other.err
    trained("eval", "run", "data.source.root=data/val", "data.source.pixels=float32").assert_error(
        "data.source", "float32", "data.source.pixels=uint16"
    )


@pytest.mark.parametrize("preprocessing", [(), ("--preprocessing",)])
def test_an_exported_graph_equals_the_model(trained, preprocessing):
    pytest.importorskip("onnxruntime", reason="not installed: pip install 'paceline[export]'")
    import onnxruntime

    name = f"model{len(preprocessing)}.onnx"
    exported = trained("export", "run", "--format", "onnx", "--out", name, *preprocessing)  # which checks the parity
    assert exported.code == 0, exported.err
    session = onnxruntime.InferenceSession(str(trained.folder / name))
    (given,) = session.get_inputs()
    assert given.type == "tensor(float)"
    assert given.shape[1:] == ([12, 12, 5] if preprocessing else [5, 12, 12])


def test_data_commands_read_and_pack_it(trained):
    inspected = trained("data", "inspect", "digits", SOURCE, "--json").result
    assert inspected["train"]["formats"] == {"NPY": 24}
    assert trained("data", "verify", "digits", SOURCE).code == 0
    packed = trained("data", "pack", "digits", "wide.pack", SOURCE)
    assert packed.code == 0, packed.err
    assert trained("data", "verify", "wide.pack", SOURCE).code == 0
    quick = ("--seconds", "0.1", "--rounds", "1", "--images", "8", "--workers", "1")
    measured = trained("data", "bench", "data", *SOURCE_FIELDS, *quick, "--json")
    assert measured.code == 0, measured.err
    names = {row["name"] for row in measured.result["rows"]}
    assert any("pack" in name for name in names) and not any("decode" in name for name in names)
    assert trained("data", "unpack", "wide.pack", "files").code == 0
    for path in (trained.folder / "data").rglob("*.npy"):
        assert (trained.folder / "files" / path.relative_to(trained.folder / "data")).read_bytes() == path.read_bytes()
    resized = trained("data", "pack", "digits", "small.pack", SOURCE, "--resize", "8")
    resized.assert_error("resize: 8", "5 channels of uint16", "leave it out")
    lmdb = trained("data", "pack", "digits", "folder.lmdb", SOURCE, "--format", "lmdb")
    lmdb.assert_error("--format: lmdb", "5 channels of uint16", "leave it out")


@pytest.mark.parametrize("name", ["color_jitter", "rand_augment", "trivial_augment"])
def test_augmentation_of_colors_is_refused(trained, name):
    args = "{name: color_jitter, brightness: 0.1}" if name == "color_jitter" else name
    refused = trained(*TRAIN, f"data.augment=[flip,{args}]", "--dry-run")
    refused.assert_error("data.augment[1]", name, "5 channels of uint16", "leave it out")


def test_a_file_with_nan_is_a_bad_image(paceline, tmp_path):
    for number in range(12):
        path = tmp_path / "data" / ("train" if number < 8 else "val") / "ab"[number % 2] / f"{number:02}.npy"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).normal(size=(8, 8, 5)).astype(np.float32)
        pixels[0, 0, 0] = np.nan if number == 3 else 0
        np.save(path, pixels)
    source = "data.source={name: folder, root: data, channels: 5, pixels: float32}"
    args = ("train", "digits", source, "data.image_size=8", "data.batch_size=4", "train.epochs=1", *SMALL)
    paceline(*args, "--run-dir", "failed").assert_error("03.npy", "NaN or infinite", "remove it")
    result = paceline(*args, "data.on_bad_image=skip", "--run-dir", "run", "--json").result
    assert result["bad_images"] == 1
    (row,) = [json.loads(line) for line in (tmp_path / "run/bad_images.jsonl").read_text().splitlines()]
    assert row["path"].endswith("b/03.npy")


def test_wide_images_with_several_labels_train_the_same_from_a_pack(trained):
    lists = {"train": ["path,label"], "val": ["path,label"]}
    for path in sorted((trained.folder / "data").rglob("*.npy")):
        number = int(path.stem)
        labels = [path.parent.name, *(["odd"] if number % 3 == 0 else [])] if number % 5 else []
        lists[path.parent.parent.name].append(f"{path.relative_to(trained.folder)},{';'.join(labels)}")
    for split, lines in lists.items():
        (trained.folder / f"{split}.csv").write_text("\n".join(lines) + "\n")
    listed = "data.source={name: manifest, train: train.csv, val: val.csv, separator: ';', channels: 5, pixels: uint16}"
    augment = "data.augment=[flip,{name: mixup, until: 50%}]"
    options = (*TRAIN[:2], *TRAIN[3:], *SMALL, augment, "data.sampler=repeated", "train.loss=bce", "--json")

    packed = trained("data", "pack", "digits", "labels.pack", listed)
    assert packed.code == 0, packed.err
    files = trained(*options, listed, "--run-dir", "listed").result
    pack = trained(*options, "data.source={name: pack, root: labels.pack}", "--run-dir", "packed").result

    assert files["weights_sha256"] == pack["weights_sha256"]
    assert files["eval"] == pack["eval"]
    described = json.loads((trained.folder / "packed/dataset.json").read_text())
    assert (described["pixels"], described["multi_label"], described["class_names"]) == (
        "uint16",
        True,
        ["a", "b", "odd"],
    )
