"""Does anything outlive a launcher that is killed? SIGKILL on the CPU, 2, 4 and 8 ranks, plain and under setsid.

Claim: when the process that a user has started is killed outright, at any moment from its first to its tenth second,
every process that it or its ranks have started is gone within ten seconds, stopped ones included.

    python benchmarks/orphans.py --json benchmarks/results/orphans-cpu.json

`train`, `eval`, `doctor` and `scale` are each killed `--kills` times for each number of ranks and way to start; the
moments are spread over ten seconds and drawn from `--seed`. Just before every fourth kill one descendant is stopped by
SIGSTOP, as if it hung in a call of C. One that is stopped in the first milliseconds of its life, before it has tied
itself to its parent, stays, as nothing but the kernel could end it: such kills are counted apart. Descendants are known
by a variable of their environment. How long the last of them is alive after the kill is an upper bound: it includes the
look at `/proc`, and all else that the machine does.
Unlike other benchmarks it does judge: the exit status is 1 when a process was alive after ten seconds.
"""

import argparse
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import record

from paceline.core import process

MARK = "ORPHANS_RUN"  # the environment variable by which all processes of a command are known
FIRST_S, GONE_LIMIT_S, LOOK_S, END_S = 10.0, 10.0, 0.01, 180.0
STOP_EVERY = 4
TIE = Path(process.__file__)
VERBS = ("train", "eval", "doctor", "scale")
SMALL = ("model.width=0.1", "data.workers=1", "parallel.threads=1", "log.tensorboard=off", "log.report=off")
MADE = ("data.source.num_images=64", "data.source.num_val_images=16", "data.batch_size=16", "train.steps=2")
ENDLESS = ("data.batch_size=64", "train.epochs=100000", "train.eval_every=20st", "checkpoint.every=5st")


@dataclass(frozen=True)
class Kill:
    """What is killed: `verb` on `ranks`, after `moment_s`; `stops` says that a descendant is stopped before."""

    verb: str
    ranks: int
    how: str
    moment_s: float
    stops: bool


@dataclass(frozen=True)
class Killed:
    """What came of a kill: how many processes there were beside the launcher, and how long the last was alive.

    `had_ended` says that the command was over before; `left` are the commands of what was alive after ten seconds.
    """

    kill: Kill
    descendants: int
    survival_s: float
    had_ended: bool
    left: tuple[str, ...]

    @property
    def stopped_before_tied(self) -> bool:
        """Whether what was alive is the process that was stopped, and it had not yet tied itself to its parent."""
        return self.kill.stops and len(self.left) == 1 and f" {TIE} " in self.left[0]


def command_of(verb: str, ranks: int, folder: Path, run: Path) -> list[str]:
    """Return the words of a command that runs for longer than ten seconds; `run` is one that can be evaluated."""
    arguments = {
        "train": ["digits", *SMALL, *ENDLESS, "--run-dir", str(folder / "run")],
        "eval": [str(run), "data.source.num_val_images=40000", "data.eval_batch_size=8"],
        "doctor": [],
        "scale": [
            *("digits", *SMALL, "data.batch_size=64", "--mode", "strong", "--steps", "20000", "--repeats", "1"),
            *("--run-dir", str(folder / "study")),
        ],
    }[verb]
    return [sys.executable, "-P", "-m", "paceline", verb, *arguments, "--ranks", str(ranks)]


def make_run(folder: Path) -> Path:
    """Train a run that `eval` can evaluate, and return it."""
    command = [sys.executable, "-P", "-m", "paceline", "train", "synthetic", *SMALL, *MADE, "--run-dir", str(folder)]
    subprocess.run(command, check=True, capture_output=True, timeout=END_S)
    return folder


def alive(mark: str) -> list[int]:
    """Return the processes with `mark` in their environment that have not ended."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and int(folder.name) != os.getpid():
            with suppress(OSError):  # it ends while it is looked at
                is_ours = wanted in (folder / "environ").read_bytes().split(b"\0")
                letter = (folder / "stat").read_text().rpartition(")")[2].split()[0]
                if is_ours and letter not in "ZX":
                    found.append(int(folder.name))
    return found


def command_line(pid: int) -> str:
    """Return what a process was started as, nothing where it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return ""


def kill_one(kill: Kill, run: Path, chance: random.Random) -> Killed:
    """Start a command, kill its launcher at its moment, and return how long anything of it was alive."""
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory(prefix="orphans-", ignore_cleanup_errors=True) as folder:
        arguments = ["setsid"] * (kill.how == "setsid") + command_of(kill.verb, kill.ranks, Path(folder), run)
        environ = {**os.environ, MARK: mark, "OMP_NUM_THREADS": "1"}
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        launcher = subprocess.Popen(arguments, cwd=folder, env=environ, **streams)
        try:
            time.sleep(kill.moment_s)
            had_ended = launcher.poll() is not None
            descendants = [pid for pid in alive(mark) if pid != launcher.pid]
            if kill.stops and descendants:
                with suppress(ProcessLookupError):
                    os.kill(chance.choice(descendants), signal.SIGSTOP)
            launcher.kill()
            killed_s = time.monotonic()
            launcher.wait()
            left = alive(mark)
            while left and time.monotonic() - killed_s < GONE_LIMIT_S:
                time.sleep(LOOK_S)
                left = alive(mark)
            survival_s = time.monotonic() - killed_s
            names = tuple(command_line(pid) for pid in left)
        finally:
            launcher.kill()
            launcher.wait()
            for pid in alive(mark):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        return Killed(kill, len(descendants), round(survival_s, 3), had_ended, names)


def plan_kills(number: int, ranks: Sequence[int], verbs: Sequence[str], hows: Sequence[str], seed: int) -> list[Kill]:
    """Return `number` kills for each verb, number of ranks and way to start, in an order that mixes them."""
    chance = random.Random(seed)
    kills = []
    for verb, each, how in itertools.product(verbs, ranks, hows):
        moments = [FIRST_S * (position + chance.random()) / number for position in range(number)]
        kills += [
            Kill(verb, each, how, round(moment_s, 3), stops=position % STOP_EVERY == STOP_EVERY - 1)
            for position, moment_s in enumerate(moments)
        ]
    chance.shuffle(kills)
    return kills


def summary(killed: Sequence[Killed]) -> dict[str, Any]:
    """Return what kills came to: the longest survival, and how many had something to leave behind."""
    return {
        "kills": len(killed),
        "with_descendants": sum(each.descendants > 0 for each in killed),
        "with_one_stopped": sum(each.kill.stops and each.descendants > 0 for each in killed),
        "had_ended": sum(each.had_ended for each in killed),
        "stopped_before_tied": sum(each.stopped_before_tied for each in killed),
        "alive_after_ten_s": sum(bool(each.left) and not each.stopped_before_tied for each in killed),
        "longest_survival_s": max((each.survival_s for each in killed if not each.stopped_before_tied), default=0.0),
        "survival": record.spread([each.survival_s for each in killed if not each.stopped_before_tied] or [0.0]),
    }


def main() -> int:
    """Kill all, print, write the result; return 1 when something was left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="of each verb, ranks and way to start (default: 20)")
    parser.add_argument("--ranks", default="2,4,8", help="numbers of ranks (default: 2,4,8)")
    parser.add_argument("--verbs", default=",".join(VERBS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most-s", type=float, default=float("inf"), help="start no kill after so many seconds")
    parser.add_argument("--json", type=Path, metavar="OUT", help="where to write the result")
    args = parser.parse_args()
    provenance, start_s = record.provenance(), time.monotonic()
    ranks, verbs = [int(each) for each in args.ranks.split(",")], args.verbs.split(",")
    kills = plan_kills(args.kills, ranks, verbs, ("plain", "setsid"), args.seed)
    killed: list[Killed] = []
    chance = random.Random(args.seed)
    with tempfile.TemporaryDirectory(prefix="orphans-") as folder:
        run = make_run(Path(folder) / "run")
        for kill in kills:
            if time.monotonic() - start_s > args.most_s:
                break
            killed.append(kill_one(kill, run, chance))
            print(f"{len(killed)} of {len(kills)}: {killed[-1]}", flush=True)
    cells = itertools.product(verbs, ranks, ("plain", "setsid"))
    of_cell = {
        cell: [each for each in killed if (each.kill.verb, each.kill.ranks, each.kill.how) == cell] for cell in cells
    }
    facts = {"seed": args.seed, "planned": len(kills), "took_s": round(time.monotonic() - start_s)}
    facts |= {"load_average_after": [round(load, 2) for load in os.getloadavg()]}
    table = {f"{verb}, {each} ranks, {how}": summary(found) for (verb, each, how), found in of_cell.items() if found}
    print(json.dumps(summary(killed), indent=2))
    if args.json:
        rows = [
            {**asdict(each.kill), **{name: value for name, value in asdict(each).items() if name != "kill"}}
            for each in killed
        ]
        values = {"benchmark": "orphans", **provenance, **facts, "all": summary(killed), "cells": table, "kills": rows}
        record.write(args.json, values)
    return int(summary(killed)["alive_after_ten_s"] > 0)


if __name__ == "__main__":
    sys.exit(main())
