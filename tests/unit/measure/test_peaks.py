"""`measure.peaks`: what a device could do, by its name or by a short measurement."""

import pytest

from paceline.measure.roofline import measure_peak, peak_of


@pytest.mark.parametrize(
    ("device", "precision", "tflops", "gb_per_s"),
    [
        ("Tesla V100-SXM2-16GB", "fp32", 15.7, 900),
        ("Tesla V100-PCIE-32GB", "fp16", 112, 900),
        ("Tesla V100S-PCIE-32GB", "fp16", 130, 1134),
        ("Tesla T4", "fp16", 65, 320),
        ("NVIDIA A100-SXM4-40GB", "bf16", 312, 1555),
        ("A100-PCIE-40GB", "tf32", 156, 1555),
        ("A100-PCIE-40GB", "torch_default", 156, 1555),
        ("Tesla V100-SXM2-16GB", "torch_default", 15.7, 900),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312, 2039),
        ("NVIDIA A100 80GB PCIe", "bf16", 312, 1935),
        ("NVIDIA A10", "bf16", 125, 600),
        ("NVIDIA A30", "bf16", 165, 933),
        ("NVIDIA L4", "bf16", 121, 300),
        ("NVIDIA L40S", "bf16", 362.05, 864),
        ("NVIDIA GeForce RTX 3090", "bf16", 71, 936),
        ("NVIDIA GeForce RTX 4090", "fp16", 165.2, 1008),
        ("NVIDIA H100 PCIe", "bf16", 756.5, 2000),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.5, 3350),
        ("NVIDIA H200", "bf16", 989.5, 4800),
        ("NVIDIA H200 NVL", "bf16", 835.5, 4800),
        ("NVIDIA B200", "bf16", 2250, 8000),
    ],
)
def test_a_gpu_has_the_rates_of_its_datasheet(device: str, precision: str, tflops: float, gb_per_s: float) -> None:
    peak = peak_of(device, precision)

    assert peak is not None
    assert peak.flops_per_s == pytest.approx(tflops * 1e12)  # rounding of a product
    assert peak.bytes_per_s == gb_per_s * 1e9
    assert peak.source.startswith("NVIDIA ") and not peak.is_measured


@pytest.mark.parametrize(
    "device",
    [
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GH200 480GB",
        "NVIDIA L40",
        "Quadro P1000",
        "",
    ],
)
def test_a_device_that_only_resembles_one_of_the_table_has_no_peak(device: str) -> None:
    assert peak_of(device, "fp16") is None


def test_amp_is_the_format_that_the_device_is_made_for() -> None:
    ampere, volta = peak_of("NVIDIA A10", "amp"), peak_of("Tesla V100-SXM2-16GB", "amp")

    assert ampere is not None and (ampere.precision, ampere.element_bytes) == ("bf16", 2)
    assert volta is not None and (volta.precision, volta.flops_per_s) == ("fp16", 125e12)


def test_copies_of_weights_do_not_change_what_is_computed_in() -> None:
    assert peak_of("NVIDIA H200", "bf16_master") == peak_of("NVIDIA H200", "bf16")


def test_a_format_without_a_rate_has_no_peak() -> None:
    assert peak_of("Tesla V100-SXM2-16GB", "bf16") is None
    assert peak_of("NVIDIA L4", "fp64") is None


def test_a_measured_peak_is_that_of_the_fastest_turn_and_says_so() -> None:
    # Began and ended, of two products and then of two copies; the turns before them are not timed.
    ticks = iter([0.0, 4.0, 10.0, 12.0, 20.0, 21.0, 30.0, 30.5])

    peak = measure_peak("tf32", size=8, repeats=2, now=lambda: next(ticks))

    assert (peak.precision, peak.element_bytes, peak.is_measured) == ("fp32", 4, True)
    assert peak.flops_per_s == 2 * 8**3 / 2.0
    assert peak.bytes_per_s == 2 * 64 * 2**20 / 0.5
    assert peak.device.startswith("CPU, ")
    assert peak.source == "largest matmul rate seen here, 8 x 8, and largest copy rate, best of 2"


@pytest.mark.parametrize(
    ("precision", "computed"), [("fp64", "fp64"), ("amp", "bf16"), ("torch_default", "fp32"), ("fp16_pure", "fp16")]
)
def test_every_precision_can_be_measured(precision: str, computed: str) -> None:
    peak = measure_peak(precision, size=8, repeats=1)

    assert peak.precision == computed
    assert peak.flops_per_s > 0 and peak.bytes_per_s > 0
