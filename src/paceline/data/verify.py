"""Decode every image of a data set in worker processes; report unreadable images and duplicates. Torch-free."""

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from paceline.core.dataset import Datasets, Sample, Source, Split
from paceline.core.errors import DataError
from paceline.core.process import die_with_parent
from paceline.core.units import Duration
from paceline.data.bad import BadImage
from paceline.data.copies import Copies, Digests
from paceline.data.decode import decode
from paceline.data.workers import Trail

# Images after which a worker reports its progress.
_TOLD_EVERY = 32


@dataclass(frozen=True)
class BadFile:
    """An unreadable image and its split."""

    split: Split
    image: BadImage


@dataclass(frozen=True)
class Verified:
    """Number of images checked so far, and the unreadable ones in no particular order.

    `copies` is None until all images are checked, and if nothing was.
    """

    images: int
    bad: tuple[BadFile, ...] = ()
    copies: Copies | None = None


def verify(datasets: Datasets, workers: int, timeout: Duration) -> Iterator[Verified]:
    """Decode all images of both splits in `workers` processes; yield progress, and at the end the full result.

    Each worker takes every `workers`-th image. A worker that an image kills, or that makes no progress for `timeout`,
    is replaced, and the image counts as bad.
    """
    images = _Images(datasets, Digests(len(datasets.train) + len(datasets.val)))
    with closing(_Crew(images, max(1, min(workers, len(images))), timeout)) as pool:
        seen = 0
        bad: list[BadFile] = []
        while pool.is_busy:
            for findings in pool.wait():
                seen += findings.images
                bad += findings.bad
            yield Verified(seen, tuple(bad))
    assert seen == len(images), f"{seen} of {len(images)} images were checked"
    ordered = tuple(sorted(bad, key=lambda file: (file.split, file.image.index)))
    yield Verified(seen, ordered, images.digests.copies(len(datasets.train)))


def trouble(source: Source, index: int) -> str:
    """Return the reason why sample `index` cannot be read or decoded, or ""."""
    try:
        _decoded(source, index)
    except DataError as error:
        return BadImage.of(index, "", error).reason
    return ""


def _decoded(source: Source, index: int) -> Sample:
    """Return sample `index` as read, after checking that it decodes. Raise `DataError` if it does not."""
    content, label = source.read(index)
    if isinstance(content, bytes):
        decode(content, channels=3 if source.info.channels == 3 else 1, name=source.name_of(index))
    return content, label


@dataclass(frozen=True)
class _Images:
    """The images of both splits in one sequence, training first, with their `digests`."""

    datasets: Datasets
    digests: Digests

    def __len__(self) -> int:
        return len(self.datasets.train) + len(self.datasets.val)

    def check(self, number: int) -> tuple[BadFile, ...]:
        """Read and decode an image; return it if that fails."""
        source, _, index = self._place(number)
        try:
            self.digests.note(number, *_decoded(source, index))
        except DataError as error:
            return (self.blame(number, BadImage.of(index, "", error).reason),)
        return ()

    def blame(self, number: int, reason: str) -> BadFile:
        """Return an image as bad with the given `reason`."""
        source, split, index = self._place(number)
        return BadFile(split, BadImage(index, source.name_of(index), reason))

    def _place(self, number: int) -> tuple[Source, Split, int]:
        num_train = len(self.datasets.train)
        if number < num_train:
            return self.datasets.train, "train", number
        return self.datasets.val, "val", number - num_train


@dataclass
class _Crew:
    images: _Images
    workers: int
    timeout: Duration
    trail: Trail = field(init=False)
    _at_work: dict[Connection, tuple[int, BaseProcess]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.trail = Trail(self.workers)
        for worker in range(self.workers):
            self._start(worker, worker)

    @property
    def is_busy(self) -> bool:
        """Whether images are left to check."""
        return bool(self._at_work)

    def wait(self) -> Iterator[Verified]:
        """Wait for findings of at least one worker, and yield them."""
        ready = wait(list(self._at_work), timeout=self.timeout.seconds)
        for pipe in ready or list(self._at_work):
            assert isinstance(pipe, Connection)
            worker, process = self._at_work[pipe]
            if not ready:
                process.kill()
            try:
                yield pipe.recv()
            except EOFError:
                del self._at_work[pipe]
                pipe.close()
                process.join()
                if process.exitcode:
                    yield self._replace(worker, process.exitcode, hangs=not ready)

    def close(self) -> None:
        """Kill the remaining processes."""
        for pipe, (_, process) in self._at_work.items():
            process.kill()
            process.join()
            pipe.close()
        self._at_work.clear()

    def _start(self, worker: int, first: int) -> None:
        fork = multiprocessing.get_context("fork")
        pipe, sender = fork.Pipe(duplex=False)
        process = fork.Process(
            target=_work, args=(self.images, worker, first, self.workers, self.trail, sender, os.getpid()), daemon=True
        )
        self.trail.begin(worker, first)
        process.start()
        sender.close()
        self._at_work[pipe] = (worker, process)

    def _replace(self, worker: int, exit_code: int, *, hangs: bool) -> Verified:
        """Report the image that a dead worker was at, and start a worker on the images after it."""
        _, unreported, at = self.trail.spots()[worker]
        at = max(at, unreported)  # the worker may have died before it noted the next image
        if at >= len(self.images):
            return Verified(0)
        if hangs:
            reason = f"is not decoded within {self.timeout}"
        elif exit_code < 0:
            reason = f"kills the process that decodes it, by {signal.Signals(-exit_code).name}"
        else:
            reason = f"ends the process that decodes it, with exit code {exit_code}"
        if at + self.workers < len(self.images):
            self._start(worker, at + self.workers)
        return Verified((at - unreported) // self.workers + 1, (self.images.blame(at, reason),))


def _work(
    images: _Images, worker: int, first: int, stride: int, progress: Trail, sender: Connection, parent: int
) -> None:
    """Check images `first`, `first + stride`, ..., and send findings; a bad image is sent at once."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(parent)
    progress.enter(worker, first)
    seen = 0
    for number in range(first, len(images), stride):
        progress.sample(number)
        bad = images.check(number)
        seen += 1
        if bad or seen == _TOLD_EVERY:
            sender.send(Verified(seen, bad))
            progress.batch(number + stride)  # as "batch", note the first image that is not reported yet
            seen = 0
    sender.send(Verified(seen))
