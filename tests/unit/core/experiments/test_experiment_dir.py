"""`core.experiments.experiment_dir`: the same request resumes an unfinished experiment."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from paceline.core.errors import PacelineError, RecipeError
from paceline.core.experiments.experiment_dir import ExperimentDir, open_experiment
from paceline.core.experiments.results import Predicted, PredictionResult

NOW = datetime(2026, 11, 21, 10, 15, tzinfo=UTC)
REQUEST = {"ladder": "cpu", "steps": 40}


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
    """Return a function that opens an experiment in this folder, and a list of its notices."""
    monkeypatch.chdir(tmp_path)
    notices: list[str] = []

    def reopen(request: object = REQUEST, run_dir: Path | None = None) -> ExperimentDir:
        found = open_experiment("ladder-cpu", dict(request), run_dir, NOW, notices.append)
        if not found.recipe.exists():
            found.recipe.write_text("seed: 0\n", encoding="utf-8")
        return found

    return reopen, notices


def test_the_same_request_resumes_and_another_one_starts_a_new_folder(opened) -> None:
    reopen, notices = opened
    first = reopen()
    assert reopen().path == first.path and notices == [f"resuming {first.path}"]
    assert reopen({**REQUEST, "steps": 50}).path != first.path
    first.write(prediction())
    assert reopen().path != first.path, "a finished one is not resumed"


def test_a_named_folder_is_resumed_only_for_the_same_request(opened, tmp_path: Path) -> None:
    reopen, _ = opened
    assert reopen(run_dir=tmp_path / "mine").path == reopen(run_dir=tmp_path / "mine").path
    with pytest.raises(RecipeError, match=r"^--run-dir: .*mine holds something else \(name a new folder\)$"):
        reopen({**REQUEST, "steps": 50}, run_dir=tmp_path / "mine")


def test_an_unusable_folder_is_refused_in_one_line(opened, tmp_path: Path) -> None:
    reopen, _ = opened
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(RecipeError, match=r"^--run-dir: .*file cannot be used: File exists \(name another\)$"):
        reopen(run_dir=tmp_path / "file")
    (tmp_path / "locked").mkdir()
    (tmp_path / "locked" / ".lock").write_text("", encoding="utf-8")
    assert reopen(run_dir=tmp_path / "locked").path.name == "locked", "a folder that a killed process left is new"


def test_a_result_of_any_kind_reads_back(tmp_path: Path) -> None:
    folder = ExperimentDir(tmp_path)
    with pytest.raises(PacelineError, match=r"has no experiment\.json \(the experiment has not ended"):
        folder.read()
    folder.write(prediction())
    assert folder.read() == prediction()
    folder.result.write_text('{"kind": "ladder"}', encoding="utf-8")
    with pytest.raises(PacelineError, match=r"experiment\.json: cannot be read: "):
        folder.read()


def test_a_new_folder_may_hold_submitted_files_and_temporary_ones(opened, tmp_path: Path) -> None:
    reopen, notices = opened
    (tmp_path / "mine" / "job").mkdir(parents=True)
    (tmp_path / "mine" / ".asked.json.node-b.7").write_text("{", encoding="utf-8")
    assert reopen(run_dir=tmp_path / "mine").path == tmp_path / "mine" and notices == []
    reopen(run_dir=tmp_path / "mine")
    assert notices == [f"resuming {tmp_path / 'mine'}"]


def test_versions_in_an_old_request_are_not_compared(opened, tmp_path: Path) -> None:
    reopen, notices = opened
    first = reopen()
    (first.path / "asked.json").write_text(
        json.dumps({**REQUEST, "paceline": "0.0.9", "torch": "2.1"}), encoding="utf-8"
    )
    assert reopen().path == reopen(run_dir=first.path).path == first.path
    assert notices == [f"resuming {path}" for path in (first.path, first.path)]
    with pytest.raises(RecipeError, match="holds something else"):
        reopen({**REQUEST, "steps": 50}, run_dir=first.path)


def test_an_invalid_request_file_is_refused(opened, tmp_path: Path) -> None:
    reopen, _ = opened
    folder = reopen().path
    (folder / "asked.json").write_text("[1]", encoding="utf-8")
    with pytest.raises(RecipeError, match="holds something else"):
        reopen(run_dir=folder)
