"""`paceline predict-scaling --points FILE` prints a table, or JSON alone, and refuses what cannot be."""

import csv
import json
import re
from pathlib import Path

import pytest

from paceline.cli.options import PredictScalingOptions
from paceline.cli.scale_predict import predict_scaling
from paceline.core.errors import DataError, RecipeError
from paceline.core.experiments.experiment_dir import ExperimentDir
from paceline.report.write import build_experiment_page

TABLE = "ranks,nodes,rank_batch,images,time_s\n1,1,256,1000000,1600\n4,1,256,1000000,410\n8,2,128,1000000,230\n"


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "points.csv"
    path.write_text(TABLE)
    return path


def test_json_alone_comes_out(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        predict_scaling(PredictScalingOptions(points=table, at="16,32", ranks_per_node=4, rank_batch=64, as_json=True))
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert [each["ranks"] for each in found["predictions"]] == [16, 32]
    for each in found["predictions"]:
        assert each["low_s"] < each["time_s"] < each["high_s"]
        assert 0 < each["efficiency"] <= 1
        assert (each["nodes"], each["rank_batch"]) == (each["ranks"] // 4, 64)


def test_the_table_is_printed_with_its_basis(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert predict_scaling(PredictScalingOptions(points=table, at="16", ranks_per_node=4, price=2.0)) == 0
    out = capsys.readouterr().out
    assert "with 95 % confidence" in " ".join(out.replace("│", " ").split())
    assert "cost" in out
    assert "f_s: left out" in " ".join(out.split())


def test_measurements_come_before_predictions(table: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    """In the terminal, in CSV, in Markdown and in JSON."""
    monkeypatch.setenv("COLUMNS", "200")
    predict_scaling(PredictScalingOptions(points=table, at="16", ranks_per_node=4, run_dir=tmp_path / "foretold"))
    out = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "26 min 40 s (measured) 1.00x 100.0 %" in out and "3 min 50 s (measured) 6.96x 87.0 %" in out
    assert re.search(r"3 min 50 s \(measured\) .* 16 \d+ [\d,]+ \d min \d\d s", out)
    folder = ExperimentDir(tmp_path / "foretold")
    assert "| 4 | 1 | 256 | 6 min 50 s (measured) | 3.90x | 97.6 % |" in folder.markdown.read_text()
    rows = list(csv.DictReader(folder.table.read_text().splitlines()))
    assert [float(row["efficiency"]) for row in rows[:3]] == pytest.approx([1.0, 1600 / 410 / 4, 1600 / 230 / 8])
    assert [point.efficiency for point in folder.read().points] == [float(row["efficiency"]) for row in rows[:3]]


def test_speeds_are_shown_as_the_time_that_the_images_take(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    path = tmp_path / "points.csv"
    path.write_text("ranks,nodes,rank_batch,images,time_s\n1,1,128,2625,1\n4,1,128,8295,1\n16,2,128,34205,1\n")
    predict_scaling(
        PredictScalingOptions(points=path, at="32", ranks_per_node=8, images=5e6, run_dir=tmp_path / "foretold")
    )
    folder = ExperimentDir(tmp_path / "foretold")
    (time,) = [section for section in build_experiment_page(folder, folder.read()).sections if section.key == "time"]
    throughput = {line.name: dict(line.points) for line in time.blocks[0].charts[0].lines}
    assert throughput["measured"] == {1: 2625, 4: 8295, 16: 34205}
    assert throughput["ideal"] == {1: 2625, 4: 10500, 16: 42000, 32: 84000}
    out = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "16 2 128 2 min 26 s (measured) 13.03x 81.4 % 59.9 ms 34,205 0.650" in out


def test_the_fitted_start_up_is_printed(table: Path, tmp_path: Path, capsys) -> None:
    """So a page shows what its command prints."""
    path = tmp_path / "jsc.csv"
    path.write_text(table.read_text() + "16,4,128,1000000,125\n32,8,128,1000000,80\n")
    predict_scaling(PredictScalingOptions(points=path, at="64", as_json=True))
    f_s = json.loads(capsys.readouterr().out)["terms"]["f_s"]
    assert f_s > 1
    predict_scaling(PredictScalingOptions(points=path, at="64"))
    out = " ".join(capsys.readouterr().out.split())
    assert f"start-up, f_s of the fit, is {100 * f_s / 80:.1f} % of the run on 32 ranks" in out


def test_ranks_per_node_default_to_the_largest_of_the_table_with_a_note(table: Path, capsys) -> None:
    predict_scaling(PredictScalingOptions(points=table, at="16", as_json=True))
    found = json.loads(capsys.readouterr().out)
    assert found["predictions"][0]["nodes"] == 4
    assert any(note.startswith("nodes: 4 ranks on each") for note in found["notes"])
    predict_scaling(PredictScalingOptions(points=table, at="16", ranks_per_node=8, as_json=True))
    found = json.loads(capsys.readouterr().out)
    assert found["predictions"][0]["nodes"] == 2
    assert not any(note.startswith("nodes:") for note in found["notes"])


def test_the_measured_coverage_of_intervals_is_printed(table: Path, capsys) -> None:
    record = Path(__file__).parents[3] / "benchmarks" / "results" / "prediction.json"
    known = json.loads(record.read_text()).values()
    held = sum(each["low"] <= 0 <= each["high"] for each in known) / len(known)
    predict_scaling(PredictScalingOptions(points=table, at="16", ranks_per_node=4))
    assert f"nominally 95 %; on published tables, {100 * held:.0f} % of" in " ".join(capsys.readouterr().out.split())


def test_a_prediction_is_written_to_run_dir(table: Path, tmp_path: Path) -> None:
    predict_scaling(PredictScalingOptions(points=table, at="16", run_dir=tmp_path / "foretold"))
    assert (tmp_path / "foretold" / "report.html").is_file()
    found = ExperimentDir(tmp_path / "foretold").read()
    assert found.kind == "prediction" and [each.ranks for each in found.predictions] == [16]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"at": "16,x"}, "--at: 'x' is not a number of ranks"),
        ({"at": ""}, "--at: '' is not a number of ranks"),
        ({"images": float("nan")}, "--images: nan is out of range (write a number above 0)"),
        ({"price": float("inf")}, "--price: inf is out of range (write a number above 0)"),
    ],
)
def test_options_that_cannot_be_are_refused(table: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(RecipeError) as expected:
        predict_scaling(PredictScalingOptions(points=table, **{"at": "16", "ranks_per_node": 4, **options}))
    assert str(expected.value).startswith(message)


def test_an_invalid_table_is_an_error_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "points.csv"
    path.write_text(TABLE + "x,1,1,1,1\n")
    with pytest.raises(DataError, match=r"points\.csv:5: ranks: 'x' is not a number"):
        predict_scaling(PredictScalingOptions(points=path, at="16", ranks_per_node=4))
