"""Memory of batches: nobody's while somebody holds a tensor over it, and lent again after that."""

import torch

from paceline.data.loaders.native import PageableHostBuffers, build_host_buffers


def test_memory_is_not_lent_twice_while_any_tensor_over_it_is_held() -> None:
    slots = PageableHostBuffers()
    whole = slots.allocate((4, 3, 2, 2))
    whole.fill_(7)
    part = whole.chunk(2)[1]
    del whole
    for _ in range(5):
        slots.allocate((4, 3, 2, 2)).fill_(9)
    assert part.unique().tolist() == [7]


def test_memory_that_nobody_holds_is_lent_again() -> None:
    slots = PageableHostBuffers()
    first = slots.allocate((4, 3, 2, 2))
    where = first.data_ptr()
    del first
    assert slots.allocate((4, 3, 2, 2)).data_ptr() == where
    assert slots.num_bytes == 48


def test_there_is_as_much_memory_as_was_held_at_once() -> None:
    slots = PageableHostBuffers()
    held: list[torch.Tensor] = []
    for _ in range(100):
        held = [*held[-2:], slots.allocate((10,))]
    assert slots.num_bytes == 40  # three that are held, and one while a fourth is taken


def test_a_smaller_batch_takes_the_memory_of_a_larger_one() -> None:
    slots = PageableHostBuffers()
    slots.allocate((10, 3))
    assert slots.allocate((7, 3)).shape == (7, 3) and slots.num_bytes == 30


def test_memory_that_is_too_small_is_given_up() -> None:
    slots = PageableHostBuffers()
    slots.allocate((10,))
    slots.allocate((20,))
    assert slots.num_bytes == 20


def test_an_array_over_a_tensor_holds_the_memory_too() -> None:
    slots = PageableHostBuffers()
    array = slots.allocate((6,)).fill_(1).numpy()
    slots.allocate((6,)).fill_(2)
    assert array.tolist() == [1] * 6


def test_a_cpu_is_lent_ordinary_memory() -> None:
    assert isinstance(build_host_buffers(pin_memory=False), PageableHostBuffers)
