"""Is anything lost when a run is killed, again and again, at any moment? SIGKILL on the CPU, 2, 3 and 4 ranks.

Claim: a run that is killed 100 times, and started again with `--resume` each time, ends with the bits, the logs and
the samples of one that never was; no kill costs more steps than lie between two checkpoints, besides those that were
taken while one was being written.

    python benchmarks/chaos.py --kills 100 --json benchmarks/results/chaos-cpu.json
    python benchmarks/chaos.py --kills 100 --ranks 1,2,3,4 --sampler balanced --sampler '{name: weighted, ...}' \\
        --json benchmarks/results/chaos-samplers-cpu.json

With `--sampler`, the kills are divided among samplers. The samples of each step must be the same for all world sizes.
For each one run is left alone, and one is killed: one rank of it, the launcher, or all its processes at once; while it
starts, between or within steps, or while a checkpoint is written; with no loader workers or with two. The moments are
spread over the whole run and drawn from `--seed`. Afterwards everything that was written is compared.
Unlike other benchmarks it does judge: the exit status is 1 when something was lost or a process stayed behind.
"""

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any, Self

import psutil
import record

from paceline.training.checkpoint import load_tensor_group, read_state, verify_checkpoint, weights_sha256

ARGUMENTS = (
    "synthetic",
    "model.width=0.1",
    "data.source.num_images=240",
    "data.source.num_val_images=24",
    "data.batch_size=12",
    "data.augment=[pad_crop,flip]",
    "schedule.name=plateau",
    "train.ema.decay=0.9",
    "log.every=1st",
    "log.samples=true",
    "log.tensorboard=off",
    "parallel.threads=1",
)
STEPS_A_KILL = 6
MARK = "CHAOS_RUN"  # the environment variable by which all processes of a run are known, however deep they stand
# How long the others may live. Ranks whose peer is gone before they met wait for it until their launcher ends them.
GONE_LIMIT_S = {"rank": 10.0, "launcher": 5.0, "all": 5.0}
PATIENCE_S = 180.0
STEP_S, SAVE_S = 0.1, 0.01  # what a kill is spread over: a step with its evaluation now and then; a checkpoint
SAME_RESULT = ("status", "steps", "images_seen", "skipped_steps", "eval", "ema", "best", "weights_sha256")


@dataclass(frozen=True)
class Setting:
    """One world size: how many ranks, for how many steps, saved how often."""

    ranks: int
    steps: int
    every: int
    sampler: str = "shuffle"

    def command(self, run: Path, workers: int) -> list[str]:
        """Return the command line that starts a run, or resumes it."""
        lengths = (f"train.steps={self.steps}", f"checkpoint.every={self.every}st", f"data.workers={workers}")
        lengths = (*lengths, f"data.sampler={self.sampler}")
        options = ("--ranks", str(self.ranks), "--run-dir", str(run), "--resume", "--json")
        return [sys.executable, "-m", "paceline", "train", *ARGUMENTS, *lengths, *options]


@dataclass(frozen=True)
class Kill:
    """What is to be killed, and when: `moment` is start, step (after `step` steps) or save (the first one after them).

    `fraction` in [0, 1) says how far into that; `victim` is rank (number `rank`), launcher or all.
    """

    moment: str
    step: int
    fraction: float
    victim: str
    rank: int
    workers: int


@dataclass(frozen=True)
class Killed:
    """What came of a kill: who was hit, where the process had started from, after which step it was, what is kept.

    `started_from` and `done` are None where it had not come so far. `in_save` says that a checkpoint was left
    half-written, `gone_s` how long it took until no process was left, `startup_s` how long until the first step.
    """

    moment: str
    victim: str
    workers: int
    started_from: int | None
    done: int | None
    kept: int
    in_save: bool
    startup_s: float | None
    gone_s: float

    def __str__(self) -> str:
        place = "before a step" if self.done is None else f"after step {self.done}, from {self.started_from}"
        saving = ", in a save" if self.in_save else ""
        return f"{self.victim} {place}{saving}: {self.kept} kept, {self.repeated} lost, gone in {self.gone_s:.2f} s;"

    @property
    def repeated(self) -> int:
        """Steps that were lost with the process, and have to be taken again."""
        return 0 if self.done is None else max(0, self.done - self.kept)


class Process:
    """A running `paceline train`: launcher, ranks and workers, which all end with this context at the latest.

    `number` counts those of one run.
    """

    def __init__(self, setting: Setting, run: Path, number: int, workers: int) -> None:
        self.run = run
        self.checkpoints = run / "checkpoints"
        self._mark = uuid.uuid4().hex
        self._started = time.time()  # as files have it
        self.out, self.err = (run.with_name(f"{run.name}-{number:04}.{end}") for end in ("out", "err"))
        self.started_s = time.monotonic()
        environ = {**os.environ, MARK: self._mark, "OMP_NUM_THREADS": "1"}
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.launcher = subprocess.Popen(setting.command(run, workers), env=environ, stdout=out, stderr=err)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        shoot([*self._members()])
        self.launcher.wait(timeout=PATIENCE_S)

    def done(self) -> int | None:
        """Return after how many steps it is, by the trace of samples; None before it has cut that to its start."""
        counts = []
        for path in self._own("steps.rank*.jsonl"):
            with suppress(FileNotFoundError):  # it is being replaced
                counts.append(path.read_bytes().count(b"\n"))
        return max(counts, default=None)

    def is_saving(self) -> bool:
        """Return whether there is a checkpoint that it has begun and not moved into its place."""
        return bool(self._own("checkpoints/.*"))

    def started_from(self) -> int | None:
        """Return the step that it reports to resume from; None before it has printed one."""
        stderr = self.err.read_text()
        if " steps of " not in stderr:
            return None
        return int(stderr.partition("from step ")[2].partition(":")[0].replace(",", "") or 0)

    def wait_for(self, is_ready: Callable[[], bool]) -> None:
        """Wait until something is there. Raise when the process ends before, or takes too long."""
        while not is_ready():
            if self.launcher.poll() is not None:
                raise SystemExit(f"ended by itself, with {self.launcher.returncode}: {self.err.read_text()}")
            if time.monotonic() - self.started_s > PATIENCE_S:
                raise SystemExit(f"{PATIENCE_S:.0f} s were not enough: {self.err.read_text()}")
            time.sleep(0.001)

    def aim(self, victim: str, rank: int) -> tuple[str, list[psutil.Process]]:
        """Return what to kill, and its processes: the launcher, where there is no such rank yet."""
        members = [*self._members()]
        targets = {"rank": [each for each in members if self._is_rank(each, rank)], "all": members}.get(victim, [])
        return (victim, targets) if targets else ("launcher", [psutil.Process(self.launcher.pid)])

    def gone_s(self, limit_s: float) -> float:
        """Wait until no process is left; return how long that took. Raise when some are there after `limit_s`."""
        start_s = time.monotonic()
        while True:
            left = [*self._members()]
            if not left:
                return time.monotonic() - start_s
            if time.monotonic() - start_s > limit_s:
                raise SystemExit(f"{len(left)} processes were left after {limit_s:.0f} s: {self.err.read_text()}")
            time.sleep(0.02)

    def finish(self) -> None:
        """Wait for the end of the run, which must be a good one."""
        self.launcher.wait(timeout=PATIENCE_S)
        if self.launcher.returncode != 0:
            raise SystemExit(f"ended with {self.launcher.returncode}: {self.err.read_text()}")

    def _own(self, pattern: str) -> list[Path]:
        """Return what matches and was written since it started."""
        found = []
        for path in self.run.glob(pattern):
            with suppress(FileNotFoundError):
                if path.stat().st_ctime > self._started:
                    found.append(path)
        return found

    def _members(self) -> Iterator[psutil.Process]:
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if process.environ().get(MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE:
                    yield process

    def _is_rank(self, process: psutil.Process, rank: int) -> bool:
        with suppress(psutil.Error):
            return process.ppid() == self.launcher.pid and process.environ().get("RANK") == str(rank)
        return False


def shoot(targets: list[psutil.Process]) -> None:
    """Send SIGKILL to all."""
    for each in targets:
        with suppress(psutil.Error):
            each.kill()


def plan_kills(number: int, setting: Setting, chance: random.Random) -> list[Kill]:
    """Draw `number` kills, in the order of the steps at which they strike; the run ends after all of them."""
    last = setting.steps - 2 * setting.every
    return [
        Kill(
            moment=chance.choices(("start", "step", "save"), (3, 4, 3))[0],
            step=step,
            fraction=chance.random(),
            victim=chance.choices(("rank", "launcher", "all"), (4, 3, 3))[0],
            rank=chance.choice((0, chance.randrange(setting.ranks))),  # rank 0 saves, and hosts the store
            workers=chance.choice((0, 2)),
        )
        for step in sorted(chance.randint(1, last) for _ in range(number))
    ]


def strike(kill: Kill, process: Process, startup_s: float) -> Killed:
    """Wait for the moment, kill, wait until nothing is left, and look at what is."""
    began_s = None
    if kill.moment == "start":
        until_s = process.started_s + 0.1 + kill.fraction * startup_s
        process.wait_for(lambda: time.monotonic() >= until_s or (process.done() or 0) > kill.step)
        victim, targets = process.aim(kill.victim, kill.rank)
    else:
        process.wait_for(lambda: process.done() is not None)
        began_s = time.monotonic() - process.started_s
        victim, targets = process.aim(kill.victim, kill.rank)  # takes longer than a save, so not when the time has come
        process.wait_for(lambda: (process.done() or 0) >= kill.step)
        if kill.moment == "save":
            process.wait_for(process.is_saving)
        time.sleep(kill.fraction * (SAVE_S if kill.moment == "save" else STEP_S))
    shoot(targets)
    gone_s = process.gone_s(GONE_LIMIT_S[victim])
    return Killed(
        moment=kill.moment,
        victim=victim,
        workers=kill.workers,
        started_from=process.started_from(),
        done=process.done(),
        kept=newest(process.checkpoints),
        in_save=process.is_saving(),
        startup_s=began_s,
        gone_s=gone_s,
    )


def newest(checkpoints: Path) -> int:
    """Return the step of the newest checkpoint, 0 when there is none."""
    return max((int(path.name.removeprefix("step-")) for path in checkpoints.glob("step-*")), default=0)


def left_alone(setting: Setting, run: Path) -> float:
    """Run to the end; return how long it took to the first step, in seconds."""
    with Process(setting, run, 0, workers=0) as process:
        process.wait_for(lambda: process.done() is not None)
        startup_s = time.monotonic() - process.started_s
        process.finish()
        return startup_s


def killed_all_along(
    setting: Setting, run: Path, kills: list[Kill], startup_s: float, report: Callable[[str], None]
) -> list[Killed]:
    """Start, kill, start again, until all `kills` have struck and the run has ended; return what came of each."""
    outcomes: list[Killed] = []
    for number, kill in enumerate(kills, 1):
        start_s = time.monotonic()
        with Process(setting, run, number, kill.workers) as process:
            outcomes.append(strike(kill, process, startup_s))
        passed_s = time.monotonic() - start_s
        report(f"{setting.ranks} ranks, kill {number}/{len(kills)}: {outcomes[-1]} in {passed_s:.1f} s")
    with Process(setting, run, len(kills) + 1, workers=0) as process:
        process.finish()
    return outcomes


def verdicts(setting: Setting, whole: Path, killed: Path, outcomes: list[Killed]) -> dict[str, bool]:
    """Return what must be true of a killed run beside one that was left alone, and whether it is."""
    stderr = [path.read_text() for path in sorted(killed.parent.glob(f"{killed.name}-*.err"))]
    one, other = (json.loads((run / "result.json").read_text()) for run in (whole, killed))
    traces = [[rows(run / f"steps.rank{rank}.jsonl") for run in (whole, killed)] for rank in range(setting.ranks)]
    steps = list(range(setting.steps))
    for name in ("steps.jsonl", "evals.jsonl"):
        print_difference(name, rows(whole / name), rows(killed / name))
    return {
        "same_result": all(one[name] == other[name] for name in SAME_RESULT),
        "same_weights_optimizer_and_average": last_checkpoint(whole) == last_checkpoint(killed),
        "same_records": all(rows(whole / name) == rows(killed / name) for name in ("steps.jsonl", "evals.jsonl")),
        "same_samples_each_once": all(a == b and [row["step"] for row in a] == steps for a, b in traces),
        "goes_on_from_the_newest_checkpoint": all(
            then.started_from in (None, before.kept) for before, then in pairwise(outcomes)
        ),
        "no_more_lost_than_the_interval_unless_in_a_save": all(
            each.repeated <= setting.every * (2 if each.in_save else 1) for each in outcomes
        ),
        "no_checkpoint_found_damaged": not any("damaged" in text or "cannot be read" in text for text in stderr),
        "no_traceback": not any("Traceback" in strip_worker_tracebacks(text) for text in stderr),
        "nothing_half_written_left": not [*killed.glob("checkpoints/.*"), *killed.rglob("*.tmp*")],
    }


def print_difference(name: str, expected: list[Any], found: list[Any]) -> None:
    """Print the first rows of two files that differ."""
    for number, (one, other) in enumerate(zip_longest(expected, found)):
        if one != other:
            print(f"{name}, row {number}: {one} without kills, {other} with them", flush=True)
            return


def strip_worker_tracebacks(stderr: str) -> str:
    """Return what was said without the traceback that Python's own thread in a worker prints when its rank is gone."""
    blocks = re.split(r"(?=^(?:\[rank\d+\]: )?Traceback)", stderr, flags=re.MULTILINE)
    return "".join(each for each in blocks if "resource_sharer.py" not in each)


def rows(path: Path) -> list[Any]:
    """Return the rows of a JSON-lines file, without times."""
    return [untimed(json.loads(line)) for line in path.read_text().splitlines()]


def untimed(value: Any) -> Any:
    """Return a value from JSON without what a clock has put into it: seconds, and shares of them."""
    if isinstance(value, dict):
        return {name: untimed(each) for name, each in value.items() if not name.endswith(("_s", "_share"))}
    return value


def last_checkpoint(run: Path) -> dict[str, Any]:
    """Return digests of what the newest checkpoint of a run holds, and its other state without times."""
    path = max((run / "checkpoints").glob("step-*"))
    verify_checkpoint(path)
    parts = {name: load_tensor_group(path, name) for name in ("model", "optimizer", "average")}
    assert all(parts.values()), f"{path} lacks one of {list(parts)}"
    return {"state": untimed(read_state(path)), **{name: weights_sha256(tensors) for name, tensors in parts.items()}}


def samples_of_steps(setting: Setting, run: Path) -> list[Counter[int]]:
    """Return how often each sample is in each step of a run, over all its ranks."""
    of_ranks = [rows(run / f"steps.rank{rank}.jsonl") for rank in range(setting.ranks)]
    return [sum((Counter(row["samples"]) for row in step), Counter()) for step in zip(*of_ranks, strict=True)]


def same_on_all_world_sizes(traces: list[list[Counter[int]]]) -> bool:
    """Return whether runs have the same samples in each step, as far as the shortest goes."""
    num_steps = min(len(trace) for trace in traces)
    return all(trace[:num_steps] == traces[0][:num_steps] for trace in traces)


def summary(setting: Setting, outcomes: list[Killed], checks: dict[str, bool]) -> dict[str, Any]:
    """Return what a world size came to."""
    started = [each for each in outcomes if each.done is not None]
    repeated = Counter(each.repeated for each in started)
    return {
        "steps": setting.steps,
        "kills": len(outcomes),
        "before_the_first_step": len(outcomes) - len(started),
        "in_a_save": sum(each.in_save for each in outcomes),
        "of": dict(sorted(Counter(each.victim for each in outcomes).items())),
        "steps_repeated": {str(steps): repeated[steps] for steps in sorted(repeated)},
        "more_than_the_interval": sum(each.repeated > setting.every for each in outcomes),
        "until_all_were_gone": record.spread([each.gone_s for each in outcomes]),
        "start_to_first_step": record.spread([each.startup_s for each in started if each.startup_s] or [0.0]),
        "checks": checks,
    }


def get_run(folder: Path, name: str, setting: Setting) -> Path:
    """Return the folder of a run."""
    return folder / f"{name}-{setting.ranks}"


def chaos(
    setting: Setting, number: int, folder: Path, seed: int, report: Callable[[str], None] = print
) -> tuple[dict[str, Any], list[Killed]]:
    """Kill a run of `setting` `number` times, and compare; return the summary and each kill."""
    whole, killed = (get_run(folder, name, setting) for name in ("whole", "killed"))
    startup_s = left_alone(setting, whole)
    kills = plan_kills(number, setting, random.Random(f"{seed} {setting.ranks}"))
    outcomes = killed_all_along(setting, killed, kills, startup_s, report)
    return summary(setting, outcomes, verdicts(setting, whole, killed, outcomes)), outcomes


def main() -> int:
    """Run all, print, write the result; return 1 when something was lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="over all world sizes (default: 100)")
    parser.add_argument("--ranks", default="2,3,4", help="world sizes (default: 2,3,4)")
    parser.add_argument("--every", type=int, default=5, metavar="K", help="steps between checkpoints (default: 5)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sampler", action="append", metavar="TEXT", help="value of data.sampler; may be repeated")
    parser.add_argument("--json", type=Path, metavar="OUT", help="where to write the result")
    args = parser.parse_args()
    worlds = [int(ranks) for ranks in args.ranks.split(",")]
    provenance, start_s = record.provenance(), time.monotonic()
    samplers = args.sampler or ["shuffle"]
    found, kills, is_exact = {}, {}, True
    runs = [(sampler, ranks) for sampler in samplers for ranks in worlds]
    numbers = dict(zip(runs, split_evenly(args.kills, len(runs)), strict=True))
    for sampler in samplers:
        with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
            summaries, traces = {}, []
            for ranks in worlds:
                number = numbers[sampler, ranks]
                setting = Setting(ranks, max(4 * args.every, STEPS_A_KILL * number), args.every, sampler)
                summaries[str(ranks)], outcomes = chaos(setting, number, Path(folder), args.seed)
                traces.append(samples_of_steps(setting, get_run(Path(folder), "killed", setting)))
                kills[f"{ranks} ranks, {sampler}"] = [{**asdict(each), "repeated": each.repeated} for each in outcomes]
                print(json.dumps(summaries[str(ranks)], indent=2), flush=True)
            is_same = same_on_all_world_sizes(traces)
            print(f"{sampler}: the same samples in each step on {args.ranks} ranks: {is_same}", flush=True)
            found[sampler] = {"same_samples_on_all_ranks": is_same, "ranks": summaries}
            is_exact &= is_same and all(all(each["checks"].values()) for each in summaries.values())
    facts = {"recipe": ARGUMENTS, "every": args.every, "seed": args.seed, "took_s": round(time.monotonic() - start_s)}
    if args.json:
        result = {"samplers": found} if args.sampler else found["shuffle"]
        record.write(args.json, {"benchmark": "chaos", **provenance, **facts, **result, "kills": kills})
    return int(not is_exact)


def split_evenly(number: int, parts: int) -> list[int]:
    """Divide a number into parts that differ by one at most, the larger ones first."""
    return [number // parts + (part < number % parts) for part in range(parts)]


if __name__ == "__main__":
    sys.exit(main())
