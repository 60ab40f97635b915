"""Photographs decoded and sized where the model is: by nvJPEG on a GPU, through torchvision. Only bytes cross the bus.

The pixels differ from the host's in the last bits of the inverse transform and of resampling. What nvJPEG is not made
for (other formats, four colours, three that are stored as red, green and blue), the host decodes one by one, and a
batch with a file that cannot be read is left to the host's reader as a whole, which knows whom to name and what stands
in for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torchvision.io import ImageReadMode

from paceline.core.dataset import Sample, Source
from paceline.core.errors import DataError, RecipeError
from paceline.data.augment.protocol import Augment
from paceline.data.decode import MAX_PIXELS, decode, orientation
from paceline.data.jpeg import jpeg_header
from paceline.data.laps import Laps
from paceline.data.reader import Indices, PictureReader, Samples
from paceline.data.sizing import Sizing, as_tensor


class Decoder(Protocol):
    """Decode JPEG files of one or three colours, several at once."""

    @property
    def device(self) -> torch.device:
        """Where the pixels are."""
        ...

    def __call__(self, files: Sequence[bytes]) -> list[Tensor]:
        """Return uint8 [C, H, W] of each, as it is stored. Raise `RuntimeError` where one cannot be decoded."""
        ...


@dataclass(frozen=True)
class TorchvisionDecoder:
    """torchvision's decoder: nvJPEG on a GPU, libjpeg-turbo on a CPU.

    Its operators are called as they are: the functions around them warn that torchcodec is to follow them.
    """

    device: torch.device
    channels: Literal[1, 3]

    def __call__(self, files: Sequence[bytes]) -> list[Tensor]:
        """Return the pixels of each."""
        mode = (ImageReadMode.RGB if self.channels == 3 else ImageReadMode.GRAY).value
        contents = [torch.frombuffer(bytearray(file), dtype=torch.uint8) for file in files]
        if self.device.type == "cuda":
            decoded: list[Tensor] = torch.ops.image.decode_jpegs_cuda(contents, mode, self.device)
            return decoded
        return [torch.ops.image.decode_jpeg(content, mode, False) for content in contents]


class DecodedReader:
    """Read samples as `PictureReader` does, but decode and size them on a device; `host` is for what it cannot do."""

    def __init__(self, host: PictureReader, source: Source, sizing: Sizing, decoder: Decoder, laps: Laps) -> None:
        self._host = host
        self._source = source
        self._sizing = sizing
        self._decoder = decoder
        self._laps = laps
        self._stream = _stream_of(decoder.device)
        self.num_draws = sizing.num_draws

    def read(self, indices: Indices, draws: NDArray[np.float64], size: int) -> Samples:
        """Return (uint8 [K, C, size, size] on the device, int64 [K]), and what was left out.

        Raise `torch.OutOfMemoryError` where the device is full.
        """
        if self._stream is None:
            return self._read(indices, draws, size)
        here = torch.cuda.current_stream(self._decoder.device)
        with torch.cuda.stream(self._stream):
            try:
                read = self._read(indices, draws, size)
            finally:
                # The decoder takes memory of this stream and writes to it on another one, which waits for neither: what
                # is lent again must not be read by anything that is still queued.
                self._stream.synchronize()
        read.images.record_stream(here)  # its memory is lent again when what reads it there is done
        return read

    def _read(self, indices: Indices, draws: NDArray[np.float64], size: int) -> Samples:
        try:
            samples = [self._got(self._source.read(index)) for index in indices.tolist()]
            pictures = self._decoded([content for content, _ in samples], indices)
        except torch.OutOfMemoryError:
            raise  # the host would read all that follows, and nobody would be told
        except (DataError, RuntimeError):
            read = self._host.read(indices, draws, size)
            return read._replace(images=read.images.to(self._decoder.device))
        sized = [self._sizing(picture, draw, size) for picture, draw in zip(pictures, draws, strict=True)]
        images = torch.stack(sized)
        self._laps.lap("decode")
        labels = torch.tensor([label for _, label in samples], dtype=torch.int64)
        return Samples(images, labels, np.ones(len(indices), dtype=np.bool_))

    def _got(self, sample: Sample) -> Sample:
        content, _ = sample
        self._laps.got(len(content) if isinstance(content, bytes) else content.nbytes)
        return sample

    def _decoded(self, contents: Sequence[bytes | NDArray[np.uint8]], indices: Indices) -> list[Tensor]:
        """Return the pictures, upright, uint8 [C, H, W] on the device."""
        channels: Literal[1, 3] = 3 if self._source.info.channels == 3 else 1
        pictures: dict[int, Tensor] = {}
        files: dict[int, tuple[bytes, int]] = {}
        for place, content in enumerate(contents):
            if not isinstance(content, bytes):
                pictures[place] = torch.from_numpy(content.transpose(2, 0, 1).copy())
                continue
            header = jpeg_header(content)
            is_known = header is not None and header.components in (1, 3) and not header.is_rgb
            if header and is_known and header.height * header.width <= MAX_PIXELS:
                files[place] = content, orientation(header.exif)
            else:
                name = self._source.name_of(int(indices[place]))
                pictures[place] = as_tensor(decode(content, channels=channels, name=name))
        if files:
            decoded = self._decoder([file for file, _ in files.values()])
            turned = [upright(each, turn) for each, (_, turn) in zip(decoded, files.values(), strict=True)]
            pictures.update(zip(files, turned, strict=True))
        return [pictures[place].to(self._decoder.device) for place in range(len(contents))]


@dataclass(frozen=True)
class OnDevice:
    """Do what `change` does to images that are on `device` already, by draws that are not."""

    change: Augment
    device: torch.device

    @property
    def num_draws(self) -> int:
        """How many draws a sample uses."""
        return self.change.num_draws

    def __call__(self, images: Tensor, draws: Tensor) -> Tensor:
        """Return uint8 [N, C, H, W]."""
        return self.change(images, draws if self.change.needs_host else draws.to(self.device, non_blocking=True))


def upright(picture: Tensor, turn: int) -> Tensor:
    """Return [C, H, W] as it is meant to be seen, by the value of EXIF's orientation, 1 to 8; others are 1."""
    match turn:
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


def _stream_of(device: torch.device) -> torch.cuda.Stream | None:
    """Return a stream on which nothing else is queued, or None where a device has no streams.

    Its priority is not that of the other streams of a run: torch has 32 of each, and lends them again after that.
    """
    return torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


def build_decoder(device: torch.device, channels: int) -> Decoder:
    """Return what decodes on `device`. Raise `RecipeError` where this torchvision decodes nothing there."""
    decoder = TorchvisionDecoder(device, 3 if channels == 3 else 1)
    tried = BytesIO()
    Image.new("RGB", (16, 16)).save(tried, "JPEG")
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # it writes to memory that may still be read, as `DecodedReader` says
        decoder([tried.getvalue()])
    except (AttributeError, RuntimeError) as error:
        first = " ".join(str(error).split())[:120]
        raise RecipeError(
            f"data.loader: nvjpeg: torchvision cannot decode here: {first} (set data.loader=auto)"
        ) from None
    return decoder
