"""`paceline eval`: which weights it takes, and that it shows what came out."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.cli.evaluate import evaluate
from paceline.core.class_table import ClassCount, ClassTable
from paceline.core.errors import CheckpointError, RecipeError
from paceline.core.results import EvalReport, EvalResult
from paceline.recipe.load import load
from paceline.recipe.patch import Patch
from paceline.recipe.yamlfile import write_text
from paceline.train.checkpoint import Checkpoints, Keep, Snapshot

RAW = EvalResult(images=8, top1=0.5, top5=1.0, loss=1.0)
REPORT = EvalReport(val=RAW, ema=RAW, classes=ClassTable((ClassCount("a", 8, 4),)))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a run with checkpoints of steps 4 and 8, the best of which was the first."""
    text = write_text(load("digits", Patch.parse(["parallel.device=cpu"])).recipe.to_dict())
    (tmp_path / "recipe.yaml").write_text(text)
    for step in (4, 8):
        snapshot = Snapshot({"model": {}, "optimizer": {}}, {"train": {"best_step": 4}})
        Checkpoints(tmp_path / "checkpoints", Keep(9)).save(step, 4, snapshot)
    return tmp_path


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Put a stand-in for the trainer in place, and return the checkpoints it is given."""
    checkpoints: list[Path] = []

    def work(recipe: object, world: object, checkpoint: Path, **options: object) -> EvalReport:
        checkpoints.append(checkpoint)
        return REPORT

    monkeypatch.setitem(sys.modules, "paceline.train.run", SimpleNamespace(evaluate=work))
    return checkpoints


@pytest.mark.parametrize(("name", "step"), [("last", 8), ("best", 4), ("4", 4), ("8", 8)])
def test_a_checkpoint_is_chosen_by_its_name(run: Path, taken: list[Path], name: str, step: int) -> None:
    assert evaluate(run, [], "1", name, port=0, as_json=True, per_class=False) == 0
    assert [path.name for path in taken] == [f"step-{step:08d}"]


def test_json_has_raw_and_averaged_weights_and_classes_when_asked(
    run: Path, taken: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    evaluate(run, [], "1", "last", port=0, as_json=True, per_class=True)
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
def test_a_checkpoint_that_is_not_there_is_refused_in_one_line(
    run: Path, taken: list[Path], name: str, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind) as caught:
        evaluate(run, [], "1", name, port=0, as_json=True, per_class=False)
    assert message in str(caught.value) and len(str(caught.value).splitlines()) == 1
    assert taken == []


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="is not a run directory"):
        evaluate(tmp_path, [], "1", "last", port=0, as_json=True, per_class=False)
