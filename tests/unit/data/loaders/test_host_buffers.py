"""Host memory is not reused while a tensor references it, and reused after that."""

import torch

from paceline.data.loaders.native import PageableBuffers


def test_memory_is_not_reused_while_a_tensor_references_it() -> None:
    buffers = PageableBuffers()
    whole = buffers.allocate((4, 3, 2, 2))
    whole.fill_(7)
    part = whole.chunk(2)[1]
    del whole
    for _ in range(5):
        buffers.allocate((4, 3, 2, 2)).fill_(9)
    assert part.unique().tolist() == [7]


def test_unreferenced_memory_is_reused() -> None:
    buffers = PageableBuffers()
    first = buffers.allocate((4, 3, 2, 2))
    where = first.data_ptr()
    del first
    assert buffers.allocate((4, 3, 2, 2)).data_ptr() == where
    assert buffers.num_bytes == 48


def test_the_total_is_the_most_memory_in_use_at_once() -> None:
    buffers = PageableBuffers()
    referenced: list[torch.Tensor] = []
    for _ in range(100):
        referenced = [*referenced[-2:], buffers.allocate((10,))]
    assert buffers.num_bytes == 40  # three in use while a fourth is allocated


def test_a_smaller_batch_reuses_the_memory_of_a_larger_one() -> None:
    buffers = PageableBuffers()
    buffers.allocate((10, 3))
    assert buffers.allocate((7, 3)).shape == (7, 3) and buffers.num_bytes == 30


def test_memory_that_is_too_small_is_freed() -> None:
    buffers = PageableBuffers()
    buffers.allocate((10,))
    buffers.allocate((20,))
    assert buffers.num_bytes == 20


def test_an_array_over_a_tensor_references_the_memory_too() -> None:
    buffers = PageableBuffers()
    array = buffers.allocate((6,)).fill_(1).numpy()
    buffers.allocate((6,)).fill_(2)
    assert array.tolist() == [1] * 6
