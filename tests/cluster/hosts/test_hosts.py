"""Runs over hosts that no scheduler watches: the same bits as on one machine, whatever happens to a link or a host."""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

STEPS = 40
ARGS = (
    *("train", "synthetic", "model.width=0.1", "data.source.num_images=240", "data.source.num_val_images=24"),
    *("data.batch_size=12", "data.augment=[pad_crop,flip]", "data.workers=0", "train.ema.decay=0.9"),
    *("checkpoint.every=10st", "log.every=1st", "log.samples=true", "log.tensorboard=off", "log.report=off"),
    *("parallel.threads=1", f"train.steps={STEPS}", "--json"),
)
TIMEOUT_S = 4.0
EXPLAINS_S = 6.0
"""What a rank may take, on a busy machine, to look round for who is lost and to end: two beats and a second or two."""
SLOW = "80mbit"
"""A step of a tenth of a second, most of it for its gradients: a run lasts long enough to be cut."""
ALONE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


def steps_of(run: Path) -> int:
    path = run / "steps.rank0.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def result_of(run: Path) -> dict:
    return json.loads((run / "result.json").read_text())


def test_two_hosts_give_the_same_result_as_two_ranks_of_one(hosts, run: Path, uninterrupted, same) -> None:
    """As it is typed on each of two machines, whose names lead to their addresses."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "RANK", "WORLD"))}
    meet = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "host1:29400", "--rdzv-id", "photos")
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", *meet)
    command = [*torchrun, "--max-restarts", "3", "-m", "paceline", *ARGS, "--run-dir", str(run), "--resume"]
    agents = [hosts.machines[name].start(command, run.parent, clean) for name in ("host1", "host2")]
    ends = hosts.completed(*agents, within_s=120)
    assert [end.code for end in ends] == [0, 0], ends
    result, alone = result_of(run), result_of(uninterrupted(2, *ARGS))
    assert (result["status"], result["world_size"], result["provenance"]["launcher"]) == ("completed", 2, "torchrun")
    assert result["weights_sha256"] == alone["weights_sha256"]
    same(run, uninterrupted(2, *ARGS))


def test_three_hosts_wait_for_the_one_whose_link_is_slow(hosts, run: Path, uninterrupted, same) -> None:
    hosts.shape(SLOW, "host3")
    ends = hosts.completed(*hosts.by_hand(("host1", "host2", "host3"), *ARGS, "--run-dir", str(run)))
    assert [end.code for end in ends] == [0, 0, 0], ends
    assert result_of(run)["world_size"] == 3
    same(run, uninterrupted(3, *ARGS))


def test_ranks_connect_if_a_host_name_resolves_to_loopback(
    hosts, run: Path, tmp_path: Path, uninterrupted, same
) -> None:
    """As Debian's installer writes it: nobody else can reach what listens at 127.0.1.1."""
    for name in ("host1", "host2"):
        own = tmp_path / name
        own.write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n")
        hosts.machines[name]("mount", "--bind", str(own), "/etc/hosts")
    args = (*ARGS, f"parallel.timeout={TIMEOUT_S}s", "--run-dir", str(run))
    ends = hosts.completed(*hosts.by_hand(("host1", "host2"), *args))
    assert [end.code for end in ends] == [0, 0], ends
    same(run, uninterrupted(2, *ARGS))


def test_a_link_that_is_cut_for_five_seconds_is_survived(hosts, run: Path, uninterrupted, same) -> None:
    hosts.shape(SLOW)
    args = (*ARGS, "parallel.timeout=30s", "--run-dir", str(run))
    agents = [hosts.agent(name, *args, to="host1") for name in ("host1", "host2")]
    hosts.wait(lambda: steps_of(run) > 5, *agents)
    hosts.cut("host2")
    time.sleep(0.5)  # what is on its way arrives
    stood_at = steps_of(run)
    time.sleep(4.5)
    assert steps_of(run) == stood_at < STEPS
    hosts.restore("host2")
    ends = hosts.completed(*agents)
    assert [end.code for end in ends] == [0, 0], ends
    assert [end.errors for end in ends] == [[], []]
    same(run, uninterrupted(2, *ARGS))


def test_a_link_that_stays_cut_ends_both_hosts_and_the_run_goes_on_afterwards(
    hosts, run: Path, uninterrupted, same
) -> None:
    hosts.shape(SLOW)
    args = (*ARGS, "--run-dir", str(run), "--resume")
    ranks = hosts.by_hand(("host1", "host2"), *args, f"parallel.timeout={TIMEOUT_S}s")
    hosts.wait(lambda: steps_of(run) > 15, *ranks)
    hosts.cut("host2")
    ends = hosts.completed(*ranks, within_s=TIMEOUT_S + EXPLAINS_S)
    assert [end.code for end in ends] == [1, 1], ends
    for rank, end in enumerate(ends):
        (line,) = end.errors
        assert line.startswith(f"error: rank {rank} of 2: rank {1 - rank} does not answer (last heartbeat "), line
        assert "or its machine is cut off)" in line
    assert not hosts.busy("host1") and not hosts.busy("host2")
    assert steps_of(run) < STEPS
    hosts.restore("host2")
    ends = hosts.completed(*hosts.by_hand(("host1", "host2"), *args))
    assert [end.code for end in ends] == [0, 0], ends
    same(run, uninterrupted(2, *ARGS))


def test_a_rank_that_is_killed_is_started_again_and_so_is_that_of_the_other_host(
    hosts, run: Path, uninterrupted, same
) -> None:
    """In the store that the killed one has left: the agents, which share it, do not count their restarts alike."""
    hosts.shape(SLOW)
    args = (*ARGS, "parallel.timeout=20s", "--run-dir", str(run), "--resume")
    agents = [hosts.agent(name, *args, to="host1", restarts=1) for name in ("host1", "host2")]
    hosts.wait(lambda: steps_of(run) > 15, *agents)
    killed = hosts.rank_by(agents[1])
    killed.kill()
    ends = hosts.completed(*agents)
    assert [end.code for end in ends] == [0, 0], ends
    same(run, uninterrupted(2, *ARGS))


def test_a_host_that_is_lost_is_replaced_by_another_and_the_run_goes_on(
    hosts, run: Path, uninterrupted, same, lines_of: Callable[[Path], list[dict]]
) -> None:
    """The new one comes first in the order of names, so that it gets rank 0, which was on the host that is left."""
    hosts.shape(SLOW)
    args = (*ARGS, f"parallel.timeout={TIMEOUT_S}s", "--run-dir", str(run), "--resume")
    agents = {name: hosts.agent(name, *args, to="host2", restarts=2, **ALONE) for name in ("host2", "host3")}
    hosts.wait(lambda: steps_of(run) > 15, *agents.values())
    hosts.lose("host3")
    hosts.completed(agents["host3"])
    agents["host1"] = hosts.agent("host1", *args, to="host2", restarts=2, **ALONE)
    ends = hosts.completed(agents["host1"], agents["host2"])
    assert [end.code for end in ends] == [0, 0], ends
    (line,) = ends[1].errors
    assert line.startswith("error: rank 0 of 2: rank 1 does not answer (last heartbeat "), line
    assert [row["host"] for row in lines_of(run / "attempts.jsonl") if "host" in row] == ["host2", "host1"]
    same(run, uninterrupted(2, *ARGS))
