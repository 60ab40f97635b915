"""Predictions of steps on other numbers of ranks from a run directory; the measured one is exact."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import PacelineError, RecipeError
from paceline.core.results import AccountResult, RankResult, RunResult, StragglerResult, ThroughputResult, TimeResult
from paceline.lab.predict.from_run import (
    COMMUNICATION_PART,
    DATA_PART,
    OVERHEAD_PART,
    STRAGGLERS_PART,
    GradientBucket,
    MeasuredStep,
    assume_buckets,
    build_step_model,
    check_same_recipe,
    expected_lateness,
    predict_from_run,
    read_measured_step,
)
from paceline.lab.predict.network import Link, NetworkModel, build_network
from paceline.lab.predict.points import PredictionRequest
from paceline.lab.trial import write_recipe
from paceline.recipe.load import Patch, load

TWO = MeasuredStep(
    source="a run",
    ranks=2,
    nodes=2,
    rank_batch=32,
    images=6400,
    step_s=1.0,
    low_s=0.95,
    high_s=1.1,
    data_s=0.1,
    exposed_s=0.3,
    late_s=0.02,
    jitter_s=0.0589,  # the latest of two is 0.589 standard deviations later than the mean
    sigma_s=0.1,
    fixed_s=20.0,
    buckets=(GradientBucket(1_000_000, 0.0), GradientBucket(1_000_000, 0.2)),
)
ONE = dataclasses.replace(TWO, ranks=1, nodes=1, step_s=0.6, low_s=0.59, high_s=0.61, exposed_s=0.0)
LINK = Link("link", 0.001, 1e7, 0.8e7, 1.2e7, "made up")
NETWORK = NetworkModel("gloo", LINK, LINK, "ring")


def asked(*at: int, rank_batch: int = 32, price: float | None = None) -> PredictionRequest:
    return PredictionRequest(at=at, ranks_per_node=1, rank_batch=rank_batch, images=6400, price=price)


def steps(
    *at: int, step: MeasuredStep = TWO, network: NetworkModel = NETWORK, alone: MeasuredStep | None = None
) -> list[float]:
    found = predict_from_run(build_step_model(step, network, alone), asked(*at))
    return [each.step_s for each in found.predictions]


@pytest.mark.parametrize("alone", [None, ONE])
@pytest.mark.parametrize("bytes_per_s", [1e5, 1e7, 1e12])  # a wire that explains too much, some, or nothing at all
@pytest.mark.parametrize("nodes", [1, 2])
def test_what_was_measured_is_predicted_as_it_was(nodes, bytes_per_s, alone):
    link = dataclasses.replace(LINK, bytes_per_s=bytes_per_s)
    per_node = dataclasses.replace(asked(2), ranks_per_node=2 // nodes)
    model = build_step_model(dataclasses.replace(TWO, nodes=nodes), NetworkModel("one", link, link, "best"), alone)
    found = predict_from_run(model, per_node)
    assert found.predictions[0].step_s == pytest.approx(TWO.step_s)
    assert found.points[0].fitted_s == pytest.approx(TWO.step_s)


def test_the_measured_step_is_predicted_by_the_model_and_not_repeated():
    model = dataclasses.replace(build_step_model(TWO, NETWORK), left_s=0.0)
    (point,) = predict_from_run(model, asked(4)).points
    assert (point.time_s, point.fitted_s) == (1.0, pytest.approx(model.fitted_s()))
    assert point.fitted_s < 0.95


def test_a_run_alone_that_is_faster_than_the_others_wait_for_data_waits_for_no_more_than_it_takes():
    quick = dataclasses.replace(ONE, step_s=0.04, low_s=0.04, high_s=0.04)
    (found,) = predict_from_run(build_step_model(TWO, NETWORK, quick), asked(4)).predictions
    assert found.parts[DATA_PART] == pytest.approx(50 * 0.04)
    assert all(each >= 0 for name, each in found.parts.items() if name != OVERHEAD_PART)


def test_a_run_of_one_rank_is_predicted_as_it_was():
    assert steps(1, step=ONE) == [pytest.approx(ONE.step_s)]
    assert steps(1, alone=ONE) == [pytest.approx(ONE.step_s)]


def test_without_a_wire_or_stragglers_more_ranks_take_as_long():
    free = NetworkModel("free", *(dataclasses.replace(LINK, alpha_s=0.0, bytes_per_s=math.inf),) * 2, "ring")
    found = steps(1, 2, 64, step=dataclasses.replace(ONE, late_s=0.0, sigma_s=0.0), network=free)
    assert found == [pytest.approx(ONE.step_s)] * 3


def test_each_part_of_a_step_is_as_documented():
    (found,) = predict_from_run(build_step_model(TWO, NETWORK), asked(4)).predictions
    num_steps = 6400 / (4 * 32)
    # Rings of four send 1.5 MB a bucket in 6 hops: 0.156 s each. The second is ready after 0.2 s, when the first is
    # gone. Of two they send 1 MB in 2 hops: 0.102 s is exposed, of the 0.3 s measured; stragglers are 0.0789 s.
    assert found.parts[COMMUNICATION_PART] == pytest.approx(num_steps * 0.156)
    late_s = 0.02 + 0.1 * expected_lateness(4)
    assert found.parts[STRAGGLERS_PART] == pytest.approx(num_steps * late_s)
    left_s = 0.3 - 0.102 - 0.02 - 0.1 * expected_lateness(2)
    assert found.parts[OVERHEAD_PART] == pytest.approx(num_steps * left_s)
    assert found.step_s == pytest.approx(0.7 + 0.156 + late_s + left_s)
    assert math.fsum(found.parts.values()) == pytest.approx(found.time_s)
    assert found.time_s == pytest.approx(num_steps * found.step_s + 20)
    assert found.dominates == "start_up"


def test_what_sending_takes_from_computing_grows_as_the_bytes_that_a_rank_sends():
    without, beside = steps(4), steps(4, alone=ONE)
    assert beside[0] - without[0] == pytest.approx((0.7 - 0.6) * 0.5)  # 1.5 times the bytes of two ranks, not once


def test_the_interval_holds_the_prediction_and_grows_with_the_ranks():
    found = predict_from_run(build_step_model(TWO, NETWORK), asked(2, 8, 512)).predictions
    assert all(each.low_s < each.time_s < each.high_s for each in found)
    widths = [(each.high_s - each.low_s) / each.time_s for each in found]
    assert widths == sorted(widths)


def test_hours_and_price_are_those_of_all_ranks():
    (found,) = predict_from_run(build_step_model(TWO, NETWORK), asked(4, price=3.0)).predictions
    assert found.gpu_hours == pytest.approx(4 * found.time_s / 3600)
    assert found.cost == pytest.approx(3 * found.gpu_hours)


def test_efficiency_is_of_one_rank_with_the_same_start():
    (found,) = predict_from_run(build_step_model(TWO, NETWORK, ONE), asked(4)).predictions
    assert found.efficiency == pytest.approx((200 * 0.6 + 20) / (4 * found.time_s))


def test_a_rank_batch_that_was_not_measured_is_noted():
    twice = asked(4, rank_batch=64)
    found = predict_from_run(build_step_model(TWO, NETWORK), twice)
    assert any("rank batch: 64 was not measured" in note for note in found.notes)
    assert found.predictions[0].step_s > steps(4)[0]


def test_a_run_of_one_rank_with_another_batch_does_not_go_with_it():
    with pytest.raises(RecipeError, match="name a run of one rank of 32"):
        build_step_model(TWO, NETWORK, dataclasses.replace(ONE, rank_batch=16))


def test_a_network_that_explains_too_much_within_a_node_makes_none_faster_between_nodes():
    within = dataclasses.replace(TWO, nodes=1)  # 0.3 s exposed, which NVLink would be done with at once
    slow = build_network(None, ranks_per_node=1, alpha_us=1000, gigabytes_per_s=0.001)
    model = build_step_model(within, dataclasses.replace(slow, intra_node=slow.inter_node))
    assert model.left_s < 0
    assert model.compute_parts(4, asked(4))[OVERHEAD_PART] == 0


def test_a_network_within_a_node_predicts_no_other_nodes():
    model = build_step_model(TWO, build_network("nvlink4", ranks_per_node=8))
    eight = PredictionRequest((8,), 8, 32, 6400)
    assert predict_from_run(model, eight).network == "nvlink4 (370 GB/s and 1.64 us a hop within a node)"
    with pytest.raises(RecipeError, match=r"16 ranks need several \(add one between nodes, such as nvlink4\+ndr"):
        predict_from_run(model, dataclasses.replace(eight, at=(8, 16)))


def test_the_latest_of_many_is_as_late_as_in_tables():
    # The exact values are Teichroew's (1956, Annals of Mathematical Statistics 27, 410-426); Blom's are within 5 %.
    for ranks, exact in ((2, 0.56419), (4, 1.02938), (10, 1.53875), (20, 1.86748)):
        assert expected_lateness(ranks) == pytest.approx(exact, rel=0.05)
    assert expected_lateness(1) == 0
    assert all(expected_lateness(ranks) < math.sqrt(2 * math.log(ranks)) for ranks in (2, 64, 4096))


def result(ranks: int, **more: Any) -> RunResult:
    stages = {"backward": 0.5, "data_wait": 0.1, "exposed_communication": 0.3}
    waits = (0.3, 0.1)
    rows = tuple(
        RankResult(rank=rank, step_s=1.0, late_s=0.0, stages={**stages, "exposed_communication": waits[rank % 2]})
        for rank in range(ranks)
    )
    values = {
        "status": "completed",
        "recipe_hash": "0123456789ab",
        "world_size": ranks,
        "epochs": 1.0,
        "steps": 50,
        "images_seen": 3200,
        "eval": None,
        "best": None,
        "throughput": ThroughputResult(
            images_per_s=32.0 * ranks, spread=(30.0 * ranks, 40.0 * ranks), n=4, excluded_s=0
        ),
        "time": TimeResult(wall_s=4.0, startup_s=1.5, train_s=2.0, eval_s=0, checkpoint_s=0, to_target_s=None),
        "account": AccountResult(
            wall_s=4.0,
            start_up_s=1.5,
            compile_s=0.0,
            warmup_s=0.0,
            stages_s=2.0,
            counted_steps=2,
            pauses={},
            finish_s=0.5,
            residual_s=0.0,
            explained=1.0,
        ),
        "stages": {name: {"host_s": 2 * each, "device_s": 2 * each, "share": each} for name, each in stages.items()},
        "ranks": rows if ranks > 1 else (),
        "straggler": StragglerResult(lost_s=0.2, share=0.2, rank=1, late_s=0.15) if ranks > 1 else None,
        "verdict": {"bottleneck": "unknown", "evidence": "none", "ceiling": "at most 9x", "try": ""},
        "lr": "0.1 at 64",
        "weights_sha256": "ab",
        "provenance": {"device": "cpu", "threads": 1, "launcher": "local" if ranks > 1 else "single"},
    }
    return RunResult.model_validate({**values, **more})


def write_run(path: Path, found: RunResult, profile: dict[str, Any], **settings: Any) -> Path:
    said = Patch(tuple((name.replace("__", "."), value) for name, value in settings.items()))
    write_recipe(load("digits", said).recipe, path / "recipe.yaml")
    (path / "result.json").write_text(found.model_dump_json())
    plan = {"batch_size": 32 * found.world_size, "rank_batch": 32, "train_images": 6400}
    (path / "plan.json").write_text(json.dumps(plan))
    (path / "profile.json").write_text(json.dumps(profile))
    return path


BUCKETS = {
    "exposed_s": 0.3,
    "share": 0.3,
    "bytes": 3000,
    "wire_s": 0.4,
    "overlap": 0.1,
    "buckets": [{"bytes": size, "ready_s": ready, "wire_s": 0.1, "n": 2} for size, ready in ((1000, 0.0), (2000, 0.4))],
}


def test_a_profile_of_ranks_is_read_as_means_over_them(tmp_path: Path):
    found = read_measured_step(write_run(tmp_path, result(2), {"communication": BUCKETS}), ranks_per_node=8)
    assert (found.ranks, found.nodes, found.rank_batch, found.images) == (2, 1, 32, 6400)
    assert (found.step_s, found.low_s, found.high_s) == (1.0, pytest.approx(0.8), pytest.approx(64 / 60))
    assert (found.exposed_s, found.data_s, found.fixed_s) == (pytest.approx(0.2), pytest.approx(0.1), 2.0)
    # The clock's lost_s is how much later the latest is than the other one: twice how much later than their mean.
    assert (found.late_s, found.jitter_s) == (pytest.approx(0.075), pytest.approx(0.025))
    assert found.sigma_s == pytest.approx(0.025 / expected_lateness(2))
    assert found.buckets == (GradientBucket(1000, 0.0), GradientBucket(2000, 0.4))
    assert found.notes == ()


def test_a_profile_of_one_rank_guesses_what_needs_more_and_notes_it(tmp_path: Path):
    found = read_measured_step(write_run(tmp_path, result(1), {"cost": {"parameters": 1000}}), ranks_per_node=8)
    assert (found.exposed_s, found.data_s) == (pytest.approx(0.3), pytest.approx(0.1))
    assert sum(bucket.num_bytes for bucket in found.buckets) == 4000
    assert found.sigma_s > 0
    assert [note.partition(":")[0] for note in found.notes] == ["stragglers", "buckets"]


def test_a_run_that_has_nothing_about_its_gradients_is_an_error_in_one_line(tmp_path: Path):
    silent = read_measured_step(write_run(tmp_path, result(2), {}), ranks_per_node=8)
    with pytest.raises(RecipeError, match="run `paceline profile`") as raised:
        build_step_model(silent, NETWORK)
    assert "\n" not in str(raised.value)


def test_a_run_of_one_rank_that_gives_compute_alone_need_not(tmp_path: Path):
    silent = read_measured_step(write_run(tmp_path, result(1, stages={}), {}), ranks_per_node=8)
    assert build_step_model(TWO, NETWORK, silent).busy_s == TWO.busy_s


def test_ranks_of_other_launchers_are_as_many_to_a_node_as_requested(tmp_path: Path):
    over_nodes = result(4, provenance={"launcher": "slurm"})
    folder = write_run(tmp_path, over_nodes, {"communication": BUCKETS})
    assert read_measured_step(folder, ranks_per_node=2).nodes == 2


def test_a_folder_without_a_run_is_an_error_in_one_line(tmp_path: Path):
    with pytest.raises(PacelineError, match="has not finished"):
        read_measured_step(tmp_path, ranks_per_node=8)


@pytest.mark.parametrize(
    ("setting", "fix"),
    [
        ({"parallel__strategy": "fsdp"}, "profile it with parallel.strategy=ddp"),
        ({"parallel__strategy": "dataparallel"}, "profile it with parallel.strategy=ddp"),
        ({"parallel__sync_gradients": False}, "profile it with parallel.sync_gradients=true"),
    ],
)
def test_what_sends_otherwise_than_ddp_is_refused(tmp_path: Path, setting: dict[str, Any], fix: str):
    folder = write_run(tmp_path, result(2), {"communication": BUCKETS}, **setting)
    with pytest.raises(RecipeError, match=f"only ddp is modeled .*{fix}") as raised:
        read_measured_step(folder, ranks_per_node=8)
    assert "\n" not in str(raised.value)


def test_assumed_buckets_are_as_large_and_as_small_as_the_recipe_states(tmp_path: Path):
    profile = {"cost": {"parameters": 1 << 20}}
    sizes = []
    for name, settings in (
        ("whole", {}),
        ("bf16", {"parallel__compression": "bf16"}),
        ("small", {"parallel__bucket_mb": 2.0, "parallel__compression": "fp16"}),
    ):
        (folder := tmp_path / name).mkdir()
        found = read_measured_step(write_run(folder, result(1), profile, **settings), ranks_per_node=8)
        sizes.append([bucket.num_bytes / 2**20 for bucket in found.buckets])
    # 4 MiB of gradients: a first bucket of 1 and the rest; the cap counts them before they are sent in 2 bytes each.
    assert sizes == [[1, 3], [0.5, 1.5], [1, 1]]


def test_what_powersgd_sends_is_known_where_it_was_measured(tmp_path: Path):
    setting = {"parallel__compression": "powersgd"}
    for name, profile, num_buckets in (("one", {"cost": {"parameters": 9}}, 0), ("two", {"communication": BUCKETS}, 2)):
        (folder := tmp_path / name).mkdir()
        found = read_measured_step(write_run(folder, result(2), profile, **setting), ranks_per_node=8)
        assert len(found.buckets) == num_buckets


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("plan.json", None, "plan.json: cannot be read: No such file or directory (run it again)"),
        ("plan.json", "{}", "plan.json: cannot be read: batch_size: Field required (run it again)"),
        ("profile.json", "{", "profile.json: cannot be read: Invalid JSON"),
        ("profile.json", '{"communication": {"share": 1}}', "profile.json: cannot be read: communication."),
        ("profile.json", '{"cost": {"parameters": "many"}}', "profile.json: cannot be read: cost.parameters: "),
    ],
)
def test_a_damaged_folder_is_an_error_in_one_line(tmp_path: Path, name: str, text: str | None, says: str):
    folder = write_run(tmp_path, result(2), {"communication": BUCKETS})
    (folder / name).unlink()
    if text is not None:
        (folder / name).write_text(text)
    with pytest.raises(PacelineError) as raised:
        read_measured_step(folder, ranks_per_node=8)
    assert says in str(raised.value) and "\n" not in str(raised.value)


def test_a_path_that_is_no_run_is_named_as_what_it_is(tmp_path: Path):
    (tmp_path / "scale" / "trials").mkdir(parents=True)
    (tmp_path / "scale" / "points.csv").write_text("")
    (tmp_path / "times.csv").write_text("")
    for name, says in (
        (
            "scale",
            f"is the folder of an experiment, not of a run (name one of its runs, in trials/, or --points {tmp_path}",
        ),
        ("times.csv", "is a file; a prediction needs a run"),
        ("digits", "no such folder; a prediction needs a run (name the folder of a run"),
    ):
        with pytest.raises(RecipeError) as raised:
            read_measured_step(tmp_path / name, ranks_per_node=8)
        assert says in str(raised.value)


def test_a_run_alone_has_the_recipe_of_the_others_but_for_its_batch_seed_length_and_measuring(tmp_path: Path):
    run, same, other = (tmp_path / name for name in ("run", "same", "other"))
    for folder in (run, same, other):
        folder.mkdir()
    write_run(run, result(2), {}, measure__communication="on", data__batch_size=256)
    write_run(same, result(1), {}, seed=3, train__epochs=1.0)
    write_run(other, result(1), {}, model__width=0.5)
    check_same_recipe(run, same)
    with pytest.raises(RecipeError, match=r"^--alone: .*other: model\.width is 0\.5, but .* \(train the same recipe"):
        check_same_recipe(run, other)


def test_an_ethernet_that_is_slower_than_backward_is_what_dominates():
    """ResNet-50 at 6,000 images/s a GPU: 102 MB over 25 GbE take eight nodes 66 ms, and a step without 43."""
    step_s, num_bytes = 256 / 6_000, int(4 * 25.56e6)
    of_one = dataclasses.replace(ONE, rank_batch=256, step_s=step_s, data_s=0.0, late_s=0.0, sigma_s=0.0, fixed_s=0.0)
    one = dataclasses.replace(of_one, buckets=assume_buckets(num_bytes, step_s * 2 / 3))
    full = PredictionRequest((64,), 8, 256, 1e6)
    slow, fast = (
        predict_from_run(build_step_model(one, build_network(name, ranks_per_node=8)), full).predictions[0]
        for name in ("25gbe", "ndr")
    )
    assert slow.dominates == COMMUNICATION_PART
    wire_s = 2 * 7 / 8 * num_bytes / 2.7e9
    idle_s = one.buckets[1].ready_s  # of the wire, as the first bucket is soon gone
    # Within nodes are 0.6 ms, and in rings of five buckets 70 hops of 30 us at most: 2.7 ms, which is 4 % of a step.
    assert slow.step_s == pytest.approx(step_s / 3 + idle_s + wire_s, rel=0.04)
    assert fast.efficiency > 0.98
