"""Does `paceline why` name the cause that was planted between two runs first, and nothing between equal runs?

    python benchmarks/why.py --only script-workers recipe-width
    python benchmarks/why.py --identical 10 --json benchmarks/results/why.json

Each pair is two short runs: of `why_script.py` under `paceline watch`, or of the recipe digits. The second differs in
the planted cause, and in things that explain nothing: a label, an environment variable, and for speed the seed.
Exits with 1 if fewer than 9 in 10 causes come first, or if equal runs are blamed.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import record

from paceline.core.why_result import WhyResult
from paceline.report.why_compare import compare_sides
from paceline.report.why_sides import read_side

SCRIPT = Path(__file__).with_name("why_script.py")
NEEDED = 0.9
BUSY = "while True: pass"
COMMON = ["--ranks=1", "train.epochs=4", "parallel.threads=1", "log.every=1st", "log.report=off", "data.loader=threads",
          "train.eval_every=4ep", "checkpoint.every=off", "schedule.warmup=0ep", "model.width=0.25"]  # fmt: skip
INPUT_BOUND = ("model.name=empty", "model.width=1", "data.image_size=64", "data.workers=1")


@dataclass(frozen=True)
class Planted:
    """A cause: what the second run has in addition, and the name by which the first cause must be found.

    `a` and `b` are all arguments of the two runs. `edit` replaces text of the script. `busy` is the number of processes
    beside the second run. `about` is `speed` or `outcome`.
    """

    name: str
    expected: str
    a: tuple[str, ...] = ()
    b: tuple[str, ...] = ()
    edit: tuple[str, str] = ("", "")
    environ: tuple[str, str] = ("", "")
    busy: int = 0
    ranks: int = 1
    about: str = "speed"

    @property
    def is_script(self) -> bool:
        """Whether the runs are of the script."""
        return self.name.startswith("script")


CAUSES = (
    Planted("script-workers", "workers", ("--load-ms=1", "--workers=1"), ("--load-ms=1", "--workers=0")),
    Planted("script-slow-transform", "getitem",
            edit=("image[:, index % 10] += 1.0", "image[:, index % 10] += 1.0; [image.sort() for _ in range(20)]")),
    Planted("script-omp-threads", "OMP_NUM_THREADS|threads", ("--width=48",), ("--width=48",), environ=("2", "1")),
    Planted("script-batch-size", "batch.size", ("--batch-size=64",), ("--batch-size=4",)),
    Planted("script-logging", "log.every", ("--width=8", "--log-every=50"), ("--width=8", "--log-every=1")),
    Planted("script-image-size", "image.size|input", ("--image-size=24",), ("--image-size=40",)),
    Planted("script-width", "width|parameters", ("--width=8",), ("--width=24",)),
    Planted("script-neighbor", "load of other", ("--width=32",), ("--width=32",), busy=3),
    Planted("script-evaluation", "eval", ("--images=512", "--eval-every=4"), ("--images=512", "--eval-every=1")),
    Planted("script-checkpoints", "save|checkpoint", ("--width=8", "--save-every=64"), ("--width=8", "--save-every=1")),
    Planted("script-anomaly", "anomaly", (), ("--anomaly",)),
    Planted("script-model-code", "build_model|model|code",
            edit=("nn.AdaptiveAvgPool2d", "nn.Conv2d(width, width, 5, padding=2), nn.AdaptiveAvgPool2d")),
    Planted("script-slow-rank", "slow.rank|straggler", ("--images=512",), ("--images=512", "--slow-rank=1"), ranks=2),
    Planted("script-lr", "lr", ("--lr=0.05",), ("--lr=0.0001",), about="outcome"),
    Planted("script-smoothing", "smoothing", ("--label-smoothing=0",), ("--label-smoothing=0.4",), about="outcome"),
    Planted("script-epochs", "epochs|steps", ("--epochs=4",), ("--epochs=1",), about="outcome"),
    Planted("recipe-width", "model.width", (), ("model.width=0.5",)),
    Planted("recipe-batch-size", "data.batch_size", (), ("data.batch_size=8",)),
    Planted("recipe-image-size", "data.image_size", (), ("data.image_size=24",)),
    Planted("recipe-augmentation", "data.augment", INPUT_BOUND,
            (*INPUT_BOUND, "data.augment=[{name: rand_augment}]")),
    Planted("recipe-evaluation", "train.eval_every", (), ("train.eval_every=2st",)),
    Planted("recipe-checkpoints", "checkpoint.every", (), ("checkpoint.every=1st", "checkpoint.background=off")),
    Planted("recipe-lr", "optim.lr", (), ("optim.lr=0.00001",), about="outcome"),
    Planted("recipe-epochs", "train.epochs", ("train.epochs=6",), ("train.epochs=1.5",), about="outcome"),
)  # fmt: skip


@contextmanager
def neighbors(number: int) -> Iterator[None]:
    """Keep `number` processes busy within the block."""
    processes = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(number)]
    try:
        yield
    finally:
        for each in processes:
            each.kill()
            each.wait()


def run_script(folder: Path, arguments: Sequence[str], text: str, environ: dict[str, str], ranks: int) -> None:
    """Run the script with `text` under `paceline watch`."""
    work = folder.with_name(f"{folder.name}-work")
    work.mkdir(parents=True)
    (work / "train.py").write_text(text, encoding="utf-8")
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    command = [sys.executable, "-m", "paceline", "watch", "--run-dir", str(folder), "--",
               sys.executable, *launcher, "train.py", *arguments]  # fmt: skip
    subprocess.run(command, cwd=work, env={**os.environ, **environ}, check=True, capture_output=True)


def run_recipe(folder: Path, arguments: Sequence[str]) -> None:
    """Train the recipe digits with overrides."""
    command = [sys.executable, "-m", "paceline", "train", "digits", *COMMON, *arguments, f"--run-dir={folder}"]
    subprocess.run(command, check=True, capture_output=True)


def run_pair(cause: Planted, folder: Path) -> WhyResult:
    """Run both sides, and return what `paceline why` says."""
    text = SCRIPT.read_text(encoding="utf-8")
    for side, arguments in (("a", cause.a), ("b", cause.b)):
        is_second = side == "b"
        path = folder / cause.name / side
        noise = ["seed=1"] if is_second and cause.about == "speed" else ["seed=0"]
        with neighbors(cause.busy if is_second else 0):
            if not cause.is_script:
                run_recipe(path, [*arguments, *noise])
                continue
            environ = {"TOKENIZERS_PARALLELISM": str(not is_second)}
            if any(cause.environ):
                environ["OMP_NUM_THREADS"] = cause.environ[is_second]
            seed = [f"--seed={int(is_second and cause.about == 'speed')}", f"--tag={side}"]
            edited = text.replace(*cause.edit) if is_second and cause.edit[0] else text
            assert edited != text or not (is_second and cause.edit[0]), f"{cause.name}: nothing was replaced"
            run_script(path, [*arguments, *seed], edited, environ, cause.ranks)
    return compare_sides(*(read_side(folder / cause.name / side) for side in ("a", "b")))


def judge(cause: Planted, result: WhyResult) -> dict[str, Any]:
    """Return whether the planted cause comes first."""
    causes = result.causes if cause.about == "speed" else result.outcome_causes
    named = [each.difference.name for each in causes]
    place = next((n for n, name in enumerate(named, 1) if re.search(cause.expected, name)), None)
    assert result.speed is not None
    return {
        "cause": cause.name,
        "place": place,
        "named": named[:3],
        "ratio": round(result.speed.ratio.value, 3),
        "outcome": None if result.outcome is None else result.outcome.verdict,
    }


def main() -> int:
    """Run the pairs, print a line for each, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="names of planted causes (default: all)")
    parser.add_argument("--identical", type=int, default=0, help="number of pairs without a planted cause")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    chosen = [each for each in CAUSES if options.only is None or each.name in options.only]
    rows, equal = [], []
    with tempfile.TemporaryDirectory() as folder:
        for cause in chosen:
            rows.append(judge(cause, run_pair(cause, Path(folder))))
            print(json.dumps(rows[-1]), flush=True)
        for number in range(options.identical):
            kind = "recipe" if number % 2 else "script"
            result = run_pair(Planted(f"{kind}-equal-{number}", ""), Path(folder))
            assert result.speed is not None
            blamed = [each.difference.name for each in result.causes]
            equal.append({"kind": kind, "ratio": round(result.speed.ratio.value, 3), "blamed": blamed})
            print(json.dumps(equal[-1]), flush=True)
    first, blamed = sum(row["place"] == 1 for row in rows), sum(bool(row["blamed"]) for row in equal)
    print(f"{first} of {len(rows)} planted causes come first; {blamed} of {len(equal)} equal pairs are blamed")
    if options.json is not None:
        summary = {"first": first, "planted": len(rows), "blamed": blamed, "equal": len(equal)}
        record.write(options.json, {"provenance": record.provenance(), **summary, "rows": rows, "equal_pairs": equal})
    return int(first < NEEDED * len(rows) or blamed > 0)


if __name__ == "__main__":
    sys.exit(main())
