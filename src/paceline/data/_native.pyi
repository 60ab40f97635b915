# What csrc/module*.c offer to Python; `paceline.data.native.NativeExtension` describes the functions.
from collections.abc import Sequence
from typing import final

from paceline.data.native import Buffer, CropBox

VERSION: int

@final
class Task:
    """A submitted batch. Deleting it cancels queued images, and waits up to two seconds for those in progress.

    The output memory of an image that hangs is never freed.
    """

    @property
    def seconds(self) -> float:
        """Seconds spent so far, summed over threads."""

    @property
    def done(self) -> bool:
        """Whether all images are done. Raise ValueError if the pool was closed before."""

    def wait(self, timeout_s: float, /) -> bool:
        """Wait up to `timeout_s` seconds, and return `done`."""

    def indexes(self) -> list[bytes | None]:
        """Return the new index entry of each image that `submit_jpegs` decoded without a valid one, else None.

        None also for files that cannot have an entry: see docs/reference/indexed-jpeg.md. Raise ValueError before the
        task is done.
        """

@final
class Pool:
    """Native threads that process images in order of submission. Not usable in a forked child."""

    def __init__(self, threads: int) -> None: ...
    @property
    def scratch_bytes(self) -> int:
        """Bytes of scratch memory that the threads keep between images."""

    def submit(
        self,
        shards: Sequence[Buffer],
        shard_of: Buffer,  # int32 [N]: number of the shard
        offsets: Buffer,  # uint64 [N], in bytes
        lengths: Buffer,  # uint64 [N], in bytes; 0: `out` and `status` are not touched
        boxes: Buffer,  # float64 [N, 4], each a `CropBox`
        flips: Buffer,  # uint8 or bool [N]
        inside: bool,
        size: int,
        channels: int,
        out: Buffer,  # uint8 [N, channels, size, size]
        status: Buffer,  # int32 [N]: 0 for a decoded image, else a code for `reason`
        stage: int = 0,
    ) -> Task:
        """Queue a batch of N crops, and prefetch its bytes from disk. Other arguments are as in `decode_crop_into`.

        Everything is copied except the shards, `out` and `status`. Raise TypeError or ValueError for memory of another
        type or size, an image outside its shard, or a closed pool.
        """

    def submit_jpegs(
        self,
        files: Sequence[bytes | memoryview | None],  # absolute path, content, or None: nothing is touched
        offsets: Buffer,  # uint64 [N], in bytes: a part of the file at a path
        lengths: Buffer,  # uint64 [N], in bytes; offset and length 0: the whole file
        index_buffers: Sequence[Buffer],
        index_of: Buffer,  # int32 [N]: number of the index buffer
        index_offsets: Buffer,  # uint64 [N], in bytes
        index_lengths: Buffer,  # uint64 [N], in bytes; 0: no index entry
        boxes: Buffer,  # float64 [N, 4], each a `CropBox`
        flips: Buffer,  # uint8 or bool [N]
        inside: bool,
        size: int,
        channels: int,
        sizes: Buffer,  # int32 [N, 2]: upright height and width for which `boxes` was computed; corrected if RESIZED
        out: Buffer,  # uint8 [N, channels, size, size]
        status: Buffer,  # int32 [N]: 0 for a decoded image, else a code for `reason`
        stage: int = 0,
    ) -> Task:
        """Queue a batch of N crops of JPEG files; the pixels are those of `submit` for the records of the files.

        A file is decoded with its index entry if the entry was made from the same bytes, else by walking through all
        of its bits; see `Task.indexes`. An image of another size than `sizes` gets the status RESIZED. Paths are
        opened and read by the threads, and prefetched. Memory is held until the task is done. Errors are as in
        `submit`.
        """

    def measure(
        self,
        files: Sequence[bytes | memoryview | None],  # as in `submit_jpegs`, and so are the next two
        offsets: Buffer,
        lengths: Buffer,
        sizes: Buffer,  # int32 [N, 2]: receives the upright height and width, or zeros
        status: Buffer,  # int32 [N]: 0 for a JPEG file that may be indexable, else a code for `reason`
    ) -> Task:
        """Queue reading the headers of N JPEG files."""

    def close(self) -> None:
        """Cancel queued images, and join the threads; one that hangs is abandoned after two seconds."""

@final
class Mapped:
    """A mapped file as a buffer; the mapping lives as long as a reference to it."""

    def __init__(
        self, descriptor: int, num_bytes: int, name: bytes, offset: int = 0, is_private: bool = False
    ) -> None: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

def cut_file() -> bytes | None: ...
def isa() -> str: ...
def choose_isa(name: str, /) -> None: ...
def reason(status: int, /) -> str: ...
def index_jpeg(data: Buffer, every: int = 8) -> bytes: ...
def size_of(record: Buffer, /) -> tuple[int, int, int]: ...
def decode_into(record: Buffer, channels: int, out: Buffer) -> None: ...
def decode_crop_into(
    record: Buffer,
    box: CropBox,
    inside: bool,
    flip: bool,
    size: int,
    channels: int,
    out: Buffer,
    stage: int = 0,
) -> None: ...
def move(
    images: Buffer,
    indices: Buffer,
    tops: Buffer,
    lefts: Buffer,
    flips: Buffer,
    padding: int,
    reflect: bool,
    shape: tuple[int, int, int],
    out: Buffer,
) -> None: ...
