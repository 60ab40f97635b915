"""Is a compute-bound run called CPU-starved where others have its cores, and not where it has them to itself?

    python benchmarks/cpu_starved.py --out benchmarks/results/cpu-starved.json   # on a machine that does nothing else

It trains one recipe again and again, in turns with `--busy` processes that count without end and without them, all on
the same `--cores` cores, and notes what the result of each run says: the bottleneck, the share of time that other
processes are charged with, and images/s. `slowdown` is what the runs beside busy processes really lost, against the
median of those without: 1 - images/s over theirs; `lost_share` should be close to it. `others_before` is how many cores
were busy before a run was started: more than a tenth without busy processes says that the machine was not free.

Runs beside busy processes take about sixty times as long and need no quiet machine, so each kind can be measured by
itself: with `--only`, the rows of the other kind in the file `--out` are kept.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, Final

from record import provenance, write

from paceline.measure.cpu import core_ticks

RECIPE: Final = (
    "digits",
    "model.width=0.125",
    "data.batch_size=64",
    "data.workers=0",
    "train.eval_every=off",
    "checkpoint.every=off",
    "log.report=off",
    "parallel.device=cpu",
)
"""Computing is all that it does: pixels in memory, no workers, no evaluation, no checkpoint."""
PAUSE_S: Final = 1.0
COUNT: Final = "while True: pass"


def main() -> int:
    """Measure, and write what was found; return 1 where a run was called wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10, help="of each kind (10)")
    parser.add_argument("--busy", type=int, default=8, help="processes beside a run (8)")
    parser.add_argument("--steps", type=int, default=100, help="of a run, of which ten are warm-up (100)")
    parser.add_argument("--cores", type=int, default=2, help="that all of them share (2)")
    parser.add_argument("--only", choices=("busy", "quiet"), help="one kind alone")
    parser.add_argument("--out", type=Path, help="a JSON file to write")
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[: args.cores]
    os.sched_setaffinity(0, cores)  # which is handed down to all that is started
    kinds = [args.only] if args.only else ["quiet", "busy"]
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    kept = json.loads(args.out.read_text()) if args.only and args.out and args.out.exists() else {}
    found.update({kind: kept[kind]["rows"] for kind in ("quiet", "busy") if kind in kept and kind != args.only})
    for _ in range(args.runs):
        for kind in kinds:
            before = others(cores)
            with busy(args.busy if kind == "busy" else 0):
                row = {"others_before": before, "steps": args.steps, **run(args.steps)}
            found[kind].append(row)
            print(f"{kind}: {row}", flush=True)
    if args.out:
        write(
            args.out,
            {**provenance(), "recipe": list(RECIPE), "beside": args.busy, "cores": len(cores), **summed(found)},
        )
    wrong = sum(
        (row["bottleneck"] == "cpu-starved") != (kind == "busy") for kind, rows in found.items() for row in rows
    )
    print(f"{wrong} of {sum(map(len, found.values()))} runs were called wrong")
    return 1 if wrong else 0


def others(cores: list[int]) -> float:
    """Return how many of the cores are busy before a run is started."""
    before, began_s = sum(core_ticks(cores)), time.perf_counter()
    time.sleep(PAUSE_S)
    ticks = sum(core_ticks(cores)) - before
    return round(ticks / os.sysconf("SC_CLK_TCK") / (time.perf_counter() - began_s), 3)


@contextlib.contextmanager
def busy(number: int) -> Iterator[None]:
    """Keep so many processes busy meanwhile."""
    processes = [subprocess.Popen([sys.executable, "-S", "-c", COUNT]) for _ in range(number)]
    try:
        yield
    finally:
        for process in processes:
            process.send_signal(signal.SIGKILL)
        for process in processes:
            process.wait(timeout=30)


def run(num_steps: int) -> dict[str, Any]:
    """Train `num_steps` once; return what the result says."""
    with tempfile.TemporaryDirectory(prefix="paceline-starved-") as folder:
        place = Path(folder) / "run"
        command = [sys.executable, "-P", "-m", "paceline", "train", *RECIPE, f"train.steps={num_steps}"]
        command += ["--run-dir", str(place), "--json"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=1800)
        result = json.loads((place / "result.json").read_text())
    cpu = result["cpu"]
    return {
        "bottleneck": result["verdict"]["bottleneck"],
        "lost_share": round(cpu["share"], 4),
        "own_share": round(cpu["own_share"], 4),
        "others_cores": round(cpu["others_cores"], 3),
        "pressure": round(cpu["pressure"], 4),
        "counted_s": round(cpu["wall_s"], 3),
        "images_per_s": round(result["throughput"]["images_per_s"], 1),
    }


def summed(found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return the rows of each kind with their counts of classes, and what was really lost where both were measured."""
    rates = {kind: median(row["images_per_s"] for row in rows) for kind, rows in found.items()}
    values: dict[str, Any] = {}
    for kind, rows in found.items():
        classes = [row["bottleneck"] for row in rows]
        values[kind] = {
            "classes": {name: classes.count(name) for name in dict.fromkeys(classes)},
            "lost_share": [min(row["lost_share"] for row in rows), max(row["lost_share"] for row in rows)],
            "images_per_s": rates[kind],
            "rows": rows,
        }
    if {"quiet", "busy"} <= found.keys():
        values["slowdown"] = round(1 - rates["busy"] / rates["quiet"], 4)
    return values


if __name__ == "__main__":
    sys.exit(main())
