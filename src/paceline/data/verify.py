"""Decode every image of a dataset in worker processes; report unreadable images and duplicates. Torch-free."""

import hashlib
import mmap
import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Final

import numpy as np
from numpy.typing import NDArray

from paceline.core.dataset import Datasets, PixelArray, Sample, Source, Split, TargetTable
from paceline.core.errors import DataError
from paceline.core.process import die_with_parent
from paceline.core.units import Duration
from paceline.data.bad_images import BadImage, get_reason
from paceline.data.decode_array import decode_pixels
from paceline.data.workers import WorkerProgress

_MAX_EXAMPLES: Final = 5
# Length of a digest: among a billion different images, two collide with a probability of 1e-21.
_DIGEST_BYTES: Final = 16
# Images after which a worker reports its progress.
_REPORT_EVERY: Final = 32


@dataclass(frozen=True)
class DuplicatePair:
    """Two samples with equal content, by number."""

    first: int
    second: int
    # Of all samples with that content, not of these two alone.
    in_both_splits: bool
    in_two_classes: bool


@dataclass(frozen=True)
class Duplicates:
    """Images that occur more than once."""

    images: int  # distinct images
    samples: int  # that hold one of these images
    across_splits: int  # images that are in both splits
    in_two_classes: int  # images that have two labels
    examples: tuple[DuplicatePair, ...]


class SampleDigests:
    """Digests and labels of `num` samples, in memory shared with processes that are forked later."""

    def __init__(self, num: int) -> None:
        shared = mmap.mmap(-1, max(1, num) * (_DIGEST_BYTES + 8))
        self._rows: NDArray[np.uint64] = np.frombuffer(shared, dtype=np.uint64).reshape(-1, 3)[:num]

    def add(self, number: int, content: bytes | PixelArray, label: int) -> None:
        """Store the digest and label of sample `number`."""
        digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        if isinstance(content, bytes):
            digest.update(content)
        else:
            digest.update(f"{content.shape}".encode())  # the same bytes in another shape are another image
            digest.update(np.ascontiguousarray(content).data)
        self._rows[number, :2] = np.frombuffer(digest.digest(), dtype=np.uint64)
        self._rows[number, 2] = label + 1  # 0 marks a sample that was not read

    def find_duplicates(self, num_train: int) -> Duplicates:
        """Return the duplicates among the stored samples; the first `num_train` are the training split."""
        stored = np.flatnonzero(self._rows[:, 2])
        rows = self._rows[stored]
        order = np.lexsort((rows[:, 1], rows[:, 0]))  # stable: equal digests keep the order of their numbers
        rows, numbers = rows[order], stored[order]
        # A group of duplicates is a run of equal rows.
        starts = np.flatnonzero(np.r_[True, (rows[1:, :2] != rows[:-1, :2]).any(1)][: len(rows)])
        sizes = np.diff(np.r_[starts, len(rows)])
        starts, sizes = starts[sizes > 1], sizes[sizes > 1]
        groups = [
            _choose_pair(numbers[start : start + size], rows[start : start + size, 2], num_train)
            for start, size in zip(starts.tolist(), sizes.tolist(), strict=True)
        ]
        return Duplicates(
            len(groups),
            int(sizes.sum()),
            sum(each.in_both_splits for each in groups),
            sum(each.in_two_classes for each in groups),
            _choose_examples(groups),
        )


def _choose_pair(numbers: NDArray[np.int64], labels: NDArray[np.uint64], num_train: int) -> DuplicatePair:
    others, in_val = labels != labels[0], numbers >= num_train
    # The first sample, with one of another class, else of the other split, else any. `numbers` is sorted.
    differs = others if others.any() else in_val if in_val[-1] and not in_val[0] else np.ones_like(others)
    second = int(np.flatnonzero(differs[1:])[0]) + 1
    return DuplicatePair(int(numbers[0]), int(numbers[second]), bool(in_val[-1] and not in_val[0]), bool(others.any()))


def _choose_examples(groups: list[DuplicatePair]) -> tuple[DuplicatePair, ...]:
    # A few of each kind, the most harmful kinds first: two labels, then both splits.
    kinds: dict[tuple[bool, bool], list[DuplicatePair]] = {}
    for each in sorted(groups, key=lambda each: each.first):
        kinds.setdefault((not each.in_two_classes, not each.in_both_splits), []).append(each)
    return tuple(each for _, pairs in sorted(kinds.items()) for each in pairs[:_MAX_EXAMPLES])


@dataclass(frozen=True)
class BadSplitImage:
    """An unreadable image and its split."""

    split: Split
    image: BadImage


@dataclass(frozen=True)
class VerifyProgress:
    """Number of images checked so far, and the unreadable ones in no particular order.

    `duplicates` is None until all images are checked.
    """

    images: int
    bad: tuple[BadSplitImage, ...] = ()
    duplicates: Duplicates | None = None


def verify_images(datasets: Datasets, workers: int, timeout: Duration) -> Iterator[VerifyProgress]:
    """Decode all images of both splits in `workers` processes; yield progress, and at the end the sorted result.

    A worker that an image kills, or that makes no progress for `timeout`, is replaced, and the image counts as bad.
    """
    digests = SampleDigests(len(datasets.train) + len(datasets.val))
    images = _ImagesOfBothSplits(datasets, digests, _number_targets(datasets))
    with closing(_VerifyWorkers(images, max(1, min(workers, len(images))), timeout)) as pool:
        num_checked = 0
        bad: list[BadSplitImage] = []
        while pool.is_busy:
            for progress in pool.collect():
                num_checked += progress.images
                bad += progress.bad
            yield VerifyProgress(num_checked, tuple(bad))
    assert num_checked == len(images), f"{num_checked} of {len(images)} images were checked"
    ordered = tuple(sorted(bad, key=lambda each: (each.split, each.image.index)))
    yield VerifyProgress(num_checked, ordered, images.digests.find_duplicates(len(datasets.train)))


def find_read_error(source: Source, index: int) -> str:
    """Return the reason why sample `index` cannot be read or decoded, or ""."""
    try:
        _read_and_decode(source, index)
    except DataError as error:
        return get_reason(error)
    return ""


def _read_and_decode(source: Source, index: int) -> Sample:
    content, label = source.read(index)
    decode_pixels(content, source.info.pixel_format, name=source.name_of(index))
    return content, label


def _number_targets(datasets: Datasets) -> dict[Split, NDArray[np.int64]]:
    """Return for each split the number, among the targets of both, of each row of its table; {} for labels of classes.

    A split may number its rows in an order of its own.
    """
    train, val = datasets.train.info, datasets.val.info
    if train.targets == val.targets:
        return {}
    # A label without a table is a class.
    tables = [
        np.eye(info.num_classes, dtype=np.float32) if not info.targets else info.targets.rows for info in (train, val)
    ]
    _, numbers = TargetTable.from_targets(np.concatenate(tables), train.num_classes)
    of_train, of_val = np.split(numbers, [len(tables[0])])
    return {"train": of_train, "val": of_val}


@dataclass(frozen=True)
class _ImagesOfBothSplits:
    """The images of both splits in one sequence, training first; `target_numbers` are those of `_number_targets`."""

    datasets: Datasets
    digests: SampleDigests
    target_numbers: dict[Split, NDArray[np.int64]]

    def __len__(self) -> int:
        return len(self.datasets.train) + len(self.datasets.val)

    def check(self, number: int) -> tuple[BadSplitImage, ...]:
        source, split, index = self._locate(number)
        try:
            content, label = _read_and_decode(source, index)
            self.digests.add(number, content, int(self.target_numbers[split][label]) if self.target_numbers else label)
        except DataError as error:
            return (self.report_bad(number, get_reason(error)),)
        return ()

    def report_bad(self, number: int, reason: str) -> BadSplitImage:
        source, split, index = self._locate(number)
        return BadSplitImage(split, BadImage(index, source.name_of(index), reason))

    def _locate(self, number: int) -> tuple[Source, Split, int]:
        num_train = len(self.datasets.train)
        if number < num_train:
            return self.datasets.train, "train", number
        return self.datasets.val, "val", number - num_train


@dataclass
class _VerifyWorkers:
    images: _ImagesOfBothSplits
    workers: int
    timeout: Duration
    progress: WorkerProgress = field(init=False)
    _running: dict[Connection, tuple[int, BaseProcess]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.progress = WorkerProgress(self.workers)
        for worker in range(self.workers):
            self._start(worker, worker)

    @property
    def is_busy(self) -> bool:
        return bool(self._running)

    def collect(self) -> Iterator[VerifyProgress]:
        before = self.progress.positions()
        ready = wait(list(self._running), timeout=self.timeout.seconds)
        now = self.progress.positions()
        # A report comes after many images: only workers that are at the same image as before hang.
        hanging = (
            [] if ready else [pipe for pipe, (worker, _) in self._running.items() if now[worker] == before[worker]]
        )
        for pipe in ready or hanging:
            assert isinstance(pipe, Connection)
            worker, process = self._running[pipe]
            if not ready:
                process.kill()
            try:
                yield pipe.recv()
            except EOFError:
                del self._running[pipe]
                pipe.close()
                process.join()
                if process.exitcode:
                    yield self._replace(worker, process.exitcode, hangs=not ready)

    def close(self) -> None:
        for pipe, (_, process) in self._running.items():
            process.kill()
            process.join()
            pipe.close()
        self._running.clear()

    def _start(self, worker: int, first: int) -> None:
        fork = multiprocessing.get_context("fork")
        pipe, sender = fork.Pipe(duplex=False)
        process = fork.Process(
            target=_verify_in_worker,
            args=(self.images, worker, first, self.workers, self.progress, sender, os.getpid()),
            daemon=True,
        )
        self.progress.set_start(worker, first)
        process.start()
        sender.close()  # the worker holds the only other end, so its death is an EOF here
        self._running[pipe] = (worker, process)

    def _replace(self, worker: int, exit_code: int, *, hangs: bool) -> VerifyProgress:
        """Report the image that killed a worker, and start a worker on the images after it."""
        _, unreported, current = self.progress.positions()[worker]
        current = max(current, unreported)  # the worker may have died before it recorded the next image
        if current >= len(self.images):  # it died after its last image
            return VerifyProgress(0)
        if hangs:
            reason = f"is not decoded within {self.timeout}"
        elif exit_code < 0:
            reason = f"kills the process that decodes it, by {signal.Signals(-exit_code).name}"
        else:
            reason = f"ends the process that decodes it, with exit code {exit_code}"
        if current + self.workers < len(self.images):
            self._start(worker, current + self.workers)
        return VerifyProgress((current - unreported) // self.workers + 1, (self.images.report_bad(current, reason),))


def _verify_in_worker(
    images: _ImagesOfBothSplits,
    worker: int,
    first: int,
    stride: int,
    progress: WorkerProgress,
    sender: Connection,
    parent: int,
) -> None:
    """Check images `first`, `first + stride`, ..., and send progress."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(parent)
    progress.register(worker, first)
    num_checked = 0
    for number in range(first, len(images), stride):
        progress.set_sample(number)
        bad = images.check(number)
        num_checked += 1
        # Report a bad image at once: if a later image kills this process, what is not sent counts as readable.
        if bad or num_checked == _REPORT_EVERY:
            sender.send(VerifyProgress(num_checked, bad))
            progress.set_batch(number + stride)  # as "batch", record the first image that is not reported yet
            num_checked = 0
    sender.send(VerifyProgress(num_checked))
