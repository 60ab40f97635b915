"""The specifications of GPUs agree with themselves, and a wrong file says where it is wrong."""

import re
from pathlib import Path

import pytest

from paceline.core.errors import RecipeError
from paceline.lab.predict.network import INTRA_NODE_LINKS
from paceline.lab.quote.gpu import read_gpu
from paceline.lab.quote.quote import find_number_format
from paceline.measure.gpu import GPUS, find_gpu, list_gpu_names


@pytest.mark.parametrize("name", list_gpu_names())
def test_a_gpu_of_the_package_is_valid_and_is_found_by_its_name(name: str) -> None:
    gpu = read_gpu(name)

    assert gpu.link in INTRA_NODE_LINKS
    assert find_gpu(gpu.name) == gpu
    assert find_gpu(f"{gpu.name} Laptop GPU MIG 1g.5gb") is None
    # Two operations per clock of 64 or 128 units are the rate of fp32, so that a slip in one of the three shows.
    units = gpu.tflops["fp32"] * 1e3 / (2 * gpu.multiprocessors * gpu.boost_ghz)
    assert units == pytest.approx(64 if units < 90 else 128, rel=0.08)


def test_the_gpus_that_people_rent_are_there() -> None:
    names = {"3090", "4090", "a100", "a100-40", "a10g", "h100", "h200", "l4", "l40s", "t4", "v100", "v100-32", "b200"}
    assert names <= set(list_gpu_names())


def test_an_unknown_gpu_suggests_another() -> None:
    with pytest.raises(RecipeError, match=r"--gpu: 'a1000' is unknown.*a100"):
        read_gpu("a1000")


@pytest.mark.parametrize(
    ("old", "new", "place"),
    [
        ("gb_per_s: 900", "gb_per_s: -1", "own.yaml:6: gb_per_s"),
        ("fp32: 15.7", "fp32: 0", "own.yaml:5: tflops.fp32: 0"),
        ("fp32: 15.7, ", "", "own.yaml:5: tflops: .*fp32"),
        ("fp16: 125", "float16: 125", "own.yaml:5: tflops.float16: .*fp16"),
        ("fp16: 125", "bfloat16: 125", "own.yaml:5: tflops.bfloat16: .*bf16"),
        ("nvlink2", "nvlink9", "own.yaml:11: link"),
    ],
)
def test_a_wrong_file_is_refused_at_its_line(tmp_path: Path, old: str, new: str, place: str) -> None:
    path = tmp_path / "own.yaml"
    text = (GPUS / "v100.yaml").read_text()
    assert old in text
    path.write_text(text.replace(old, new))

    with pytest.raises(RecipeError, match=place):
        read_gpu(str(path))


def test_amp_is_the_best_format_of_16_bits_that_a_gpu_has() -> None:
    gpu = read_gpu("a100")
    rates = {"bf16": gpu.tflops, "fp16": {"fp32": 1.0, "fp16": 1.0}, "fp32": {"fp32": 1.0, "tf32": 1.0}}

    for expected, tflops in rates.items():
        assert find_number_format("amp", gpu.model_copy(update={"tflops": tflops})) == expected


def test_the_memory_is_what_programs_can_use() -> None:
    """The driver and ECC take a part of what the name says."""
    named = {name: read_gpu(name) for name in list_gpu_names()}
    sizes = {name: float(found[1]) for name, gpu in named.items() if (found := re.search(r"(\d+)GB", gpu.name))}
    assert sizes

    for name, size in sizes.items():
        assert 0.9 * size < named[name].memory_gb < size


@pytest.mark.parametrize(("device", "memory_gb"), [("Tesla V100-PCIE-16GB", 15.8), ("Tesla V100-PCIE-32GB", 31.7)])
def test_cards_of_two_sizes_are_told_apart(device: str, memory_gb: float) -> None:
    gpu = find_gpu(device)
    assert gpu is not None and gpu.name == device and gpu.memory_gb == memory_gb
