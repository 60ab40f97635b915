"""How accurate does a recipe become, and in what time? Train it once a seed, and record what came out.

    python benchmarks/accuracy.py cifar10-cpu --seeds 0 --set data.source.root=DIR --json benchmarks/results/NAME.json

Each seed is a new process of `paceline train`, so the time is the user's: start-up and evaluations included. The
mean, the spread over seeds and n stand beside every run's own evaluations. Folders are left out of the record.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import record


def main() -> None:
    """Train, print, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="one run each (default: 0)")
    parser.add_argument("--ranks", default="1")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="overrides for every run")
    parser.add_argument("--note", default="", help="what a reader of the result should know")
    parser.add_argument("--json", type=Path, metavar="OUT", help="where to write the result")
    args = parser.parse_args()
    runs = [trained([args.recipe, "--ranks", args.ranks, *args.set, f"seed={seed}"]) for seed in args.seeds]
    for seed, run in zip(args.seeds, runs, strict=True):
        print(f"seed {seed}: {summary(run)}")
    values = {"benchmark": "accuracy", "note": args.note, **record.provenance(), "recipe": args.recipe}
    values["command"] = without_folders(values["command"])
    values["top1"] = over_seeds([run["judged"]["top1"] for run in runs])
    values["wall_s"] = over_seeds([run["result"]["time"]["wall_s"] for run in runs])
    if args.json:
        record.write(args.json, {**values, "runs": dict(zip(map(str, args.seeds), runs, strict=True))})


def trained(arguments: list[str]) -> dict[str, Any]:
    """Run `paceline train` with `words`; return its result, its evaluations, and the evaluation that counts."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder, "run")
        command = [sys.executable, "-m", "paceline", "train", *arguments, "--run-dir", str(run_dir), "--json"]
        ended = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if ended.returncode:
            raise SystemExit(f"error: {' '.join(arguments)}: exit code {ended.returncode}")
        evals = [json.loads(line) for line in (run_dir / "evals.jsonl").read_text().splitlines()]
        result = json.loads(ended.stdout)
    result["provenance"].pop("command", None)
    return {"judged": result["ema"] or result["eval"], "evals": evals, "result": result}


def summary(run: dict[str, Any]) -> str:
    """Return a line about one run."""
    result = run["result"]
    minutes, rate = result["time"]["wall_s"] / 60, result["throughput"]["images_per_s"]
    return f"top-1 {run['judged']['top1']:.4f} in {minutes:.1f} min, {result['epochs']:g} epochs, {rate:.0f} images/s"


def over_seeds(values: list[float]) -> dict[str, Any]:
    """Return the mean of `values`, their standard deviation when there are several, and n."""
    deviation = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return {"mean": float(np.mean(values)), "sd": deviation, "n": len(values)}


def without_folders(command: str) -> str:
    """Return `command` with folders and files of this machine replaced."""
    arguments = [f"{word.partition('=')[0]}=DIR" if "=/" in word else word for word in command.split(" ")]
    return " ".join("OUT" if word.startswith("/") else word for word in arguments)


if __name__ == "__main__":
    main()
