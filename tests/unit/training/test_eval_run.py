"""Evaluating a run on another dataset: classes are matched by name, and pixels treated as in the run."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from paceline.cli.evaluate import evaluate as eval_verb
from paceline.cli.options import EvalOptions
from paceline.core.dataset import ArraySource
from paceline.core.errors import DataError, RecipeError
from paceline.core.results import EvalReport
from paceline.core.run_dir import RunDir
from paceline.core.world import World
from paceline.data.convert.pack_writer import PackOptions, write_pack
from paceline.data.sources.build import build_datasets
from paceline.data.sources.builtin import load_digits
from paceline.data.sources.fingerprint import digest_datasets
from paceline.models.build import build_model
from paceline.recipe.load import Patch, load
from paceline.recipe.yaml import to_yaml_text
from paceline.training.checkpoint import CheckpointStorage, KeepPolicy, Snapshot, model_tensors
from paceline.training.datasets import match_classes
from paceline.training.eval_run import evaluate
from paceline.training.state import TrainState
from paceline.training.trained_dataset import TrainedDataset

SMALL = ("model.width=0.125", "parallel.device=cpu", "parallel.threads=1", "data.workers=0")
FOLDER = ("data.image_size=12", "data.batch_size=4", "model.name=resnet18_cifar", "data.augment=[]", *SMALL)


def made_run(folder: Path, name: str, *overrides: str) -> Path:
    """Write a run whose network is as it was drawn, and return its directory."""
    recipe = load(name, Patch.parse(overrides)).recipe
    datasets = build_datasets(recipe.data.source, may_download=False)
    info, run = datasets.train.info, RunDir(folder)
    run.create()
    run.recipe.write_text(to_yaml_text(recipe.to_dict()))
    run.write_json("plan.json", {})
    run.write_json("dataset.json", TrainedDataset.from_source(datasets.train).to_dict())
    torch.manual_seed(1)
    network = build_model(recipe.model, num_classes=info.num_classes, channels=info.channels)
    values = {"train": replace(TrainState(), best_step=-1).to_dict(), "dataset": digest_datasets(datasets)}
    CheckpointStorage(run.checkpoints, KeepPolicy(1)).save(
        1, -1, Snapshot({"model": model_tensors(network), "optimizer": {}}, values)
    )
    return folder


def run_evaluation(run: Path, *overrides: str, expected_note: bool | str = True) -> EvalReport:
    """Evaluate `run` with `overrides`, and check that a note is printed, or not, with `expected_note` in it."""
    said: list[str] = []
    own, recipe = load(str(run)).recipe, load(str(run), Patch.parse(overrides)).recipe
    checkpoint = next((run / "checkpoints").iterdir())
    report = evaluate(recipe, World.single(), checkpoint, run_recipe=own, print_line=said.append)
    assert len(said) == bool(expected_note)
    assert not isinstance(expected_note, str) or expected_note in said[0]
    return report


def grow(top: Path, tree: dict[str, int], first: int = 0) -> Path:
    """Make `{"train/cat": 3}` into three images of noise in a folder, and return the top."""
    for number, (folder, num_images) in enumerate(tree.items(), start=first):
        (top / folder).mkdir(parents=True)
        random = np.random.default_rng(number)
        for image in range(num_images):
            pixels = random.integers(256, size=(14, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(top / folder / f"{image}.png")
    return top


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return class folders with a validation split."""
    tree = {f"{split}/{name}": 4 for split in ("train", "val") for name in ("ant", "bee", "cat", "dog")}
    return grow(tmp_path_factory.mktemp("photos"), tree)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, photos: Path) -> Path:
    """Return a run of `photos`."""
    return made_run(tmp_path_factory.mktemp("runs") / "run", "folder", f"data.source.root={photos}", *FOLDER)


def counts(report: EvalReport) -> dict[str, tuple[int, int]]:
    return {each.name: (each.images, each.correct) for each in report.classes.classes}


def test_a_set_that_lacks_classes_counts_as_its_part_of_the_whole_set_does(run, photos, tmp_path) -> None:
    whole = counts(run_evaluation(run, expected_note=False))
    assert sum(correct for _, correct in whole.values()) > 0
    for name in ("bee", "dog"):
        (tmp_path / name).symlink_to(photos / "val" / name)
    part = counts(run_evaluation(run, f"data.source.root={tmp_path}"))
    assert part == {**dict.fromkeys(whole, (0, 0)), **{name: whole[name] for name in ("bee", "dog")}}


@pytest.mark.parametrize("split", ["", "test/", "val/"])
def test_all_images_of_another_folder_count_or_its_validation_split(run, photos, tmp_path, split) -> None:
    for name in ("ant", "bee"):
        (tmp_path / split).mkdir(exist_ok=True)
        (tmp_path / f"{split}{name}").symlink_to(photos / "val" / name)
    assert run_evaluation(run, f"data.source.root={tmp_path}").val.images == 8


def test_a_moved_dataset_is_evaluated_on_its_validation_split(tmp_path) -> None:
    first = grow(tmp_path / "first", {"ant": 8, "bee": 8})
    run = made_run(tmp_path / "run", "folder", f"data.source.root={first}", "data.source.val_fraction=0.25", *FOLDER)
    before = run_evaluation(run, expected_note=False)
    first.rename(tmp_path / "second")
    after = run_evaluation(run, f"data.source.root={tmp_path}/second", expected_note=False)
    assert after == before and after.val.images == 4


@pytest.mark.parametrize(
    "overrides",
    [
        ("data.source.val_fraction=0.5",),
        ("data.source.split_seed=1",),
        ("data.source.root={root}/../link", "data.source.val_fraction=0.5"),
        ("data.source.val_root={root}",),
    ],
)
def test_the_own_folder_with_another_split_is_refused(tmp_path, overrides) -> None:
    root = grow(tmp_path / "photos", {"ant": 8, "bee": 8})
    (tmp_path / "link").symlink_to(root)
    run = made_run(tmp_path / "run", "folder", f"data.source.root={root}", "data.source.val_fraction=0.25", *FOLDER)
    with pytest.raises(DataError, match=r"^data.source: is the folder that the run was trained on"):
        run_evaluation(run, *(word.format(root=root) for word in overrides))


def test_an_image_that_was_added_does_not_make_the_others_new(tmp_path) -> None:
    root = grow(tmp_path / "first", {"ant": 8, "bee": 8})
    run = made_run(tmp_path / "run", "folder", f"data.source.root={root}", "data.source.val_fraction=0.25", *FOLDER)
    root.rename(tmp_path / "second")
    Image.new("RGB", (14, 16)).save(tmp_path / "second/ant/new.png")
    said = "17 images from 2 of the run's 2 classes; it measures generalization if the run was trained on none of these"
    run_evaluation(run, f"data.source.root={tmp_path}/second", expected_note=said)


def test_training_images_are_noted(run, photos) -> None:
    run_evaluation(
        run,
        f"data.source.root={photos}/train",
        expected_note="the run was trained on these images",
    )


def test_the_validation_folder_is_evaluated_with_new_images(tmp_path) -> None:
    root = grow(tmp_path / "first", {"train/ant": 4, "train/bee": 4, "val/ant": 2, "val/bee": 2})
    run = made_run(tmp_path / "run", "folder", f"data.source.root={root}", *FOLDER)
    Image.new("RGB", (14, 16)).save(root / "val/ant/new.png")
    assert run_evaluation(run, "data.source.split_seed=1").val.images == 5


PARTS = """
from paceline.models.build import build_model
from paceline.recipe.schema.model import Model
from paceline.data.sources.builtin import load_digits
def net(num_classes, in_channels):
    return build_model(Model(name="resnet18_cifar", width=0.125), num_classes=num_classes, channels=in_channels)
def digits(split):
    return getattr(load_digits(), split)
"""


def evaluated(run: Path, *, trust_code: bool = False) -> int:
    return eval_verb(EvalOptions(run=run, ranks="1", trust_code=trust_code, as_json=True))


UNUSED = ("optim={name: 'nowhere:Optim', lr: 0.1}", "data.augment=[{name: 'nowhere:Augment'}]",
          "log.sinks=[{name: 'nowhere:Sink'}]")  # fmt: skip


@pytest.mark.parametrize(
    "part, path", [("model.name", "judged_parts:net"), ("data.source.name", "judged_parts:digits")]
)
def test_code_that_a_run_names_runs_only_where_that_is_said(tmp_path, monkeypatch, part, path) -> None:
    (tmp_path / "judged_parts.py").write_text(PARTS)
    monkeypatch.syspath_prepend(tmp_path)
    run = made_run(tmp_path / "run", "digits", *SMALL)
    before = run_evaluation(run, expected_note=False)
    monkeypatch.delitem(sys.modules, "judged_parts", raising=False)
    named = load(str(run), Patch.parse([f"{part}={path}", *UNUSED])).recipe
    (run / "recipe.yaml").write_text(to_yaml_text(named.to_dict()))
    with pytest.raises(
        RecipeError, match=rf"^{run}/recipe.yaml:\d+: {part}: {path} is custom code.*\(add --trust-code"
    ):
        evaluated(run)
    assert "judged_parts" not in sys.modules
    assert evaluated(run, trust_code=True) == 0 and "judged_parts" in sys.modules
    assert run_evaluation(run, expected_note=False) == before


def test_a_plugin_of_the_evaluation_needs_no_consent_of_the_run(tmp_path, monkeypatch) -> None:
    (tmp_path / "judged_parts.py").write_text(PARTS)
    monkeypatch.syspath_prepend(tmp_path)
    run = made_run(tmp_path / "run", "digits", *SMALL)
    assert run_evaluation(run, "data.source={name: 'judged_parts:digits'}", expected_note=False) == run_evaluation(
        run, expected_note=False
    )


def test_a_class_that_the_run_does_not_know_is_named(run, tmp_path) -> None:
    other = grow(tmp_path, {"ant": 1, "beee": 1})
    with pytest.raises(DataError) as caught:
        run_evaluation(run, f"data.source.root={other}")
    message = str(caught.value)
    assert "class 'beee' is not one of the 4 that the run was trained on (did you mean 'bee'?)" in message
    assert len(message.splitlines()) == 1


def test_classes_match_by_name_in_any_order_however_an_accent_is_written() -> None:
    assert match_classes(["dog", "caf\u0065\u0301"], ["ant", "caf\u00e9", "dog"]) == (2, 1)


def test_a_folder_of_another_kind_of_set_is_normalised_and_sized_as_the_run_was(tmp_path) -> None:
    run = made_run(tmp_path / "run", "digits", *SMALL)
    val = load_digits().val
    for label in (9, 3, 5):  # the files are stretched as pixels are, from 8 to 16, and not cropped
        (tmp_path / f"files/{label}").mkdir(parents=True)
        for index in np.flatnonzero(val.labels == label):
            Image.fromarray(val.images[index, ..., 0]).save(tmp_path / f"files/{label}/{index}.png")
    overrides = ("data.source.name=folder", f"data.source.root={tmp_path}/files")
    whole, part = (
        counts(run_evaluation(run, expected_note=False)),
        counts(run_evaluation(run, *overrides, "data.source.channels=1")),
    )
    for name in whole:
        assert part[name] == (whole[name] if name in "935" else (0, 0))
    with pytest.raises(DataError, match="3 channels, and the run's model expects 1"):
        run_evaluation(run, *overrides)


def test_pixels_stay_pixels(tmp_path, monkeypatch) -> None:
    run = made_run(tmp_path / "run", "digits", *SMALL)
    before = run_evaluation(run, expected_note=False)
    digits = load_digits()
    order = np.array([3, 1, 4, 0, 5, 9, 2, 6, 8, 7])
    names = tuple(str(number) for number in order)
    info = replace(digits.val.info, class_names=names)
    val = ArraySource(info, digits.val.images, np.argsort(order)[digits.val.labels])
    monkeypatch.setattr(
        "paceline.training.datasets.build_datasets", lambda section, **options: replace(digits, val=val)
    )
    monkeypatch.setattr("paceline.training.datasets.digest_datasets", lambda datasets: "another")
    overrides = ("data.source={name: synthetic}", "data.workers=auto")
    assert run_evaluation(run, *overrides) == before


def test_a_run_on_shards_is_evaluated_as_one_on_a_single_file(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("paceline.data.convert.pack_writer._MIN_SHARD_BYTES", 1)
    digits = load_digits()
    for index in range(40):
        path = tmp_path / f"files/{digits.val.labels[index]}/{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(digits.val.images[index, ..., 0]).save(path)
    files = ("data.source.name=folder", f"data.source.root={tmp_path}/files", "data.source.channels=1")
    reports = []
    for name, shard_bytes in (("one", None), ("shards", 16_000)):
        write_pack(digits, tmp_path / name, PackOptions(shard_bytes=shard_bytes), lambda done, total: None, 1)
        run = made_run(
            tmp_path / f"run-{name}", "digits", f"data.source={{name: pack, root: {tmp_path}/{name}}}", *SMALL
        )
        reports.append((run_evaluation(run, expected_note=False), run_evaluation(run, *files)))
    assert reports[0] == reports[1]


def test_eval_train_is_off_for_another_dataset(photos, tmp_path) -> None:
    overrides = (f"data.source.root={photos}", "train.eval_train=on", *FOLDER)
    run = made_run(tmp_path / "run", "folder", *overrides)
    assert run_evaluation(run, expected_note=False).train is not None
    assert run_evaluation(run, f"data.source.root={photos}/train").train is None
