"""Keys and values of an LMDB data set; no pickle, no code."""

import re
import struct
import zlib
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from paceline.core.dataset import DatasetInfo, Split
from paceline.data.sources.places import printable

#   Key                    Value
#
#   __paceline__           `LmdbMetadata` as JSON
#   __paceline__/crc32     CRC-32 of that JSON, 8 hexadecimal digits
#   labels/SPLIT           int32, little-endian, one per sample of `train` or `val`
#   SPLIT/0000000012       sample 12: int32 label, the image, its name in UTF-8, uint16 bytes of the name, uint32 CRC-32
#                          of all before it; little-endian
#
# The image is an encoded file, or uint8 pixels [H, W, C] in row-major order. A reader that takes everything after the
# first four bytes for an image file works too, as decoders stop at the end of the image.
LAYOUT_VERSION: Literal[1] = 1
METADATA_KEY = b"__paceline__"
METADATA_CRC_KEY = b"__paceline__/crc32"
SAMPLE_TAIL = struct.Struct("<HI")
SAMPLE_LABEL = struct.Struct("<i")
MAX_METADATA_BYTES = 2**28
_MAX_NAME_BYTES = 2**16 - 1

NonEmptyText = Annotated[str, Field(min_length=1)]
HexDigest = Annotated[str, Field(pattern=re.compile(r"^[0-9a-f]{64}$"))]
ImageSide = Annotated[int, Field(ge=1, le=65535)]
ChannelStatistic = Annotated[float, Field(allow_inf_nan=False)]


class _StrictModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class LmdbSplitMetadata(_StrictModel):
    """Metadata of one split: its part of `DatasetInfo`, digest, CRC-32 of the labels, and kind of images."""

    name: NonEmptyText
    num_images: int = Field(ge=0, lt=10**10)
    image_size: tuple[ImageSide, ImageSide] | None
    mean: tuple[ChannelStatistic, ...]
    std: tuple[Annotated[ChannelStatistic, Field(gt=0)], ...]
    notes: tuple[str, ...]
    kind: Literal["encoded", "pixels"]
    digest: HexDigest
    labels_crc32: int = Field(ge=0, lt=2**32)


class LmdbMetadata(_StrictModel):
    """Metadata of both splits."""

    version: Literal[1]
    class_names: tuple[NonEmptyText, ...] = Field(min_length=1)
    channels: Literal[1, 3]
    train: LmdbSplitMetadata
    val: LmdbSplitMetadata

    @model_validator(mode="after")
    def _check_splits(self) -> "LmdbMetadata":
        for split in (self.train, self.val):
            if not len(split.mean) == len(split.std) == self.channels:
                raise ValueError("mean and std are not one for each channel")
            if split.kind == "pixels" and split.image_size is None:
                raise ValueError("pixels have no image_size")
        return self

    def for_split(self, split: Split) -> LmdbSplitMetadata:
        """Return the metadata of a split."""
        return self.train if split == "train" else self.val

    def build_info(self, split: Split) -> DatasetInfo:
        """Return the `DatasetInfo` of a split."""
        split_facts = self.for_split(split)
        return DatasetInfo(
            name=printable(split_facts.name),
            split=split,
            num_images=split_facts.num_images,
            class_names=tuple(map(printable, self.class_names)),
            channels=self.channels,
            image_size=split_facts.image_size,
            mean=split_facts.mean,
            std=split_facts.std,
            notes=tuple(map(printable, split_facts.notes)),
        )


def parse_metadata(text: bytes) -> LmdbMetadata:
    """Parse the JSON metadata. Raise `ValueError` with a reason of one line if it is invalid."""
    try:
        return LmdbMetadata.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        field = ".".join(map(str, first["loc"]))
        raise ValueError(printable(f"{field}: {first['msg']}" if field else first["msg"])[:200]) from error


def build_labels_key(split: Split) -> bytes:
    """Return the key of a split's labels."""
    return f"labels/{split}".encode()


def build_sample_key(split: Split, index: int) -> bytes:
    """Return the key of a sample."""
    return f"{split}/{index:010d}".encode()


def encode_sample(label: int, image: bytes, name: str) -> bytes:
    """Encode the value of a sample; the name is truncated to 65,535 bytes."""
    text = name.encode("utf-8", "replace")[:_MAX_NAME_BYTES]
    body = b"".join((SAMPLE_LABEL.pack(label), image, text, struct.pack("<H", len(text))))
    return body + struct.pack("<I", zlib.crc32(body))


def decode_sample(value: bytes) -> tuple[int, bytes]:
    """Return (label, image). Raise `ValueError` if the checksum does not match."""
    if len(value) < SAMPLE_LABEL.size + SAMPLE_TAIL.size:
        raise ValueError("is truncated")
    name_bytes, crc = SAMPLE_TAIL.unpack_from(value, len(value) - SAMPLE_TAIL.size)
    end = len(value) - SAMPLE_TAIL.size - name_bytes
    if end < SAMPLE_LABEL.size or zlib.crc32(memoryview(value)[:-4]) != crc:
        raise ValueError("does not have the checksum that it was written with")
    return SAMPLE_LABEL.unpack_from(value)[0], value[SAMPLE_LABEL.size : end]


def read_sample_name(tail: bytes) -> str:
    """Return the name at the end of a value, given the value or only its end."""
    name_bytes, _ = SAMPLE_TAIL.unpack_from(tail, len(tail) - SAMPLE_TAIL.size)
    end = len(tail) - SAMPLE_TAIL.size
    return printable(tail[max(0, end - name_bytes) : end].decode("utf-8", "replace"))
