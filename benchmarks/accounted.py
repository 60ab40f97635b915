"""How much of an epoch's wall clock do stages and pauses explain? CIFAR-10, two ranks, one process each.

Claim: of the time from the start of rank 0's process to the end of training, at least 98 % lies in a named row:
start-up, warm-up, a stage, a pause or the finish. What is left is the residual that every run shows.

    python benchmarks/accounted.py --root DIR --json benchmarks/results/accounted-cifar10.json

It is `paceline train` itself, and its `result.json`; nothing is changed but the width of the network and the length.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import record

from paceline.core.run_dir import RunDir


def main() -> None:
    """Run, print, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="where CIFAR-10 is")
    parser.add_argument("--width", type=float, default=0.25, help="times the channels of ResNet-18 (default: 0.25)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="OUT", help="where to write the result")
    args = parser.parse_args()
    arguments = [f"data.source.root={args.root}", f"model.width={args.width}", "train.epochs=1", "parallel.device=cpu"]
    with tempfile.TemporaryDirectory() as folder:
        command = ["-m", "paceline", "train", "cifar10-resnet18", *arguments, "--ranks", str(args.ranks)]
        rundir = RunDir(Path(folder) / "run")
        subprocess.run([sys.executable, *command, "--run-dir", str(rundir.path)], check=True)
        result = rundir.read_result()
    assert result.account is not None
    found = {
        "benchmark": "accounted",
        **record.provenance(),
        "config": {"preset": "cifar10-resnet18", "width": args.width, "ranks": args.ranks, "epochs": 1},
        "account": result.account.model_dump(),
        "stages": {name: stage.model_dump() for name, stage in result.stages.items()},
        "steps": result.steps,
    }
    print(f"explained {result.account.explained:.3%} of {result.account.wall_s:.1f} s")
    if args.json:
        record.write(args.json, found)


if __name__ == "__main__":
    main()
