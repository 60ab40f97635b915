"""A slow link between two hosts is the bottleneck of a run, and a fast one is not."""

import json
from pathlib import Path

from paceline.lab.predict.network import read_all_reduce_file

SLOW_BIT_PER_S = 30e6
PAIR = ("host1", "host2")
# 1.8 MB of gradients take 0.48 s at 30 Mbit/s, thrice the computation of a step; without the limit they take 9 ms.
ARGS = (
    *("train", "data.source.name=synthetic", "data.source.image_size=16", "data.source.num_val_images=16"),
    *("data.batch_size=192", "data.workers=0", "model.width=0.2", "train.steps=20"),
    *("parallel.threads=1", "parallel.timeout=30s", "measure.warmup_steps=5", "measure.communication=on"),
    *("train.eval_every=off", "checkpoint.every=off", "log.report=off"),
)


def result_of(hosts, run: Path) -> dict:
    """Train with one rank on each of two hosts; return the result."""
    ends = hosts.wait_all(*hosts.start_without_launcher(PAIR, *ARGS, "--run-dir", str(run)))
    assert [end.code for end in ends] == [0, 0], str(ends)
    return json.loads((run / "result.json").read_text())


def test_a_slow_link_is_the_bottleneck_and_a_fast_one_is_not(hosts, tmp_path: Path) -> None:
    # Other processes on the cores delay messages too, and slow a rank down; one of three runs must show the link.
    for attempt in range(3):
        fast = result_of(hosts, tmp_path / f"fast{attempt}")
        if fast["verdict"]["bottleneck"] != "communication-bound":
            break
    hosts.shape("30mbit", *PAIR)
    for attempt in range(3):
        slow = result_of(hosts, tmp_path / f"slow{attempt}")
        if slow["verdict"]["bottleneck"] == "communication-bound":
            break
    assert slow["verdict"]["bottleneck"] == "communication-bound", slow["verdict"]
    assert fast["verdict"]["bottleneck"] != "communication-bound", fast["verdict"]
    assert slow["weights_sha256"] == fast["weights_sha256"]

    sent = slow["communication"]
    assert sent["bytes"] == fast["communication"]["bytes"] > 1_500_000
    # Two ranks send each byte once: half of the gradients for the reduction, and half of the sums. The bucket passes 64
    # kB at once, and headers take 5 %; time beyond that is waiting for the other rank.
    line_s = 8 * sent["bytes"] / SLOW_BIT_PER_S
    assert 0.85 * line_s < sent["wire_s"] < 3 * line_s
    assert sent["exposed_s"] > 0.5 * line_s


def test_all_reduces_measure_the_bandwidth_of_a_link(hosts, tmp_path: Path) -> None:
    hosts.shape("30mbit", *PAIR)
    ends = hosts.wait_all(*hosts.start_without_launcher(PAIR, "allreduce", "--out", "wire.json"))
    assert [end.code for end in ends] == [0, 0], str(ends)
    found = read_all_reduce_file(tmp_path / "wire.json")
    assert (found.backend, found.ranks, found.nodes) == ("gloo", 2, 2)
    # Headers take 5 % of the bandwidth, and the bucket passes 64 kB of each size at once, which is most of the
    # smallest.
    assert 0.85 * SLOW_BIT_PER_S / 8 < found.bytes_per_s < 1.05 * SLOW_BIT_PER_S / 8
