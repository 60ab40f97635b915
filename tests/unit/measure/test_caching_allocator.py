"""Where torch's caching allocator places tensors on a GPU, by the sizes that its source states."""

from itertools import pairwise

from paceline.measure.caching_allocator import Block, CachingAllocator

MIB = 2**20


def test_small_requests_take_whole_blocks_of_512_bytes_of_one_segment() -> None:
    allocator = CachingAllocator()

    sizes = [allocator.allocate(num_bytes, 0).num_bytes for num_bytes in (1, 512, 513)]

    assert sizes == [512, 512, 1024] and allocator.reserved == 2 * MIB


def test_a_rest_of_at_most_one_mib_stays_with_a_large_request() -> None:
    allocator = CachingAllocator()

    first, second = allocator.allocate(9 * MIB, 0), allocator.allocate(10 * MIB, 0)

    assert (first.num_bytes, second.num_bytes) == (9 * MIB, 11 * MIB)
    assert allocator.reserved == 20 * MIB


def test_a_larger_rest_is_a_block_of_its_own() -> None:
    allocator = CachingAllocator()
    allocator.allocate(9 * MIB, 0)

    assert allocator.allocate(10 * MIB - 512, 0).num_bytes == 10 * MIB - 512
    assert allocator.reserved == 20 * MIB


def test_a_request_of_ten_mib_has_its_own_segment_in_units_of_two() -> None:
    allocator = CachingAllocator()

    block = allocator.allocate(10 * MIB + 1, 0)

    assert (block.num_bytes, allocator.reserved) == (10 * MIB + 512, 12 * MIB)


def test_free_neighbors_are_one_block_again() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(5 * MIB, 0) for _ in range(4)]
    assert allocator.reserved == 20 * MIB

    for block in (blocks[1], blocks[3], blocks[2], blocks[0]):
        allocator.free(block)

    assert allocator.allocate(19 * MIB + MIB // 2, 0).num_bytes == 20 * MIB and allocator.reserved == 20 * MIB


def test_the_smallest_free_block_that_is_large_enough_is_used() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(num_bytes * MIB, 0) for num_bytes in (4, 2, 3, 2, 9)]
    for block in (blocks[0], blocks[2]):
        allocator.free(block)

    assert allocator.allocate(3 * MIB, 0).address == blocks[2].address


def test_streams_share_no_memory() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(512, 0))

    assert allocator.reserved == 2 * MIB
    allocator.allocate(512, 1)
    assert allocator.reserved == 4 * MIB


def test_blocks_in_use_never_overlap() -> None:
    allocator, used = CachingAllocator(), list[Block]()
    for number in range(2000):
        if used and number % 3 == 0:
            allocator.free(used.pop((number * 7919) % len(used)))
        used.append(allocator.allocate((number * 104729) % (3 * MIB), 0))

    ordered = sorted(used, key=lambda block: block.address)
    assert all(first.address + first.num_bytes <= second.address for first, second in pairwise(ordered))
