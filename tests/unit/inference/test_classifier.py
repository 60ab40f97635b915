"""A loaded classifier answers as its run's evaluation did, whatever it was trained in, and whatever its images are."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from paceline.core.errors import CheckpointError, PacelineError, RecipeError
from paceline.core.results import EvalReport, EvalResult
from paceline.core.run_dir import RunDir
from paceline.core.world import World
from paceline.data.sources.builtin import load_digits
from paceline.inference.classifier import Classifier, load_classifier
from paceline.recipe.load import Patch, load
from paceline.recipe.yaml import to_yaml_text
from paceline.training.eval_run import evaluate
from paceline.training.process import Invocation
from paceline.training.run import run

SMALL = ("parallel.device=cpu", "parallel.threads=1", "data.workers=0", "measure.telemetry=off", "log.report=off",
         "log.tensorboard=off")  # fmt: skip
DIGITS = ("model.width=0.125", "train.steps=3", "train.eval_every=3st", "checkpoint.every=3st", *SMALL)
# Both sum float64 logs of the same float32 logits, in batches that are the same: only the order of the sum differs.
ROUNDING = 1e-9


def trained(folder: Path, name: str, *args: str) -> Path:
    """Train a small network for a few steps into `folder`, and return the run."""
    (folder / "run").mkdir(parents=True)
    run(load(name, Patch.parse([*args])).recipe, World.single(), RunDir(folder / "run"), invocation=Invocation())
    return folder / "run"


def evaluated(path: Path) -> EvalReport:
    """Return what evaluation says of the last checkpoint of a run."""
    recipe = load(str(path)).recipe
    checkpoint = max((path / "checkpoints").iterdir())
    return evaluate(recipe, World.single(), checkpoint, run_recipe=recipe, print_line=pytest.fail)


def classify(classifier: Classifier, images: list[bytes], labels: list[int], batch_size: int) -> tuple[int, float]:
    """Return how many of `images` are classified as their label, and the mean cross-entropy of that."""
    pixels = [classifier.image(image, "an image") for image in images]
    logs = torch.cat(
        [
            classifier.log_probabilities(torch.stack(pixels[start : start + batch_size]))
            for start in range(0, len(pixels), batch_size)
        ]
    )
    truth = torch.tensor(labels)
    best = logs.topk(min(5, logs.shape[1]), dim=1).indices[:, 0]
    return int((best == truth).sum()), float(-logs[torch.arange(len(truth)), truth].mean())


def assert_same(found: tuple[int, float], result: EvalResult) -> None:
    assert (found[0], found[1]) == (round(result.top1 * result.images), pytest.approx(float(result.loss), abs=ROUNDING))


@pytest.fixture(scope="module")
def digit_files(tmp_path_factory) -> tuple[list[bytes], list[int]]:
    """Return the digits that validate, as 8x8 gray PNG files, and their labels."""
    val = load_digits().val
    folder = tmp_path_factory.mktemp("digits")
    for index, image in enumerate(val.images):
        Image.fromarray(image[..., 0]).save(folder / f"{index}.png")
    return [(folder / f"{index}.png").read_bytes() for index in range(len(val))], val.labels.tolist()


@pytest.mark.parametrize(
    "args",
    [
        ("optim.lr=0.1",),
        ("optim.lr=0.1", "train.ema={decay: 0.5}"),
        ("optim={name: schedule_free, lr: 0.1}", "schedule={name: constant}"),
        ("train.precision=bf16",),
        ("train.precision=bf16_master", "train.ema={decay: 0.5}"),
        ("data.eval_views=2", "model.norm=sync_batch"),
        ("data.image_size=12", "data.mean=[0.5]", "data.std=[0.25]", "model.memory_format=contiguous"),
    ],
    ids=lambda args: args[0],
)
def test_files_of_the_validation_digits_have_the_accuracy_of_the_run(tmp_path, digit_files, args) -> None:
    path = trained(tmp_path, "digits", *DIGITS, *args)
    report = evaluated(path)
    classifier = load_classifier(path, device="cpu")
    batch_size = 2 * classifier.recipe.data.batch_size  # that of evaluation, as sums over channels depend on it
    assert_same(classify(classifier, *digit_files, batch_size), report.primary)
    if report.ema is not None:
        assert report.ema.loss != report.val.loss  # else it is not seen which of the two was taken


def save_as(folder: Path, kind: str, picture: Image.Image, number: int) -> None:
    """Save `picture` as a file of `kind`, which says what is special about it."""
    folder.mkdir(parents=True, exist_ok=True)
    match kind:
        case "cmyk.jpg":
            picture.convert("CMYK").save(folder / f"{number}.jpg")
        case "grey.png":
            picture.convert("L").save(folder / f"{number}.png")
        case "palette.png":
            picture.quantize(32).save(folder / f"{number}.png")
        case "alpha.webp":
            picture.convert("RGBA").save(folder / f"{number}.webp", lossless=True)
        case "turned.jpg":
            exif = Image.Exif()
            exif[0x0112] = 6
            picture.save(folder / f"{number}.jpeg", exif=exif)
        case "wide.png":
            wide = np.asarray(picture.convert("L")).astype(np.uint16) * 257
            Image.fromarray(wide).save(folder / f"{number}.png")
        case _:
            picture.save(folder / f"{number}.{kind}")


KINDS = ("jpg", "png", "webp", "bmp", "gif", "tif", "ppm", "cmyk.jpg", "grey.png", "palette.png", "alpha.webp",
         "turned.jpg", "wide.png")  # fmt: skip


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    """Return two classes of images, one of each kind in each, none of which is square."""
    folder, random = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for number, kind in enumerate(KINDS):
        for label in ("cat", "dog"):
            for split in ("train", "val"):
                pixels = random.integers(256, size=(5, 7, 3), dtype=np.uint8)
                picture = Image.fromarray(pixels).resize((50 + number, 40), Image.Resampling.BICUBIC)
                save_as(folder / split / label, kind, picture, number)
    return folder


@pytest.mark.parametrize("args", [("data.eval_resize=crop",), ("data.eval_resize=stretch", "data.source.channels=1")])
def test_every_kind_of_image_file_has_the_accuracy_of_the_run(tmp_path, photos, args) -> None:
    sizes = (
        "data.image_size=24",
        "data.batch_size=13",
        "data.augment=[]",
        "train.epochs=1",
        "model.name=resnet18_cifar",
    )
    path = trained(tmp_path, "folder", f"data.source.root={photos}", "model.width=0.125", *sizes, *SMALL, *args)
    files = [file for label in ("cat", "dog") for file in sorted((photos / "val" / label).iterdir())]
    assert len(files) == 2 * len(KINDS)
    labels = [["cat", "dog"].index(file.parent.name) for file in files]
    classifier = load_classifier(path, device="cpu")
    found = classify(classifier, [file.read_bytes() for file in files], labels, batch_size=26)
    assert_same(found, evaluated(path).primary)


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> Path:
    """Return a run of the digits."""
    return trained(tmp_path_factory.mktemp("digits_run"), "digits", *DIGITS, "checkpoint.every=2st")


def test_training_saves_the_class_names_of_the_model(digits: Path) -> None:
    classifier = load_classifier(digits, device="cpu")
    assert classifier.classes == tuple("0123456789")
    wanted = classifier.preprocessing
    info = load_digits().train.info
    assert (wanted.image_size, wanted.resize, wanted.channels) == (16, None, 1)
    assert (wanted.mean, wanted.std) == (info.mean, info.std)


def test_a_run_without_the_description_of_its_data_is_one_line(digits: Path, tmp_path: Path) -> None:
    link(digits, tmp_path, without="dataset.json")
    with pytest.raises(PacelineError, match=r"dataset\.json: does not exist \(copy the whole run directory"):
        load_classifier(tmp_path, device="cpu")


def test_probabilities_are_float32_and_sum_to_one(digits: Path) -> None:
    shares = load_classifier(digits, device="cpu").probabilities(torch.zeros(3, 1, 16, 16, dtype=torch.uint8))
    assert (shares.dtype, shares.shape) == (torch.float32, (3, 10))
    assert torch.allclose(shares.sum(dim=1), torch.ones(3), atol=1e-6)  # ten roundings to float32


def test_the_checkpoint_that_is_named_is_taken(digits: Path) -> None:
    for name, folder in (("last", "step-00000003"), ("2", "step-00000002")):
        classifier = load_classifier(digits, name, device="cpu")
        assert classifier.checkpoint.name == folder
        saved = load_file(classifier.checkpoint / "model.safetensors")
        assert all(torch.equal(tensor, saved[key]) for key, tensor in classifier.model.state_dict().items())


def test_loading_keeps_the_random_state_and_needs_no_gradients(digits: Path) -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    classifier = load_classifier(digits, device="cpu")
    assert torch.equal(torch.rand(1), expected)
    assert not classifier.model.training
    assert not any(each.requires_grad for each in classifier.model.parameters())


@pytest.mark.parametrize("precision", ["fp16", "fp16_master", "tf32"])
def test_a_network_that_was_trained_in_a_format_of_gpus_computes_in_float32_on_a_cpu(
    digits: Path, tmp_path: Path, precision: str
) -> None:
    link(digits, tmp_path, without="recipe.yaml")
    text = (digits / "recipe.yaml").read_text()
    assert "precision: fp32" in text
    (tmp_path / "recipe.yaml").write_text(text.replace("precision: fp32", f"precision: {precision}"))
    images = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    found, full = (load_classifier(each, device="cpu").log_probabilities(images) for each in (tmp_path, digits))
    assert torch.equal(found, full)


def renamed(digits: Path, folder: Path, **sections: dict[str, object]) -> Path:
    """Make `folder` the run `digits` with `sections` of its recipe replaced, and return it."""
    link(digits, folder, without="recipe.yaml")
    values = load(str(digits)).recipe.to_dict()
    for name, section in sections.items():
        values[name] = {**values[name], **section} if name in ("data", "log") else section
    (folder / "recipe.yaml").write_text(to_yaml_text(values))
    return folder


def test_a_run_cannot_consent_to_its_own_code(digits: Path, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "leaving.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\ndef net(**args): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    run = renamed(digits, tmp_path / "run", model={"name": "leaving:net", "args": {}})
    refusal = r"/recipe.yaml:\d+: model.name: leaving:net is custom code.*\(add --trust-code"
    with pytest.raises(RecipeError, match=refusal):
        load_classifier(run, device="cpu")
    assert not (tmp_path / "ran").exists()


def test_a_run_that_names_what_loads_code_is_refused_by_name(digits: Path, tmp_path: Path) -> None:
    (tmp_path / "hubconf.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\ndef net(**args): pass\n")
    args = {"repo_or_dir": str(tmp_path), "source": "local", "model": "net"}
    link(digits, tmp_path, without="recipe.yaml")
    values = load(str(digits)).recipe.to_dict()
    (tmp_path / "recipe.yaml").write_text(to_yaml_text({**values, "model": {"name": "torch.hub:load", "args": args}}))
    with pytest.raises(RecipeError, match=r"model.name: 'torch.hub:load' cannot be a plugin"):
        load_classifier(tmp_path, device="cpu", trust_code=True)
    assert not (tmp_path / "ran").exists()


def test_plugins_that_inference_does_not_need_may_be_missing(digits: Path, tmp_path: Path) -> None:
    own = {"name": "nowhere.parts:Part", "args": {}}
    data = {"source": own, "augment": [own]}
    run = renamed(digits, tmp_path, optim={"lr": 0.1, **own}, data=data, log={"sinks": [own]})
    found = load_classifier(run, device="cpu")
    images = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    same = load_classifier(digits, device="cpu")
    assert torch.equal(found.log_probabilities(images), same.log_probabilities(images))


def test_a_plugin_model_runs_with_consent(digits: Path, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "asked_net.py").write_text(
        "from paceline.models.build import build_model\nfrom paceline.recipe.schema.model import Model\n"
        "def net(num_classes, in_channels, width):\n"
        "    model = Model(name='resnet18_cifar', width=width)\n"
        "    return build_model(model, num_classes=num_classes, channels=in_channels)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert load(str(digits)).recipe.model.name == "resnet18_cifar"
    run = renamed(digits, tmp_path / "run", model={"name": "asked_net:net", "args": {"width": 0.125}})
    images = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    found, same = load_classifier(run, device="cpu", trust_code=True), load_classifier(digits, device="cpu")
    assert torch.equal(found.log_probabilities(images), same.log_probabilities(images))


def link(run: Path, folder: Path, *, without: str) -> None:
    """Make `folder` a run directory of the files of `run` but one."""
    for path in run.iterdir():
        if path.name != without:
            (folder / path.name).symlink_to(path)


@pytest.mark.parametrize(
    ("without", "checkpoint", "device", "kind", "message"),
    [
        ("recipe.yaml", "last", "cpu", RecipeError, "is not a run directory"),
        ("checkpoints", "last", "cpu", CheckpointError, "holds no checkpoint"),
        ("", "7", "cpu", CheckpointError, "no such checkpoint"),
        ("", "newest", "cpu", RecipeError, "write last, best or a step's number"),
        ("", "last", "gpu", RecipeError, "--device: 'gpu' is not a device (write cpu, cuda or auto)"),
    ],
)
def test_missing_files_are_one_line_errors(digits, tmp_path, without, checkpoint, device, kind, message) -> None:
    link(digits, tmp_path, without=without)
    with pytest.raises(kind) as caught:
        load_classifier(tmp_path, checkpoint, device)
    assert message in str(caught.value) and len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema_version": 2}', '{"schema_version": 1, "class_names": 3}'])
def test_a_damaged_description_of_the_data_is_one_line(digits: Path, tmp_path: Path, text: str) -> None:
    link(digits, tmp_path, without="dataset.json")
    (tmp_path / "dataset.json").write_text(text)
    with pytest.raises(PacelineError, match=r"dataset\.json: cannot be read"):
        load_classifier(tmp_path, device="cpu")
