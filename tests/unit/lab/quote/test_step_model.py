"""The time of kernels against sums by hand."""

from dataclasses import replace

import numpy as np
import pytest

from paceline.lab.quote.gpu import read_gpu
from paceline.lab.quote.step_model import (
    KINDS,
    KernelTable,
    PredictedTime,
    StepConstants,
    build_step_table,
    find_bounds,
    predict_time,
    read_constants,
    time_kernels,
)
from paceline.lab.quote.update import list_optimizer_kernels
from paceline.measure.gpu import Gpu
from paceline.models.flops import Kernel, StepKernels

SIMPLE = StepConstants(*(np.full(len(KINDS), value) for value in (0.5, 0.8, 0.0, 2.0, 1.0)), launch=1.0)


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

    assert seconds(kernel, gpu, 10) == pytest.approx(1e10 / (0.5 * 256 * 80 * 1.53e9) + 4e-6, rel=1e-6)


def test_a_product_with_a_side_that_is_not_aligned_takes_longer() -> None:
    constants = replace(SIMPLE, odd=np.full(len(KINDS), 3.0))

    def work_s(side: int, precision: str) -> float:
        table = KernelTable.build([Kernel("product", 1e9, 1.0, 0.0, (64, side))])
        return float(np.sum(time_kernels(table, 100, read_gpu("a100"), precision, "nhwc", constants).work_s))

    assert work_s(196, "fp16") == pytest.approx(3 * work_s(200, "fp16"))
    assert work_s(196, "tf32") == pytest.approx(work_s(200, "tf32"))


def test_short_sides_cost_more_on_faster_multiprocessors() -> None:
    short = Kernel("product", 1e9, 1.0, 0.0, (32, 64))
    constants = replace(SIMPLE, side=np.full(len(KINDS), 16.0))
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
    step = StepKernels(10**6, 10, (Kernel("product", 1e9, 1e6, 0.0, (64, 64)),), ())
    with_update, without = build_step_table(step, list_optimizer_kernels(step, "sgd", "loop")), build_step_table(step)
    constants = read_constants()["training"]

    def whole(table: KernelTable, name: str) -> float:
        return predict_time(table, 64, read_gpu(name), "fp16", "nhwc", constants).gpu_s

    assert whole(with_update, "a100") > whole(without, "a100")
    assert whole(with_update, "h100") < whole(with_update, "a100") < whole(with_update, "t4")


def test_a_step_of_tiny_kernels_takes_as_long_as_the_host_launches_them() -> None:
    constants = read_constants()["training"].model_copy(update={"host_us": 50.0})
    table = KernelTable.build([Kernel("elementwise", 0.0, 1.0, 0.0, ())] * 1000)

    def time_for(batch: int) -> PredictedTime:
        return predict_time(table, batch, read_gpu("h100"), "fp16", "nhwc", constants)

    assert time_for(1).seconds == pytest.approx(1000 * 50e-6, rel=0.01)
    assert time_for(10**9).seconds == pytest.approx(time_for(10**9).gpu_s, rel=0.01)


def test_times_of_micro_batches_and_the_update_add_up() -> None:
    assert PredictedTime(2.0, 1.0, 0.5).combine(PredictedTime(1.0, 3.0, 0.0), 4) == PredictedTime(9.0, 7.0, 2.0)


def test_the_interval_is_wider_where_less_is_known() -> None:
    """Slow kernels, another GPU, another number format, and a step that waits for the host."""
    constants = read_constants()["training"]

    def width(time: PredictedTime, precision: str = "fp16", *, is_fitted: bool = True) -> float:
        low, high = find_bounds(constants, "nhwc", precision, time, is_fitted=is_fitted)
        return high - low

    known = PredictedTime(1.0, 0.0, 0.0)
    errors = constants.errors["nhwc"]
    assert width(known) == pytest.approx(errors.high - errors.low)
    assert width(PredictedTime(1.0, 0.0, 0.5)) > width(known)
    assert width(known, is_fitted=False) > width(known)
    assert width(known, "tf32") > width(known)
    assert width(PredictedTime(1.0, 2.0, 0.0)) > width(known)
