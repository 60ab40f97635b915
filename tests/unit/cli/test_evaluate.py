"""`paceline eval`: which weights it takes, and that it shows what came out."""

import hashlib
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.cli.evaluate import evaluate
from paceline.cli.options import EvalOptions
from paceline.core.errors import CheckpointError, PacelineError, RecipeError
from paceline.core.results import ClassCount, ClassTable, EvalReport, EvalResult
from paceline.core.run_dir import RunDir
from paceline.core.world import World
from paceline.recipe.load import Patch, load
from paceline.recipe.schema import Recipe
from paceline.recipe.yaml import to_yaml_text
from paceline.training.checkpoint import CheckpointStorage, KeepPolicy, Snapshot
from paceline.training.process import Invocation

RAW = EvalResult(images=8, top1=0.5, top5=1.0, loss=1.0)
REPORT = EvalReport(val=RAW, ema=RAW, classes=ClassTable((ClassCount("a", 8, 4),)))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a run with checkpoints of steps 4 and 8, the best of which was the first."""
    text = to_yaml_text(load("digits", Patch.parse(["parallel.device=cpu"])).recipe.to_dict())
    (tmp_path / "plan.json").touch()
    (tmp_path / "recipe.yaml").write_text(text)
    for step in (4, 8):
        snapshot = Snapshot({"model": {}, "optimizer": {}}, {"train": {"best_step": 4}})
        CheckpointStorage(tmp_path / "checkpoints", KeepPolicy(9)).save(step, 4, snapshot)
    return tmp_path


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Put a stand-in for the trainer in place, and return the checkpoints it is given."""
    checkpoints: list[Path] = []

    def work(recipe: object, world: object, checkpoint: Path, **options: object) -> EvalReport:
        checkpoints.append(checkpoint)
        return REPORT

    monkeypatch.setitem(sys.modules, "paceline.training.eval_run", SimpleNamespace(evaluate=work))
    return checkpoints


@pytest.mark.parametrize(("name", "step"), [("last", 8), ("best", 4), ("4", 4), ("8", 8)])
def test_a_checkpoint_is_chosen_by_its_name(run: Path, taken: list[Path], name: str, step: int) -> None:
    assert evaluate(EvalOptions(run=run, ranks="1", checkpoint=name, as_json=True)) == 0
    assert [path.name for path in taken] == [f"step-{step:08d}"]


def test_json_has_raw_and_averaged_weights_and_requested_classes(
    run: Path, taken: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    evaluate(EvalOptions(run=run, ranks="1", as_json=True, classes=True))
    flat = {"images": 8, "top1": 0.5, "top5": 1.0, "loss": 1.0}
    classes = [{"class": "a", "images": 8, "correct": 4}]
    assert json.loads(capsys.readouterr().out) == {**flat, "ema": flat, "classes": classes}
    assert len(taken) == 1


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("7", CheckpointError, "no such checkpoint"),
        ("newest", RecipeError, "'newest' is not a checkpoint (write last, best or a step's number)"),
    ],
)
def test_a_missing_checkpoint_is_refused_in_one_line(
    run: Path, taken: list[Path], name: str, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind) as caught:
        evaluate(EvalOptions(run=run, ranks="1", checkpoint=name, as_json=True))
    assert message in str(caught.value) and len(str(caught.value).splitlines()) == 1
    assert taken == []


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="is not a run directory"):
        evaluate(EvalOptions(run=tmp_path, ranks="1", as_json=True))


SMALL = (
    *("data.source.num_images=16", "data.source.num_val_images=8", "data.source.image_size=8", "data.batch_size=8"),
    *("model.width=0.1", "train.steps=1", "parallel.device=cpu", "parallel.threads=1", "log.tensorboard=off"),
    *("data.workers=0", "measure.telemetry=off", "log.report=off"),
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run that has ended, with what its training left of the last evaluation."""
    from paceline.training.run import run

    folder = tmp_path_factory.mktemp("runs") / "trained"
    # How many maps a run of a second draws depends on the machine.
    recipe = load("synthetic", Patch.parse([*SMALL, "log.explain=off"])).recipe
    run(recipe, World.single(), RunDir(folder), invocation=Invocation())
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(each.relative_to(folder)): each.read_bytes() for each in folder.rglob("*") if each.is_file()}


def test_out_gets_the_same_files_as_training_wrote(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "judged"
    assert evaluate(EvalOptions(run=trained, ranks="1", out=out, as_json=True)) == 0
    printed = json.loads(capsys.readouterr().out)
    left = contents(out)
    expected = json.loads(left.pop("eval.json"))
    assert expected == {"run": str(trained), "checkpoint": "step-00000001", "overrides": [], **printed}
    before = contents(trained)
    assert {"classes.csv", "confusion.csv", "worst/worst.json"} <= left.keys()
    assert left == {name: before[name] for name in left}
    assert {name for name in before if name.startswith("worst/")} <= left.keys()


def test_out_has_maps_of_the_worst_images(trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "maps"
    assert evaluate(EvalOptions(run=trained, overrides=["log.explain=on"], ranks="1", out=out, as_json=True)) == 0
    rows = json.loads((out / "worst" / "worst.json").read_text())
    assert rows
    for row in rows:
        assert all((out / "worst" / row["maps"][what]).is_file() for what in ("predicted", "true"))


def test_the_outputs_are_of_the_overridden_data_set(trained: Path, tmp_path: Path) -> None:
    words = ["data.source.num_val_images=5", "log.worst=0"]
    out = tmp_path / "other"
    assert evaluate(EvalOptions(run=trained, overrides=words, ranks="1", out=out, as_json=True)) == 0
    assert sorted(contents(out)) == ["calibration.csv", "classes.csv", "confusion.csv", "eval.json"]
    expected = json.loads((out / "eval.json").read_text())
    assert (expected["images"], expected["overrides"]) == (5, words)


def test_weights_are_evaluated_despite_damaged_progress(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another version of paceline may have written it."""
    run = Path(shutil.copytree(trained, tmp_path / "copy"))
    state = run / "checkpoints" / "step-00000001" / "state.json"
    values = json.loads(state.read_text())
    for progress in ({**values["train"], "of_another_version": 1}, {"best": {"top1": 5}, "best_step": []}):
        text = json.dumps({**values, "train": progress})
        state.write_text(text)
        manifest = json.loads(state.with_name("manifest.json").read_text())
        manifest["state.json"] = hashlib.sha256(text.encode()).hexdigest()
        state.with_name("manifest.json").write_text(json.dumps(manifest))
        assert evaluate(EvalOptions(run=run, ranks="1", as_json=True)) == 0
        assert json.loads(capsys.readouterr().out)["images"] == 8


def test_the_last_checkpoint_is_not_read_twice(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read: list[Path] = []
    monkeypatch.setattr("paceline.training.resume.find_damage", read.append)
    assert evaluate(EvalOptions(run=trained, ranks="1", as_json=True)) == 0
    assert read == []


def test_an_existing_folder_is_refused_before_evaluation(run: Path, taken: list[Path], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for place, output in (
        (tmp_path / "file", "exists already"),
        (tmp_path / "file" / "a", "cannot be created: Not a dir"),
    ):
        with pytest.raises(RecipeError, match=rf"^--out: {place} {output}.* \(name another.*\)$"):
            evaluate(EvalOptions(run=run, ranks="1", out=place, as_json=True))
    assert taken == [] and (tmp_path / "file").read_text() == "mine"


def test_a_failed_evaluation_creates_no_folder(run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def work(*parts: object, **options: object) -> EvalReport:
        assert (tmp_path / "judged").is_dir()
        raise PacelineError("nothing can be read")

    monkeypatch.setitem(sys.modules, "paceline.training.eval_run", SimpleNamespace(evaluate=work))
    with pytest.raises(PacelineError, match="nothing can be read"):
        evaluate(EvalOptions(run=run, ranks="1", out=tmp_path / "judged", as_json=True))
    assert not (tmp_path / "judged").exists()


def test_named_metrics_are_added_to_those_of_the_recipe(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also of a run that was trained without evaluations, whose recipe may not name any."""
    found: list[tuple[str, ...]] = []

    def work(recipe: Recipe, *args: object, **options: object) -> EvalReport:
        found.append(recipe.train.metrics)
        return REPORT

    monkeypatch.setitem(sys.modules, "paceline.training.eval_run", SimpleNamespace(evaluate=work))
    for setting in ("train.metrics=[top3,f1]", "train.eval_every=off"):
        recipe = load("digits", Patch.parse(["parallel.device=cpu", setting])).recipe
        (run / "recipe.yaml").write_text(to_yaml_text(recipe.to_dict()))
        evaluate(EvalOptions(run=run, ranks="1", as_json=True, metrics="f1, auroc"))
    assert found == [("top3", "f1", "auroc"), ("f1", "auroc")]
    with pytest.raises(RecipeError, match=r"^--metrics: 'auruc' is not a metric .*auroc"):
        evaluate(EvalOptions(run=run, ranks="1", as_json=True, metrics="f1,auruc"))
