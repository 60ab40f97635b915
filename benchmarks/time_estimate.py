"""How close is the time that a run predicts for itself after 20 s of training? 12 varied runs of about 90 s each.

Goal: half of the estimates are within 10 % of the truth, and 95 % intervals hold for at least 10 of the 12 runs. The
table has the prediction, its interval and the time that the rest of the run took, from `result.json`.

    python benchmarks/time_estimate.py --json benchmarks/results/time-estimate.json

Each run is first trained for 15 s to choose the number of its steps for this machine. Leave the machine alone
meanwhile: a run that shares its cores later takes longer than anything could predict. It takes 25 minutes.
"""

import argparse
import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import record
from PIL import Image

from paceline.core.results import RunResult
from paceline.core.run_dir import RunDir

SMALL = ("model.width=0.25", "parallel.device=cpu", "log.report=off", "log.tensorboard=off")
SYNTHETIC = ("synthetic", "model.name=resnet18_cifar", *SMALL)
CALIBRATION_S = 15


@dataclass(frozen=True)
class Case:
    """A run: `eval_every` and `save_every` are shares of its length in percent, 0 for never."""

    name: str
    args: tuple[str, ...]
    ranks: int = 1
    eval_every: int = 10
    save_every: int = 10
    needs_images: bool = False


CASES = (
    Case("digits, batch 128", ("digits", *SMALL)),
    Case("digits, batch 16", ("digits", *SMALL, "data.batch_size=16")),
    Case("digits, 2 ranks", ("digits", *SMALL), ranks=2),
    Case("digits, evaluated often", ("digits", *SMALL), eval_every=2),
    Case("digits, evaluated once, no checkpoints", ("digits", *SMALL), eval_every=100, save_every=0),
    Case(
        "digits, evaluates EMA and training images", ("digits", *SMALL, "train.ema.decay=0.99", "train.eval_train=on")
    ),
    Case("growing images", (*SYNTHETIC, "data.progressive.start_size=16", "data.progressive.multiple=8")),
    Case("wide model, large checkpoints", ("digits", "model.width=1", *SMALL[1:]), save_every=5),
    Case("folder of JPEG", ("folder", "model.name=resnet18_cifar", *SMALL, "data.image_size=64"), needs_images=True),
    Case(
        "folder, 2 ranks, worker processes",
        ("folder", "model.name=resnet18_cifar", *SMALL, "data.image_size=64", "data.workers=1"),
        ranks=2,
        needs_images=True,
    ),
    Case(
        "folder, evaluated rarely",
        ("folder", "model.name=resnet18_cifar", *SMALL, "data.image_size=64"),
        eval_every=50,
        save_every=0,
        needs_images=True,
    ),
    Case("digits, 2 ranks, micro-batches", ("digits", *SMALL, "train.accumulate=2"), ranks=2, eval_every=25),
)


def main() -> None:
    """Run, print, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=90, help="length of a run (default: 90)")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the runs, from 0 (default: all)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="where to write the result")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        images = write_images(Path(folder) / "images")
        for number, case in enumerate(CASES):
            if args.only is None or number in args.only:
                rows.append(run_case(case, images, Path(folder) / f"run-{number}", args.seconds))
                print(describe(rows[-1]), flush=True)
    known = [row for row in rows if row["error"] is not None]
    errors = [abs(row["error"]) for row in known]
    summary = {
        "runs": len(rows),
        "median_error": median(errors) if errors else None,
        "largest_error": max(errors, default=None),
        "intervals_hold": sum(row["is_within"] for row in known),
    }
    print(summary)
    if args.json:
        config = {"seconds": args.seconds, "calibration_s": CALIBRATION_S}
        record.write(
            args.json,
            {"benchmark": "time_estimate", **record.provenance(), "config": config, **summary, "rows": rows},
        )


def run_case(case: Case, images: Path, rundir: Path, length_s: float) -> dict[str, Any]:
    """Return the estimate and the truth of a run of about `length_s` seconds."""
    args = [*case.args, *([f"data.source.root={images}"] if case.needs_images else [])]
    whole = ["train.eval_every=100%", "checkpoint.every=off", "train.steps=100000"]
    tried = train(
        args + whole, case.ranks, rundir.with_name(f"{rundir.name}-tried"), [f"train.max_time={CALIBRATION_S}s"]
    )
    assert tried.forecast is not None, f"{case.name}: no two steps in {CALIBRATION_S} s"
    steps = max(50, round(length_s / tried.forecast.forecast.step_s))
    lengths = {"train.eval_every": case.eval_every, "checkpoint.every": case.save_every}
    planned = [f"{name}={f'{share}%' if share else 'off'}" for name, share in lengths.items()]
    result = train([*args, *planned, f"train.steps={steps}"], case.ranks, rundir)
    estimate = result.estimate
    values: dict[str, Any] = {"name": case.name, "ranks": case.ranks, "steps": steps, "wall_s": result.time.wall_s}
    names = ("made_s", "predicted_s", "low_s", "high_s", "actual_s", "error", "is_within")
    if estimate is None:
        return values | dict.fromkeys(names)
    found = {**estimate.forecast.model_dump(), **estimate.model_dump(), "is_within": estimate.is_within}
    shared = result.cpu.share if result.cpu else None
    return values | {name: found[name] for name in names} | {"lost_to_other_programs": shared}


def train(args: Sequence[str], ranks: int, rundir: Path, extra: Sequence[str] = ()) -> RunResult:
    """Return the result of `paceline train` in a new process."""
    command = [sys.executable, "-m", "paceline", "train", *args, *extra, "--ranks", str(ranks)]
    done = subprocess.run([*command, "--run-dir", str(rundir)], check=False, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(args)}: {done.stderr.strip().splitlines()[-1]}")
    return RunDir(rundir).read_result()


def write_images(root: Path) -> Path:
    """Write a folder of 1,200 JPEG files of 160 x 120 pixels in four classes, and return it."""
    rng = np.random.default_rng(0)
    for number in range(1200):
        folder = root / ("val" if number % 5 == 0 else "train") / f"class{number % 4}"
        folder.mkdir(parents=True, exist_ok=True)
        rough = Image.fromarray(rng.integers(0, 256, (15, 20, 3), dtype=np.uint8))
        rough.resize((160, 120), Image.Resampling.BICUBIC).save(folder / f"{number}.jpg", quality=90)
    return root


def describe(row: dict[str, Any]) -> str:
    """Return a line of the table."""
    text = f"{row['name']:45} {row['steps']:6,} steps"
    with contextlib.suppress(TypeError):  # no estimate was recorded
        text += f"  predicted {row['predicted_s']:6.1f} s ({row['low_s']:.0f} to {row['high_s']:.0f})"
        text += (
            f"  took {row['actual_s']:6.1f} s  {100 * row['error']:+5.1f} %  {'holds' if row['is_within'] else 'FAILS'}"
        )
    return text


if __name__ == "__main__":
    main()
