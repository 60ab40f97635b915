"""Ladder files of training scripts: errors name the file, the line, the field and the fix."""

import pytest

from paceline.core.errors import RecipeError
from paceline.lab.script_ladder_file import SCRIPT_LADDERS, load_script_ladder


@pytest.fixture
def written(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "own.yaml"
        path.write_text(text)
        return str(path)

    return write


def test_a_file_gives_its_rungs(written):
    text = """# Two changes
steps: 5
rungs:
  - {name: workers, patch: {workers: auto}, parity: free}
  - {name: faster, args: {--lr: 0.5, --amp: true}, env: {OMP_NUM_THREADS: 2}}
"""
    ladder, summary = load_script_ladder(written(text))
    assert (summary, ladder.steps, ladder.warmup_steps, ladder.repeats) == ("Two changes", 5, 10, 3)
    workers, faster = ladder.rungs
    assert (workers.patch.values, workers.parity) == ({"workers": "auto"}, "free")
    assert (faster.args, faster.env) == ({"--lr": 0.5, "--amp": True}, {"OMP_NUM_THREADS": 2})


def test_the_shipped_ladders_can_be_read():
    names = [path.stem for path in SCRIPT_LADDERS.glob("*.yaml")]
    assert names == ["auto"]
    assert load_script_ladder("auto")[1]


@pytest.mark.parametrize(
    ("rung", "place", "message"),
    [
        ("{name: a, patch: {worker: 4}}", "rungs[0].patch.worker", "workers"),
        ("{name: a, patch: {autocast: half}}", "rungs[0].patch.autocast", "bfloat16"),
        ("{name: a, patch: {workers: -1}}", "rungs[0].patch.workers", "0"),
        ("{name: a, args: {--lr=1: 2}}", "rungs[0].args", "--NAME"),
        ("{name: a, args: {--lr: [1, 2]}}", "rungs[0].args", ""),
        ("{name: a}", "rungs[0]", "set args, env or patch"),
        ("{name: a, set: {train.precision: bf16}}", "rungs[0].set", ""),
    ],
)
def test_errors_name_the_place_and_the_fix(written, rung, place, message):
    file = written(f"steps: 5\nrungs:\n  - {rung}\n")
    with pytest.raises(RecipeError) as caught:
        load_script_ladder(file)
    assert str(caught.value).startswith(f"{file}:3: {place}")
    assert message in str(caught.value)


def test_an_unknown_ladder_is_refused(tmp_path):
    with pytest.raises(RecipeError, match="--script: atuo is not a ladder"):
        load_script_ladder("atuo")
    with pytest.raises(RecipeError, match="does not exist"):
        load_script_ladder(str(tmp_path / "none.yaml"))
