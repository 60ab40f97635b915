"""The native core (csrc/), where it was built: typed, and absent rather than broken. Decodes nothing itself."""

from collections.abc import Sequence
from mmap import mmap
from typing import Any, Final, Protocol

from numpy.typing import NDArray

VERSION: Final = 2
"""Of the functions below; an extension of another version is as good as none."""
MAX_SIDE: Final = 4096
"""Height and width of what is handed out (`PL_MAX_OUTPUT`)."""
MAX_THREADS: Final = 1024
"""Threads of a pool (`PL_MAX_THREADS`)."""
WHAT_IS_LOST: Final = (
    "the native core was not built, so JPEGs are decoded by torchvision, several times slower "
    "(install a C compiler and Python's headers, and install paceline again)"
)
"""What a user should read where `native()` is None."""

Memory = bytes | bytearray | memoryview | mmap | NDArray[Any]
"""What lends its bytes (the buffer protocol)."""
Box = tuple[float, float, float, float]
"""(top, left, height, width) in pixels of the upright image; they may have fractions."""


class Task(Protocol):
    """A batch that a pool makes. Deleting it leaves out what has not begun and waits for the images under way.

    Where one of them hangs, it waits for two seconds, and never gives back the memory that the image is made in.
    """

    @property
    def seconds(self) -> float:
        """Return the seconds that the threads have spent on it so far, all of them together."""
        ...

    @property
    def done(self) -> bool:
        """Return whether all its images are done; ValueError where the pool was closed before."""
        ...

    def wait(self, timeout_s: float, /) -> bool:
        """Wait at most `timeout_s`, and return whether it is done; ValueError where the pool was closed before."""
        ...


class Pool(Protocol):
    """Native threads that claim images in order of submission. A forked child may not use its parent's."""

    @property
    def scratch_bytes(self) -> int:
        """Return the bytes that the threads keep from image to image."""
        ...

    def submit(
        self,
        shards: Sequence[Memory],
        shard_of: Memory,
        offsets: Memory,
        lengths: Memory,
        boxes: Memory,
        flips: Memory,
        inside: bool,
        size: int,
        channels: int,
        out: Memory,
        status: Memory,
        stage: int = 0,
    ) -> Task:
        """Queue a batch of N crops, and ask the kernel to read their bytes.

        Image n is `lengths[n]` bytes (uint64) at `offsets[n]` (uint64) of shard `shard_of[n]` (int32); where the length
        is 0 its output and its status are left alone. `boxes` is float64 [N, 4] as `Box`, `flips` uint8 or bool [N],
        `out` uint8 [N, channels, size, size], `status` int32 [N]: 0 where an image is decoded, else for `reason`. The
        rest is as in `decode_crop_into`. All but the shards' bytes, `out` and `status` is copied. TypeError or
        ValueError for memory of another type or size, an image outside its shard, or a pool that is closed.
        """
        ...

    def close(self) -> None:
        """Leave out what has not begun, wait for the images under way, and join the threads.

        A thread that hangs, on a disk that does not answer, is left behind after two seconds.
        """
        ...


class Mapped(Protocol):
    """The bytes of a file, mapped: a buffer. They stand for as long as somebody holds it."""

    def __buffer__(self, flags: int, /) -> memoryview:
        """Lend the bytes."""
        ...


class Native(Protocol):
    """What the extension offers. Wrong arguments are TypeError or ValueError, damaged records ValueError."""

    VERSION: int

    def Pool(self, threads: int) -> Pool:  # noqa: N802
        """Start that many threads, 1 to 1024."""
        ...

    def Mapped(  # noqa: N802
        self, descriptor: int, num_bytes: int, name: bytes, offset: int = 0, is_private: bool = False
    ) -> Mapped:
        """Map a file that may be cut short while it is in use: then `cut_file` returns `name`, and zeros are read.

        `offset` is a multiple of the page size. What is written with `is_private` changes no file.
        """
        ...

    def cut_file(self) -> bytes | None:
        """Return the name of the first mapped file that was found cut short or unreadable, in this process."""
        ...

    def isa(self) -> str:
        """Return which instructions are used: `avx2` or `scalar`."""
        ...

    def choose_isa(self, name: str, /) -> None:
        """Use these instructions from now on: all give the same bits."""
        ...

    def reason(self, status: int, /) -> str:
        """Return what a person should read of a status, e.g. `its Huffman tables are damaged`."""
        ...

    def index_jpeg(self, data: Memory, every: int = 8) -> bytes:
        """Return the record of a JPEG file with a seek point every so many MCUs (1 to 255).

        ValueError says why where that cannot be done without changing a pixel.
        """
        ...

    def size_of(self, record: Memory, /) -> tuple[int, int, int]:
        """Return (height, width, channels) of a record, upright."""
        ...

    def decode_into(self, record: Memory, channels: int, out: Memory) -> None:
        """Decode a whole record, upright, into uint8 [H, W, channels], bit for bit as libjpeg-turbo's `islow` does."""
        ...

    def decode_crop_into(
        self,
        record: Memory,
        box: Box,
        inside: bool,
        flip: bool,
        size: int,
        channels: int,
        out: Memory,
        stage: int = 0,
    ) -> None:
        """Decode a box, resize it to `size` x `size` antialiased and mirror it, into uint8 [channels, size, size].

        With `inside` the filter sees pixels of the box alone, as after cropping; else it reaches beyond, as when
        cropping comes after resizing. `stage` 1 stops after the entropy decoder, 2 before resizing: to measure parts.
        """
        ...

    def move(
        self,
        images: Memory,
        indices: Memory,
        tops: Memory,
        lefts: Memory,
        flips: Memory,
        padding: int,
        reflect: bool,
        shape: tuple[int, int, int],
        out: Memory,
    ) -> None:
        """Pad, cut and mirror images: `out[n]` is the padded `images[indices[n]]` from (`tops[n]`, `lefts[n]`) on.

        `images` is uint8 [M, C, H, W] with (C, H, W) the `shape`, `indices` int64 [N], `tops` and `lefts` int32 [N] in
        0 to 2 * `padding`, `flips` uint8 or bool [N], `out` uint8 [N, C, H, W]. The padding is zeros, or reflected.
        """
        ...


def native() -> Native | None:
    """Return the native core, or None where it was not built, does not load, or is what an older source left there."""
    try:
        from paceline.data import _native
    except ImportError:
        return None
    core: Native = _native
    return core if core.VERSION == VERSION else None
