"""Runs on hosts without a scheduler have the weights of one machine, whatever happens to a link or a host."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

STEPS = 24
ARGS = (
    *("train", "synthetic", "model.width=0.1", "data.source.num_images=240", "data.source.num_val_images=24"),
    *("data.batch_size=12", "data.augment=[pad_crop,flip]", "data.workers=0", "train.ema.decay=0.9"),
    *("checkpoint.every=5st", "log.every=1st", "log.samples=true", "log.tensorboard=off", "log.report=off"),
    *("parallel.threads=1", f"train.steps={STEPS}", "--json"),
)
TIMEOUT_S = 4.0
EXPLAINS_S = 6.0
"""Time for a rank on a busy machine to find a lost peer and exit: two heartbeats and one or two seconds."""
SLOW = "80mbit"
"""A step of a tenth of a second, most of it for its gradients, so that a run is long enough to be interrupted."""
RESUMES_S = 20.0
"""TCP repeats a lost packet at doubling intervals, so after a cut of 5 s it may wait for 5 s and its first interval."""
ALONE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


def steps_of(run: Path) -> int:
    path = run / "steps.rank0.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def result_of(run: Path) -> dict:
    return json.loads((run / "result.json").read_text())


def test_two_hosts_train_the_same_as_two_ranks_of_one(hosts, run: Path, uninterrupted, same) -> None:
    """The command is that of a user on each of two machines, whose names resolve to their addresses."""
    meet = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "host1:29400", "--rdzv-id", "photos")
    torchrun = ("-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", *meet)
    command = [*torchrun, "--max-restarts", "3", "-m", "paceline", *ARGS, "--run-dir", str(run), "--resume"]
    agents = [hosts.start(name, *command) for name in ("host1", "host2")]
    ends = hosts.wait_all(*agents, within_s=120)
    assert [end.code for end in ends] == [0, 0], str(ends)
    result, alone = result_of(run), result_of(uninterrupted(2, *ARGS))
    assert (result["status"], result["world_size"], result["provenance"]["launcher"]) == ("completed", 2, "torchrun")
    assert result["weights_sha256"] == alone["weights_sha256"]
    same(run, uninterrupted(2, *ARGS))


def test_three_hosts_wait_for_the_one_with_a_slow_link(hosts, run: Path, uninterrupted, same) -> None:
    hosts.shape(SLOW, "host3")
    ends = hosts.wait_all(*hosts.start_without_launcher(("host1", "host2", "host3"), *ARGS, "--run-dir", str(run)))
    assert [end.code for end in ends] == [0, 0, 0], str(ends)
    assert result_of(run)["world_size"] == 3
    same(run, uninterrupted(3, *ARGS))


def test_ranks_connect_if_a_host_name_resolves_to_loopback(
    hosts, run: Path, tmp_path: Path, uninterrupted, same
) -> None:
    """Debian's installer writes such a name; other hosts cannot reach a listener at 127.0.1.1."""
    for name in ("host1", "host2"):
        own = tmp_path / name
        own.write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n")
        hosts.machines[name]("mount", "--bind", str(own), "/etc/hosts")
    args = (*ARGS, f"parallel.timeout={TIMEOUT_S}s", "--run-dir", str(run))
    ends = hosts.wait_all(*hosts.start_without_launcher(("host1", "host2"), *args))
    assert [end.code for end in ends] == [0, 0], str(ends)
    same(run, uninterrupted(2, *ARGS))


def test_a_run_survives_a_link_that_is_cut_for_five_seconds(hosts, run: Path, uninterrupted, same) -> None:
    hosts.shape(SLOW)
    args = (*ARGS, "parallel.timeout=30s", "--run-dir", str(run))
    agents = [hosts.agent(name, *args, to="host1") for name in ("host1", "host2")]
    hosts.wait(lambda: steps_of(run) > 5, *agents)
    hosts.cut("host2")
    time.sleep(0.5)  # packets in flight arrive
    stood_at = steps_of(run)
    time.sleep(4.5)
    assert steps_of(run) == stood_at < STEPS
    hosts.restore("host2")
    deadline_s = time.monotonic() + RESUMES_S
    while steps_of(run) == stood_at:
        assert time.monotonic() < deadline_s, hosts.describe_network()
        time.sleep(0.1)
    ends = hosts.wait_all(*agents)
    assert [end.code for end in ends] == [0, 0], str(ends)
    assert [end.errors for end in ends] == [[], []]
    same(run, uninterrupted(2, *ARGS))


def test_a_link_that_stays_cut_ends_both_hosts_and_the_run_can_be_resumed(
    hosts, run: Path, uninterrupted, same
) -> None:
    hosts.shape(SLOW)
    args = (*ARGS, "--run-dir", str(run), "--resume")
    ranks = hosts.start_without_launcher(("host1", "host2"), *args, f"parallel.timeout={TIMEOUT_S}s")
    hosts.wait(lambda: steps_of(run) > 7, *ranks)
    hosts.cut("host2")
    ends = hosts.wait_all(*ranks, within_s=TIMEOUT_S + EXPLAINS_S)
    assert [end.code for end in ends] == [1, 1], str(ends)
    for rank, end in enumerate(ends):
        (line,) = end.errors
        assert line.startswith(f"error: rank {rank} of 2: rank {1 - rank} does not answer (last heartbeat "), line
        assert "or its machine is cut off)" in line
    assert not hosts.busy("host1") and not hosts.busy("host2")
    assert steps_of(run) < STEPS
    hosts.restore("host2")
    ends = hosts.wait_all(*hosts.start_without_launcher(("host1", "host2"), *args))
    assert [end.code for end in ends] == [0, 0], str(ends)
    same(run, uninterrupted(2, *ARGS))


def test_a_killed_rank_and_its_peer_are_restarted(hosts, run: Path, uninterrupted, same) -> None:
    """The agents share the store of the killed rank, and count their restarts differently."""
    hosts.shape(SLOW)
    args = (*ARGS, "parallel.timeout=20s", "--run-dir", str(run), "--resume")
    agents = [hosts.agent(name, *args, to="host1", restarts=1) for name in ("host1", "host2")]
    hosts.wait(lambda: steps_of(run) > 7, *agents)
    killed = hosts.rank_by(agents[1])
    killed.kill()
    ends = hosts.wait_all(*agents)
    assert [end.code for end in ends] == [0, 0], str(ends)
    same(run, uninterrupted(2, *ARGS))


def test_a_lost_host_is_replaced_and_the_run_is_resumed(
    hosts, run: Path, uninterrupted, same, lines_of: Callable[[Path], list[dict]]
) -> None:
    """The new host comes first in the order of names, so it gets rank 0, which was on the remaining host."""
    hosts.shape(SLOW)
    args = (*ARGS, f"parallel.timeout={TIMEOUT_S}s", "--run-dir", str(run), "--resume")
    quick = {"to": "host2", "restarts": 2, "notice_s": 3}
    agents = {name: hosts.agent(name, *args, **quick, **ALONE) for name in ("host2", "host3")}
    hosts.wait(lambda: steps_of(run) > 7, *agents.values())
    hosts.lose("host3")
    hosts.wait_all(agents["host3"])
    agents["host1"] = hosts.agent("host1", *args, **quick, **ALONE)
    ends = hosts.wait_all(agents["host1"], agents["host2"])
    assert [end.code for end in ends] == [0, 0], str(ends)
    (line,) = ends[1].errors
    assert line.startswith("error: rank 0 of 2: rank 1 does not answer (last heartbeat "), line
    assert [row["host"] for row in lines_of(run / "attempts.jsonl") if "host" in row] == ["host2", "host1"]
    same(run, uninterrupted(2, *ARGS))
