"""Read and decode every image of a data set, in worker processes, and say which cannot be. Torch-free.

Which of them hold the same bytes is found on the way.
"""

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

_TOLD_EVERY = 32
"""Images after which a worker says how far it is."""


@dataclass(frozen=True)
class BadFile:
    """An image that cannot be read, and the split it is in."""

    split: Split
    image: BadImage


@dataclass(frozen=True)
class Verified:
    """How many images were looked at so far, and those of them that cannot be read, in no order.

    `copies` are found when all were looked at; None before, and where nothing was.
    """

    images: int
    bad: tuple[BadFile, ...] = ()
    copies: Copies | None = None


def verify(datasets: Datasets, workers: int, timeout: Duration) -> Iterator[Verified]:
    """Decode all images of both splits in `workers` processes; give how far they are, and at last all there is.

    Each worker takes every `workers`-th image. One that an image kills, or that comes no further for `timeout`, is
    replaced, and the image it was at counts as bad.
    """
    images = _Images(datasets, Digests(len(datasets.train) + len(datasets.val)))
    with closing(_Crew(images, max(1, min(workers, len(images))), timeout)) as crew:
        seen = 0
        bad: list[BadFile] = []
        while crew.is_busy:
            for told in crew.wait():
                seen += told.images
                bad += told.bad
            yield Verified(seen, tuple(bad))
    assert seen == len(images), f"{seen} of {len(images)} images were looked at"
    ordered = tuple(sorted(bad, key=lambda file: (file.split, file.image.index)))
    yield Verified(seen, ordered, images.digests.copies(len(datasets.train)))


def trouble(source: Source, index: int) -> str:
    """Return why sample `index` cannot be read or decoded; empty where it can."""
    try:
        _decoded(source, index)
    except DataError as error:
        return BadImage.of(index, "", error).reason
    return ""


def _decoded(source: Source, index: int) -> Sample:
    """Return sample `index` as it is read, once it could be decoded. Raise `DataError` where it cannot."""
    content, label = source.read(index)
    if isinstance(content, bytes):
        decode(content, channels=3 if source.info.channels == 3 else 1, name=source.name_of(index))
    return content, label


@dataclass(frozen=True)
class _Images:
    """The images of both splits as one row: those of training come first. What each holds is noted in `digests`."""

    datasets: Datasets
    digests: Digests

    def __len__(self) -> int:
        return len(self.datasets.train) + len(self.datasets.val)

    def check(self, number: int) -> tuple[BadFile, ...]:
        """Read and decode an image; return it if that cannot be done."""
        source, _, index = self._place(number)
        try:
            self.digests.note(number, *_decoded(source, index))
        except DataError as error:
            return (self.blame(number, BadImage.of(index, "", error).reason),)
        return ()

    def blame(self, number: int, reason: str) -> BadFile:
        """Return an image as bad for `reason`."""
        source, split, index = self._place(number)
        return BadFile(split, BadImage(index, source.name_of(index), reason))

    def _place(self, number: int) -> tuple[Source, Split, int]:
        first_of_val = len(self.datasets.train)
        if number < first_of_val:
            return self.datasets.train, "train", number
        return self.datasets.val, "val", number - first_of_val


@dataclass
class _Crew:
    """The processes, each of them with the end of a pipe that it tells its findings through."""

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
        """Whether there is an image left to look at."""
        return bool(self._at_work)

    def wait(self) -> Iterator[Verified]:
        """Give what the workers have found since the last time; wait until one of them has."""
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
        """End what is left of the processes."""
        for pipe, (_, process) in self._at_work.items():
            process.kill()
            process.join()
            pipe.close()
        self._at_work.clear()

    def _start(self, worker: int, first: int) -> None:
        """Start worker number `worker` at image `first`."""
        fork = multiprocessing.get_context("fork")
        pipe, mouth = fork.Pipe(duplex=False)
        process = fork.Process(
            target=_work, args=(self.images, worker, first, self.workers, self.trail, mouth, os.getpid()), daemon=True
        )
        self.trail.begin(worker, first)
        process.start()
        mouth.close()
        self._at_work[pipe] = (worker, process)

    def _replace(self, worker: int, exit_code: int, *, hangs: bool) -> Verified:
        """Blame the image that a worker was at, and go on behind it."""
        _, told, at = self.trail.spots()[worker]
        at = max(at, told)  # it may have ended before it looked at the next one
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
        return Verified((at - told) // self.workers + 1, (self.images.blame(at, reason),))


def _work(images: _Images, worker: int, first: int, stride: int, trail: Trail, mouth: Connection, parent: int) -> None:
    """Look at images `first`, `first + stride` and so on, and tell what was found: a bad one at once.

    The trail holds the first image that has not been told of, and the one looked at.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(parent)
    trail.enter(worker, first)
    seen = 0
    for number in range(first, len(images), stride):
        trail.sample(number)
        bad = images.check(number)
        seen += 1
        if bad or seen == _TOLD_EVERY:
            mouth.send(Verified(seen, bad))
            trail.batch(number + stride)
            seen = 0
    mouth.send(Verified(seen))
