"""`paceline scale --predict --points FILE` prints a table, or JSON alone, and refuses what cannot be."""

import json
from pathlib import Path

import pytest

from paceline.cli.predict_scale import predict_points
from paceline.core.errors import DataError, RecipeError
from paceline.core.experiments.folder import ExperimentDir

TABLE = "ranks,nodes,rank_batch,images,time_s\n1,1,256,1000000,1600\n4,1,256,1000000,410\n8,2,128,1000000,230\n"


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "points.csv"
    path.write_text(TABLE)
    return path


def test_json_alone_comes_out(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert predict_points(table, at="16,32", ranks_per_node=4, rank_batch=64, as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["ranks"] for each in found["predictions"]] == [16, 32]
    for each in found["predictions"]:
        assert each["low_s"] < each["time_s"] < each["high_s"]
        assert 0 < each["efficiency"] <= 1
        assert (each["nodes"], each["rank_batch"]) == (each["ranks"] // 4, 64)


def test_a_person_gets_a_table_and_what_it_rests_on(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert predict_points(table, at="16", ranks_per_node=4, price=2.0) == 0
    out = capsys.readouterr().out
    assert "95 % interval" in out
    assert "cost" in out
    assert "f_s: left out" in " ".join(out.split())


def test_nodes_are_as_full_as_the_fullest_of_the_table_and_it_is_said(table: Path, capsys) -> None:
    predict_points(table, at="16", as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["predictions"][0]["nodes"] == 4
    assert any(note.startswith("nodes: 4 ranks on each") for note in found["notes"])
    predict_points(table, at="16", ranks_per_node=8, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["predictions"][0]["nodes"] == 2
    assert not any(note.startswith("nodes:") for note in found["notes"])


def test_it_is_said_how_many_of_such_intervals_held(table: Path, capsys) -> None:
    record = Path(__file__).parents[3] / "benchmarks" / "results" / "prediction.json"
    known = json.loads(record.read_text()).values()
    held = sum(each["low"] <= 0 <= each["high"] for each in known) / len(known)
    predict_points(table, at="16", ranks_per_node=4)
    assert f"meant for 95 %; {100 * held:.0f} % of" in " ".join(capsys.readouterr().out.split())


def test_a_prediction_is_left_where_it_is_asked_for(table: Path, tmp_path: Path) -> None:
    predict_points(table, at="16", run_dir=tmp_path / "foretold")
    assert (tmp_path / "foretold" / "report.html").is_file()
    found = ExperimentDir(tmp_path / "foretold").read()
    assert found.kind == "prediction" and [each.ranks for each in found.predictions] == [16]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"at": "16,x"}, "--at: 'x' is no number of ranks"),
        ({"at": ""}, "--at: '' is no number of ranks"),
        ({"ranks_per_node": 0}, "--ranks-per-node: 0 makes no sense (write a number above 0)"),
        ({"rank_batch": -1}, "--rank-batch: -1 makes no sense (write a number above 0)"),
        ({"images": float("nan")}, "--images: nan makes no sense (write a number above 0)"),
        ({"price": float("inf")}, "--price: inf makes no sense (write a number above 0)"),
    ],
)
def test_options_that_cannot_be_are_refused(table: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(RecipeError) as told:
        predict_points(table, **{"at": "16", "ranks_per_node": 4, **options})  # type: ignore[arg-type]
    assert str(told.value).startswith(message)


def test_a_table_that_cannot_be_read_is_told_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "points.csv"
    path.write_text(TABLE + "x,1,1,1,1\n")
    with pytest.raises(DataError, match=r"points\.csv:5: ranks: 'x' is not a number"):
        predict_points(path, at="16", ranks_per_node=4)
