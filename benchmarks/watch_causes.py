"""Does `paceline watch` name the right bottleneck of scripts that others wrote, when a cause is planted in them?

    python benchmarks/watch_causes.py --data FOLDER --timm-script timm/train.py \
        --torchvision-script vision/references/classification/train.py --imagenet-script imagenet/main.py \
        --accelerate-script cv_example.py --json benchmarks/results/watch-causes-cpu.json

The scripts are those of `watch_scripts.py`, and `peers/plain_train.py`. A cause is planted from outside: by
`watch_shim/`, by an argument of the script, or by the network between two namespaces (`hosts.py`, which needs root).
Two causes need a GPU, which `tests/emulated` emulates. Runs without a cause show what is named on the same small tasks.

The exit status is 1 if fewer than nine in ten causes are named, or if a run without one gets a bottleneck that is
neither `compute-bound` nor `unknown`. A busy machine plants causes of its own: run it on a quiet one.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import record
from hosts import hosts
from watch_scripts import (
    BENCHMARKS,
    Script,
    Size,
    add_script_options,
    arrange,
    command,
    named_scripts,
    run,
    scripts,
    stage_shares,
    watched,
)

from paceline.core.watch_result import WatchResult, read_watch_result

INPUT, LOG, EVALUATE, CHECKPOINT = "input-bound", "logging-bound", "evaluation-bound", "checkpoint-bound"
STRAGGLER: Final = "straggler-bound"
NO_CAUSE: Final = ("compute-bound", "unknown")
LEAST_NAMED: Final = 0.9
SIZE: Final = Size(pixels=48, batch=8, epochs=2, workers=1)
SIZES: Final = {"imagenet": Size(pixels=224, batch=8, epochs=2, workers=1)}


@dataclass(frozen=True)
class Cause:
    """A cause in a script: its name in `watch_shim`, its seconds, and the bottleneck that it makes.

    The cause of a straggler is on rank 1, and `stage` is where that rank is late.
    """

    script: str
    name: str = ""
    seconds: float = 0.0
    bottleneck: str = ""
    ranks: int = 1
    stage: str = ""
    arguments: Sequence[str] = ()
    is_gpu: bool = False

    @property
    def truth(self) -> str:
        """Return the answer that is right."""
        return f"{self.bottleneck} ({self.stage})" if self.stage else self.bottleneck or "none"

    @property
    def title(self) -> str:
        """Return the cause in words."""
        where = f", {self.ranks} ranks" if self.ranks > 1 else ", emulated GPU" if self.is_gpu else ""
        return f"{self.script}: {self.name or 'no cause'}{where}"


CAUSES: Final = (
    Cause("timm", "load", 0.06, INPUT),
    Cause("timm", "augment", 0.06, INPUT),
    Cause("timm", "log", 0.4, LOG, arguments=("--log-interval", "1")),
    Cause("timm", "evaluate", 1.5, EVALUATE),
    Cause("timm", "checkpoint", 20.0, CHECKPOINT),
    Cause("torchvision", "load", 0.06, INPUT),
    Cause("torchvision", "prepare", 0.3, INPUT),
    Cause("torchvision", "log", 0.4, LOG, arguments=("--print-freq", "1")),
    Cause("torchvision", "evaluate", 1.5, EVALUATE),
    Cause("imagenet", "augment", 0.1, INPUT),
    Cause("imagenet", "log", 0.4, LOG, arguments=("--print-freq", "1")),
    Cause("imagenet", "evaluate", 1.5, EVALUATE),
    Cause("imagenet", "checkpoint", 60.0, CHECKPOINT),
    Cause("accelerate", "load", 0.2, INPUT),
    Cause("accelerate", "prepare", 1.5, INPUT),
    Cause("transformers", "load", 0.06, INPUT),
    Cause("transformers", "evaluate", 0.03, EVALUATE),
    Cause("transformers", "checkpoint", 8.0, CHECKPOINT),
    Cause("lightning", "load", 0.06, INPUT),
    Cause("lightning", "log", 1.5, LOG),
    Cause("lightning", "checkpoint", 20.0, CHECKPOINT),
    Cause("timm", "forward", 0.15, STRAGGLER, ranks=2, stage="forward"),
    Cause("torchvision", "backward", 0.15, STRAGGLER, ranks=2, stage="backward"),
    Cause("transformers", "load", 0.08, STRAGGLER, ranks=2, stage="data_wait"),
    Cause("lightning", "forward", 0.15, STRAGGLER, ranks=2, stage="forward"),
    Cause("plain", "backward", 0.1, STRAGGLER, ranks=2, stage="backward"),
    Cause("plain", "log", 0.1, STRAGGLER, ranks=2, stage="log", arguments=("--log-every", "1")),
    Cause("plain", "slow link", 0.0, "communication-bound", ranks=2),
    Cause("plain", "copy", 0.05, "copy-bound", is_gpu=True),
    Cause("plain", "item", 0.1, "sync-bound", arguments=("--log-every", "1"), is_gpu=True),
)
CLEAN: Final = (
    *(Cause(name) for name in ("timm", "torchvision", "imagenet", "accelerate", "transformers", "lightning")),
    *(Cause(name, ranks=2) for name in ("timm", "torchvision", "transformers", "plain")),
)


@dataclass(frozen=True)
class Runner:
    """Where scripts are run, and with what."""

    by_name: dict[str, Script]
    data: Path
    folder: Path
    rate: str
    gpu: dict[str, str] = field(default_factory=dict)

    def observe(self, number: int, cause: Cause) -> WatchResult:
        """Run a script with a cause under observation."""
        script = self.by_name[cause.script]
        place = self.folder / str(number)
        place.mkdir()
        size = SIZES.get(cause.script, SIZE)
        if cause.name == "slow link":
            words = command(script, self.data, place / "out", size, 1)
            with hosts(cause.ranks, self.rate, 1.0) as made:
                made.run(cause.ranks, watched(words, place / "watch"), place)
            return read_watch_result(place / "watch")
        words = [*command(script, self.data, place / "out", size, cause.ranks), *cause.arguments]
        environ = {"SHIM_CPU": "" if cause.is_gpu else "1", **script.environ, **(self.gpu if cause.is_gpu else {})}
        if cause.name:
            environ["SHIM_CAUSE"] = f"{cause.name}:{cause.seconds}"
            if cause.stage:
                environ["SHIM_RANK"] = "1"
        run(watched(words, place / "watch"), place, environ)
        return read_watch_result(place / "watch")


def named(result: WatchResult) -> str:
    """Return what a result names, as `Cause.truth` writes it."""
    straggler = result.straggler
    bottleneck = str(result.verdict["bottleneck"])
    if bottleneck != STRAGGLER or straggler is None:
        return bottleneck
    return f"{bottleneck} ({straggler.stage})" if straggler.rank == 1 else f"{bottleneck} (rank {straggler.rank})"


def judge(cause: Cause, answer: str) -> str:
    """Return whether an answer is right, an abstention, or wrong."""
    if answer == cause.truth or (not cause.name and answer in NO_CAUSE):
        return "right"
    return "no answer" if answer == "unknown" else "WRONG"


def emulated_gpu() -> dict[str, str]:
    """Return the environment variables of an emulated GPU, nothing if none can be emulated here."""
    sys.path.insert(0, str(BENCHMARKS.parent / "tests" / "emulated"))
    from emulation import build, missing_requirement

    return {} if missing_requirement() else build(BENCHMARKS.parent / "build" / "emulated")


def main() -> int:
    """Run, print and write; return 1 where too few causes are named, or one where there is none."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_script_options(parser)
    parser.add_argument("--only", help="runs whose title has this, such as 'timm: load'")
    parser.add_argument("--rate", default="100mbit", help="of the slow link, as tc writes it (100mbit)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="where to write the result")
    args = parser.parse_args()
    found = {each.name: each for each in scripts({**named_scripts(args), "plain": BENCHMARKS})}
    chosen = [each for each in (*CAUSES, *CLEAN) if each.script in found and (args.only or "") in each.title]
    gpu = emulated_gpu() if any(each.is_gpu for each in chosen) else {}
    chosen = [each for each in chosen if gpu or not each.is_gpu]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="watch-causes-") as temporary:
        folder = Path(temporary)
        arrange(args.data, folder / "data", 64, 1)
        runner = Runner(found, folder / "data", folder, args.rate, gpu)
        for number, cause in enumerate(chosen):
            result = runner.observe(number, cause)
            answer = named(result)
            row = {"run": cause.title, "truth": cause.truth, "answer": answer, "judgment": judge(cause, answer)}
            print(f"{row['run']:36} {row['truth']:30} {answer:30} {row['judgment']}", flush=True)
            if row["judgment"] != "right":
                print(f"    {result.verdict['evidence']}", flush=True)
            rows.append({**row, "step_s": result.step_s, "stages": stage_shares(result), "pauses": result.pauses})
    planted, clean = rows[: sum(bool(each.name) for each in chosen)], rows[sum(bool(each.name) for each in chosen) :]
    hits = sum(each["judgment"] == "right" for each in planted)
    false_alarms = sum(each["judgment"] != "right" for each in clean)
    print(f"{hits} of {len(planted)} causes named; {false_alarms} of {len(clean)} runs without a cause got one")
    if args.json:
        totals = {"causes": len(planted), "named": hits, "clean": len(clean), "false_alarms": false_alarms}
        record.write(args.json, {"benchmark": "watch_causes", **record.provenance(), **totals, "rows": rows})
    return int(hits < LEAST_NAMED * len(planted) or false_alarms > 0)


if __name__ == "__main__":
    sys.exit(main())
