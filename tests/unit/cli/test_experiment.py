"""An experiment's folder is opened, gone on with and left in one way, whatever the verb."""

import json
from pathlib import Path

import pytest

from paceline.cli.experiment import Session, finish_experiment, locked_experiment, run_experiment
from paceline.cli.options import ScaleOptions
from paceline.core.experiments.experiment_dir import ExperimentDir
from paceline.core.experiments.results import Predicted, PredictionResult

POINT = Predicted(
    ranks=8,
    nodes=1,
    rank_batch=32,
    images=1e6,
    time_s=10.0,
    low_s=9.0,
    high_s=11.0,
    step_s=0.1,
    images_per_s=1e5,
    efficiency=0.9,
    gpu_hours=0.02,
)
RESULT = PredictionResult(basis="points", source="a.csv", form="T = t", terms={"t": 1.0}, predictions=(POINT,))


def test_a_finished_experiment_is_not_run_again(tmp_path: Path) -> None:
    started: list[ExperimentDir] = []

    def run(session: Session) -> PredictionResult:
        started.append(session.folder)
        return RESULT

    for _ in range(2):
        options = ScaleOptions(run_dir=tmp_path / "e")
        assert run_experiment("x", {}, options, run) == 0
    assert len(started) == 1


def test_the_result_is_written_after_the_tables_and_the_removal_of_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An experiment that is killed while it writes tables is unfinished."""
    folder = ExperimentDir(tmp_path)
    folder.data.mkdir()

    def killed(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("paceline.report.experiment_tables.write_tables", killed)
        finish_experiment(folder, RESULT)
    assert not folder.result.exists() and not folder.data.exists()
    finish_experiment(folder, RESULT)
    assert folder.read() == RESULT and folder.table.exists() and folder.markdown.exists() and folder.report.exists()


def test_an_interrupt_prints_how_to_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt), locked_experiment("x", {}, tmp_path / "e", as_json=True):
        raise KeyboardInterrupt
    assert capsys.readouterr() == ("", f"stopped: run the same command to resume {tmp_path / 'e'}\n")


def test_an_experiment_is_gone_on_with_whatever_versions_it_was_begun_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Versions are no part of a request: each commit of a checkout has its own, and tasks may wait in a queue."""
    monkeypatch.chdir(tmp_path)
    folders = []
    for _ in range(2):
        with locked_experiment("x", {"steps": 1}, None, as_json=True) as folder:
            request = folder.path / "asked.json"
            assert folders or json.loads(request.read_text(encoding="utf-8")) == {"steps": 1}
            request.write_text(json.dumps({"steps": 1, "paceline": "0.0.1", "torch": "1.0"}), encoding="utf-8")
            folder.recipe.write_text("seed: 0\n", encoding="utf-8")
            folders.append(folder.path)
    assert folders[0] == folders[1]
