"""Decode only what training keeps of a JPEG, in code that reads images with Pillow.

`RandomResizedCrop` of torchvision and of timm crops an image and resizes the crop. Pillow decodes all of the image
first; here `Image.convert("RGB")` of a JPEG decodes nothing yet, and the native core decodes the resized crop.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from typing import Any, Final, final

import numpy as np
from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile

from paceline.data.native import MAX_SIDE, NATIVE_MISSING_MESSAGE, load_native

_ORIENTATION: Final = 0x0112
"""The EXIF tag of the orientation, which the native core applies and Pillow does not."""
_UPRIGHT: Final = 1
_END_OF_IMAGE: Final = b"\xff\xd9"
Box = tuple[int, int, int, int]
"""(left, top, right, bottom) in pixels."""
_convert = Image.Image.convert
_on_first_crop: Callable[[], None] | None = None


def patch_pillow(*, on_first_crop: Callable[[], None] | None = None) -> None:
    """Decode resized crops of JPEGs with paceline's native core, in this process and in those forked from it.

    Call it before training, in any script whose transforms use Pillow. `image.convert("RGB")` of a color JPEG then
    returns an image that is decoded when its pixels are needed. If it is resized to a square with bilinear
    interpolation, or first cropped and then resized, as `RandomResizedCrop` of torchvision (both versions) and timm do,
    the native core decodes what that needs. Anything else gets Pillow's pixels, as do truncated files and those that
    the core does not decode. The image that was converted stays undecoded: use its own pixels before it is closed.

    The core's pixels are those of paceline's loaders: they differ from Pillow's by about 0.2 of 255 on average
    (docs/reference/indexed-jpeg.md). No random number is drawn or skipped.

    `on_first_crop` is called after the first crop that the core has decoded, in worker processes too.

    Raise `RuntimeError` if the native core was not built.
    """
    global _on_first_crop
    if load_native() is None:
        raise RuntimeError(NATIVE_MISSING_MESSAGE)
    _on_first_crop = on_first_crop
    JpegImageFile.convert = _convert_lazily  # type: ignore[assignment, method-assign]


def _convert_lazily(image: Image.Image, mode: str | None = None, *args: Any, **kwargs: Any) -> Image.Image:
    """Do what `Image.convert` does, but leave a color JPEG undecoded if nothing is to be converted."""
    if mode == "RGB" and not args and not kwargs and type(image) is JpegImageFile:
        content = _read_undecoded(image)
        if content is not None:
            return _UndecodedImage(_Jpeg(content), (0, 0, *image.size), image.info)
    return _convert(image, mode, *args, **kwargs)


def _read_undecoded(image: JpegImageFile) -> bytes | None:
    """Return the file of a color JPEG that is whole, upright, and of which nothing was decoded, else None."""
    file = image.fp
    if file is None or image.mode != "RGB" or not image.tile or image.decoderconfig or not _is_upright(image):
        return None
    try:
        file.seek(0)
        content = file.read()
    except (OSError, ValueError):  # closed, or not seekable
        return None
    image.fp = BytesIO(content)  # which the image may decode later, whatever becomes of the file
    if getattr(image, "_exclusive_fp", False):
        file.close()
    return content if content.rstrip(b"\0").endswith(_END_OF_IMAGE) else None


def _is_upright(image: JpegImageFile) -> bool:
    """Return whether the native core will not rotate it. Of a damaged EXIF block, it may read more than Pillow does."""
    exif = image.info.get("exif", b"")
    if not any(_ORIENTATION.to_bytes(2, order) in exif for order in ("big", "little")):
        return True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return bool(image.getexif().get(_ORIENTATION) == _UPRIGHT)
    except Exception:  # Pillow raises many kinds
        return False


@dataclass
class _Jpeg:
    """A file in memory, and its indexed record once there is one."""

    content: bytes
    record: bytes | None = None


@final
class _UndecodedImage(Image.Image):
    """A part of a JPEG that is not decoded yet. The first operation on its pixels makes it a plain `Image`."""

    def __init__(self, jpeg: _Jpeg, box: Box, info: dict[Any, Any]) -> None:
        super().__init__()
        self._mode = "RGB"
        self._size = (box[2] - box[0], box[3] - box[1])
        self.info = info.copy()
        self._jpeg = jpeg
        self._box = box

    def load(self) -> Any:
        """Decode the whole file with Pillow."""
        whole = JpegImageFile(BytesIO(self._jpeg.content))
        whole.load()
        self.im = whole.im if self._box == (0, 0, *whole.size) else whole.im.crop(self._box)
        self.__class__ = Image.Image  # type: ignore[assignment]
        return self.load()

    def convert(self, mode: str | None = None, *args: Any, **kwargs: Any) -> Image.Image:
        """Return another undecoded image if nothing is to be converted."""
        if mode == "RGB" and not args and not kwargs:
            return _UndecodedImage(self._jpeg, self._box, self.info)
        return super().convert(mode, *args, **kwargs)

    def crop(self, box: tuple[float, float, float, float] | None = None) -> Image.Image:
        """Return a part of the image, undecoded if it is within it."""
        if box is not None:
            left, top, right, bottom = (int(round(each)) for each in box)  # noqa: RUF046 - of NumPy's numbers
            if 0 <= left < right <= self.width and 0 <= top < bottom <= self.height:
                x, y = self._box[:2]
                return _UndecodedImage(self._jpeg, (x + left, y + top, x + right, y + bottom), self.info)
        return super().crop(box)

    def resize(self, size: Any, resample: int | None = None, *args: Any, **kwargs: Any) -> Image.Image:
        """Return the image resized; decode only what that needs, if the native core can."""
        width, height = size
        can_decode = width == height <= MAX_SIDE and resample == Image.Resampling.BILINEAR and self.size != tuple(size)
        if can_decode and not args and not any(kwargs.values()):
            pixels = _decode(self._jpeg, self._box, int(width))
            if pixels is not None:
                resized = Image.fromarray(pixels)
                resized.info = self.info.copy()
                return resized
        return super().resize(size, resample, *args, **kwargs)

    # Methods of `Image` that use pixels without calling `load`.

    def thumbnail(self, *args: Any, **kwargs: Any) -> None:
        """Decode, and resize in place."""
        self.load()
        self.thumbnail(*args, **kwargs)

    def close(self) -> None:
        """Forget the file."""
        self.__class__ = Image.Image  # type: ignore[assignment]
        self.close()

    def __eq__(self, other: object) -> bool:
        self.load()
        return self == other

    __hash__ = None  # type: ignore[assignment]

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.load()
        return self.__reduce_ex__(protocol)


def _decode(jpeg: _Jpeg, box: Box, size: int) -> Any:
    """Return a box of an image resized to uint8 [size, size, 3], or None if only Pillow reads the file.

    In the caller's thread: waking another one costs a good part of a millisecond on a virtual machine.
    """
    global _on_first_crop
    native = load_native()
    assert native is not None, "checked by `patch_pillow`"
    left, top, right, bottom = box
    out = np.empty((3, size, size), dtype=np.uint8)
    try:
        if jpeg.record is None:
            jpeg.record = native.index_jpeg(jpeg.content)
        native.decode_crop_into(jpeg.record, (top, left, bottom - top, right - left), True, False, size, 3, out)
    except (ValueError, MemoryError):
        return None
    report, _on_first_crop = _on_first_crop, None
    if report is not None:
        report()
    return np.ascontiguousarray(out.transpose(1, 2, 0))
