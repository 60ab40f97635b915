"""How torch's caching allocator places tensors in the memory of a GPU: blocks, segments, and what lies between them.

Sizes and rules are those of `c10/cuda/CUDACachingAllocator.cpp` in PyTorch 2.15 without options: a request takes whole
blocks of 512 bytes; up to 1 MiB come from segments of 2 MiB, and larger ones from segments of 20 MiB or of their own
size in units of 2 MiB. The smallest free block that is large enough is used, and split if enough remains. So a request
above 1 MiB may take up to 1 MiB more than it asked for.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import Final, Protocol

_BLOCK: Final = 512
_SMALL: Final = 2**20
_SMALL_SEGMENT: Final = 2 * 2**20
_LARGE_SEGMENT: Final = 20 * 2**20
_OWN_SEGMENT: Final = 10 * 2**20
_SEGMENT_UNIT: Final = 2 * 2**20


@dataclass(eq=False)
class Block:
    """A part of a segment: `num_bytes` from `address`, in use or free."""

    address: int
    num_bytes: int
    pool: "_Pool | None" = None
    is_used: bool = False
    before: "Block | None" = None
    after: "Block | None" = None


class Allocator(Protocol):
    """Give blocks to tensors, and take them back."""

    @property
    def reserved(self) -> int:
        """Bytes that were taken from the device."""
        ...

    def allocate(self, num_bytes: int, stream: int) -> Block:
        """Return a block of at least `num_bytes` for a tensor of `stream`."""
        ...

    def free(self, block: Block) -> None:
        """Take a block back."""
        ...


class ExactAllocator:
    """Give each tensor its own bytes and no more."""

    reserved = 0

    def allocate(self, num_bytes: int, stream: int) -> Block:
        """Return a block of `num_bytes`."""
        return Block(0, num_bytes)

    def free(self, block: Block) -> None:
        """Do nothing."""


@dataclass
class _Pool:
    """The free blocks of one stream, of small or of large segments, by size and address."""

    keeps_at_least: int
    free: list[tuple[int, int]] = field(default_factory=list)
    blocks: dict[int, Block] = field(default_factory=dict)

    def add(self, block: Block) -> None:
        insort(self.free, (block.num_bytes, block.address))
        self.blocks[block.address] = block

    def remove(self, block: Block) -> None:
        self.free.pop(bisect_left(self.free, (block.num_bytes, block.address)))
        del self.blocks[block.address]

    def find(self, num_bytes: int) -> Block | None:
        at = bisect_left(self.free, (num_bytes, 0))
        return self.blocks[self.free[at][1]] if at < len(self.free) else None


class CachingAllocator:
    """Place tensors as torch does on a GPU with unlimited memory."""

    def __init__(self) -> None:
        self._pools: dict[tuple[int, bool], _Pool] = {}
        self.reserved = 0

    def allocate(self, num_bytes: int, stream: int) -> Block:
        """Return a block of at least `num_bytes`, in a new segment if no free one is large enough."""
        needed = max(_BLOCK, -(-num_bytes // _BLOCK) * _BLOCK)
        is_small = needed <= _SMALL
        pool = self._pools.setdefault((stream, is_small), _Pool(_BLOCK if is_small else _SMALL + 1))
        block = pool.find(needed)
        if block is None:
            block = Block(self.reserved, _segment_bytes(needed), pool)
            self.reserved += block.num_bytes
        else:
            pool.remove(block)
        block.is_used = True
        remaining = block.num_bytes - needed
        if remaining >= pool.keeps_at_least:
            rest = Block(block.address + needed, remaining, pool, before=block, after=block.after)
            if rest.after:
                rest.after.before = rest
            block.num_bytes, block.after = needed, rest
            pool.add(rest)
        return block

    def free(self, block: Block) -> None:
        """Take a block back, and merge it with free neighbors."""
        pool = block.pool
        assert pool is not None
        block.is_used = False
        for neighbor in (block.before, block.after):
            if neighbor is None or neighbor.is_used:
                continue
            pool.remove(neighbor)
            first, second = (neighbor, block) if neighbor is block.before else (block, neighbor)
            first.num_bytes += second.num_bytes
            first.after = second.after
            if first.after:
                first.after.before = first
            block = first
        pool.add(block)


def _segment_bytes(needed: int) -> int:
    if needed <= _SMALL:
        return _SMALL_SEGMENT
    return _LARGE_SEGMENT if needed < _OWN_SEGMENT else -(-needed // _SEGMENT_UNIT) * _SEGMENT_UNIT
