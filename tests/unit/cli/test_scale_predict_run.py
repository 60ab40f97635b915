"""What `paceline predict-scaling RUN` prints, of a run's folder alone, and what it refuses."""

import json
from pathlib import Path

import pytest

from paceline.cli.options import PredictScalingOptions
from paceline.cli.scale_predict import parse_ranks, predict_scaling
from paceline.core.errors import RecipeError
from paceline.core.experiments.experiment_dir import ExperimentDir
from paceline.core.experiments.results import PredictionResult
from paceline.core.results import RunResult
from paceline.lab.trial import write_recipe
from paceline.recipe.load import Patch, load

RESULT = {
    "status": "completed",
    "recipe_hash": "0123456789ab",
    "world_size": 1,
    "epochs": 1.0,
    "steps": 50,
    "images_seen": 3200,
    "eval": None,
    "best": None,
    "throughput": {"images_per_s": 6400.0, "spread": [6300.0, 6500.0], "n": 4, "excluded_s": 0.0},
    "time": {
        "wall_s": 4.0,
        "startup_s": 1.5,
        "train_s": 2.0,
        "eval_s": 0.0,
        "checkpoint_s": 0.0,
        "to_target_s": None,
    },
    "stages": {},
    "verdict": {},
    "lr": "0.1 at 64",
    "weights_sha256": "ab",
    "provenance": {"device": "cuda", "launcher": "single"},
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return the folder of a profile of one rank: a step of 64 images takes 10 ms, and gradients are 40 MB."""
    (tmp_path / "result.json").write_text(RunResult.model_validate(RESULT).model_dump_json())
    (tmp_path / "plan.json").write_text(json.dumps({"batch_size": 64, "rank_batch": 64, "train_images": 64_000}))
    (tmp_path / "profile.json").write_text(json.dumps({"cost": {"parameters": 10_000_000}}))
    write_recipe(load("digits").recipe, tmp_path / "recipe.yaml")
    return tmp_path


def printed(capsys: pytest.CaptureFixture[str]) -> PredictionResult:
    return PredictionResult.model_validate_json(capsys.readouterr().out)


def test_json_is_the_only_output(run, capsys):
    assert predict_scaling(PredictScalingOptions(run=run, at="1,8,64", network="ndr", as_json=True)) == 0
    found = printed(capsys)
    assert [each.ranks for each in found.predictions] == [1, 8, 64]
    assert [each.nodes for each in found.predictions] == [1, 1, 8]
    assert found.predictions[0].time_s == pytest.approx(1000 * 0.01 + 1.5)
    assert (found.basis, found.source) == ("run", str(run))
    assert found.provenance == RESULT["provenance"]


def test_powers_of_two_from_8_to_4096_ranks_are_predicted_by_default(run, capsys):
    predict_scaling(PredictScalingOptions(run=run, network="hdr", as_json=True))
    assert [each.ranks for each in printed(capsys).predictions] == [2**power for power in range(3, 13)]


def test_times_efficiency_and_the_dominating_part_are_printed(run, capsys):
    for ranks, images in (("8", 64e3), ("4096", 64e7)):
        predict_scaling(PredictScalingOptions(run=run, at=ranks, network="25gbe", price=2.0, images=images))
    out = capsys.readouterr().out
    for words in ("4,096", "is likely", "cost", "communication", "start-up", "25gbe"):
        assert words in out, words


def test_a_prediction_is_written_to_run_dir(run, tmp_path, capsys):
    folder = tmp_path / "foretold"
    for _ in range(2):  # the same again is the same folder
        predict_scaling(PredictScalingOptions(run=run, at="8", network="ndr", run_dir=folder, as_json=True))
        assert ExperimentDir(folder).read() == printed(capsys)
    assert all((folder / name).stat().st_size for name in ("table.csv", "table.md", "report.html"))
    with pytest.raises(RecipeError, match=r"^--run-dir: .* holds something else"):
        predict_scaling(PredictScalingOptions(run=run, at="16", network="ndr", run_dir=folder))


def test_a_run_alone_of_another_recipe_is_refused(run, tmp_path, capsys):
    (alone := tmp_path / "alone").mkdir()
    for name in ("result.json", "plan.json", "profile.json"):
        (alone / name).write_text((run / name).read_text())
    write_recipe(load("digits", Patch((("seed", 3),))).recipe, alone / "recipe.yaml")
    predict_scaling(PredictScalingOptions(run=run, at="8", network="ndr", alone=alone))
    write_recipe(load("digits", Patch((("train.precision", "bf16"),))).recipe, alone / "recipe.yaml")
    with pytest.raises(RecipeError, match=r"^--alone: .*: train\.precision is bf16, but fp32 in "):
        predict_scaling(PredictScalingOptions(run=run, at="8", network="ndr", alone=alone))


def test_a_longer_run_takes_longer_but_starts_once(run, capsys):
    times = []
    for more in ({}, {"epochs": 2.0}, {"images": 128_000.0}, {"fixed_s": 0.0}):
        predict_scaling(PredictScalingOptions(run=run, at="1", network="ndr", as_json=True, **more))
        times.append(printed(capsys).predictions[0].time_s)
    assert times == [pytest.approx(11.5), pytest.approx(21.5), pytest.approx(21.5), pytest.approx(10.0)]


def test_a_network_of_ones_own_needs_no_name(run, capsys):
    predict_scaling(PredictScalingOptions(run=run, at="64", alpha_us=10.0, gigabytes_per_s=3.0, as_json=True))
    assert "3 GB/s and 10 us a hop" in printed(capsys).network


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({}, "--network: is not set"),
        ({"network": "ndr", "at": "8,x"}, "--at: 'x' is not a number of ranks"),
        ({"network": "ndr", "at": "0"}, "--at: '0' is not a number of ranks"),
        ({"network": "ndr", "price": -1.0}, "--price: -1 is out of range"),
        ({"network": "ndr", "images": float("nan")}, "--images: nan is out of range"),
        ({"network": "ndr", "fixed_s": -1.0}, "--fixed-s: -1 is out of range"),
        ({"network": "ndr", "epochs": 2.0, "images": 9.0}, "leave one out"),
    ],
)
def test_an_invalid_option_is_an_error_in_one_line(run, more, message):
    with pytest.raises(RecipeError) as raised:
        predict_scaling(PredictScalingOptions(run=run, **more))
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_numbers_of_ranks_are_taken_once_in_their_order():
    assert parse_ranks("64, 8,64") == (64, 8)
