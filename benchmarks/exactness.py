"""Show that a run is a function of its recipe: one epoch on 1, 2 and 3 ranks, and on 2 under torchrun.

Compares, step by step, the samples and a CRC-32 of their augmented pixels, the losses, and the evaluation. The model
has no batch norm, whose statistics are of a rank's own images, and computes in float64: in float32 the rounding of a
sum over another split of the batch grows, as some activations change sign, into differences of 1e-2 within an epoch
(see `--precision fp32`), which would hide a real one. Needs CIFAR-10 (class folders or torchvision's layout):

    python benchmarks/exactness.py --root DIR --json benchmarks/results/exactness-cifar10.json
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ARGUMENTS = (
    "train",
    "cifar-base",
    "model.norm=none",
    "model.width=0.125",
    "data.batch_size=96",
    "data.augment=[pad_crop,flip,rotate]",
    "optim.lr_scaling=none",
    "optim.base_batch_size=auto",
    "optim.lr=0.01",
    "train.epochs=1",
    "log.every=1st",
    "log.samples=true",
    "parallel.threads=1",
    "checkpoint.every=off",
)
TORCHRUN = ("torch.distributed.run", "--nproc-per-node", "2", "-m", "paceline")
RUNS = (("1 rank", 1, ()), ("2 ranks", 2, ()), ("3 ranks", 3, ()), ("torchrun, 2 ranks", 2, TORCHRUN))


def train(arguments: list[str], ranks: int, program: tuple[str, ...], run: Path) -> dict:
    """Run the program and return its result."""
    command = [sys.executable, "-m", *(program or ("paceline",)), *arguments, "--run-dir", str(run), "--json"]
    if not program:
        command += ["--ranks", str(ranks)]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


def lines(path: Path) -> list[dict]:
    """Return the records of a JSON-lines file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def samples(run: Path, ranks: int) -> list[list[tuple[int, int]]]:
    """Return (sample index, checksum of its augmented pixels) of each global step, in order."""
    parts = [lines(run / f"steps.rank{rank}.jsonl") for rank in range(ranks)]
    return [
        [pair for record in step for pair in zip(record["samples"], record["crc32"], strict=True)]
        for step in zip(*parts, strict=True)
    ]


def main() -> int:
    """Run all, compare with the first, print a table; return 1 when a sample differs or a loss by more than 1e-4."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="CIFAR-10")
    parser.add_argument("--json", type=Path, help="where to write the record")
    parser.add_argument("--precision", choices=["fp64", "fp32"], default="fp64")
    parser.add_argument("overrides", nargs="*", help="KEY=VALUE")
    options = parser.parse_args()
    arguments = [*ARGUMENTS, f"train.precision={options.precision}"]
    arguments += [f"data.source.root={options.root.resolve()}", *options.overrides]
    rows, first = [], None
    with tempfile.TemporaryDirectory() as folder:
        for name, ranks, program in RUNS:
            run = Path(folder) / name.replace(" ", "-").replace(",", "")
            result = train(arguments, ranks, program, run)
            seen, losses = samples(run, ranks), [record["loss"] for record in lines(run / "steps.jsonl")]
            first = first or (seen, losses)
            rows.append(
                {
                    "run": name,
                    "steps": result["steps"],
                    "samples_equal": seen == first[0],
                    "largest_loss_difference": max(abs(a - b) for a, b in zip(losses, first[1], strict=True)),
                    "last_loss": losses[-1],
                    "eval": result["eval"],
                    "weights_sha256": result["weights_sha256"],
                    "recipe_hash": result["recipe_hash"],
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    record = {
        "words": [*ARGUMENTS, f"train.precision={options.precision}", *options.overrides],
        "runs": rows,
        "provenance": result["provenance"],
    }
    del record["provenance"]["command"]
    if options.json:
        options.json.write_text(json.dumps(record, indent=2) + "\n")
    return int(not all(row["samples_equal"] and row["largest_loss_difference"] <= 1e-4 for row in rows))


if __name__ == "__main__":
    sys.exit(main())
