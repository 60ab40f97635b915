"""A thousand ranks in one process, hundreds at a real store, and sixteen that train.

No sample is lost or repeated, no two files have the same name, and the work of a rank does not grow with their number.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from paceline.core.dataset import DatasetInfo
from paceline.core.errors import RecipeError
from paceline.core.random import permutation
from paceline.core.run_dir import RunDir
from paceline.data.order import EvalShard, TrainOrder
from paceline.parallel.environ import world_from_environ
from paceline.parallel.rendezvous import missing_keys
from paceline.recipe.load import Patch, load
from paceline.recipe.plan import Plan
from paceline.report.read_run import MAX_NODES, read_run
from paceline.training.measurements import trace_file_name

RANKS, RANKS_PER_NODE = 1024, 4
NODES = RANKS // RANKS_PER_NODE
NUM_CONNECTED = 256
MEETING = Path(__file__).with_name("many_ranks_script.py")
TIMEOUT_S = 60
SHORT_OF_NAMES = {"RES_OPTIONS": "timeout:1 attempts:1"}
"""glibc options that prevent name server queries, which torch sends for each store connection.

A small name server drops some of hundreds of queries, which are repeated only 5 s later.
"""


def task(rank: int, ranks: int = RANKS) -> dict[str, str]:
    """Return the environment of a task that srun starts, in a job with four tasks per node."""
    nodes = ranks // RANKS_PER_NODE
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank % RANKS_PER_NODE),
        "SLURM_NODEID": str(rank // RANKS_PER_NODE),
        "SLURM_STEP_NUM_TASKS": str(ranks),
        "SLURM_STEP_TASKS_PER_NODE": f"{RANKS_PER_NODE}(x{nodes})",
        "SLURM_STEP_NODELIST": f"node[0001-{nodes:04}]",
    }


def lines_run(work: Callable[[], object]) -> int:
    """Return how many lines of Python `work` runs: a measure of time that other programs do not affect."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def test_1024_tasks_have_their_own_ranks_and_the_same_store_address() -> None:
    worlds = [world_from_environ(task(rank)) for rank in range(RANKS)]
    assert [world.rank for world in worlds] == list(range(RANKS))
    assert {(each.world_size, each.local_world_size, each.num_nodes) for each in worlds} == {(RANKS, 4, NODES)}
    assert len({(each.master_addr, each.master_port) for each in worlds}) == 1 and worlds[0].master_addr == "node0001"
    assert sum(world.is_main for world in worlds) == 1 and sum(world.is_node_main for world in worlds) == NODES


def test_world_from_environ_takes_as_long_for_1024_ranks_as_for_8() -> None:
    of = {ranks: lines_run(lambda ranks=ranks: world_from_environ(task(ranks - 1, ranks))) for ranks in (8, RANKS)}
    assert of[RANKS] == of[8] > 20


def test_1024_ranks_take_each_sample_once_in_the_order_of_one_rank() -> None:
    num_images, batch_size = 50_000, 4 * RANKS
    whole = TrainOrder(3, num_images, batch_size)
    ranks = [replace(whole, rank=rank, world_size=RANKS) for rank in range(RANKS)]
    for epoch in (0, 7):
        steps = range(epoch * whole.steps_per_epoch, (epoch + 1) * whole.steps_per_epoch)
        taken = [np.concatenate([rank.indices(step) for rank in ranks]) for step in steps]
        assert all((step == whole.indices(number)).all() for number, step in zip(steps, taken, strict=True))
        every = np.concatenate(taken)
        assert len(every) == len(set(every.tolist())) == num_images // batch_size * batch_size
        assert set(every.tolist()) <= set(permutation(3, epoch, num_images).tolist())


@pytest.mark.parametrize("num_images", [10_007, 1024, 100], ids=["uneven", "one each", "fewer than ranks"])
def test_1024_ranks_evaluate_each_image_once_in_equal_shares(num_images: int) -> None:
    shards = [EvalShard(num_images, batch_size=8, rank=rank, world_size=RANKS) for rank in range(RANKS)]
    parts = [[each for number in range(shard.num_batches) for each in shard.indices(number)] for shard in shards]
    assert [each for part in parts for each in part] == list(range(num_images))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_the_plan_for_1024_ranks_is_correct_and_takes_as_long_as_for_2() -> None:
    train = DatasetInfo("photographs", "train", 1_281_167, ("a", "b"), 3, (224, 224), (0.5,) * 3, (0.25,) * 3)
    val = replace(train, split="val", num_images=50_000)
    recipe = load("synthetic", Patch.parse(["data.batch_size=32768", "train.steps=400"])).recipe
    plans = {ranks: Plan.derive(recipe, ranks, train, val) for ranks in (1, 2, RANKS)}
    assert {ranks: (plan.world_size, plan.rank_batch, plan.micro_batch) for ranks, plan in plans.items()} == {
        1: (1, 32_768, 32_768),
        2: (2, 16_384, 16_384),
        RANKS: (RANKS, 32, 32),
    }
    assert len({(plan.steps_per_epoch, plan.dropped_images, plan.total_steps) for plan in plans.values()}) == 1
    assert plans[RANKS].steps_per_epoch == 39 and plans[RANKS].dropped_images == 1_281_167 - 39 * 32_768
    of = {ranks: lines_run(lambda ranks=ranks: Plan.derive(recipe, ranks, train, val)) for ranks in (2, RANKS)}
    assert of[RANKS] == of[2] > 50
    uneven = load("synthetic", Patch.parse(["data.batch_size=33000"])).recipe
    with pytest.raises(RecipeError, match=r"33000 does not divide evenly over 1,024 ranks \(try 32768\)"):
        Plan.derive(uneven, RANKS, train, val)


def test_1024_ranks_and_256_nodes_write_different_files(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    of_ranks = [[run.samples(rank), run.stacks(rank), run.trace / trace_file_name(rank)] for rank in range(RANKS)]
    names = [path for paths in of_ranks for path in paths] + [run.telemetry(node) for node in range(NODES)]
    names += [run.steps, run.evals, run.metrics, run.attempts, run.recipe, run.merged_trace]
    assert len({str(name) for name in names}) == len(names) == 3 * RANKS + NODES + 6


def test_nodes_are_ordered_by_number(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.recipe.write_text(json.dumps({"extends": "digits"}))
    for node in range(NODES):
        run.telemetry(node).write_text(json.dumps({"unix_s": 1e9 + node, "cpu": 0.5}) + "\n")
    read = read_run(run)
    assert read.num_nodes == NODES
    assert [node.number for node in read.nodes] == list(range(MAX_NODES))


class CountingStore:
    """A store with given keys that counts the queries."""

    def __init__(self, there: set[str]) -> None:
        self.there, self.questions = there, 0

    def check(self, keys: list[str]) -> bool:
        self.questions += 1
        return self.there.issuperset(keys)


@pytest.mark.parametrize(("missing", "most"), [((), 1), ((1023,), 21), ((0, 511, 900), 61)])
def test_missing_ranks_of_1024_are_determined_by_few_queries(missing: tuple[int, ...], most: int) -> None:
    keys = [f"here/{rank}" for rank in range(RANKS)]
    store = CountingStore({key for rank, key in enumerate(keys) if rank not in missing})
    assert list(missing_keys(store, keys)) == [keys[rank] for rank in missing]
    assert store.questions <= most


@pytest.fixture
def connect(forking, tmp_path: Path) -> Callable[..., dict]:
    """Return a function that connects so many ranks except the missing ones, and returns what rank 0 sees."""

    def run(*numbers: int) -> dict:
        process = forking.start([str(MEETING), *map(str, numbers)], tmp_path, SHORT_OF_NAMES)
        try:
            out, err = process.communicate(timeout=TIMEOUT_S)
        finally:
            process.kill()
            process.wait()
        assert process.returncode == 0, err
        return json.loads(out)

    return run


def test_256_ranks_connect_to_a_real_store_and_exchange_heartbeats(connect) -> None:
    assert connect(NUM_CONNECTED) == {"seen": [[rank, "alive"] for rank in range(NUM_CONNECTED)], "refusals": {}}


def test_missing_ranks_of_256_are_named_on_all_others(connect) -> None:
    refusal = "WORLD_SIZE: 256, but ranks 77, 200 did not come within 2s"
    assert connect(NUM_CONNECTED, 77, 200) == {"seen": [], "refusals": {refusal: NUM_CONNECTED - 2}}


SIXTEEN = (
    *("train", "synthetic", "model.norm=none", "model.width=0.1", "data.source.num_images=128", "data.batch_size=32"),
    *("data.source.num_val_images=37", "data.source.image_size=16", "data.augment=[pad_crop,flip]", "data.workers=0"),
    *("optim.lr=0.02", "train.steps=4", "train.precision=fp64", "parallel.threads=1", "log.every=1st"),
    *("log.samples=true", "log.tensorboard=off", "log.report=off", "measure.telemetry=off", "--json"),
)


def test_16_ranks_train_the_same_as_2(paceline, tmp_path: Path, lines_of) -> None:
    results, samples, weights = {}, {}, {}
    for ranks in (2, 16):
        run = tmp_path / str(ranks)
        results[ranks] = paceline(*SIXTEEN, "--ranks", str(ranks), "--run-dir", str(run)).result
        parts = [lines_of(run / f"steps.rank{rank}.jsonl") for rank in range(ranks)]
        samples[ranks] = [[sample for each in step for sample in each["samples"]] for step in zip(*parts, strict=True)]
        weights[ranks] = load_file(max((run / "checkpoints").glob("step-*")) / "model.safetensors")
    assert (results[16]["status"], results[16]["world_size"]) == ("completed", 16)
    assert samples[16] == samples[2] and [len(step) for step in samples[16]] == [32] * 4
    assert sorted(sample for step in samples[16] for sample in step) == list(range(128))
    assert results[16]["eval"]["images"] == results[2]["eval"]["images"] == 37
    assert results[16]["eval"] == pytest.approx(results[2]["eval"], abs=1e-9)
    # float64 rounds at 1e-16; sums over 16 ranks have another order than over 2.
    for name, weight in weights[2].items():
        np.testing.assert_allclose(weights[16][name], weight, rtol=1e-9, atol=1e-12)
