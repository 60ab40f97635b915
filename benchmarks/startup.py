"""How soon does the program answer when it is asked for words only? `paceline --help` and `paceline recipes`.

    python benchmarks/startup.py --runs 15 --json benchmarks/results/startup.json

Each run is a new process, timed from outside; the commands take turns with an empty Python, the floor that no program
in Python can beat. One more run of each, untimed, says whether it imported torch. Files are read from a warm cache:
the first round is dropped. Times are measured, not checked: the exit status is 0.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import record

PROGRAM = Path(sys.executable).with_name("paceline")
FLOOR = "python -c pass"
COMMANDS: dict[str, list[str]] = {
    FLOOR: [sys.executable, "-c", "pass"],
    "paceline --help": [str(PROGRAM), "--help"],
    "paceline recipes": [str(PROGRAM), "recipes"],
}
CHECK_TORCH = """
import sys
from paceline.cli import main
try:
    main()
finally:
    print("torch" in sys.modules, file=sys.stderr)
"""


def main() -> None:
    """Measure, print, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=15, help="timed runs of each command (default: 15)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="where to write the result")
    args = parser.parse_args()
    times_s: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for round_number in range(args.runs + 1):
        for name, command in COMMANDS.items():
            elapsed_s = wall_s(command)
            if round_number > 0:
                times_s[name].append(elapsed_s)
    commands: dict[str, dict[str, Any]] = {name: record.spread(seconds) for name, seconds in times_s.items()}
    for name, facts in commands.items():
        facts["above_floor_s"] = round(facts["median_s"] - commands[FLOOR]["median_s"], 6)
        if name != FLOOR:
            facts["imports_torch"] = imports_torch(COMMANDS[name][1:])
    print(table(commands))
    if args.json:
        record.write(args.json, {"benchmark": "startup", **record.provenance(), "commands": commands})


def wall_s(command: list[str]) -> float:
    """Return how long `command` takes from start to end, in seconds. Raise when it fails."""
    start_s = time.perf_counter()
    # No timeout: with one, Python polls for the end, at last every 50 ms, and that would be in the time.
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start_s


def imports_torch(arguments: list[str]) -> bool:
    """Return whether the program, given `words`, had imported torch by its end."""
    command = [sys.executable, "-c", CHECK_TORCH, *arguments]
    ended = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    return {"True": True, "False": False}[ended.stderr.split()[-1]]


def table(commands: dict[str, dict[str, Any]]) -> str:
    """Return the result as a person reads it."""
    lines = []
    for name, facts in commands.items():
        torch = {True: ", imports torch", False: ", without torch", None: ""}[facts.get("imports_torch")]
        lines.append(
            f"{name:17} {facts['median_s'] * 1e3:6.0f} ms (10th-90th percentile {facts['p10_s'] * 1e3:.0f}-"
            f"{facts['p90_s'] * 1e3:.0f}, n {facts['n']}){torch}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
