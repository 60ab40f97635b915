"""A run with `log.quote` reports its quote against the truth, or says in one line why it cannot."""

import io
import json
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.cli.options import QuoteOptions
from paceline.cli.quote import quote
from paceline.core.dataset import DatasetInfo
from paceline.core.errors import RecipeError
from paceline.core.quote_result import QuoteResult, QuoteTruth
from paceline.core.results import RunResult
from paceline.core.run_dir import RunDir
from paceline.core.statistics import Interval
from paceline.core.world import World
from paceline.lab.quote.gpu import GPUS
from paceline.lab.quote.memory import MemoryCounter
from paceline.measure.machine import describe_machine
from paceline.recipe.load import Patch, load
from paceline.recipe.plan import Plan
from paceline.recipe.schema import Recipe
from paceline.report.run_summary import quote_pieces
from paceline.training.process import Invocation
from paceline.training.quote_truth import compare_with_quote, keep_quote, read_quote
from paceline.training.run import run

WORDS = (
    *("data.source.num_images=64", "data.source.num_val_images=8", "data.source.image_size=8", "data.batch_size=8"),
    *("model.width=0.1", "train.epochs=1", "parallel.device=cpu", "parallel.threads=1", "log.tensorboard=off"),
    *("data.workers=0", "checkpoint.every=off", "measure.telemetry=off", "measure.warmup_steps=1"),
)


def make_recipe(*overrides: str) -> Recipe:
    return load("synthetic", Patch.parse([*WORDS, *overrides])).recipe


@pytest.fixture(scope="module")
def quoted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a quote for the CPU of this machine, as if it were a GPU."""
    folder = tmp_path_factory.mktemp("quote")
    lines = (GPUS / "t4.yaml").read_text().splitlines()
    name = json.dumps(describe_machine()["cpu"])
    (folder / "own.yaml").write_text("\n".join([f"name: {name}", *lines[1:]]))
    options = QuoteOptions(args=["synthetic", *WORDS], gpu=str(folder / "own.yaml"), ranks="1,2", as_json=True)
    with redirect_stdout(io.StringIO()) as out, pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemoryCounter, "find_largest_micro_batch", lambda *_: 64)  # which no test here looks at
        assert quote(options) == 0
    (folder / "quote.json").write_text(out.getvalue())
    return folder / "quote.json"


@pytest.fixture(scope="module")
def trained(quoted: Path, tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    folder = tmp_path_factory.mktemp("run") / "run"
    # Seed and logs are no part of the work.
    recipe = make_recipe(f"log.quote={quoted}", "seed=3", "log.every=1st", "log.report=off")
    return run(recipe, World.single(), RunDir(folder), invocation=Invocation())


def compare(trained: RunResult, quoted: Path, *overrides: str, **changes: object) -> QuoteTruth:
    recipe = make_recipe(*overrides)
    result = QuoteResult.model_validate_json(quoted.read_text()).model_copy(update=changes)
    return compare_with_quote(result, recipe, derive(recipe), trained, first_startup_s=1.0)


def derive(recipe: Recipe) -> Plan:
    info = DatasetInfo(
        name="synthetic", split="train", num_images=64, class_names=tuple("0123456789"), channels=3,
        image_size=(8, 8), mean=(), std=(),
    )  # fmt: skip
    return Plan.derive(recipe, 1, info, replace(info, split="val", num_images=8), 64)


def test_a_run_reports_what_was_quoted_and_measured(trained: RunResult, quoted: Path) -> None:
    truth, plan = trained.quote, QuoteResult.model_validate_json(quoted.read_text()).plans[0]
    assert truth is not None and truth.why == ""
    assert (truth.device, truth.ranks, truth.gpu) == (plan.device, 1, plan.gpu)
    assert (truth.images_per_s, truth.hours) == (plan.images_per_s, plan.hours)
    assert truth.measured_images_per_s == trained.images_per_s
    assert truth.measured_hours is not None and trained.goodput is not None
    assert 3600 * truth.measured_hours == pytest.approx(trained.goodput.wall_s - trained.goodput.startup_s)
    assert trained.run_dir is not None
    assert QuoteResult.model_validate_json(RunDir(trained.run_dir).quote.read_text()).plans[0] == plan
    assert RunResult.model_validate_json(trained.model_dump_json()).quote == truth


@pytest.mark.parametrize(("measured", "outcome"), [(950.0, "within"), (500.0, "outside"), (1300.0, "outside")])
def test_the_summary_says_whether_the_interval_held(measured: float, outcome: str) -> None:
    truth = QuoteTruth(
        device="H100", ranks=8, gpu="h100", images_per_s=Interval(value=1000.0, low=900.0, high=1200.0),
        measured_images_per_s=measured, hours=Interval(value=2.0, low=1.5, high=3.0), measured_hours=2.5,
    )  # fmt: skip
    speed, time = quote_pieces(truth)
    assert "8 x h100" in speed and "(900 to 1,200)" in speed and outcome in speed
    assert "2 h 30 min" in time and "(1 h 30 min to 3 h 00 min)" in time and "within" in time


def test_a_quote_of_other_work_is_named_and_not_compared(trained: RunResult, quoted: Path) -> None:
    truth = compare(trained, quoted, "model.width=0.2")
    assert "synthetic" in truth.why and "model.width 0.1, here 0.2" in truth.why
    assert truth.images_per_s is None and [*quote_pieces(truth)] == [truth.why]


def test_a_quote_without_the_device_or_the_ranks_names_those_it_has(trained: RunResult, quoted: Path) -> None:
    plans = QuoteResult.model_validate_json(quoted.read_text()).plans
    other = plans[0].model_copy(update={"device": "NVIDIA H100 80GB HBM3"})
    truth = compare(trained, quoted, plans=(other,))
    assert "NVIDIA H100 80GB HBM3 on 1" in truth.why and truth.device in truth.why and truth.images_per_s is None
    truth = compare(trained, quoted, plans=plans[1:])
    assert f"{plans[1].device} on 2" in truth.why and truth.images_per_s is None


def test_a_run_on_a_gpu_is_found_by_the_name_that_torch_has_for_it(trained: RunResult, quoted: Path) -> None:
    name = "NVIDIA H100 80GB HBM3"
    provenance = {**trained.provenance, "device": "cuda", "cuda_devices": [name, "NVIDIA T4"]}
    plans = [
        each.model_copy(update={"device": name}) for each in QuoteResult.model_validate_json(quoted.read_text()).plans
    ]
    truth = compare(trained.model_copy(update={"provenance": provenance}), quoted, plans=tuple(plans))
    assert truth.device == name and truth.images_per_s == plans[0].images_per_s and truth.why == ""


@pytest.mark.parametrize(("field", "value"), [("rank_batch", 16), ("image_size", 32)])
def test_a_quote_of_other_batches_or_images_is_not_compared(
    trained: RunResult, quoted: Path, field: str, value: int
) -> None:
    plans = QuoteResult.model_validate_json(quoted.read_text()).plans
    truth = compare(trained, quoted, plans=(plans[0].model_copy(update={field: value}),))
    assert str(value) in truth.why and "8" in truth.why and truth.images_per_s is None


def test_a_run_of_other_length_is_compared_by_its_speed(trained: RunResult, quoted: Path) -> None:
    plans = QuoteResult.model_validate_json(quoted.read_text()).plans
    truth = compare(trained, quoted, plans=(plans[0].model_copy(update={"total_steps": 1000}),))
    assert "1,000 steps" in truth.why and truth.measured_hours is None
    assert truth.is_speed_within is not None and truth.is_time_within is None
    stopped = trained.model_copy(update={"status": "preempted"})
    truth = compare(stopped, quoted)
    assert truth.why and truth.measured_hours is None and truth.measured_images_per_s is not None


def test_a_quote_that_cannot_be_read_ends_the_run_before_it_begins(tmp_path: Path) -> None:
    recipe = make_recipe(f"log.quote={tmp_path / 'missing.json'}")
    with pytest.raises(RecipeError, match=r"log\.quote: .*missing\.json cannot be read"):
        run(recipe, World.single(), RunDir(tmp_path / "run"), invocation=Invocation())
    assert not (tmp_path / "run").exists()
    (tmp_path / "wrong.json").write_text('{"quotes": []}')
    with pytest.raises(RecipeError, match=r"log\.quote: .*wrong\.json is not what"):
        read_quote(make_recipe(f"log.quote={tmp_path / 'wrong.json'}").log, RunDir(tmp_path))


def test_a_resumed_run_uses_its_copy_if_the_file_is_gone_or_another(quoted: Path, tmp_path: Path) -> None:
    rundir, result = RunDir(tmp_path), QuoteResult.model_validate_json(quoted.read_text())
    rundir.quote.write_text(quoted.read_text())
    (tmp_path / "other.json").write_text(result.model_copy(update={"recipe": "other"}).model_dump_json())
    for name in ("gone.json", "other.json"):
        assert read_quote(make_recipe(f"log.quote={tmp_path / name}").log, rundir) == result
    assert read_quote(make_recipe().log, rundir) is None


def test_a_resumed_run_with_a_quote_that_cannot_be_read_is_warned(trained: RunResult, tmp_path: Path) -> None:
    recipe, rundir, warnings = make_recipe(f"log.quote={tmp_path / 'gone.json'}"), RunDir(tmp_path), []
    rundir.quote.write_text("{")
    kept = keep_quote(recipe.log, rundir, warnings.append)
    assert isinstance(kept, str) and str(rundir.quote) in kept and [kept in each for each in warnings] == [True]
    truth = compare_with_quote(kept, recipe, derive(recipe), trained, first_startup_s=1.0)
    assert truth.why == kept and truth.images_per_s is None


def test_the_time_excludes_the_first_start_up_of_several(trained: RunResult, quoted: Path) -> None:
    assert trained.goodput is not None
    goodput = trained.goodput.model_copy(update={"wall_s": 3610.0, "startup_s": 9.0, "starts": 2})
    truth = compare(trained.model_copy(update={"goodput": goodput}), quoted)
    assert truth.measured_hours == pytest.approx(3609 / 3600)


def test_what_was_not_measured_is_named(trained: RunResult, quoted: Path) -> None:
    throughput = trained.throughput.model_copy(update={"n": 0})
    truth = compare(trained.model_copy(update={"throughput": throughput, "goodput": None}), quoted)
    assert "measure.warmup_steps" in truth.why and "time was not measured" in truth.why


def test_other_evaluations_and_checkpoints_change_the_time_alone(trained: RunResult, quoted: Path) -> None:
    truth = compare(trained, quoted, "train.eval_every=4st", "data.eval_views=2")
    assert "train.eval_every 1ep, here 4st" in truth.why and "data.eval_views 1, here 2" in truth.why
    assert truth.measured_hours is None and truth.is_speed_within is not None


def test_the_work_hash_ignores_what_does_not_change_a_step() -> None:
    def hash_of(*overrides: str) -> str:
        return make_recipe(*overrides).work_hash

    same = ("seed=3", "log.quote=x.json", "measure.warmup_steps=3", "data.source.num_images=32", "data.workers=1",
            "data.batch_size=16", "parallel.threads=2", "train.epochs=2", "train.max_time=1h", "optim.lr=0.3",
            "checkpoint.every=1ep", "train.eval_every=2ep", "train.patience=3", "train.monitor=loss",
            "data.eval_batch_size=4", "data.replay=host", "schedule.name=cosine")  # fmt: skip
    assert {hash_of(each) for each in same} == {hash_of()}
    other = [hash_of(each) for each in ("model.width=0.2", "train.precision=bf16", "optim.momentum=0")]
    assert hash_of() not in other and len(set(other)) == len(other)
