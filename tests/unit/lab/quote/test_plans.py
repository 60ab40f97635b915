"""Plans of whole runs: data path, evaluation, checkpoints, failures and prices."""

import math

import pytest

from paceline.cli.args import split_recipe_args
from paceline.core.dataset import DatasetInfo
from paceline.core.goodput import efficiency
from paceline.core.statistics import Interval
from paceline.lab.quote.plans import Conditions, Offer, Saving, build_plan, plan_saving, with_verdicts
from paceline.lab.quote.quote import Quote
from paceline.measure.time_estimate import PlannedWork
from paceline.recipe.load import load
from paceline.recipe.plan import Plan
from paceline.recipe.schema import Recipe
from paceline.training.run_timing import build_planned_work

SAVING = Saving(1e9, stall_s=2.0, write_s=8.0)
RATE = 1000.0


def dataset(split: str, num_images: int) -> DatasetInfo:
    classes = tuple(map(str, range(10)))
    return DatasetInfo(
        name="made", split=split, num_images=num_images, class_names=classes, channels=3, image_size=(32, 32), mean=(),
        std=(),
    )  # fmt: skip


def make_recipe(*overrides: str) -> Recipe:
    args = ["synthetic", "data.rank_batch_size=100", "train.epochs=4", *overrides]
    return load(*split_recipe_args(args)).recipe


def derive(ranks: int = 1, *overrides: str) -> Plan:
    return Plan.derive(make_recipe(*overrides), ranks, dataset("train", 100_000), dataset("val", 30_000), 100_000)


def make_quote(plan: Plan, rate: float = RATE) -> Quote:
    speed = Interval(value=rate, low=0.8 * rate, high=1.25 * rate)
    return Quote(
        gpu="made",
        ranks=plan.world_size,
        rank_batch=plan.rank_batch,
        images_per_s=speed,
        memory_bytes=10**9,
        memory_parts={},
        unused_bytes=0,
        context_bytes=0,
        fits=True,
        largest_micro_batch=256,
    )


def build(plan: Plan, conditions: Conditions = Conditions(8), offer: Offer = Offer(), rate: float = RATE):  # noqa: B008
    work = PlannedWork.from_plan(plan)
    return build_plan(make_quote(plan, rate), "Made GPU", plan, work, SAVING, conditions, offer)


def test_without_failures_a_plan_is_the_sum_of_its_parts() -> None:
    found = build(derive())
    steps_s = 400_000 / RATE
    parts_s = {"steps": steps_s, "evaluation": 4 * 30_000 / RATE / 3, "checkpoints": 4 * 2.0, "failures": 0.0}
    assert {name: 3600 * hours for name, hours in found.parts.items()} == pytest.approx(parts_s)
    assert 3600 * found.hours.value == pytest.approx(sum(parts_s.values()))
    assert found.hours.low < found.hours.value < found.hours.high


def test_failures_are_those_of_the_goodput_formula() -> None:
    found = build(derive(), Conditions(8, mtbf_s=500.0, restart_s=60.0))
    train_s = 400_000 / RATE + 4 * 30_000 / RATE / 3
    share = efficiency(train_s / 4, 2.0, 60.0, 500.0, write_s=8.0)
    assert 3600 * found.hours.value == pytest.approx(train_s / share)


def test_failures_and_interruptions_of_all_nodes_add_up() -> None:
    two_nodes = build(derive(2), Conditions(1, mtbf_s=1000.0), Offer("spot", 1.0, mtbf_s=1000.0))
    one_node = build(derive(2), Conditions(2, mtbf_s=250.0))
    assert two_nodes.nodes == 2 and one_node.nodes == 1
    assert two_nodes.hours.value == pytest.approx(one_node.hours.value)


def test_failures_that_leave_no_time_never_end() -> None:
    found = build(derive(1, "checkpoint.every=off"), Conditions(8, mtbf_s=0.1))
    assert math.isinf(found.hours.value) and found.hours.high == math.inf


def test_failures_that_leave_next_to_no_time_never_end_and_cost_without_end_or_nothing() -> None:
    plan, conditions = derive(1, "checkpoint.every=off"), Conditions(8, mtbf_s=50.0)  # a run of 440 s
    paid, free = (build(plan, conditions, Offer("on demand", price)).cost for price in (2.0, 0.0))
    assert math.isinf(build(plan, conditions).hours.value)
    assert paid is not None and free is not None
    assert math.isinf(paid.value) and (free.value, free.low, free.high) == (0, 0, 0)


@pytest.mark.parametrize(
    ("overrides", "images"),
    [
        ((), 4 * 30_000),
        (("data.eval_views=2",), 8 * 30_000),
        (("train.ema=on",), 8 * 30_000),
        (("optim.name=schedule_free", "train.eval_train=on"), 16 * 30_000),
        (("data.sampler={name: hard, after: 1, every: 1}",), 4 * 30_000 + 3 * 100_000),
    ],
    ids=str,
)
def test_all_passes_of_evaluations_take_time(overrides: tuple[str, ...], images: int) -> None:
    plan = derive(1, *overrides)
    work = build_planned_work(make_recipe(*overrides), plan)
    found = build_plan(make_quote(plan), "Made GPU", plan, work, SAVING, Conditions(8), Offer())
    assert 3600 * found.parts["evaluation"] == pytest.approx(images / RATE / 3)


def test_a_checkpoint_has_weights_average_and_state_of_the_optimizer() -> None:
    parts = {"weights": 100, "optimizer": 200, "activations": 1000}
    assert plan_saving(make_recipe(), parts).num_bytes == 300
    assert plan_saving(make_recipe("train.ema=on"), parts).num_bytes == 400
    assert plan_saving(make_recipe(), {"weights": 100}).num_bytes == 100
    assert plan_saving(make_recipe("checkpoint.every=off"), parts) == Saving(0.0, 0.0, 0.0)


def test_a_time_limit_of_the_recipe_cuts_the_run_short() -> None:
    whole = build(derive())
    cut = build(derive(), Conditions(8, max_hours=0.1))
    assert whole.hours.value > 0.1 and cut.is_cut_short and not whole.is_cut_short
    assert cut.hours.value == pytest.approx(0.1) == pytest.approx(sum(cut.parts.values()))
    assert cut.hours.high == pytest.approx(0.1)
    assert build(derive(), Conditions(8, max_hours=100.0)) == whole


def test_a_run_without_checkpoints_loses_all_of_its_work() -> None:
    conditions = Conditions(8, mtbf_s=500.0)
    assert build(derive(1, "checkpoint.every=off"), conditions).hours.value > build(derive(), conditions).hours.value


def test_the_data_path_of_each_node_caps_the_speed() -> None:
    free = build(derive(2), Conditions(1))
    assert free.data_images_per_s == RATE / 2 and not free.waits_for_data
    capped = build(derive(2), Conditions(1, loader_rate=300.0))
    assert capped.waits_for_data and capped.images_per_s.value == 600.0
    assert capped.parts["steps"] == pytest.approx(400_000 / 600 / 3600, rel=0.01)
    assert not build(derive(2), Conditions(1, loader_rate=500.0)).waits_for_data


def test_small_images_need_more_of_the_data_path() -> None:
    plan = derive(1, "data.image_size=32", "data.progressive={start_size: 16, begin: 0%, end: 50%, multiple: 16}")
    assert min(size for _, size in plan.train_sizes) == 16
    assert build(plan).data_images_per_s == 4 * RATE
    assert build(plan, Conditions(8, loader_rate=RATE)).hours.value > build(plan).hours.value


def test_cost_is_of_all_gpus_for_the_whole_time() -> None:
    found = build(derive(4), offer=Offer("on demand", 2.5))
    assert found.cost is not None
    assert [found.cost.value, found.cost.low, found.cost.high] == pytest.approx(
        [10 * each for each in (found.hours.value, found.hours.low, found.hours.high)]
    )


@pytest.mark.parametrize(("limit", "verdict"), [(1.0, "no"), (1.9, "unlikely"), (2.1, "likely"), (2.6, "yes")], ids=str)
def test_a_limit_is_judged_by_the_interval(limit: float, verdict: str) -> None:
    found = build(derive()).model_copy(update={"hours": Interval(value=2.0, low=1.6, high=2.5)})
    assert with_verdicts(found, limit, None).ends_in_time == verdict
    assert with_verdicts(found, None, 10.0).is_within_budget == ""
