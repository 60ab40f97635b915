"""Decode and resize images on the GPU with nvJPEG through torchvision; only file contents are copied to the device.

It has not run on a GPU: the tests decode with torchvision on the CPU. `data.loader=nvjpeg` selects it. Pixels differ
from the host decoder's in the last bits of the inverse DCT and of resampling.
"""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from typing import Final, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torchvision.io import ImageReadMode

from paceline.core.dataset import ArraySource, PixelArray, Sample, Source
from paceline.core.errors import DataError, RecipeError
from paceline.data.augment.geometric import Augment
from paceline.data.bad_images import BadImagePolicy
from paceline.data.decode import EXIF_SIGNATURE, MAX_PIXELS, START_OF_SCAN, decode, read_orientation
from paceline.data.loaders.reader import ImageReader, Indices, ReadSamples, to_planes
from paceline.data.resize import Resizer, to_tensor
from paceline.data.timing import BatchTimer
from paceline.recipe.schema.data import Data

# JPEG markers: ITU-T T.81, annex B (https://www.w3.org/Graphics/JPEG/itu-t81.pdf).
_JPEG_START: Final = b"\xff\xd8"
# Start-of-frame markers that decoders support: baseline, extended and progressive with Huffman coding.
_SUPPORTED_FRAMES: Final = frozenset({0xC0, 0xC1, 0xC2})
_APP1: Final = 0xE1
_APP14: Final = 0xEE
_ADOBE_SIGNATURE: Final = b"Adobe"
# Offset of the color transform in Adobe's segment; 0: stored without one (ITU-T T.872, 6.5.3,
# https://www.itu.int/rec/T-REC-T.872).
_ADOBE_TRANSFORM_OFFSET: Final = 11


@dataclass(frozen=True)
class TorchvisionDecoder:
    """Decode several JPEG files of one or three color components: with nvJPEG on a GPU, with libjpeg-turbo on a CPU."""

    device: torch.device
    channels: Literal[1, 3]

    def __call__(self, files: Sequence[bytes]) -> list[Tensor]:
        """Return uint8 [C, H, W] per file, not rotated. Raise `RuntimeError` if a file cannot be decoded."""
        # Call the operators directly: the functions around them warn of a move to torchcodec.
        mode = (ImageReadMode.RGB if self.channels == 3 else ImageReadMode.GRAY).value
        contents = [torch.frombuffer(bytearray(file), dtype=torch.uint8) for file in files]
        if self.device.type == "cuda":
            decoded: list[Tensor] = torch.ops.image.decode_jpegs_cuda(contents, mode, self.device)
            return decoded
        return [torch.ops.image.decode_jpeg(content, mode, False) for content in contents]


class DeviceDecodeReader(ImageReader):
    """Read samples as `ImageReader` does, but decode and resize on a device what nvJPEG supports."""

    def __init__(
        self,
        source: Source,
        resizer: Resizer,
        bad_image_policy: BadImagePolicy,
        timer: BatchTimer,
        *,
        decoder: TorchvisionDecoder,
    ) -> None:
        super().__init__(source, resizer, bad_image_policy, timer)
        self._decoder = decoder
        self._stream = _create_stream(decoder.device)

    def read(self, indices: Indices, draws: NDArray[np.float64], size: int) -> ReadSamples:
        """Return uint8 [K, C, size, size] on the device, labels int64 [K], and the dropped samples.

        Raise `torch.OutOfMemoryError` if the device memory is full.
        """
        if self._stream is None:
            return self._read(indices, draws, size)
        current = torch.cuda.current_stream(self._decoder.device)
        with torch.cuda.stream(self._stream):
            try:
                read = self._read(indices, draws, size)
            finally:
                # nvJPEG allocates on this stream but writes on a stream of its own, without waiting: memory that the
                # allocator reuses must not be read by anything still queued.
                self._stream.synchronize()
        read.images.record_stream(current)  # else the allocator could reuse the memory before `current` has read it
        return read

    def _read(self, indices: Indices, draws: NDArray[np.float64], size: int) -> ReadSamples:
        try:
            samples = [self._end_read(self._source.read(index)) for index in indices.tolist()]
            pictures = self._decode_files([content for content, _ in samples], indices)
        except torch.OutOfMemoryError:
            raise  # else the host would silently read every following batch
        except (DataError, RuntimeError):  # an unreadable file: read the whole batch again, by the bad-image policy
            read = super().read(indices, draws, size)
            return read._replace(images=read.images.to(self._decoder.device))
        resized = [self._resizer(picture, draw, size) for picture, draw in zip(pictures, draws, strict=True)]
        images = torch.stack(resized)
        self._timer.end_stage("decode")
        labels = torch.tensor([label for _, label in samples], dtype=torch.int64)
        return ReadSamples(images, labels, np.ones(len(indices), dtype=np.bool_))

    def _end_read(self, sample: Sample) -> Sample:
        content, _ = sample
        self._timer.end_read(len(content) if isinstance(content, bytes) else content.nbytes)
        return sample

    def _decode_files(self, contents: Sequence[bytes | PixelArray], indices: Indices) -> list[Tensor]:
        channels: Literal[1, 3] = 3 if self._source.info.channels == 3 else 1
        pictures: dict[int, Tensor] = {}
        files: dict[int, tuple[bytes, int]] = {}
        for position, content in enumerate(contents):
            if not isinstance(content, bytes):
                pictures[position] = to_planes(content)
                continue
            header = parse_jpeg_header(content)
            # The host decodes the rest: other formats, CMYK, JPEGs stored as RGB.
            is_supported = header is not None and header.components in (1, 3) and not header.is_rgb
            if header and is_supported and header.height * header.width <= MAX_PIXELS:
                files[position] = content, read_orientation(header.exif)
            else:
                name = self._source.name_of(int(indices[position]))
                pictures[position] = to_tensor(decode(content, channels=channels, name=name))
        if files:  # all at once: nvJPEG decodes a batch
            decoded = self._decoder([file for file, _ in files.values()])
            rotated = [apply_orientation(image, exif) for image, (_, exif) in zip(decoded, files.values(), strict=True)]
            pictures.update(zip(files, rotated, strict=True))
        return [pictures[position].to(self._decoder.device) for position in range(len(contents))]


@dataclass(frozen=True)
class DeviceAugment:
    """Apply `augment` to images on `device`, with draws from the host."""

    augment: Augment
    device: torch.device

    @property
    def num_draws(self) -> int:
        """Draws per sample."""
        return self.augment.num_draws

    def __call__(self, images: Tensor, draws: Tensor) -> Tensor:
        """Return uint8 [N, C, H, W]."""
        return self.augment(images, draws if self.augment.needs_host else draws.to(self.device, non_blocking=True))


def apply_orientation(picture: Tensor, exif_orientation: int) -> Tensor:
    """Rotate and flip [C, H, W] by an EXIF orientation; values other than 1 to 8 count as 1."""
    match exif_orientation:
        case 2:
            return picture.flip(-1)
        case 3:
            return picture.flip(-2, -1)
        case 4:
            return picture.flip(-2)
        case 5:
            return picture.transpose(-2, -1)
        case 6:
            return picture.transpose(-2, -1).flip(-1)
        case 7:
            return picture.transpose(-2, -1).flip(-2, -1)
        case 8:
            return picture.transpose(-2, -1).flip(-2)
    return picture


def _create_stream(device: torch.device) -> torch.cuda.Stream | None:
    # torch recycles 32 streams per priority; a priority that nothing else in a run uses keeps this one exclusive.
    return torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


def build_nvjpeg(
    device: torch.device, channels: int, augments: Sequence[Augment]
) -> tuple[Callable[..., ImageReader], tuple[DeviceAugment, ...]]:
    """Return the class of readers that decode on `device`, called as `ImageReader` is, and `augments` there."""
    make_reader = partial(DeviceDecodeReader, decoder=build_jpeg_decoder(device, channels))
    return make_reader, tuple(DeviceAugment(augment, device) for augment in augments)


def check_nvjpeg(data: Data, source: Source, *, is_gpu: bool) -> None:
    """Raise `RecipeError` if nvJPEG cannot serve `source`."""
    if not is_gpu:
        raise RecipeError("data.loader: nvjpeg decodes on a GPU, and this run is on a CPU (set data.loader=auto)")
    if isinstance(source, ArraySource):
        raise RecipeError(
            f"data.loader: nvjpeg decodes image files, and {data.source.name} is stored as pixels "
            f"(set data.loader=auto)"
        )
    if data.augment_on == "host":
        raise RecipeError(
            "data.loader: nvjpeg makes batches on the GPU, and data.augment_on is host (leave one at auto)"
        )


def build_jpeg_decoder(device: torch.device, channels: int) -> TorchvisionDecoder:
    """Build the decoder for `device`. Raise `RecipeError` if this torchvision cannot decode there."""
    decoder = TorchvisionDecoder(device, 3 if channels == 3 else 1)
    sample = BytesIO()
    Image.new("RGB", (16, 16)).save(sample, "JPEG")
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # nvJPEG may write to memory that is still read, see `DeviceDecodeReader`
        decoder([sample.getvalue()])
    except (AttributeError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:120]
        raise RecipeError(
            f"data.loader: nvjpeg: torchvision cannot decode on this device: {reason} (set data.loader=auto)"
        ) from None
    return decoder


class JpegHeader(NamedTuple):
    """Header of a JPEG file: height and width in pixels as stored, not upright."""

    height: int
    width: int
    components: int  # color components
    exif: bytes  # b"" without an EXIF block
    is_rgb: bool = False  # the colors may be RGB, not YCbCr


def parse_jpeg_header(data: bytes) -> JpegHeader | None:
    """Parse a JPEG header; return None if it is damaged, or `data` is not a JPEG with 8 bits per sample."""
    if not data.startswith(_JPEG_START):
        return None
    offset, exif, is_rgb = len(_JPEG_START), b"", False
    try:
        while data[offset] == 0xFF:
            marker = data[offset + 1]
            if marker == 0xFF:  # fill bytes may precede a marker
                offset += 1
                continue
            if marker == START_OF_SCAN:
                return None
            (length,) = struct.unpack_from(">H", data, offset + 2)
            body = data[offset + 4 : offset + 2 + length]
            if marker in _SUPPORTED_FRAMES:
                bits, height, width, components = struct.unpack_from(">BHHB", body)
                is_rgb |= body[6:15:3] == b"RGB"  # the ids of the components
                return JpegHeader(height, width, components, exif, is_rgb and components == 3) if bits == 8 else None
            if marker == _APP1 and body.startswith(EXIF_SIGNATURE) and not exif:
                exif = body
            is_rgb |= (
                marker == _APP14 and body.startswith(_ADOBE_SIGNATURE) and body[_ADOBE_TRANSFORM_OFFSET:][:1] == b"\0"
            )
            offset += 2 + length
    except (IndexError, struct.error):  # the header is truncated
        pass
    return None
