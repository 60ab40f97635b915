"""`paceline data verify`: read and decode every image of a data set before a run does, and list the bad ones."""

import json
import os
import sys
import time
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from paceline.cli.words import split_words
from paceline.core.dataset import ArraySource, Datasets
from paceline.core.errors import DataError, WorldError
from paceline.core.units import count
from paceline.data.sources.build import build_datasets
from paceline.data.verify import BadFile, Verified
from paceline.data.verify import verify as check
from paceline.recipe.load import load


def verify(words: list[str], workers: str, *, as_json: bool) -> int:
    """Do what `paceline data verify` was asked for; return the exit code. Raise `DataError` when an image is bad.

    Pixels in memory were all read to get there.
    """
    name, patch = split_words(words)
    data = load(name, patch).recipe.data
    num_workers = _count_workers(workers)
    datasets = build_datasets(data.source, may_download=False, skip_bad=True)
    if isinstance(datasets.train, ArraySource) and isinstance(datasets.val, ArraySource):
        _show(Verified(_num_images(datasets)), "held in memory, nothing to decode", as_json=as_json)
        return 0
    progress = _build_progress(_num_images(datasets))
    started_s = time.perf_counter()
    found = Verified(0)
    with progress:
        for found in check(datasets, num_workers, data.worker_timeout):
            progress.told(found, time.perf_counter() - started_s)
    rate = found.images / (time.perf_counter() - started_s)
    _show(found, f"{rate:,.0f} images/s, {count(num_workers, 'worker')}", as_json=as_json)
    if found.bad:
        raise DataError(
            f"{found.bad[0].image.name}: {found.bad[0].image.reason} ({count(len(found.bad), 'bad image')} of "
            f"{found.images:,}; remove or replace them, or train with data.on_bad_image=skip)"
        )
    return 0


def _count_workers(text: str) -> int:
    """Return how many processes to decode with: `auto` is one a core."""
    if text == "auto":
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if not text.isdecimal() or int(text) < 1:
        raise WorldError(f"--workers: {text!r} is not a number of processes (write 1, 2, ... or auto)")
    return int(text)


def _num_images(datasets: Datasets) -> int:
    return len(datasets.train) + len(datasets.val)


def _show(found: Verified, how: str, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"images": found.images, "bad": [_row(file) for file in found.bad]}, indent=2))
        return
    for file in found.bad:
        print(f"{file.split:5}  {file.image.name}: {file.image.reason}")
    print(f"{count(found.images, 'image')}, {len(found.bad):,} bad ({how})")


def _row(file: BadFile) -> dict[str, str | int]:
    return {"split": file.split, "index": file.image.index, "path": file.image.name, "reason": file.image.reason}


class _Reporter(Protocol):
    """Say how far the work is, on stderr."""

    def __enter__(self) -> object: ...

    def __exit__(self, *_: object) -> None: ...

    def told(self, found: Verified, elapsed_s: float) -> None:
        """Say that `found` is known after `elapsed_s` seconds."""
        ...


class _Lines:
    """A line every ten seconds."""

    _QUIET_S = 10.0

    def __init__(self, num_images: int) -> None:
        self._num_images = num_images
        self._said_s = 0.0

    def __enter__(self) -> "_Lines":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def told(self, found: Verified, elapsed_s: float) -> None:
        """Say it where the last line is long enough ago."""
        if elapsed_s - self._said_s >= self._QUIET_S:
            self._said_s = elapsed_s
            print(f"{found.images:,}/{self._num_images:,} images  {_facts(found, elapsed_s)}", file=sys.stderr)


class _Bar:
    """A live bar on a terminal."""

    def __init__(self, num_images: int, console: Console) -> None:
        text = TextColumn("{task.completed:,.0f}/{task.total:,.0f} images  {task.fields[facts]}", markup=False)
        self._progress = Progress(BarColumn(bar_width=24), text, console=console, transient=True)
        self._task = self._progress.add_task("", total=num_images, facts="starting")

    def __enter__(self) -> "_Bar":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def told(self, found: Verified, elapsed_s: float) -> None:
        """Move the bar."""
        self._progress.update(self._task, completed=found.images, facts=_facts(found, elapsed_s))


def _build_progress(num_images: int) -> _Reporter:
    console = Console(stderr=True, markup=False, emoji=False, highlight=False)
    return _Bar(num_images, console) if console.is_terminal else _Lines(num_images)


def _facts(found: Verified, elapsed_s: float) -> str:
    return f"{len(found.bad):,} bad  {found.images / max(elapsed_s, 1e-9):,.0f} images/s"
