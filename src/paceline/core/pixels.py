"""The type and channels of an image's pixels. Without numpy: recipes name them."""

from typing import Final, Literal, NamedTuple

from paceline.core.units import count

PixelType = Literal["uint8", "uint16", "float32"]

MAX_CHANNELS: Final = 16
# The pixel value that is 1 in `DatasetInfo.mean` and `std`: float pixels are as they are.
FULL_SCALE: Final[dict[PixelType, int]] = {"uint8": 255, "uint16": 65535, "float32": 1}


class PixelFormat(NamedTuple):
    """Number of channels and type of an image's pixels."""

    channels: int
    pixels: PixelType = "uint8"

    def __str__(self) -> str:
        """Return text such as `5 channels of uint16`."""
        return f"{count(self.channels, 'channel')} of {self.pixels}"

    @property
    def is_photo(self) -> bool:
        """Whether the pixels are 8-bit gray or RGB, which image libraries and JPEG have."""
        return self.pixels == "uint8" and self.channels in (1, 3)

    @property
    def is_wide(self) -> bool:
        """Whether batches are float32, already divided by `FULL_SCALE`, and not uint8."""
        return self.pixels != "uint8"

    @property
    def batch_bytes(self) -> int:
        """Bytes of a pixel in a batch, over all channels."""
        return self.channels * (4 if self.is_wide else 1)
