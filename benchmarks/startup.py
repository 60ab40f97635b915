"""How soon does the program answer, and how soon does it train?

    python benchmarks/startup.py --runs 15 --files 300000 --before CHECKOUT --json benchmarks/results/startup.json

- **Words**: `paceline --help` and `paceline recipes` against an empty Python, the floor that no program in Python can
  beat. One more run of each, untimed, says whether it imported torch.
- **Training**: seconds from the start of `paceline train` on a small data set to its first step (`account.start_up_s`),
  on one and two ranks, against as many processes at once that import torch and torchvision.
- **Files**: the same for a folder of `--files` JPEGs (hard links to one photograph per class folder), in a
  first run, which lists it, and in a second one, which checks the kept listing; against `os.scandir` on two threads and
  torchvision's `ImageFolder`. Give `--files 0` to leave it out.

Each run is a new process, timed from outside; all take turns. `--before` names a checkout of an earlier version, which
takes its turns too. Files are read from a warm cache: the first round is dropped. Times are measured, not checked: the
exit status is 0.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import record
from PIL import Image

FILES_PER_CLASS = 1000
SMALL_MODEL = ("model.name=resnet18_cifar", "model.width=0.25")
FLOOR = "python -c pass"
IMPORTS = "import torch, torchvision"
COMMANDS = {FLOOR: ["-c", "pass"], "paceline --help": ["--help"], "paceline recipes": ["recipes"]}
SCAN = """
import os, sys
from concurrent.futures import ThreadPoolExecutor
def scan(folder):
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries if entry.is_file()]
with ThreadPoolExecutor(2) as threads:
    folders = [entry.path for split in os.scandir(sys.argv[1]) for entry in os.scandir(split.path)]
    print(sum(map(len, threads.map(scan, folders))))
"""
IMAGE_FOLDER = """
import sys, torch, torchvision
for split in ("train", "val"):
    torchvision.datasets.ImageFolder(f"{sys.argv[1]}/{split}")
"""
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
    args = parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if args.files:
            link_files(folder / "files", args.files)
        contenders = all_contenders(args, folder)
        found: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
        for round_number in range(args.runs + 1):
            for name, contender in contenders.items():
                if args.files and "files" in name and round_number > args.file_runs:
                    continue
                seconds = contender()
                if round_number > 0:
                    found[name].append(seconds)
    result = {name: summary(runs) for name, runs in found.items()}
    for name in ("paceline --help", "paceline recipes"):
        result[name]["imports_torch"] = imports_torch(COMMANDS[name])
    print(table(result))
    if args.json:
        config = {"files": args.files}
        record.write(args.json, {"benchmark": "startup", **record.provenance(), "config": config, "commands": result})


def parse_args() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=15, help="timed runs of each command (default: 15)")
    parser.add_argument("--files", type=int, default=0, help="JPEGs of the folder (default: leave that part out)")
    parser.add_argument("--file-runs", type=int, default=5, help="timed runs on that folder (default: 5)")
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="an earlier version, which takes its turns")
    parser.add_argument("--json", type=Path, metavar="OUT", help="where to write the result")
    return parser.parse_args()


def all_contenders(args: argparse.Namespace, folder: Path) -> dict[str, Callable[[], dict[str, float]]]:
    """Return what is timed, by name."""
    sources = {"": Path(__file__).parents[1] / "src"}
    sources |= {", before": args.before / "src"} if args.before else {}
    found = {FLOOR: partial(whole_s, [[sys.executable, *COMMANDS[FLOOR]]])}
    for when, source in sources.items():
        for name in ("paceline --help", "paceline recipes"):
            found[name + when] = partial(whole_s, [paceline(*COMMANDS[name])], source=source)
    for ranks in (1, 2):
        label = "1 rank" if ranks == 1 else "2 ranks"
        found[f"{IMPORTS}, {label}"] = partial(whole_s, [[sys.executable, "-c", IMPORTS]] * ranks)
        for when, source in sources.items():
            home = folder / f"home{when}"
            found[f"train, {label}{when}"] = partial(train_s, [], ranks, source, home)
    if args.files:
        root = folder / "files"
        found["files: os.scandir on 2 threads"] = partial(whole_s, [[sys.executable, "-c", SCAN, str(root)]])
        found["files: ImageFolder"] = partial(whole_s, [[sys.executable, "-c", IMAGE_FOLDER, str(root)]])
        data = ["folder", f"data.source.root={root}", "train.max_time=1s", "data.image_size=32", *SMALL_MODEL]
        for when, source in sources.items():
            first = partial(train_s, data, 1, source, None)
            found[f"files: train, first{when}"] = first
            found[f"files: train, again{when}"] = partial(train_s, data, 1, source, folder / f"home{when}")
    return found


def paceline(*arguments: str) -> list[str]:
    """Return the command line of the program."""
    return [sys.executable, "-m", "paceline", *arguments]


def link_files(root: Path, num_files: int) -> None:
    """Make a folder of JPEGs, of which every fifth is for validation."""
    first: dict[Path, Path] = {}  # of each class folder; file systems limit the links to one file
    for number in range(num_files):
        split = "train" if number % 5 else "val"
        folder = root / split / f"{number // 5 // FILES_PER_CLASS:04}"
        path = folder / f"{number:07}.jpg"
        if folder in first:
            os.link(first[folder], path)
        else:
            folder.mkdir(parents=True)
            Image.effect_noise((64, 64), 40).convert("RGB").save(path)
            first[folder] = path


def environ_of(source: Path, home: Path) -> dict[str, str]:
    """Return the environment of a program of the checkout with `source`."""
    return {**os.environ, "PYTHONPATH": str(source), "HOME": str(home), "XDG_CACHE_HOME": str(home / ".cache")}


def whole_s(commands: list[list[str]], source: Path | None = None) -> dict[str, float]:
    """Return how long `commands`, run at once, take from start to end. Raise when one fails."""
    environ = environ_of(source, Path.home()) if source else None
    start_s = time.perf_counter()
    # No timeout: with one, Python polls for the end, at last every 50 ms, and that would be in the time.
    with ThreadPoolExecutor(len(commands)) as threads:
        run = partial(subprocess.run, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=environ)
        list(threads.map(run, commands))
    return {"end": time.perf_counter() - start_s}


def train_s(arguments: list[str], ranks: int, source: Path, home: Path | None) -> dict[str, float]:
    """Return how long a run takes to its first step; without `home`, it has a new one."""
    with tempfile.TemporaryDirectory() as out:
        home = home or Path(out) / "home"
        home.mkdir(exist_ok=True)
        command = paceline("train", *arguments, "--ranks", str(ranks), "--run-dir", f"{out}/run", "parallel.device=cpu")
        command += ["train.epochs=1", "train.eval_every=off", "parallel.threads=1"]
        done = subprocess.run(
            command, env=environ_of(source, home), stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        if done.returncode:
            sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
        account = json.loads(Path(out, "run", "result.json").read_text())["account"]
    return {"step": account["start_up_s"]}


def imports_torch(arguments: list[str]) -> bool:
    """Return whether the program, given `arguments`, had imported torch by its end."""
    command = [sys.executable, "-c", CHECK_TORCH, *arguments]
    ended = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    return {"True": True, "False": False}[ended.stderr.split()[-1]]


def summary(runs: list[dict[str, float]]) -> dict[str, Any]:
    """Return the spread of each moment."""
    return {moment: record.spread([each[moment] for each in runs]) for moment in runs[0]}


def table(result: dict[str, dict[str, Any]]) -> str:
    """Return the result as a person reads it."""
    lines = []
    for name, facts in result.items():
        torch = {True: ", imports torch", False: ", without torch", None: ""}[facts.get("imports_torch")]
        moments = [
            f"{moment} {spread['median_s'] * 1e3:6.0f} ms ({spread['p10_s'] * 1e3:.0f}-{spread['p90_s'] * 1e3:.0f}, "
            f"n {spread['n']})"
            for moment, spread in facts.items()
            if moment != "imports_torch"
        ]
        lines.append(f"{name:38} {', '.join(moments)}{torch}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
