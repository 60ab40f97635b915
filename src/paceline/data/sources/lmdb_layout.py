"""What paceline keeps in an LMDB: which keys there are, and what their values hold. No pickle, no code.

    __paceline__           `Facts` as JSON
    __paceline__/crc32     the CRC-32 of that JSON, 8 hexadecimal digits
    labels/SPLIT           int32, little-endian, one for each sample of `train` or `val`
    SPLIT/0000000012       sample 12: int32 label, the image, its name in UTF-8, uint16 bytes of the name, uint32 CRC-32
                           of all before it; numbers little-endian

The image is the encoded file, or uint8 pixels [H, W, C] in rows. Whoever takes all after the first four bytes for an
image file finds the image: decoders stop at its end.
"""

import re
import struct
import zlib
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from paceline.core.dataset import DatasetInfo, Split
from paceline.data.sources.places import printable

VERSION: Literal[1] = 1
FACTS_KEY = b"__paceline__"
FACTS_CRC_KEY = b"__paceline__/crc32"
TAIL = struct.Struct("<HI")
LABEL = struct.Struct("<i")
MAX_FACTS_BYTES = 2**28
_MAX_NAME_BYTES = 2**16 - 1

Text = Annotated[str, Field(min_length=1)]
Digest = Annotated[str, Field(pattern=re.compile(r"^[0-9a-f]{64}$"))]
Side = Annotated[int, Field(ge=1, le=65535)]
Channel = Annotated[float, Field(allow_inf_nan=False)]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class SplitFacts(_Strict):
    """One split: what `DatasetInfo` says of it alone, its digest, its labels' CRC-32, and what its images are."""

    name: Text
    num_images: int = Field(ge=0, lt=10**10)
    image_size: tuple[Side, Side] | None
    mean: tuple[Channel, ...]
    std: tuple[Annotated[Channel, Field(gt=0)], ...]
    notes: tuple[str, ...]
    kind: Literal["encoded", "pixels"]
    digest: Digest
    labels_crc32: int = Field(ge=0, lt=2**32)


class Facts(_Strict):
    """All of the metadata."""

    version: Literal[1]
    class_names: tuple[Text, ...] = Field(min_length=1)
    channels: Literal[1, 3]
    train: SplitFacts
    val: SplitFacts

    @model_validator(mode="after")
    def _agree(self) -> "Facts":
        for split in (self.train, self.val):
            if not len(split.mean) == len(split.std) == self.channels:
                raise ValueError("mean and std are not one for each channel")
            if split.kind == "pixels" and split.image_size is None:
                raise ValueError("pixels have no image_size")
        return self

    def of(self, split: Split) -> SplitFacts:
        """Return the facts of a split."""
        return self.train if split == "train" else self.val

    def info(self, split: Split) -> DatasetInfo:
        """Return the facts of a split as sources carry them."""
        own = self.of(split)
        return DatasetInfo(
            name=printable(own.name),
            split=split,
            num_images=own.num_images,
            class_names=tuple(map(printable, self.class_names)),
            channels=self.channels,
            image_size=own.image_size,
            mean=own.mean,
            std=own.std,
            notes=tuple(map(printable, own.notes)),
        )


def parse_facts(text: bytes) -> Facts:
    """Return the metadata in JSON `text`. Raise `ValueError`, with a reason in one line, for anything else."""
    try:
        return Facts.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise ValueError(printable(f"{place}: {first['msg']}" if place else first["msg"])[:200]) from error


def labels_key(split: Split) -> bytes:
    """Return the key of a split's labels."""
    return f"labels/{split}".encode()


def sample_key(split: Split, index: int) -> bytes:
    """Return the key of a sample."""
    return f"{split}/{index:010d}".encode()


def pack_sample(label: int, image: bytes, name: str) -> bytes:
    """Return the value of a sample; a very long name is cut."""
    text = name.encode("utf-8", "replace")[:_MAX_NAME_BYTES]
    body = b"".join((LABEL.pack(label), image, text, struct.pack("<H", len(text))))
    return body + struct.pack("<I", zlib.crc32(body))


def unpack_sample(value: bytes) -> tuple[int, bytes]:
    """Return (label, image). Raise `ValueError` where the value is not the one that was written."""
    if len(value) < LABEL.size + TAIL.size:
        raise ValueError("is cut short")
    name_bytes, crc = TAIL.unpack_from(value, len(value) - TAIL.size)
    end = len(value) - TAIL.size - name_bytes
    if end < LABEL.size or zlib.crc32(memoryview(value)[:-4]) != crc:
        raise ValueError("does not have the checksum that it was written with")
    return LABEL.unpack_from(value)[0], value[LABEL.size : end]


def name_in(tail: bytes) -> str:
    """Return the name at the end of a value, or of the end of one."""
    name_bytes, _ = TAIL.unpack_from(tail, len(tail) - TAIL.size)
    end = len(tail) - TAIL.size
    return printable(tail[max(0, end - name_bytes) : end].decode("utf-8", "replace"))
