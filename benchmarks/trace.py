"""Where does the time of one training step of two ranks go, on one time axis?

    python benchmarks/trace.py --json benchmarks/results/trace-cpu.json

`paceline profile --trace` records `--steps` steps of two ranks on the CPU, with one thread each and the images made in
the ranks. The record keeps the stages, the sends and receives and the operators of one step: the one of median duration
on rank 0. The record is that of the last of three runs. Tracing itself slows a step down: `untraced_step_s` is the
median without it.
"""

import argparse
import gzip
import json
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from record import provenance, write

from paceline.measure.chrome_trace import STAGES_TID, STEP

RANKS: Final = 2
OPERATORS: Final = 6
"""Number of operators in the record, by their own time."""
RECIPE: Final = (
    *("synthetic", "data.augment=[trivial_augment, flip]", "data.workers=0", "data.batch_size=128"),
    *("model.width=0.25", "parallel.threads=1", "measure.warmup_steps=5"),
)
Event = dict[str, Any]


def main() -> None:
    """Trace, reduce, print, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="steps to trace (20)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="where to write the result")
    options = parser.parse_args()
    command = ["profile", *RECIPE, "--ranks", str(RANKS), "--steps", str(options.steps), "--no-probes", "--trace"]
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "profile"
        traced = [f"measure.trace={options.steps}", "--run-dir", str(run_dir)]
        subprocess.run([sys.executable, "-m", "paceline", *command, *traced], check=True, timeout=300)
        with gzip.open(run_dir / "trace.json.gz", "rt", encoding="utf-8") as file:
            events = json.load(file)["traceEvents"]
        profile = json.loads((run_dir / "profile.json").read_text(encoding="utf-8"))
    result = {
        "recipe": [*RECIPE],
        "ranks": RANKS,
        "untraced_step_s": round(128 / profile["base"]["images_per_s"], 6),
        "starved": profile["starved"],
        **reduce_trace(events),
    }
    for rank in result["ranks_of_step"]:
        print(f"rank {rank['rank']}, step {result['step']}:")
        for name, start_s, length_s in rank["stages"]:
            print(f"  {name}: {length_s * 1e3:.1f} ms from {start_s * 1e3:.1f}")
    if options.json:
        write(options.json, {**result, "provenance": provenance()})


def reduce_trace(events: Sequence[Event]) -> dict[str, Any]:
    """Return the step of median duration on rank 0 with its spans of every rank, in seconds since it began."""
    rank_of = {
        event["pid"]: int(event["args"]["name"].split()[1])
        for event in events
        if event["name"] == "process_name" and len(event["args"]["name"].split()) == 2
    }
    spans = [event for event in events if event["ph"] == "X" and event["pid"] in rank_of and event["dur"] > 0]
    steps: dict[int, dict[int, Event]] = defaultdict(dict)
    for span in spans:
        if span["name"].startswith(STEP):
            steps[int(span["name"].removeprefix(STEP))][rank_of[span["pid"]]] = span
    whole = [number for number, ranks in steps.items() if len(ranks) == RANKS]
    number = sorted(whole, key=lambda each: steps[each][0]["dur"])[len(whole) // 2]
    begin_us = min(step["ts"] for step in steps[number].values())
    ranks = [
        _reduce_rank(rank, steps[number][rank], [each for each in spans if rank_of[each["pid"]] == rank], begin_us)
        for rank in range(RANKS)
    ]
    return {"traced_steps": len(whole), "step": number, "ranks_of_step": ranks}


def _reduce_rank(rank: int, step: Event, spans: Iterable[Event], begin_us: float) -> dict[str, Any]:
    """Return the spans of one rank's step: [name, start, length] in seconds, and the own time of its operators."""
    inside = sorted(
        (each for each in spans if step["ts"] <= each["ts"] < step["ts"] + step["dur"]),
        key=lambda each: (each["ts"], -each["dur"]),
    )

    def shown(span: Event) -> list[Any]:
        return [span["name"], round((span["ts"] - begin_us) / 1e6, 6), round(span["dur"] / 1e6, 6)]

    operators = [each for each in inside if each.get("cat") == "cpu_op"]
    own_us = _own_times_us(operators)
    return {
        "rank": rank,
        "span": shown(step),
        "stages": [shown(each) for each in inside if each["tid"] == STAGES_TID],
        "communication": [shown(each) for each in inside if each["name"].startswith("gloo:")],
        "num_operators": len(operators),
        "operators": [[name, round(own / 1e6, 6)] for name, own in own_us.most_common(OPERATORS)],
    }


def _own_times_us(spans: Sequence[Event]) -> Counter[str]:
    """Return the time of each operator without that of the operators inside it; `spans` are sorted by start."""
    own_us: Counter[str] = Counter()
    stack: list[Event] = []
    for span in spans:
        while stack and (stack[-1]["tid"] != span["tid"] or stack[-1]["ts"] + stack[-1]["dur"] <= span["ts"]):
            stack.pop()
        if stack:
            own_us[stack[-1]["name"]] -= span["dur"]
        own_us[span["name"]] += span["dur"]
        stack.append(span)
    return own_us


if __name__ == "__main__":
    main()
