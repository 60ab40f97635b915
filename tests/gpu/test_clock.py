"""`measure.clock` on a real GPU measures device time without synchronizing in a step."""

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from paceline.measure import StageClock, build_clock

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.silicon,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    # torch warns once that the synchronization debug mode is a prototype
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
]
NUM_KERNELS = 30


@pytest.fixture
def matrix() -> torch.Tensor:
    """Return a 4096 x 4096 matrix that has been multiplied once, so that cuBLAS is initialized."""
    matrix = torch.eye(4096, device="cuda")
    multiply(matrix, 2)
    torch.cuda.synchronize()
    return matrix


@pytest.fixture
def synchronising_raises() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def multiply(matrix: torch.Tensor, times: int = NUM_KERNELS) -> torch.Tensor:
    product = matrix
    for _ in range(times):
        product = product @ matrix
    return product


def test_device_time_is_that_of_the_kernels(matrix: torch.Tensor) -> None:
    """Tolerance 20 %: the reference includes host launches and the synchronization, and the events do not."""
    start_s = time.perf_counter()
    multiply(matrix)
    torch.cuda.synchronize()
    expected_s = time.perf_counter() - start_s
    clock = build_clock("on", device_type="cuda", warmup_steps=1)
    for _ in range(4):
        with clock.stage("forward"):
            multiply(matrix)
        clock.end_step(images=1)

    summary = clock.drain()

    assert summary.n == 3
    assert summary.stages["forward"].device_s / summary.n == pytest.approx(expected_s, rel=0.2)


@pytest.mark.usefixtures("synchronising_raises")
def test_no_step_synchronises_with_the_device(matrix: torch.Tensor) -> None:
    """The device is still busy when the steps are over, so no step can have waited for it."""
    clock = build_clock("on", device_type="cuda", warmup_steps=1)
    for _ in clock.batches(range(5)):
        with clock.stage("forward"):
            multiply(matrix)
            clock.pop_shares()
        clock.end_step(images=1)
    last = torch.cuda.Event()
    last.record()
    still_at_work = not last.query()

    torch.cuda.set_sync_debug_mode("default")
    summary = clock.drain()

    assert still_at_work
    assert last.query()
    assert summary.stages["forward"].device_s > summary.stages["forward"].host_s


def test_shares_are_of_the_steps_that_the_device_has_completed(matrix: torch.Tensor) -> None:
    """Three parts of four are forward. Tolerance 20 % as above."""
    clock = StageClock.for_device("cuda", warmup_steps=0)
    for _ in range(4):
        for stage, times in (("forward", 3 * NUM_KERNELS), ("backward", NUM_KERNELS)):
            with clock.stage(stage):
                multiply(matrix, times)
        clock.end_step(images=1)
    torch.cuda.synchronize()

    shares = clock.pop_shares()

    assert shares == pytest.approx({"forward": 0.75, "backward": 0.25}, rel=0.2)
    assert sum(shares.values()) <= 1.0 + 1e-6
    assert clock.pop_shares() == {}


def test_a_stage_change_in_backward_splits_device_time(matrix: torch.Tensor) -> None:
    """Autograd runs the hook in another thread. Tolerance 20 % as above; both halves have equally many kernels."""
    clock = StageClock.for_device("cuda", warmup_steps=1)
    weight = torch.ones_like(matrix, requires_grad=True)
    turned = []

    def last_gradient(_: torch.Tensor) -> None:
        turned.append(threading.get_ident())
        clock.switch_stage("exposed_communication")
        multiply(matrix)

    weight.register_post_accumulate_grad_hook(last_gradient)
    for _ in range(3):
        weight.grad = None
        product = weight
        for _ in range(NUM_KERNELS):
            product = product @ matrix
        with clock.stage("backward"):
            product.sum().backward()
        clock.end_step(images=1)

    recent = clock.drain().recent

    assert len(turned) == 3 and threading.get_ident() not in turned
    assert recent["backward"] == pytest.approx(recent["exposed_communication"], rel=0.2)


def test_only_a_device_that_waits_for_its_host_is_starved(matrix: torch.Tensor) -> None:
    shares = {}
    for name, times, sleep_s in (("lags", NUM_KERNELS, 0.0), ("waits", 1, 0.05)):
        clock = StageClock.for_device("cuda", warmup_steps=1)
        for _ in range(5):
            with clock.stage("forward"):
                multiply(matrix, times)
            with clock.stage("other"):
                time.sleep(sleep_s)
            clock.end_step(images=1)
        shares[name] = clock.drain().starved

    assert shares == {"lags": 0.0, "waits": 1.0}
