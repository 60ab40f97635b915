"""The device and the CPU threads of a rank."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from paceline.core.errors import WorldError
from paceline.core.host import usable_cores
from paceline.core.world import World
from paceline.parallel.device import choose_device, create_thread_pool, set_threads
from paceline.recipe.schema.train import Parallel

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")


@without_gpu
def test_without_a_gpu_auto_is_the_cpu() -> None:
    assert choose_device(Parallel(), World.single()) == torch.device("cpu")


@without_gpu
def test_missing_gpus_are_one_line() -> None:
    with pytest.raises(WorldError, match=r"^parallel.device: cuda: 2 ranks on a node with 0 GPUs \(set .*cpu\)$"):
        choose_device(Parallel(device="cuda"), World(0, 2, 0, 2))


def test_more_ranks_than_gpus_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(WorldError, match=r"^parallel.device: auto: 3 ranks on a node with 2 GPUs \(start 2, or set"):
        choose_device(Parallel(), World(0, 3, 0, 3))


def test_a_gpu_that_slurm_shows_to_one_rank_alone_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    bound = World(3, 4, 3, 4, launcher="slurm", allocated_cpus=32, allocated_gpus=4, local_tasks=4)
    assert choose_device(Parallel(), bound) == torch.device("cuda", 0)
    with pytest.raises(WorldError, match="4 ranks on a node with 1 GPU"):
        choose_device(Parallel(), replace(bound, allocated_gpus=1))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert choose_device(Parallel(), bound) == torch.device("cuda", 3)


def test_nccl_without_gpus_is_one_line() -> None:
    with pytest.raises(WorldError, match="nccl needs GPUs"):
        choose_device(Parallel(device="cpu", backend="nccl"), World.single())


def test_ranks_share_the_cores_by_default() -> None:
    before = torch.get_num_threads()
    try:
        assert set_threads(Parallel(), World(0, 4, 0, 4)) == max(1, usable_cores() // 4) == torch.get_num_threads()
        assert set_threads(Parallel(threads=3), World.single()) == 3 == torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


def test_threads_of_a_pool_compute_on_one_core_and_leave_the_others_as_they_are() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with create_thread_pool(2, "test") as pool:
            together = threading.Barrier(2)
            used = [pool.submit(lambda: (together.wait(), torch.get_num_threads())[1]) for _ in range(2)]
            assert [each.result() for each in used] == [1, 1]
        assert torch.get_num_threads() == 3
        with ThreadPoolExecutor(1) as later:
            assert later.submit(torch.get_num_threads).result() == 3
    finally:
        torch.set_num_threads(before)
