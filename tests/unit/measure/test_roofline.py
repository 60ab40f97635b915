"""`measure.roofline`: shares of a peak, from numbers made by hand."""

from dataclasses import replace

import pytest

from paceline.measure.roofline import Peak, roofline

PEAK = Peak("toy", "bf16", flops_per_s=1000.0, bytes_per_s=100.0, source="by hand")


def test_each_kernel_takes_as_long_as_what_holds_it_back() -> None:
    kernels = [(1000.0, 10.0), (100.0, 100.0), (0.0, 50.0)]  # 1 s of FLOPs; 2 s and 1 s of bytes, 2 an element

    found = roofline(kernels, 0.125, PEAK)

    assert found.bound_images_per_s == 0.25
    assert found.share == 0.5
    assert found.flops_per_s == 137.5
    assert found.mfu == pytest.approx(0.1375)  # rounding of a quotient


def test_wider_numbers_take_longer_to_move_and_no_longer_to_compute() -> None:
    moving, computing = [(0.0, 100.0)], [(1000.0, 0.0)]
    in_fp32 = replace(PEAK, precision="fp32")

    assert roofline(moving, 1.0, PEAK).bound_images_per_s == 2 * roofline(moving, 1.0, in_fp32).bound_images_per_s
    assert roofline(computing, 1.0, PEAK).bound_images_per_s == roofline(computing, 1.0, in_fp32).bound_images_per_s


def test_a_run_at_the_roofline_has_all_of_it() -> None:
    assert roofline([(1000.0, 0.0)], 1.0, PEAK).share == 1.0
    assert roofline([(1000.0, 0.0)], 1.0, PEAK).mfu == 1.0


def test_all_of_it_is_plain_values() -> None:
    plain = roofline([(1000.0, 10.0)], 0.5, PEAK).to_dict()

    assert plain["peak"]["source"] == "by hand"
    assert set(plain) == {"images_per_s", "flops_per_s", "mfu", "bound_images_per_s", "share", "peak"}


def test_published_networks_have_the_rooflines_worked_out_for_them() -> None:
    """790 TFLOP/s and 4.3 TB/s are what one H200 was assumed to give; a kernel each of FLOPs and of bytes."""
    h200 = Peak("NVIDIA H200", "bf16", 790e12, 4.3e12, "assumed")

    assert roofline([(7.816e9, 0.0)], 1.0, h200).bound_images_per_s == pytest.approx(101_075, rel=1e-4)
    assert roofline([(0.0, 103e6 / 2)], 1.0, h200).bound_images_per_s == pytest.approx(41_700, rel=2e-3)
