"""Cause every kind of failure, and record the exit codes and the location that each error names."""

import contextlib
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

from jobs import Case, Job
from recipes import SHORT, SYNTHETIC
from values import Record, lines_in

TINY = ("train", *SYNTHETIC, *SHORT, "log.samples=false")
LONG = (*TINY, "train.steps=1000000", "train.eval_every=off", "checkpoint.every=1000st", "log.every=2st")

SITUATIONS: dict[str, tuple[str, ...]] = {
    "dry run": (*TINY, "--dry-run"),
    "no such verb": ("trian", "digits"),
    "no such option": ("train", "digits", "--epochs", "2"),
    "no such field": ("train", "digits", "optim.learning_rate=1"),
    "wrong type": ("train", "digits", "optim.lr=high"),
    "value out of range": ("train", "digits", "train.label_smoothing=1.5"),
    "fields that do not fit": (*TINY, "parallel.compression=powersgd", "parallel.strategy=fsdp"),
    "field without effect": (*TINY, "optim.base_batch_size=32"),
    "no such recipe": ("train", "digitz"),
    "no such recipe file": ("train", "missing.yaml"),
    "no data": ("train", "folder", "data.source.root=missing"),
    "no such device": (*TINY, "parallel.device=cuda"),
    "batch that does not divide": (*TINY, "data.batch_size=7", "--ranks", "2"),
    "too many ranks": (*TINY, "--ranks", "99"),
    "port out of range": (*TINY, "--port", "70000"),
    "nothing to resume": (*TINY, "--run-dir", "runs/nothing", "--resume"),
    "code of one's own": ("train", "own.yaml"),
    "not a number": (*TINY, "optim.lr=1e30", "--run-dir", "runs/nan"),
    "eval of no run": ("eval", "runs/missing"),
    "compare of no run": ("compare", "runs/missing"),
    "report of no run": ("report", "runs/missing"),
    "predict with no run": ("predict", "runs/missing", "photos"),
    "data without images": ("data", "inspect", "home"),
    "damaged image": ("data", "verify", "damaged"),
    "damaged image in training": (
        *("train", "folder", "data.source.root=damaged", "model.name=resnet18_cifar", "model.width=0.1"),
        *("model.norm=none", "data.image_size=16", "data.batch_size=1", *SHORT),
    ),
    "pack that is there": ("data", "pack", "photos", "photos.pack"),
    "full disk on stdout": ("recipes", "--json"),
}


def code_cases(record: Record, work: Path) -> Iterator[Case]:
    """Return the situations; those that train and are interrupted come first."""
    (work / "own.yaml").write_text("extends: digits\nmodel: {name: 'mine:Model'}\n")
    yield _preempted(record, work)
    yield _preempted_ranks(record, work)
    yield _killed_rank(record, work)
    yield _existing_run(record, work)
    for name, args in SITUATIONS.items():
        yield _situation(record, name, args)


def _situation(record: Record, name: str, args: tuple[str, ...], **more) -> Case:
    completed = yield Job(args, stdout="/dev/full" if name == "full disk on stdout" else "", **more)
    record.put(f"codes/{name}", completed.codes[0])
    if name != "killed rank":  # whether the other rank has time to report is random
        record.put_error(f"codes/{name}", completed.err)


def _preempted(record: Record, work: Path) -> Case:
    run = work / "runs/preempted"
    args = (*LONG, "--run-dir", "runs/preempted", "--json")
    yield from _situation(record, "preempted", args, disturb=_once_training(run, signal.SIGTERM))
    result = json.loads((run / "result.json").read_text()) if (run / "result.json").is_file() else {}
    record.put("codes/preempted status", result.get("status", "no result"))
    record.put_files("codes/preempted", run / "job")
    yield from _situation(record, "resumed with another recipe", (*args, "optim.lr=1", "--resume"))


def _preempted_ranks(record: Record, work: Path) -> Case:
    run = work / "runs/preempted-ranks"
    args = (*LONG, "--ranks", "2", "--run-dir", "runs/preempted-ranks")
    disturb = _once_training(run, signal.SIGUSR1)
    yield from _situation(record, "two ranks preempted", args, disturb=disturb, cores=2)


def _killed_rank(record: Record, work: Path) -> Case:
    run = work / "runs/killed"

    def kill(launcher: int) -> bool:
        if lines_in(run / "steps.jsonl") < 2:
            return False
        start = json.loads((run / "attempts.jsonl").read_text().splitlines()[0])
        os.kill(start["pid"], signal.SIGKILL)
        return True

    args = (*LONG, "--ranks", "2", "--run-dir", "runs/killed")
    yield from _situation(record, "killed rank", args, disturb=kill, cores=2)


def _once_training(run: Path, number: int) -> Callable[[int], bool]:
    def disturb(pid: int) -> bool:
        if lines_in(run / "steps.jsonl") < 2:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        return True

    return disturb


def _existing_run(record: Record, work: Path) -> Case:
    """A completed run: started again, resumed, and with damaged checkpoints."""
    run, args = work / "runs/ended", (*TINY, "--run-dir", "runs/ended")
    yield from _situation(record, "ok", args)
    yield from _situation(record, "run that is there", args)
    yield from _situation(record, "run that has ended resumed", (*args, "--resume"))
    yield from _situation(record, "speed below", ("compare", "runs/ended", "--fail-below", "top1=1"))
    unreadable = ("predict", "runs/ended", "damaged", "--format", "csv")
    yield from _situation(record, "image that cannot be read", unreadable)
    shutil.copytree(run, work / "runs/damaged-1")
    newest, *older = sorted((run / "checkpoints").iterdir(), reverse=True)
    _damage(work / "runs/damaged-1/checkpoints" / newest.name)
    yield from _situation(record, "newest checkpoint damaged", (*TINY, "--run-dir", "runs/damaged-1", "--resume"))
    record.put_files("codes/newest checkpoint damaged", work / "runs/damaged-1")
    for path in (newest, *older):
        _damage(path)
    yield from _situation(record, "all checkpoints damaged", (*args, "--resume"))
    yield from _situation(record, "eval of damaged weights", ("eval", "runs/ended"))


def _damage(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
