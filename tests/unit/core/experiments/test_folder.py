"""The folder of an experiment is gone on with by asking for the same again."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from paceline.core.errors import PacelineError, RecipeError
from paceline.core.experiments.experiment_dir import ExperimentDir, open_experiment
from paceline.core.experiments.results import Predicted, PredictionResult

NOW = datetime(2026, 11, 21, 10, 15, tzinfo=UTC)
ASKED = {"ladder": "cpu", "steps": 40}


def prediction() -> PredictionResult:
    point = Predicted(
        ranks=8,
        nodes=1,
        rank_batch=32,
        images=1e6,
        time_s=10.0,
        low_s=9.0,
        high_s=float("inf"),
        step_s=0.1,
        images_per_s=1e5,
        efficiency=0.9,
        gpu_hours=0.02,
    )
    return PredictionResult(basis="points", source="a.csv", form="T = t", terms={"t": 1.0}, predictions=(point,))


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that opens an experiment in this folder, and a list of what it says."""
    monkeypatch.chdir(tmp_path)
    said: list[str] = []

    def again(asked: object = ASKED, run_dir: Path | None = None) -> ExperimentDir:
        found = open_experiment("ladder-cpu", dict(asked), run_dir, NOW, said.append)
        if not found.recipe.exists():
            found.recipe.write_text("seed: 0\n", encoding="utf-8")
        return found

    return again, said


def test_the_same_again_goes_on_and_another_starts_anew(opened) -> None:
    again, said = opened
    first = again()
    assert again().path == first.path and said == [f"resuming {first.path}"]
    assert again({**ASKED, "steps": 50}).path != first.path
    first.write(prediction())
    assert again().path != first.path, "one that has ended is not gone on with"


def test_a_folder_that_is_named_is_gone_on_with_only_where_it_is_the_same(opened, tmp_path: Path) -> None:
    again, _ = opened
    assert again(run_dir=tmp_path / "mine").path == again(run_dir=tmp_path / "mine").path
    with pytest.raises(RecipeError, match=r"^--run-dir: .*mine holds something else \(name a new folder\)$"):
        again({**ASKED, "steps": 50}, run_dir=tmp_path / "mine")


def test_a_folder_that_cannot_be_one_is_refused_in_a_line(opened, tmp_path: Path) -> None:
    again, _ = opened
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(RecipeError, match=r"^--run-dir: .*file cannot be used: File exists \(name another\)$"):
        again(run_dir=tmp_path / "file")
    (tmp_path / "locked").mkdir()
    (tmp_path / "locked" / ".lock").write_text("", encoding="utf-8")
    assert again(run_dir=tmp_path / "locked").path.name == "locked", "what a kill has left in time is a new folder"


def test_what_it_came_to_reads_back_whatever_it_is(tmp_path: Path) -> None:
    folder = ExperimentDir(tmp_path)
    with pytest.raises(PacelineError, match=r"has no experiment\.json \(the experiment has not ended"):
        folder.read()
    folder.write(prediction())
    assert folder.read() == prediction()
    folder.result.write_text('{"kind": "ladder"}', encoding="utf-8")
    with pytest.raises(PacelineError, match=r"experiment\.json: cannot be read: "):
        folder.read()


def test_what_was_submitted_may_lie_in_a_new_folder_and_what_others_begin_to_write_too(opened, tmp_path: Path) -> None:
    again, said = opened
    (tmp_path / "mine" / "job").mkdir(parents=True)
    (tmp_path / "mine" / ".asked.json.node-b.7").write_text("{", encoding="utf-8")
    assert again(run_dir=tmp_path / "mine").path == tmp_path / "mine" and said == []
    again(run_dir=tmp_path / "mine")
    assert said == [f"resuming {tmp_path / 'mine'}"]


def test_versions_that_an_older_paceline_wrote_down_are_not_compared(opened, tmp_path: Path) -> None:
    again, said = opened
    first = again()
    (first.path / "asked.json").write_text(json.dumps({**ASKED, "paceline": "0.0.9", "torch": "2.1"}), encoding="utf-8")
    assert again().path == again(run_dir=first.path).path == first.path
    assert said == [f"resuming {path}" for path in (first.path, first.path)]
    with pytest.raises(RecipeError, match="holds something else"):
        again({**ASKED, "steps": 50}, run_dir=first.path)


def test_what_is_no_list_of_what_was_asked_is_something_else(opened, tmp_path: Path) -> None:
    again, _ = opened
    folder = again().path
    (folder / "asked.json").write_text("[1]", encoding="utf-8")
    with pytest.raises(RecipeError, match="holds something else"):
        again(run_dir=folder)
