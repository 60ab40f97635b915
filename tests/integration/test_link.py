"""Two hosts and the link between them: a slow one is the bottleneck of a run, and a fast one is not.

The hosts are network namespaces joined by a virtual cable, which a token bucket holds to 100 Mbit/s or to nothing.
They need root and `ip` and `tc` (iproute2); nothing outside of them is touched.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from paceline.lab.predict.measured import read_collective

LIMIT_S = 120
SLOW_BIT_PER_S = 100e6
ADDRESSES = ("10.77.0.1", "10.77.0.2")
# 1.8 MB of gradients take 0.15 s at 100 Mbit/s and computing a step takes as long; without the limit they take 9 ms.
WORDS = (
    *("train", "data.source.name=synthetic", "data.source.image_size=16", "data.source.num_val_images=16"),
    *("data.batch_size=192", "data.workers=0", "model.width=0.2", "train.steps=25"),
    *("parallel.threads=1", "parallel.timeout=30s", "measure.warmup_steps=5", "measure.communication=on"),
    *("train.eval_every=off", "checkpoint.every=off", "log.report=off"),
)


@dataclass(frozen=True)
class Link:
    """Two hosts, by the names of their namespaces."""

    hosts: tuple[str, str]

    def shape(self, rate: str) -> None:
        """Send no faster than `rate` from either host."""
        for host in self.hosts:
            bucket = ("tbf", "rate", rate, "burst", "64kb", "latency", "100ms")
            do("tc", "-n", host, "qdisc", "replace", "dev", "eth0", "root", *bucket)

    def train(self, run: Path) -> dict:
        """Train with one rank on each host; return the result."""
        self.start([sys.executable, "-m", "paceline", *WORDS, "--run-dir", str(run)], run.parent)
        return json.loads((run / "result.json").read_text())

    def start(self, command: list[str], folder: Path) -> None:
        """Run a command as one rank on each host, and wait for both."""
        ranks = [self._start(rank, command, folder) for rank in range(2)]
        try:
            errors = [rank.communicate(timeout=LIMIT_S)[1] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.communicate()
        assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(errors)[-4000:]

    def _start(self, rank: int, command: list[str], folder: Path) -> "subprocess.Popen[str]":
        """Start a rank as torchrun does on each of two nodes. `ip` becomes the program, so it can be killed."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        world = {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": ADDRESSES[0],
            "MASTER_PORT": "29500",  # nobody else is in the namespace
            "GLOO_SOCKET_IFNAME": "eth0",
        }
        return subprocess.Popen(
            ["ip", "netns", "exec", self.hosts[rank], *command],
            cwd=folder,
            env=clean | world,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )


def do(*command: str) -> None:
    """Run a command; raise `CalledProcessError` with what it says."""
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=10)


def connect(hosts: tuple[str, str]) -> None:
    for host in hosts:
        do("ip", "netns", "add", host)
    do("ip", "link", "add", "eth0", "netns", hosts[0], "type", "veth", "peer", "name", "eth0", "netns", hosts[1])
    for host, address in zip(hosts, ADDRESSES, strict=True):
        do("ip", "-n", host, "address", "add", f"{address}/24", "dev", "eth0")
        do("ip", "-n", host, "link", "set", "lo", "up")
        do("ip", "-n", host, "link", "set", "eth0", "up")


@pytest.fixture
def link() -> Iterator[Link]:
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"two hosts need {' and '.join(missing)} (install iproute2)")
    made = Link((f"paceline{os.getpid()}a", f"paceline{os.getpid()}b"))
    try:
        try:
            connect(made.hosts)
            made.shape("10gbit")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"two hosts need namespaces, veth and tbf, and here: {error.stderr.strip()}")
        yield made
    finally:
        for host in made.hosts:
            subprocess.run(["ip", "netns", "delete", host], capture_output=True, timeout=10)


def test_a_slow_link_is_the_bottleneck_and_a_fast_one_is_not(link: Link, tmp_path: Path) -> None:
    # Whoever else uses the cores holds up what is sent, too; a link that is slow is so every time.
    for attempt in range(3):
        fast = link.train(tmp_path / f"fast{attempt}")
        if fast["verdict"]["bottleneck"] != "communication-bound":
            break
    link.shape("100mbit")
    slow = link.train(tmp_path / "slow")
    assert slow["verdict"]["bottleneck"] == "communication-bound", slow["verdict"]
    assert fast["verdict"]["bottleneck"] != "communication-bound", fast["verdict"]
    assert slow["weights_sha256"] == fast["weights_sha256"]

    sent = slow["communication"]
    assert sent["bytes"] == fast["communication"]["bytes"] > 1_500_000
    # Two ranks send each byte once: half of the gradients to be added up, and half of the sums. The bucket lets 64 kB
    # through at once, and headers take 5 %; the rest of what is more is waiting for the other rank.
    line_s = 8 * sent["bytes"] / SLOW_BIT_PER_S
    assert 0.85 * line_s < sent["wire_s"] < 3 * line_s
    assert sent["exposed_s"] > 0.5 * line_s


def test_what_all_reduces_say_of_a_link_is_what_it_is_held_to(link: Link, tmp_path: Path) -> None:
    link.shape("100mbit")
    link.start([sys.executable, "-m", "paceline", "scale", "--collective", "--out", "wire.json"], tmp_path)
    found = read_collective(tmp_path / "wire.json")
    assert (found.backend, found.ranks, found.nodes) == ("gloo", 2, 2)
    # Headers take 5 % of the line, and the bucket lets 64 kB of each through at once, which is most of the smallest.
    assert 0.85 * SLOW_BIT_PER_S / 8 < found.bytes_per_s < 1.05 * SLOW_BIT_PER_S / 8
