"""`paceline ladder`: errors in one line, its lists, and the printed result."""

import json
import re

import pytest

from paceline.cli.experiment import show_experiment, with_steps_time
from paceline.cli.ladder import ladder
from paceline.cli.options import LadderOptions
from paceline.core.errors import RecipeError
from paceline.core.experiments.experiment_dir import ExperimentDir
from paceline.core.experiments.results import LadderResult, ParityResult, RungResult
from paceline.core.statistics import Interval

BASE = RungResult(
    name="base",
    explains="as it is",
    patch=(),
    status="kept",
    why="the first, the baseline of all others",
    images_per_s=Interval(value=100.0, low=99.0, high=101.0, n=3),
    stages={"forward": 0.06, "backward": 0.03, "loss": 1e-5},
    step_s=0.1,
    startup_s=2.5,
    host_bytes=10**9,
    verdict={"bottleneck": "compute-bound", "evidence": "It is.", "ceiling": "", "try": ""},
)
FAST = RungResult(
    name="bf16",
    explains="half the bits",
    patch=("train.precision=bf16",),
    status="kept",
    why="faster: 2.00x (1.90 to 2.10) in 3 pairs",
    below="base",
    expects=("forward", "backward"),
    shrank={"forward": (0.06, 0.02), "backward": (0.03, 0.03)},
    images_per_s=Interval(value=200.0, low=190.0, high=210.0, n=3),
    over_below=Interval(value=2.0, low=1.9, high=2.1, n=3),
    over_first=Interval(value=2.0, low=1.9, high=2.1, n=3),
    stages={"forward": 0.02, "backward": 0.03},
    step_s=0.05,
    startup_s=2.5,
    compile_s=61.0,
    prepare_s=12.0,
    parity=ParityResult(
        loss=2.0, loss_below=2.0, gap=Interval(value=0, low=0, high=0, n=3), tolerance=0.02, verdict="same", why="alike"
    ),
)
SLOW = FAST.model_copy(update={"name": "plain", "status": "dropped", "why": "slower", "prepare_s": 0.0})
NEVER = RungResult(name="gpu", explains="", patch=(), status="left_out", why="only helps with a GPU", below="bf16")
RESULT = LadderResult(
    ladder="own",
    summary="",
    recipe="digits",
    recipe_hash="ab",
    ranks=1,
    steps=20,
    warmup_steps=5,
    repeats=3,
    batch_size=128,
    rungs=(BASE, FAST, SLOW, NEVER),
    best="bf16",
    best_patch=("train.precision=bf16",),
    stopped="nothing is left",
    wall_s=75.0,
    command=("paceline", "ladder", "own"),
    provenance={},
)


def run_verb(words, **options):
    """Call the verb as the command line does."""
    return ladder(LadderOptions(args=list(words), **{"ranks": "1", **options}))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["cup"], r"'cup': is not a ladder \(did you mean 'cpu'\?\)"),
        (["cpu", "digits", "recipe=synthetic"], r"'synthetic': a ladder varies one recipe, and 'digits' is one \(drop"),
        (["auto", "train.epochs=3"], r"train.epochs: 3 has no effect on a ladder \(leave it out, or set --steps\)"),
        (["auto", "measure.clock=off"], r"measure.clock: off leaves nothing to compare \(leave it out\)"),
        (["auto", "nothing"], r"'nothing': is neither a preset"),
    ],
)
def test_a_missing_option_is_an_error_in_one_line(words, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match=expected):
        run_verb(words)
    assert not list(tmp_path.iterdir())


def test_ranks_of_a_launcher_are_refused(monkeypatch):
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "x",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RecipeError, match="ladder: starts its own ranks, but torchrun started this process"):
        run_verb(["auto"])


def test_the_list_names_each_shipped_ladder(capsys):
    assert run_verb([], list_only=True) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["cpu"].startswith("Optimizations for CPU cores")
    assert {"auto", "cpu", "ddp-post", "sc20"} <= set(lines)


def test_the_list_of_a_ladder_names_its_rungs(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    run_verb(["sc20"], list_only=True)
    out = capsys.readouterr().out
    assert "sc20, over sc20/bs256: NERSC" in out
    assert "model.memory_format=channels_last" in out
    run_verb(["sc20"], list_only=True, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert [rung["name"] for rung in found["rungs"]][:2] == ["fp32", "amp"]


def test_the_list_of_a_ladder_has_all_that_a_rung_changes(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    path = tmp_path / "mine.yaml"
    path.write_text(
        "recipe: digits\nrungs:\n  - name: first\n"
        "  - {name: packed, data: pack, cache: cold, set: {data.workers: auto, parallel.static_graph: false}}\n"
        "  - {name: two ranks, ranks: 2, batch_factor: 2, on: ranks}\n"
    )
    run_verb([str(path)], list_only=True)
    rows = [line.split("│")[1:3] for line in capsys.readouterr().out.splitlines() if "│" in line]
    lines = {name.strip(): settings.strip() for name, settings in rows}
    assert lines["packed"] == "data.workers=auto, parallel.static_graph=false, data: pack, cache: cold"
    assert lines["two ranks"] == "batch x2, ranks: 2, on: ranks"


def test_the_outcome_of_each_rung_is_printed_with_its_reason(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    show_experiment(RESULT, ExperimentDir(tmp_path), as_json=False)
    out = capsys.readouterr().out
    assert "2.00x (1.90 to 2.10)" in out
    assert re.search(r"bf16 .* kept: faster: 2.00x \(1.90 to 2.10\) in 3 pairs", out)
    assert re.search(r"plain .* dropped: slower", out) and "left out: only helps with a GPU" in out
    assert re.search(rf"\n  paceline train {tmp_path} train.precision=bf16 --ranks \d\n", out)
    assert f"folder: {tmp_path}\n" in out


def test_the_seconds_of_an_epoch_are_printed(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    rungs = [rung.model_copy(update={"epoch_s": 78.5} if rung.step_s else {}) for rung in RESULT.rungs]
    show_experiment(RESULT.model_copy(update={"rungs": tuple(rungs)}), ExperimentDir(tmp_path), as_json=False)
    out = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "images/s per epoch over below" in out and "base 100 (99 to 101) 1 min 18 s" in out


def test_the_time_of_the_counted_steps_is_in_the_result():
    assert with_steps_time(BASE, 300).steps_s == 300 * 0.1
    assert with_steps_time(NEVER, 300) == NEVER


def test_a_program_gets_the_result_and_nothing_else(capsys, tmp_path):
    show_experiment(RESULT, ExperimentDir(tmp_path), as_json=True)
    assert LadderResult.model_validate_json(capsys.readouterr().out) == RESULT
