"""Is what `paceline predict-scaling` says of three and four hosts true, when it has seen one and two?

    python benchmarks/hosts.py --json benchmarks/results/hosts-cpu.json

Hosts are network namespaces on a bridge, each with a link that a token bucket holds to `--rate` and a share of the
cores that a control group holds to `--cpu`, so that four hosts on two cores have as much each as one alone. One rank
trains on each, with as many images a step. One and two hosts are run in turns, all-reduces are timed between two; then
three and four are predicted, which is written down, and only then run. The exit status is 1 where a step of them took
more than 10 % more or less than predicted.

It needs root, `ip` and `tc` (iproute2), and the cpu controller of control groups, of version 1 or 2.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import record

from paceline.lab.predict.from_run import (
    GradientBucket,
    MeasuredStep,
    build_step_model,
    predict_from_run,
    read_measured_step,
)
from paceline.lab.predict.network import AllReduceMeasurement, build_measured_network, read_all_reduce_file
from paceline.lab.predict.points import PredictionRequest

LIMIT_S: Final = 300
TOLERANCE: Final = 0.1
SEEN: Final = (1, 2)
UNSEEN: Final = (3, 4)
QUOTA_US: Final = 1_000
"""Of a share of the cores: the kernel's shortest, so that a rank that has used it up waits as briefly as can be."""
RANK_BATCH: Final = 64
ARGUMENTS: Final = (
    *("train", "data.source.name=synthetic", "data.source.image_size=16", "data.source.num_val_images=16"),
    *("data.source.num_images=4096", "data.workers=0", "model.width=0.2", "parallel.bucket_mb=0.5"),
    *("parallel.threads=1", "parallel.timeout=2min", "measure.warmup_steps=5", "measure.communication=on"),
    *("train.eval_every=off", "checkpoint.every=off", "log.report=off", "log.tensorboard=off", "optim.lr=0.01"),
)


@dataclass(frozen=True)
class Hosts:
    """Namespaces on a bridge, and the control group of each."""

    names: tuple[str, ...]
    groups: tuple[Path, ...]

    def run(self, num: int, command: Sequence[str], folder: Path) -> None:
        """Run a command as one rank on each of the first `num` hosts. Raise `SystemExit` where one fails."""
        ranks = [self._start(rank, num, command, folder) for rank in range(num)]
        try:
            errors = [rank.communicate(timeout=LIMIT_S)[1] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.communicate()
        if any(rank.returncode for rank in ranks):
            raise SystemExit(f"error: {num} hosts: {''.join(errors)[-2000:]}")

    def _start(self, rank: int, num: int, command: Sequence[str], folder: Path) -> "subprocess.Popen[str]":
        """Start a rank as torchrun does. The shell enters the group and becomes `ip`, which becomes the program."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        world = {"RANK": str(rank), "WORLD_SIZE": str(num), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        rendezvous = {
            "MASTER_ADDR": address(0),
            "MASTER_PORT": "29500",
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
        }
        enter = ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(self.groups[rank])]
        return subprocess.Popen(
            [*enter, "ip", "netns", "exec", self.names[rank], *command],
            cwd=folder,
            env=clean | rendezvous | (world if num > 1 else {}),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )


def main() -> int:
    """Run, predict, run, write; return 1 where the prediction is off."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="40mbit", help="of each host's link, as tc writes it (40mbit)")
    parser.add_argument("--cpu", type=float, default=0.25, help="cores of each host (0.25)")
    parser.add_argument("--steps", type=int, default=40, help="steps counted in each run (40)")
    parser.add_argument("--turns", type=int, default=3, help="runs of each number of hosts (3)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="where to write the result")
    parser.add_argument("--collective", type=Path, metavar="OUT", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.collective:  # as a rank on a host
        from paceline.cli.allreduce import time_allreduce
        from paceline.cli.options import ScaleOptions

        return time_allreduce(ScaleOptions(out=args.collective, as_json=True))
    caution = caution_of(os.getloadavg()[0], os.cpu_count() or 1)
    if caution:
        print(f"warning: {caution}", file=sys.stderr)
    with (
        tempfile.TemporaryDirectory(prefix="paceline-hosts-") as folder,
        hosts(max(UNSEEN), args.rate, args.cpu) as made,
    ):
        found = measured(made, Path(folder), args.steps, args.turns)
    if args.json:
        shape = {"rate": args.rate, "cores_a_host": args.cpu, "words": [*ARGUMENTS], "rank_batch": RANK_BATCH}
        record.write(args.json, {"benchmark": "hosts", **record.provenance(), "caution": caution, **shape, **found})
    return int(any(abs(each["error"]) > TOLERANCE for each in found["unseen"].values()))


def caution_of(load: float, cores: int) -> str:
    """Return in a sentence that a machine was busy before anything was run on it, "" where it was not."""
    if load <= cores:
        return ""
    return f"{load:.2f} processes wanted {cores} cores before it began: hosts may have had less than their share"


def measured(made: Hosts, folder: Path, steps: int, turns: int) -> dict[str, Any]:
    """Return what was seen, what was predicted from it, and what came of the hosts that were not seen."""
    wire = folder / "wire.json"
    made.run(2, [sys.executable, str(Path(__file__).resolve()), "--collective", str(wire)], folder)
    network = read_all_reduce_file(wire)
    print(f"network: {network.bytes_per_s / 1e6:.2f} MB/s, {network.alpha_s * 1e3:.2f} ms a hop", flush=True)
    seen = trained(made, SEEN, folder, steps, turns)
    alone, two = (typical(seen[num]) for num in SEEN)
    foretold = predicted(alone, two, network)
    print(f"predicted: {foretold}", flush=True)
    after = trained(made, UNSEEN, folder, steps, turns)
    unseen = {str(num): compared(foretold[str(num)], [each.step_s for each in after[num]]) for num in UNSEEN}
    print(json.dumps(unseen, indent=2), flush=True)
    return {
        "network": network.model_dump(mode="json"),
        "seen": {"1": dataclasses.asdict(alone), "2": dataclasses.asdict(two)},
        "seen_step_s": {str(num): [each.step_s for each in seen[num]] for num in SEEN},
        "predicted_step_s": foretold,
        "unseen": unseen,
        "unseen_typical": {str(num): dataclasses.asdict(typical(after[num])) for num in UNSEEN},
    }


def trained(made: Hosts, nums: Sequence[int], folder: Path, steps: int, turns: int) -> dict[int, list[MeasuredStep]]:
    """Train on so many hosts, in turns; return what a step of each run is made of."""
    found: dict[int, list[MeasuredStep]] = {num: [] for num in nums}
    for turn in range(turns):
        for num in nums if turn % 2 == 0 else nums[::-1]:
            run = folder / f"{num}-{turn}"
            arguments = [*ARGUMENTS, f"train.steps={steps + 5}", f"data.batch_size={num * RANK_BATCH}"]
            arguments += [] if num > 1 else ["measure.communication=off"]
            made.run(num, [sys.executable, "-m", "paceline", *arguments, "--run-dir", str(run)], folder)
            step = dataclasses.replace(read_measured_step(run, ranks_per_node=1), source=f"hosts {run.name}")
            print(f"{num} hosts, turn {turn + 1}: {step.step_s * 1e3:.1f} ms a step", flush=True)
            found[num].append(step)
    return found


def typical(steps: Sequence[MeasuredStep]) -> MeasuredStep:
    """Return the run whose step is the median, or the one below it."""
    return sorted(steps, key=lambda step: step.step_s)[(len(steps) - 1) // 2]


def predicted(
    alone: MeasuredStep, two: MeasuredStep, network: AllReduceMeasurement, at: Sequence[int] = UNSEEN
) -> dict[str, float]:
    """Return the seconds of a step on so many hosts, from those of a run on one and of a run on two."""
    args = PredictionRequest(at=tuple(at), ranks_per_node=1, rank_batch=two.rank_batch, images=two.images)
    model = build_step_model(two, build_measured_network(network), alone)
    return {str(each.ranks): each.step_s for each in predict_from_run(model, args).predictions}


def compared(predicted_s: float, measured_s: Sequence[float]) -> dict[str, Any]:
    """Return both, and how far the prediction is from the median, as a share of that."""
    typical_s = median(measured_s)
    error = predicted_s / typical_s - 1
    return {"predicted_s": predicted_s, "median_s": typical_s, "measured_s": list(measured_s), "error": error}


def step_of(values: dict[str, Any]) -> MeasuredStep:
    """Return a step as a result has it."""
    buckets = tuple(GradientBucket(**each) for each in values["buckets"])
    return MeasuredStep(**{**values, "buckets": buckets, "notes": tuple(values["notes"])})


@contextmanager
def hosts(num: int, rate: str, cpu: float) -> Iterator[Hosts]:
    """Make hosts, and remove them. Raise `SystemExit` where this machine cannot."""
    stem = f"paceline{os.getpid()}"
    bridge, names = f"{stem}br", tuple(f"{stem}h{number}" for number in range(num))
    with ExitStack() as undo:
        try:
            for name in (bridge, *names):
                do("ip", "netns", "add", name)
                undo.callback(do, "ip", "netns", "delete", name)
            do("ip", "-n", bridge, "link", "add", "br0", "type", "bridge")
            do("ip", "-n", bridge, "link", "set", "br0", "up")
            for number, name in enumerate(names):
                connect(name, bridge, number, rate)
            groups = tuple(undo.enter_context(share_of_cores(name, cpu)) for name in names)
        except (OSError, subprocess.CalledProcessError) as error:
            message = getattr(error, "stderr", "") or str(error)
            raise SystemExit(f"error: hosts need root, iproute2 and the cpu controller: {message.strip()}") from None
        yield Hosts(names, groups)


def connect(name: str, bridge: str, number: int, rate: str) -> None:
    """Give a host an address on the bridge, and a link that sends at `rate`."""
    port = f"port{number}"
    do("ip", "link", "add", "eth0", "netns", name, "type", "veth", "peer", "name", port, "netns", bridge)
    do("ip", "-n", bridge, "link", "set", port, "master", "br0", "up")
    do("ip", "-n", name, "address", "add", f"{address(number)}/24", "dev", "eth0")
    do("ip", "-n", name, "link", "set", "lo", "up")
    do("ip", "-n", name, "link", "set", "eth0", "up")
    bucket = ("tbf", "rate", rate, "burst", "64kb", "latency", "100ms")
    do("tc", "-n", name, "qdisc", "replace", "dev", "eth0", "root", *bucket)


@contextmanager
def share_of_cores(name: str, cpu: float) -> Iterator[Path]:
    """Make a control group whose processes have `cpu` cores together, before all others that ask, and remove it."""
    top = Path("/sys/fs/cgroup")
    is_second = (top / "cgroup.controllers").exists()
    group = top / name if is_second else top / "cpu" / name
    period_us = round(QUOTA_US / cpu)
    limits = {"cpu.max": f"{QUOTA_US} {period_us}", "cpu.weight": "10000"}
    if not is_second:
        limits = {"cpu.cfs_period_us": f"{period_us}", "cpu.cfs_quota_us": f"{QUOTA_US}", "cpu.shares": "65536"}
    group.mkdir()
    try:
        for file, limit in limits.items():
            (group / file).write_text(limit)
        yield group
    finally:
        group.rmdir()


def address(number: int) -> str:
    """Return the address of a host."""
    return f"10.79.0.{number + 1}"


def do(*command: str) -> None:
    """Run a command; raise `CalledProcessError` with what it says."""
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=10)


if __name__ == "__main__":
    sys.exit(main())
