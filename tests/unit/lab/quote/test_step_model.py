"""The time of kernels against sums by hand."""

import numpy as np
import pytest

from paceline.lab.quote.gpu import Gpu, read_gpu
from paceline.lab.quote.step_model import (
    KINDS,
    KernelTable,
    StepConstants,
    build_step_table,
    find_bounds,
    predict_time,
    read_constants,
    time_kernels,
)
from paceline.models.flops import Kernel, StepKernels

SIMPLE = StepConstants(*(np.full(len(KINDS), value) for value in (0.5, 0.8, 0.0, 2.0)), launch=1.0)


def seconds(kernel: Kernel, gpu: Gpu, batch: int, layout="nhwc", constants: StepConstants = SIMPLE) -> float:
    times = time_kernels(KernelTable.build([kernel]), batch, gpu, "fp16", layout, constants)
    return float(np.sum(times.work_s + times.launch_s))


def test_a_kernel_takes_as_long_as_its_flops_or_its_bytes() -> None:
    gpu = read_gpu("v100")
    computes = Kernel("product", 1e9, 1.0, 0.0, (64,))
    moves = Kernel("elementwise", 0.0, 9e6, 0.0, ())
    updates = Kernel("elementwise", 0.0, 0.0, 9e6, ())

    assert seconds(computes, gpu, 100) == pytest.approx(1e11 / (0.5 * 125e12) + 4e-6, rel=1e-6)
    assert seconds(moves, gpu, 100) == pytest.approx(9e8 / (0.8 * 900e9) + 4e-6, rel=1e-6)
    assert seconds(updates, gpu, 100) == pytest.approx(9e6 / (0.8 * 900e9) + 4e-6, rel=1e-6)
    assert seconds(moves, gpu, 100, "nchw") == pytest.approx(2 * 9e8 / (0.8 * 900e9) + 4e-6, rel=1e-6)


def test_depthwise_convolutions_use_no_tensor_cores() -> None:
    gpu = read_gpu("v100")
    kernel = Kernel("depthwise", 1e9, 1.0, 0.0, (1, 9))

    assert seconds(kernel, gpu, 10) == pytest.approx(1e10 / (0.5 * 15.7e12) + 4e-6, rel=1e-6)


def test_short_sides_cost_more_on_faster_multiprocessors() -> None:
    short = Kernel("product", 1e9, 1.0, 0.0, (32, 64))
    constants = StepConstants(SIMPLE.compute, SIMPLE.memory, np.full(len(KINDS), 16.0), SIMPLE.nchw, 1.0)
    reference, fast = read_gpu("3090"), read_gpu("h100")

    def loss(gpu: Gpu) -> float:
        return (seconds(short, gpu, 100, constants=constants) - 4e-6) / (seconds(short, gpu, 100) - 4e-6)

    assert loss(reference) == pytest.approx(1.5 * 1.25, rel=1e-6)
    assert loss(fast) > 2 * loss(reference)


def test_equal_kernels_share_a_row_and_cost_as_much_as_apart() -> None:
    gpu, kernel = read_gpu("t4"), Kernel("copy", 0.0, 1e6, 0.0, ())
    table = KernelTable.build([kernel] * 3)
    times = time_kernels(table, 8, gpu, "fp16", "nhwc", SIMPLE)

    assert table.count.tolist() == [3]
    assert float(np.sum(times.work_s + times.launch_s)) == pytest.approx(3 * seconds(kernel, gpu, 8))


def test_the_constants_of_the_package_are_of_all_classes_and_plausible() -> None:
    for constants in read_constants().values():
        assert set(constants.kinds) == set(KINDS)
        assert set(constants.errors) == {"nchw", "nhwc"}
        assert all(each.low < 0 < each.high for each in constants.errors.values())
        for kind in ("convolution", "product"):
            assert 0.2 < constants.kinds[kind].compute < 1.2
            assert 0.3 < constants.kinds[kind].memory < 1.5


def test_a_step_has_the_optimizer_and_a_faster_gpu_is_faster() -> None:
    step = StepKernels(10**6, 10, (Kernel("product", 1e9, 1e6, 0.0, (64, 64)),), (), 0.0)
    with_update, without = build_step_table(step), build_step_table(step, None)
    constants = read_constants()["training"]

    def whole(table: KernelTable, name: str) -> float:
        return predict_time(table, 64, read_gpu(name), "fp16", "nhwc", constants).seconds

    assert whole(with_update, "a100") > whole(without, "a100")
    assert whole(with_update, "h100") < whole(with_update, "a100") < whole(with_update, "t4")


def test_a_fused_optimizer_takes_less() -> None:
    step = StepKernels(10**6, 100, (), (), 0.0)
    constants = read_constants()["training"]

    def update_s(optimizer: str) -> float:
        return predict_time(build_step_table(step, optimizer), 1, read_gpu("a100"), "fp16", "nhwc", constants).seconds

    assert update_s("fused_sgd") < update_s("fused_adamw") < update_s("sgd") < update_s("adamw")


def test_the_interval_is_wider_for_slow_kernels_and_on_another_gpu() -> None:
    constants = read_constants()["training"]

    def width(share: float, *, is_fitted: bool) -> float:
        low, high = find_bounds(constants, "nhwc", share, is_fitted=is_fitted)
        return high - low

    errors = constants.errors["nhwc"]
    assert width(0.0, is_fitted=True) == pytest.approx(errors.high - errors.low)
    assert width(0.5, is_fitted=True) > width(0.0, is_fitted=True)
    assert width(0.0, is_fitted=False) > width(0.0, is_fitted=True)
