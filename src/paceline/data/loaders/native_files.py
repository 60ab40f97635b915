"""JPEG files for the native loader: find their indexes, measure them ahead, and store the indexes of new ones."""

import contextlib
import os
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.errors import DataError
from paceline.core.units import Duration
from paceline.data.loaders.jpeg_index import FoundIndexes, IndexCache, NoIndexCache
from paceline.data.loaders.native_plan import BatchPlan, DecodeTask
from paceline.data.loaders.thread import wait_until
from paceline.data.native import NOT_INDEXABLE, RESIZED, UNREADABLE
from paceline.data.resize import Resizer
from paceline.data.sources.image_files import FileSource, LocatedFiles

if TYPE_CHECKING:
    from paceline.data._native import Pool, Task

# Attempts to decode a file that changes meanwhile; then Python reads it.
_MAX_ATTEMPTS: Final = 3
# Initial status of an image that is measured; the extension writes other values.
_UNMEASURED: Final = -1


class _Measuring(NamedTuple):
    task: "Task"
    indices: NDArray[np.int64]
    sizes: NDArray[np.int32]
    status: NDArray[np.int32]


class FileImages:
    """The files of `source`, with what is known of each: its index, its size, and whether only Python reads it.

    Raise a `WatchError` that names a file if one is not measured within `timeout`.
    """

    def __init__(self, source: FileSource, indexes: IndexCache | NoIndexCache, timeout: Duration) -> None:
        self.source = source
        self.indexes = indexes
        self._timeout = timeout
        self._sizes = np.zeros((len(source), 2), dtype=np.uint16)  # as seen in this run
        self._is_for_python = np.zeros(len(source), dtype=np.bool_)
        self._pool: Pool | None = None
        self._measuring: _Measuring | None = None

    def start(self, pool: "Pool") -> None:
        """Decode in `pool` from now on, with the indexes that others have written meanwhile."""
        self._pool, self._measuring = pool, None
        self.indexes.refresh()

    def finish(self) -> None:
        """Write the new indexes, and forget the pool."""
        self._pool, self._measuring = None, None
        self.indexes.seal()

    def measure(self, indices: NDArray[np.int64]) -> None:
        """Begin to read the headers of those files, int64 [N], whose size is unknown."""
        assert self._pool is not None and self._measuring is None, "`locate` follows each `measure`"
        indices = indices[self._is_unknown(indices)]
        files = self.source.locate_files(indices)
        self._sizes[indices] = self.indexes.find(files.names).sizes
        rows = np.flatnonzero(self._is_unknown(indices))
        if len(rows):
            files, indices = files.take(rows), indices[rows]
            sizes, status = np.zeros((len(rows), 2), np.int32), np.full(len(rows), _UNMEASURED, dtype=np.int32)
            task = self._pool.measure(files.files, files.offsets, files.lengths, sizes, status)
            self._measuring = _Measuring(task, indices, sizes, status)

    def locate(self, indices: NDArray[np.int64]) -> "LocatedJpegs":
        """Return files, int64 [N], with their indexes; wait for the sizes of those that are measured."""
        self._end_measuring()
        self.measure(indices)
        self._end_measuring()
        files = self.source.locate_files(indices)
        files = files.without(self._is_for_python[indices])
        return LocatedJpegs(self, indices, files, self.indexes.find(files.names), self._sizes[indices].astype(np.int32))

    def store(self, located: "LocatedJpegs", task: "Task", status: NDArray[np.int32]) -> None:
        """Store what decoding files has shown: new indexes, and which of them only Python reads."""
        self._is_for_python[located.indices[status == NOT_INDEXABLE]] = True
        new = {row: index for row, index in enumerate(task.indexes()) if index is not None}
        if new:
            names = [located.files.names[row] for row in new]
            self.indexes.add(names, located.sizes[list(new)], list(new.values()))

    def set_sizes(self, indices: NDArray[np.int64], sizes: NDArray[np.int64]) -> None:
        """Set the upright sizes, [N, 2], of files that have changed, int64 [N]."""
        self._sizes[indices] = sizes

    def _is_unknown(self, indices: NDArray[np.int64]) -> NDArray[np.bool_]:
        is_known = (self._sizes[indices] > 0).all(axis=1) | self._is_for_python[indices]
        return np.asarray(~is_known)

    def _end_measuring(self) -> None:
        measured, self._measuring = self._measuring, None
        if measured is None:
            return
        wait_until(measured.task.wait, self._timeout, partial(self._describe_hang, measured))
        self._sizes[measured.indices] = measured.sizes
        self._is_for_python[measured.indices[measured.status == NOT_INDEXABLE]] = True

    def _describe_hang(self, measured: _Measuring) -> str:
        index = next(iter(measured.indices[measured.status == _UNMEASURED].tolist()), measured.indices[0])
        return (
            f"data.worker_timeout: no batch for {self._timeout}: the native loader hangs at the header of "
            f"{self.source.name_of(int(index))} (check that image and its disk, or raise data.worker_timeout)"
        )


class LocatedJpegs(NamedTuple):
    """Files of `images` with their indexes; a file is None if the extension must not decode it."""

    images: FileImages
    indices: NDArray[np.int64]
    files: LocatedFiles
    found: FoundIndexes
    sizes: NDArray[np.int32]

    @property
    def is_decodable(self) -> NDArray[np.bool_]:
        """Whether the extension is to decode an image, bool [N]."""
        return np.array([file is not None for file in self.files.files], dtype=np.bool_)

    @property
    def may_need_python(self) -> bool:
        """Whether a file has no index: it is new, or maybe none that the extension decodes."""
        return bool((self.found.lengths == 0).any())

    @property
    def num_bytes(self) -> int:
        """Bytes of the files that the extension decodes."""
        return sum(map(self._count_bytes, range(len(self.indices))))

    def take(self, rows: slice) -> "LocatedJpegs":
        """Return some of the files."""
        return LocatedJpegs(
            self.images, self.indices[rows], self.files.take(rows), self.found.take(rows), self.sizes[rows]
        )

    def submit(
        self, pool: "Pool", plan: BatchPlan, resizer: Resizer, images: Tensor, status: NDArray[np.int32]
    ) -> DecodeTask:
        """Decode the files of a batch."""
        return FileTask(self, pool, plan, resizer, images, status)

    def _count_bytes(self, row: int) -> int:
        file, indexed_bytes = self.files.files[row], self.found.get_file_bytes(row)
        if not isinstance(file, bytes):
            return file.nbytes if file is not None else 0
        if self.files.lengths[row]:
            return int(self.files.lengths[row])
        if indexed_bytes is not None:
            return indexed_bytes
        with contextlib.suppress(OSError):
            return os.stat(file).st_size  # noqa: PTH116 - a path in bytes
        return 0


class FileTask:
    """A submitted batch of files. `wait` stores new indexes, and submits once more what has changed meanwhile."""

    def __init__(
        self,
        located: LocatedJpegs,
        pool: "Pool",
        plan: BatchPlan,
        resizer: Resizer,
        images: Tensor,
        status: NDArray[np.int32],
    ) -> None:
        self._located = located
        self._pool = pool
        self._plan = plan
        self._resizer = resizer
        self._out = images.numpy()
        self._status = status
        self._boxes = plan.boxes
        self._attempts = 0
        self._is_finished = False
        self._earlier_s = 0.0
        self._files = [*located.files.files]
        self._task = self._submit(self._files)

    @property
    def seconds(self) -> float:
        """Seconds spent so far, summed over threads."""
        return self._earlier_s + self._task.seconds

    @property
    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._is_finished or (self._task.done and not len(self._find_changed()))

    def wait(self, timeout_s: float, /) -> bool:
        """Wait up to `timeout_s` seconds, and return whether all images are done."""
        if self._is_finished:
            return True
        if not self._task.wait(timeout_s):
            return False
        self._located.images.store(self._located, self._task, self._status)
        changed = self._find_changed()
        if len(changed):
            self._submit_again(changed)
        self._is_finished = not len(changed)
        return self._is_finished

    def _find_changed(self) -> NDArray[np.int64]:
        if self._attempts >= _MAX_ATTEMPTS:
            return np.empty(0, dtype=np.int64)
        return np.flatnonzero((self._status == RESIZED) | (self._status == UNREADABLE))

    def _submit_again(self, rows: NDArray[np.int64]) -> None:
        located, plan, resizer = self._located, self._plan, self._resizer
        resized = rows[self._status[rows] == RESIZED]
        sizes, draws = located.sizes[resized].astype(np.int64), plan.draws[resized, : resizer.num_draws]
        self._boxes = self._boxes.copy()
        self._boxes[resized] = resizer.compute_regions(sizes, draws, plan.size).boxes
        located.images.set_sizes(located.indices[resized], sizes)
        for row in rows[self._status[rows] == UNREADABLE].tolist():
            self._files[row] = self._read(int(located.indices[row]))
        is_again = np.zeros(len(self._files), dtype=np.bool_)
        is_again[rows] = True
        self._earlier_s += self._task.seconds
        self._task = self._submit(located.files._replace(files=self._files).without(~is_again).files)

    # Python might read what a thread could not, for want of a descriptor for example, and Pillow's pixels differ.
    def _read(self, index: int) -> memoryview | None:
        try:
            content, _ = self._located.images.source.read(index)
        except DataError:  # the reader of the batch raises it too
            return None
        return memoryview(content) if isinstance(content, bytes) else None

    def _submit(self, files: Sequence[bytes | memoryview | None]) -> "Task":
        self._attempts += 1
        plan, located = self._plan, self._located
        return self._pool.submit_jpegs(
            files,
            located.files.offsets,
            located.files.lengths,
            *located.found[:4],
            self._boxes,
            plan.flips,
            plan.is_inside,
            plan.size,
            self._out.shape[1],
            located.sizes,
            self._out,
            self._status,
        )
