"""`train.accumulate=auto` and `data.batch_size=auto`: the choice, and runs that make it."""

import json
import math
from pathlib import Path

import pytest

from paceline.core.errors import RecipeError
from paceline.core.run_dir import RunDir
from paceline.core.world import World
from paceline.recipe.load import Patch, load
from paceline.training import batch_fit
from paceline.training.batch_fit import MicroBatchFit, choose_accumulation, choose_batch, extrapolate, is_on_line
from paceline.training.process import Invocation
from paceline.training.run import run

SMALL = ("data.source.num_images=64", "data.source.num_val_images=8", "data.source.image_size=32", "model.width=0.125")
SMALL += ("data.batch_size=32", "train.steps=3", "log.tensorboard=off", "log.report=off", "parallel.threads=1")
SMALL += ("parallel.device=cpu", "log.explain=off")
FIXED = 100


def need(images: int) -> float:
    return FIXED + 10 * images


@pytest.mark.parametrize(
    ("allowed", "expected"),
    [
        (FIXED + 320, MicroBatchFit(1, 420, 420)),
        (FIXED + 319, MicroBatchFit(2, 260, 419, 420)),
        (FIXED + 80, MicroBatchFit(4, 180, 180, 260)),
    ],
)
def test_the_fewest_micro_batches_that_fit_are_chosen(allowed: int, expected: MicroBatchFit) -> None:
    assert choose_accumulation([1, 2, 4, 8, 16, 32], 32, need, allowed) == expected


def test_a_step_that_ran_out_of_memory_has_no_bytes() -> None:
    fit = choose_accumulation([1, 2], 32, lambda images: math.inf if images > 16 else 50, 60)
    assert fit == MicroBatchFit(2, 50, 60)
    assert choose_accumulation([1, 2], 32, need, 60).accumulate > 2**32


def test_memory_is_extrapolated_on_a_line() -> None:
    points = [(2, 30), (4, 30), (8, 50), (16, 90), (32, 170)]
    assert [is_on_line(points[:number]) for number in range(1, 6)] == [False, False, False, True, True]
    assert [extrapolate(points, images) for images in (1, 4, 6, 32, 64)] == [30, 30, 50, 170, 330]
    assert extrapolate([(2, 30)], 8) == 120


@pytest.mark.parametrize(
    ("speeds", "expected"),
    [({8: 50.0, 16: 96.0, 32: 98.0, 64: 97.0}, 16), ({8: 50.0, 16: 94.0, 32: 98.0}, 32), ({8: 1.0}, 8)],
)
def test_the_smallest_batch_within_3_percent_of_the_fastest_is_chosen(speeds: dict, expected: int) -> None:
    assert choose_batch(speeds) == expected


def train(folder: Path, *args: str, resume: bool = False) -> RunDir:
    rundir = RunDir(folder)
    recipe = load("synthetic", Patch.parse([*SMALL, *args])).recipe
    run(recipe, World.single(), rundir, resume=resume, invocation=Invocation())
    return rundir


def notes_of(rundir: RunDir) -> list[str]:
    return json.loads((rundir.path / "plan.json").read_text())["notes"]


@pytest.fixture
def needs(monkeypatch) -> dict[int, float]:
    """Bytes that a micro-batch of 1 to 32 images needs, as runs measure them."""
    found: dict[int, float] = {}
    measure = batch_fit._StepMemory.need

    def recorded(self, images: int) -> float:
        found[images] = measure(self, images)
        return found[images]

    monkeypatch.setattr(batch_fit._StepMemory, "need", recorded)
    return found


def allow(monkeypatch, num_bytes: float) -> None:
    monkeypatch.setattr(batch_fit, "memory_budget", lambda device, local_ranks: int(num_bytes))


def test_auto_is_the_number_that_fits_and_has_the_bits_of_that_number(tmp_path: Path, monkeypatch, needs) -> None:
    whole = train(tmp_path / "whole", "train.accumulate=auto")
    assert RunDir(whole.path).read_result().provenance["measured_batch"]["accumulate"] == 1
    allow(monkeypatch, needs[32] / 2.5)
    fitted = train(tmp_path / "fitted", "train.accumulate=auto")
    result = fitted.read_result()
    assert list(needs) == [32, 16, 8] and needs[8] <= needs[32] / 2.5 < needs[16]
    assert load(str(fitted.path)).recipe.train.accumulate == 4
    assert result.provenance["measured_batch"] == {
        "accumulate": 4,
        "batch_size": 32,
        "needed_bytes": int(needs[8]),
        "allowed_bytes": pytest.approx(needs[32] / 2.5, rel=0.1),
    }
    notes = [note for note in notes_of(fitted) if note.startswith("train.accumulate=4: ")]
    assert len(notes) == 2 and "8 images" in notes[0] and "BatchNorm" in notes[1]
    given = train(tmp_path / "given", "train.accumulate=4").read_result()
    assert result.weights_sha256 == given.weights_sha256
    assert result.weights_sha256 != whole.read_result().weights_sha256  # by BatchNorm


def test_a_resumed_run_keeps_the_number_whatever_fits_now(tmp_path: Path, monkeypatch) -> None:
    args = ("train.accumulate=auto", "checkpoint.every=1st")
    allow(monkeypatch, 10**9)
    train(tmp_path / "run", *args, "train.max_time=0.001s")
    allow(monkeypatch, 0)
    resumed = train(tmp_path / "run", *args, resume=True)
    assert load(str(resumed.path)).recipe.train.accumulate == 1
    result = resumed.read_result()
    assert result.steps == 3
    assert result.provenance["measured_batch"]["accumulate"] == 1
    assert result.provenance["measured_batch"]["allowed_bytes"] > 0


def test_a_run_goes_on_with_other_micro_batches_and_says_so(tmp_path: Path, monkeypatch) -> None:
    args = ("checkpoint.every=1st", "model.norm=none", "train.precision=fp64")
    whole = train(tmp_path / "whole", *args).read_result()
    train(tmp_path / "run", *args, "train.max_time=0.001s")
    resumed = train(tmp_path / "run", *args, "train.accumulate=auto", resume=True)
    assert "resumed with train.accumulate=auto, which was 1" in notes_of(resumed)
    resumed = train(tmp_path / "other", *args, "train.max_time=0.001s")
    resumed = train(tmp_path / "other", *args, "train.accumulate=4", resume=True)
    assert load(str(resumed.path)).recipe.train.accumulate == 4
    assert "resumed with train.accumulate=4, which was 1" in notes_of(resumed)
    assert resumed.read_result().steps == 3
    assert resumed.read_result().eval.loss == pytest.approx(whole.eval.loss, rel=1e-9)


def test_a_model_that_never_fits_is_one_line_with_the_bytes(tmp_path: Path, monkeypatch) -> None:
    allow(monkeypatch, 1000)
    with pytest.raises(RecipeError, match=r"^train.accumulate: auto: a micro-batch of 2 images needs .* \(set train\."):
        train(tmp_path / "run", "train.accumulate=auto")


def test_memory_is_predicted_from_small_micro_batches(tmp_path: Path, needs, monkeypatch) -> None:
    train(tmp_path / "extrapolated", "train.accumulate=auto", "train.ema=on", "optim.name=adamw", "model.norm=group")
    predicted = needs[32]
    monkeypatch.setattr(batch_fit, "is_on_line", lambda points: False)  # to the whole batch
    train(tmp_path / "measured", "train.accumulate=auto", "train.ema=on", "optim.name=adamw", "model.norm=group")
    assert predicted == pytest.approx(needs[32], rel=0.05)


def test_a_measured_batch_is_recorded_and_leaves_the_generators_alone(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(batch_fit, "_time_batches", lambda context, sizes, on_progress: dict.fromkeys(sizes, 1.0))
    measured = train(tmp_path / "measured", "data.batch_size=auto", "train.accumulate=auto")
    recipe = load(str(measured.path)).recipe
    assert (recipe.data.batch_size, recipe.train.accumulate) == (8, 1)
    given = train(tmp_path / "given", "data.batch_size=8")
    assert measured.read_result().weights_sha256 == given.read_result().weights_sha256
    assert "learning rate" in next(note for note in notes_of(measured) if "batch_size=8" in note)


def test_batches_that_do_not_fit_are_not_timed(tmp_path: Path, monkeypatch, needs) -> None:
    timed: list[int] = []
    monkeypatch.setattr(
        batch_fit, "_time_batches", lambda context, sizes, on_progress: timed.extend(sizes) or dict.fromkeys(sizes, 1.0)
    )
    train(tmp_path / "all", "data.batch_size=auto", "data.source.num_images=256")
    assert timed == [8, 16, 32] == list(needs)
    timed.clear()
    allow(monkeypatch, (needs[16] + needs[32]) / 2)
    train(tmp_path / "some", "data.batch_size=auto", "data.source.num_images=256")
    assert timed == [8, 16]


def test_batches_are_timed_by_steps_of_the_run(tmp_path: Path) -> None:
    result = train(tmp_path / "run", "data.batch_size=auto", "data.augment=[flip,mixup]").read_result()
    speeds = result.provenance["measured_batch"]["images_per_s"]
    assert list(speeds) == ["8"] and speeds["8"] > 0  # of 64 images, which are 8 steps
