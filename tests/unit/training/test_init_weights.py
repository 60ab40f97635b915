"""Initial weights: of a file or of another run, which checkpoint that is, and what is recorded."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.core.errors import CheckpointError, RecipeError
from paceline.core.results import RunResult
from paceline.core.run_dir import RunDir
from paceline.core.world import World
from paceline.models.build import build_model
from paceline.recipe.load import Patch, load
from paceline.recipe.schema.model import Model
from paceline.recipe.yaml import to_yaml_text
from paceline.training.checkpoint import model_tensors, weights_sha256
from paceline.training.init_weights import (
    InitialWeights,
    find_initial_checkpoint,
    load_initial_weights,
    restored_origin,
)
from paceline.training.process import Invocation
from paceline.training.run import run

NAME, WIDTH = "resnet18_cifar", 0.125
WORDS = (
    *("data.source.num_images=16", "data.source.num_val_images=8", "data.source.image_size=8", "data.batch_size=8"),
    *(f"model.width={WIDTH}", "parallel.device=cpu", "parallel.threads=1", "log.tensorboard=off", "log.report=off"),
    *("data.workers=0", "measure.telemetry=off", "checkpoint.every=1st", "checkpoint.keep=9", "train.eval_every=1st"),
)


def train(folder: Path, *overrides: str, resume: bool = False) -> RunResult:
    recipe = load("synthetic", Patch.parse([*WORDS, *overrides])).recipe
    return run(recipe, World.single(), RunDir(folder), resume=resume, invocation=Invocation())


@pytest.fixture(scope="module")
def averaging(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of two steps that is judged by its averaged weights."""
    folder = tmp_path_factory.mktemp("runs") / "averaging"
    train(folder, "train.steps=2", "train.ema={decay: 0.5}", "data.source.num_classes=4")
    return folder


def section(weights: Path) -> Model:
    return Model(name=NAME, width=WIDTH, weights=str(weights))


def network(num_classes: int = 4) -> torch.nn.Module:
    torch.manual_seed(9)
    return build_model(Model(name=NAME, width=WIDTH), num_classes=num_classes, channels=3)


def test_a_file_of_another_digest_is_refused_before_it_is_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.training.init_weights.load_weights", lambda *_: pytest.fail("was parsed"))
    (tmp_path / "weights.pth").write_bytes(b"hostile")
    wanted = section(tmp_path / "weights.pth").model_copy(update={"weights_sha256": "0" * 8})
    with pytest.raises(RecipeError, match=r"weights.pth: its SHA-256 is [0-9a-f]{64}, not 00000000 \(model.weights_"):
        load_initial_weights(wanted, network(), "")


def test_a_run_means_its_last_checkpoint_and_a_step_folder_that_one(averaging: Path) -> None:
    checkpoints = averaging / "checkpoints"
    steps = [checkpoints / f"step-{step:08d}" for step in (1, 2)]
    assert [find_initial_checkpoint(str(place)) for place in (averaging, checkpoints / "last", *steps)] == [
        str(steps[1]), str(steps[1]), str(steps[0]), str(steps[1])
    ]  # fmt: skip
    best = json.loads((steps[1] / "state.json").read_text())["train"]["best_step"]
    assert best in (1, 2) and find_initial_checkpoint(str(checkpoints / "best")) == str(steps[best - 1])


def test_a_missing_checkpoint_is_one_line_and_a_file_beside_them_is_a_file(averaging: Path) -> None:
    gone = averaging / "checkpoints" / "step-00000099"
    with pytest.raises(RecipeError, match=rf"^model.weights: {gone}: no such checkpoint \(see .*/checkpoints\)$"):
        find_initial_checkpoint(str(gone))
    inside = averaging / "checkpoints" / "step-00000001" / "model.safetensors"
    assert inside.is_file() and find_initial_checkpoint(str(inside)) == ""
    beside = averaging / "checkpoints" / "mine.pth"
    beside.touch()
    assert find_initial_checkpoint(str(beside)) == ""


def test_a_run_of_another_model_is_named_with_the_setting_that_takes_it(averaging: Path) -> None:
    wanted = Model(name="speednet94", weights=str(averaging))
    model = build_model(wanted, num_classes=4, channels=3)
    with pytest.raises(
        RecipeError,
        match=r"has no .* \(it is of a resnet18_cifar, not of a speednet94: set model.name=resnet18_cifar\)$",
    ):
        load_initial_weights(wanted, model, find_initial_checkpoint(str(averaging)))


@pytest.mark.parametrize("weights", ["off", "nowhere", "nowhere/checkpoints/best", "last", "checkpoints/step-00000001"])
def test_weights_that_are_no_folder_are_no_checkpoint(tmp_path: Path, monkeypatch, weights: str) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_initial_checkpoint(weights) == ""


def test_a_folder_of_no_run_and_a_run_without_checkpoint_are_one_line_each(tmp_path: Path, averaging: Path) -> None:
    (tmp_path / "step-00000001").mkdir()
    for place in (tmp_path / "step-00000001", averaging / "checkpoints"):
        with pytest.raises(RecipeError, match=rf"^model.weights: {place}: is neither a run directory nor .* a .pth\)$"):
            find_initial_checkpoint(str(place))
    (tmp_path / "recipe.yaml").write_text(to_yaml_text(load("digits").recipe.to_dict()))
    with pytest.raises(RecipeError, match=r"^model.weights: .*: is neither a run directory nor"):
        find_initial_checkpoint(str(tmp_path))  # a recipe alone makes no run: it may lie among images
    (tmp_path / "plan.json").touch()
    with pytest.raises(RecipeError, match=r"^model.weights: .*/checkpoints: holds no checkpoint \(.*\)$") as caught:
        find_initial_checkpoint(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_file_is_recorded_with_its_digest(tmp_path: Path) -> None:
    path, model = tmp_path / "weights.safetensors", network()
    save_file(model.state_dict(), path)
    other = build_model(Model(name=NAME, width=WIDTH), num_classes=4, channels=3)
    assert load_initial_weights(section(path), other, "") == InitialWeights(
        f"model.weights: {path}: loaded 102 of 102 tensors",
        {"started_from": {"path": str(path), "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}},
    )
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in other.state_dict().items())
    assert load_initial_weights(Model(name=NAME), other, "") == InitialWeights()


def test_a_run_gives_its_averaged_weights_if_it_evaluated_them(averaging: Path) -> None:
    checkpoint, model = averaging / "checkpoints" / "step-00000001", network()
    found = load_initial_weights(section(averaging), model, str(checkpoint))
    kept, raw = (load_file(checkpoint / f"{part}.safetensors") for part in ("average", "model"))
    taken = {name: tensor for name, tensor in model_tensors(model).items() if "num_b" not in name}
    assert (
        taken.keys() <= kept.keys()
        and len(taken) == 102
        and all(torch.equal(tensor, kept[name]) for name, tensor in taken.items())
    )
    assert not all(torch.equal(tensor, raw[name]) for name, tensor in taken.items())
    assert found.note == f"model.weights: {averaging}: the averaged weights of step-00000001: loaded 102 of 102 tensors"


def test_a_run_gives_its_weights_with_the_digest_of_its_result(tmp_path: Path) -> None:
    result = train(tmp_path / "a", "train.steps=1")
    model = network(num_classes=10)
    found = load_initial_weights(section(tmp_path / "a"), model, find_initial_checkpoint(str(tmp_path / "a")))
    assert found.provenance["started_from"] == {
        "path": str(tmp_path / "a"), "checkpoint": "step-00000001", "sha256": result.weights_sha256
    }  # fmt: skip
    assert found.note is not None and ": the weights of step-00000001: loaded 102 of 102 tensors" in found.note
    counters = {name for name in model_tensors(model) if name.endswith("num_batches_tracked")}
    raw = load_file(tmp_path / "a" / "checkpoints" / "step-00000001" / "model.safetensors")
    plain = {name: tensor for name, tensor in model_tensors(model).items() if name not in counters}
    assert weights_sha256(plain) == weights_sha256({name: raw[name] for name in plain})


def test_torchs_random_state_is_as_it_was(averaging: Path) -> None:
    model = network()
    before = torch.get_rng_state()
    load_initial_weights(section(averaging), model, find_initial_checkpoint(str(averaging)))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_damaged_checkpoint_and_another_network_are_one_line_each(averaging: Path, tmp_path: Path) -> None:
    copied = tmp_path / "run"
    shutil.copytree(averaging, copied)
    checkpoint = find_initial_checkpoint(str(copied))
    wide = build_model(Model(name=NAME, width=0.25), num_classes=4, channels=3)
    with pytest.raises(RecipeError, match=r"^model.weights: .*/run: '.*' is .* instead of .* \(is it for another "):
        load_initial_weights(Model(name=NAME, width=0.25, weights=str(copied)), wide, checkpoint)
    (Path(checkpoint) / "average.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"average.safetensors: is damaged"):
        load_initial_weights(section(copied), network(), checkpoint)


def test_code_of_another_run_is_not_imported(averaging: Path, tmp_path: Path) -> None:
    copied = tmp_path / "run"
    shutil.copytree(averaging, copied)
    values = load(str(copied)).recipe.to_dict()
    foreign = {
        **values,
        "model": load("digits", Patch.parse(["model.name=nowhere.parts:Net"])).recipe.to_dict()["model"],
    }
    (copied / "recipe.yaml").write_text(to_yaml_text(foreign))
    with pytest.raises(
        RecipeError, match=r"^model.weights: .*: is of nowhere.parts:Net, which is code that the run nam"
    ):
        load_initial_weights(section(copied), network(), find_initial_checkpoint(str(copied)))


def test_a_run_with_other_classes_starts_from_it_and_records_that_on_resume(averaging: Path, tmp_path: Path) -> None:
    source, folder = tmp_path / "source", tmp_path / "run"
    shutil.copytree(averaging, source)
    overrides = ("train.steps=2", f"model.weights={source}", "data.source.num_classes=3")
    whole = train(folder, *overrides)
    (note,) = (each for each in json.loads((folder / "plan.json").read_text())["notes"] if "model.weights" in each)
    assert note.endswith("loaded 100 of 102 tensors; the classifier starts fresh (4 -> 3 classes)")
    recorded = whole.provenance["started_from"]
    assert recorded["path"] == str(source) and recorded["checkpoint"] == "step-00000002"
    shutil.rmtree(source)
    (folder / "result.json").unlink()
    shutil.rmtree(folder / "checkpoints" / "step-00000002")
    resumed = train(folder, *overrides, resume=True)
    assert resumed.provenance["started_from"] == recorded
    assert resumed.weights_sha256 == whole.weights_sha256
    assert restored_origin(str(folder / "checkpoints" / "step-00000002")).provenance == {"started_from": recorded}
