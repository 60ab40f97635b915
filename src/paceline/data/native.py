"""Typed interface of the native extension (csrc/)."""

from mmap import mmap
from typing import TYPE_CHECKING, Any, Final, Protocol

from numpy.typing import NDArray

if TYPE_CHECKING:
    from paceline.data._native import Mapped, Pool

# Version of the interface below; an extension with another version is not used.
VERSION: Final = 3
# Largest output height and width in pixels (`PL_MAX_OUTPUT`).
MAX_SIDE: Final = 4096
# Largest number of threads of a pool (`PL_MAX_THREADS`).
MAX_THREADS: Final = 1024
# Status of a file that is missing, empty or not readable (`PL_UNREADABLE`).
UNREADABLE: Final = 8
# Status of an image whose file has another size than `boxes` was computed for (`PL_RESIZED`).
RESIZED: Final = 9
# Status of a file that only Pillow reads, if anything does (`PL_NOT_INDEXABLE`).
NOT_INDEXABLE: Final = 10
# Message for the user if `load_native()` returns None.
NATIVE_MISSING_MESSAGE: Final = (
    "the native core was not built, so Pillow decodes JPEGs, several times slower "
    "(install a C compiler and Python's headers, and install paceline again)"
)

# Objects with the buffer protocol.
Buffer = bytes | bytearray | memoryview | mmap | NDArray[Any]
# (top, left, height, width) in pixels of the upright image, possibly fractional.
CropBox = tuple[float, float, float, float]


class NativeExtension(Protocol):
    """Functions of the extension. Invalid arguments raise TypeError or ValueError, damaged records ValueError."""

    VERSION: int

    def Pool(self, threads: int) -> "Pool":  # noqa: N802
        """Start `threads` threads, 1 to 1024."""
        ...

    def Mapped(  # noqa: N802
        self, descriptor: int, num_bytes: int, name: bytes, offset: int = 0, is_private: bool = False
    ) -> "Mapped":
        """Map a file that may be truncated while in use: zeros are read, and `cut_file` returns `name` unless empty.

        `offset` is a multiple of the page size. With `is_private`, writes do not change the file.
        """
        ...

    def cut_file(self) -> bytes | None:
        """Return the name of the first mapped file that this process found truncated or unreadable."""
        ...

    def isa(self) -> str:
        """Return the instruction set in use: `avx2` or `scalar`."""
        ...

    def choose_isa(self, name: str, /) -> None:
        """Select the instruction set; the results are bit-identical."""
        ...

    def reason(self, status: int, /) -> str:
        """Describe a status code, e.g. `its Huffman tables are damaged`."""
        ...

    def index_jpeg(self, data: Buffer, every: int = 8) -> bytes:
        """Return the record of a JPEG file with a seek point per `every` MCUs (1 to 255).

        Raise ValueError with the reason if the pixels would not be exact.
        """
        ...

    def size_of(self, record: Buffer, /) -> tuple[int, int, int]:
        """Return (height, width, channels) of a record, upright, in pixels."""
        ...

    def decode_into(self, record: Buffer, channels: int, out: Buffer) -> None:
        """Decode a whole record, upright, into uint8 [H, W, channels], bit-identical to libjpeg-turbo's `islow`."""
        ...

    def decode_crop_into(
        self,
        record: Buffer,
        box: CropBox,
        inside: bool,
        flip: bool,
        size: int,
        channels: int,
        out: Buffer,  # uint8 [channels, size, size]
        stage: int = 0,  # for measurements: 1 stops after entropy decoding, 2 before resizing, 3 does not reduce
    ) -> None:
        """Decode a box, resize it to `size` x `size` with antialiasing, and flip it.

        A component that has at least 4 samples per output sample in both directions is decoded at a half, a quarter or
        an eighth of its size, so that at least 2 remain.

        With `inside`, the filter sees only pixels of the box (crop, then resize), else also those around it (resize,
        then crop).
        """
        ...

    def move(
        self,
        images: Buffer,  # uint8 [M, C, H, W]
        indices: Buffer,  # int64 [N]
        tops: Buffer,  # int32 [N], 0 to 2 * `padding`
        lefts: Buffer,  # int32 [N], 0 to 2 * `padding`
        flips: Buffer,  # uint8 or bool [N]
        padding: int,
        reflect: bool,  # else the padding is zeros
        shape: tuple[int, int, int],  # (C, H, W)
        out: Buffer,  # uint8 [N, C, H, W]
    ) -> None:
        """Pad, crop and flip: `out[n]` is cut from the padded `images[indices[n]]` at (`tops[n]`, `lefts[n]`)."""
        ...


def load_native() -> NativeExtension | None:
    """Load the native extension; return None if it is not built, fails to load, or has another version."""
    try:
        from paceline.data import _native
    except ImportError:
        return None
    extension: NativeExtension = _native
    # An extension left by an older build would be called with the wrong arguments.
    return extension if extension.VERSION == VERSION else None
