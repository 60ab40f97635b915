"""Ranks that a script or a notebook starts: what they could not import, their errors, and what a notebook shows."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

import paceline
from paceline.cli.notebook import NotebookView
from paceline.cli.python_ranks import _Outputs, _require_importable, _write_recipe
from paceline.core.errors import RecipeError
from paceline.core.results import RunResult
from paceline.core.world import World
from paceline.recipe.load import load, load_values
from paceline.training.logging.base import StepRecord


@pytest.mark.parametrize("name", ["__main__:Net", "no_such_module:Net", "no.such.module:Net"])
def test_a_model_that_other_processes_cannot_import_is_refused(name: str) -> None:
    recipe = load_values({"extends": "digits", "model": {"name": name}}).recipe
    with pytest.raises(RecipeError, match=rf"^model.name: {name} .*\(move it to a module, .* or leave ranks out\)$"):
        _require_importable(recipe)


def test_a_recipe_of_values_is_written_as_it_is_loaded_here(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.yaml").write_text("extends: digits\nseed: 4\n")
    (tmp_path / "out").mkdir()
    file = _write_recipe({"extends": "base.yaml", "optim": {"lr": 0.3}}, tmp_path / "out")
    loaded = load(file)
    assert (loaded.recipe.seed, loaded.recipe.optim.lr, loaded.name) == (4, 0.3, "script")
    (tmp_path / "again").mkdir()
    again = load(_write_recipe(loaded.recipe, tmp_path / "again")).recipe
    assert again == loaded.recipe and yaml.safe_load(Path(file).read_text())
    assert _write_recipe("digits", tmp_path / "out") == "digits"


def read_error(rank: int, *lines: str, code: int = 1) -> str:
    outputs = _Outputs(2, None)
    for line in lines:
        outputs._read_stderr(rank, line)
    outputs.close()
    return outputs.describe_error(code)


def test_errors_name_their_rank_unless_they_are_of_all(capsys) -> None:
    assert read_error(1, "Traceback", "error: ValueError: no") == "rank 1 of 2: ValueError: no"
    assert capsys.readouterr().err == "Traceback\n"
    assert read_error(1, "error: rank 1 of 2: KeyError: 'a'") == "rank 1 of 2: KeyError: 'a'"
    assert read_error(0, "error: data.source.root: x is no folder", code=2) == "data.source.root: x is no folder"
    outputs = _Outputs(2, None)
    for rank in (1, 0):  # whichever comes first
        outputs._read_stderr(rank, "error: model.name: no")
    outputs.close()
    assert outputs.describe_error(2) == "model.name: no"
    assert read_error(0, code=9) == "rank 0 of 2: the ranks ended with exit code 9"


def test_a_rank_that_imports_a_script_which_trains_says_where_to_put_the_call(monkeypatch) -> None:
    monkeypatch.setattr("paceline.cli.python_api.enter_world", lambda: World(launcher="local"))
    with pytest.raises(RecipeError, match="if __name__ == '__main__'"):
        paceline.train("digits")


def step(number: int, loss: float = 1.0) -> StepRecord:
    return StepRecord(number, 0.1 * number, 10 * number, loss, 0.1, 123.4, 2.0 * number)


def test_a_notebook_output_is_redrawn_with_the_last_lines_the_pace_and_the_curve() -> None:
    drawn: list[str] = []
    time_s = [0.0]

    def show(html: str):
        drawn.append(html)
        return drawn.append

    view = NotebookView(show, lambda: time_s[0])
    view.add_line("<b>&")
    view.step(step(10, 2.0), 100)
    assert len(drawn) == 1  # within half a second
    time_s[0] = 0.6
    view.step(step(20, float("nan")), 100)
    view.step(step(30, 1.5), 100)
    view.close()
    assert len(drawn) == 3 and "&lt;b&gt;&amp;" in drawn[-1] and "<b>" not in drawn[-1]
    assert "step 30/100  loss 1.5000  123 images/s  2 min 20 s left" in drawn[-1]
    assert 'value="30" max="100"' in drawn[-1] and 'points="0.0,0.0 320.0,60.0"' in drawn[-1]
    for number in range(40, 12_000, 10):
        view.step(step(number), 12_000)
    assert view.render().count(",") < 900  # the curve stays small


def test_a_result_is_a_table_in_a_notebook_with_escaped_paths(tmp_path: Path) -> None:
    folder = tmp_path / "<script>"
    folder.mkdir()
    values = SimpleNamespace(n=1, images_per_s=123.4)
    result = RunResult.model_construct(
        status="completed", steps=3, eval=None, ema=None, throughput=values, time=SimpleNamespace(wall_s=1.5),
        provenance={}, run_dir=folder,
    )  # fmt: skip
    assert "<script>" not in result._repr_html_() and "report" not in result._repr_html_()
    (folder / "report.html").touch()
    assert 'href="file:///' in result._repr_html_() and "1.50 s" in result._repr_html_()
