# What csrc/module*.c offer to Python; the words are at `paceline.data.native`.
from collections.abc import Sequence
from typing import final

from paceline.data.native import Buffer, CropBox

VERSION: int

@final
class Task:
    @property
    def seconds(self) -> float: ...
    @property
    def done(self) -> bool: ...
    def wait(self, timeout_s: float, /) -> bool: ...

@final
class Pool:
    def __init__(self, threads: int) -> None: ...
    @property
    def scratch_bytes(self) -> int: ...
    def submit(
        self,
        shards: Sequence[Buffer],
        shard_of: Buffer,
        offsets: Buffer,
        lengths: Buffer,
        boxes: Buffer,
        flips: Buffer,
        inside: bool,
        size: int,
        channels: int,
        out: Buffer,
        status: Buffer,
        stage: int = 0,
    ) -> Task: ...
    def close(self) -> None: ...

@final
class Mapped:
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
