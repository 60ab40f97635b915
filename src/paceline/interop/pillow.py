"""Decode only what training keeps of a JPEG, in code that reads images with Pillow.

`RandomResizedCrop` of torchvision and of timm crops an image and resizes the crop. Pillow decodes all of it before;
here `Image.convert("RGB")` of a JPEG decodes nothing yet, and a resized crop is decoded by the native core.
"""

import os
import threading
from io import BytesIO
from typing import Any, Final, final

import numpy as np
from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile

from paceline.data.native import MAX_SIDE, NATIVE_MISSING_MESSAGE, load_native

_ORIENTATION: Final = 0x0112
"""The EXIF tag of the orientation, which the native core applies and Pillow does not."""
_UPRIGHT: Final = 1
_TIMEOUT_S: Final = 60.0
_OPENED: Final = np.zeros(1, dtype=np.uint64)
_NO_INDEX: Final = np.zeros(1, dtype=np.int32)
_NO_FLIP: Final = np.zeros(1, dtype=np.uint8)
_local = threading.local()
_convert = Image.Image.convert


def patch_pillow() -> None:
    """Decode resized crops of JPEGs with paceline's native core, in this process and in those forked from it.

    Call it before training, in any script whose transforms use Pillow. `image.convert("RGB")` of a color JPEG then
    returns an image that is decoded when its pixels are needed. If the first operations are `crop` and a bilinear
    `resize` to a square, as in `RandomResizedCrop` of torchvision (both versions) and timm, only the crop is decoded;
    anything else gets Pillow's pixels. Files that the core does not decode are left to Pillow, too.

    The pixels of such crops are those of paceline's loaders: they differ from Pillow's by about 0.2 of 255 on average
    (docs/reference/indexed-jpeg.md). No random number is drawn or skipped. Errors of damaged files are raised by the
    first operation on the pixels.

    Raise `RuntimeError` if the native core was not built.
    """
    if load_native() is None:
        raise RuntimeError(NATIVE_MISSING_MESSAGE)
    JpegImageFile.convert = _convert_lazily  # type: ignore[method-assign]


def _convert_lazily(image: Image.Image, mode: str | None = None, *args: Any, **kwargs: Any) -> Image.Image:
    """Do what `Image.convert` does, but leave a color JPEG undecoded if nothing is to be converted."""
    if mode == "RGB" and not args and not kwargs and type(image) is JpegImageFile:
        content = _read_undecoded(image)
        if content is not None:
            return _UndecodedJpeg(content)
    return _convert(image, mode, *args, **kwargs)


def _read_undecoded(image: JpegImageFile) -> bytes | None:
    """Return the file of a color JPEG that is stored upright and of which nothing was decoded, else None."""
    file = image.fp
    if file is None or image.mode != "RGB" or not image.tile or image.decoderconfig:
        return None
    if "exif" in image.info and image.getexif().get(_ORIENTATION, _UPRIGHT) != _UPRIGHT:
        return None
    try:
        position = file.tell()
        file.seek(0)
        content = file.read()
        file.seek(position)
    except (OSError, ValueError):  # closed, or not seekable
        return None
    return content if content.startswith(b"\xff\xd8") else None


@final
class _UndecodedJpeg(JpegImageFile):
    """A color JPEG in memory. Like every image file of Pillow, it is decoded by its first operation on pixels."""

    format = None  # as of every converted image

    def __init__(self, content: bytes) -> None:
        super().__init__(BytesIO(content))
        self.content = content

    def crop(self, box: tuple[float, float, float, float] | None = None) -> Image.Image:
        """Return a part of the image, undecoded if it is within it."""
        if box is not None and self.tile and not self.decoderconfig:
            left, top, right, bottom = (round(each) for each in box)
            if 0 <= left < right <= self.width and 0 <= top < bottom <= self.height:
                return _UndecodedCrop(self, (left, top, right, bottom))
        return super().crop(box)


@final
class _UndecodedCrop(Image.Image):
    """A part of an undecoded JPEG, `box` (left, top, right, bottom) in pixels."""

    _source: _UndecodedJpeg | None = None  # None once it is decoded

    def __init__(self, source: _UndecodedJpeg, box: tuple[int, int, int, int]) -> None:
        super().__init__()
        self._mode = source.mode
        self._size = (box[2] - box[0], box[3] - box[1])
        self.info = source.info.copy()
        self._source = source
        self._box = box

    def load(self) -> Any:
        """Decode the whole image with Pillow, if that was not done before."""
        source, self._source = self._source, None
        if source is not None:
            self.im = _crop_decoded(source, self._box)
        return super().load()

    def resize(self, size: Any, resample: int | None = None, *args: Any, **kwargs: Any) -> Image.Image:
        """Return the crop resized; decode only what that needs, if the native core can."""
        width, height = size
        can_decode = width == height <= MAX_SIDE and resample == Image.Resampling.BILINEAR and self.size != tuple(size)
        if can_decode and self._source is not None and not args and not any(kwargs.values()):
            pixels = _decode(self._source, self._box, width)
            if pixels is not None:
                return Image.fromarray(pixels)
        return super().resize(size, resample, *args, **kwargs)


def _crop_decoded(image: Image.Image, box: tuple[int, int, int, int]) -> Any:
    image.load()
    return image.im.crop(box)


def _decode(image: _UndecodedJpeg, box: tuple[int, int, int, int], size: int) -> Any:
    """Return a box of an image resized to uint8 [size, size, 3], or None if only Pillow reads the file."""
    left, top, right, bottom = box
    out, status = np.empty((1, 3, size, size), dtype=np.uint8), np.full(1, -1, dtype=np.int32)
    task = _get_pool().submit_jpegs(
        files=[memoryview(image.content)],
        offsets=_OPENED,
        lengths=_OPENED,
        index_buffers=[],
        index_of=_NO_INDEX,
        index_offsets=_OPENED,
        index_lengths=_OPENED,
        boxes=np.array([[top, left, bottom - top, right - left]], dtype=np.float64),
        flips=_NO_FLIP,
        inside=True,
        size=size,
        channels=3,
        sizes=np.array([[image.height, image.width]], dtype=np.int32),
        out=out,
        status=status,
    )
    if not task.wait(_TIMEOUT_S) or status[0] != 0:
        return None
    return np.ascontiguousarray(out[0].transpose(1, 2, 0))


def _get_pool() -> Any:
    """Return the pool of this thread: one native thread, as a transform has one image at a time."""
    owner = getattr(_local, "owner", None)
    if owner != os.getpid():  # a forked child has no threads of its parent
        native = load_native()
        assert native is not None, "checked by `patch_pillow`"
        _local.pool, _local.owner = native.Pool(1), os.getpid()
    return _local.pool
