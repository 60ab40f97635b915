"""The specifications of GPUs agree with the table of peaks, and a wrong file says where it is wrong."""

from pathlib import Path

import pytest

from paceline.core.errors import RecipeError
from paceline.lab.predict.network import INTRA_NODE_LINKS
from paceline.lab.quote.gpu import GPUS, list_gpu_names, read_gpu
from paceline.measure.roofline import peak_of


@pytest.mark.parametrize("name", list_gpu_names())
def test_a_specification_agrees_with_the_table_of_peaks(name: str) -> None:
    gpu = read_gpu(name)

    assert gpu.link in INTRA_NODE_LINKS
    for precision, rate in gpu.tflops.items():
        peak = peak_of(gpu.name, precision)
        if peak is not None:
            assert (peak.flops_per_s, peak.bytes_per_s) == pytest.approx((rate * 1e12, gpu.gb_per_s * 1e9))


def test_the_gpus_that_people_rent_are_there() -> None:
    names = ["3090", "4090", "a100", "a100-40", "a10g", "h100", "h200", "l4", "l40s", "t4", "v100", "v100-32"]
    assert list_gpu_names() == names


def test_an_unknown_gpu_suggests_another() -> None:
    with pytest.raises(RecipeError, match=r"--gpu: 'a1000' is unknown.*a100"):
        read_gpu("a1000")


@pytest.mark.parametrize(
    ("old", "new", "place"),
    [
        ("gb_per_s: 900", "gb_per_s: -1", "own.yaml:5: gb_per_s"),
        ("fp32: 15.7", "fp32: 0", "own.yaml: tflops"),
        ("nvlink2", "nvlink9", "own.yaml:9: link"),
    ],
)
def test_a_wrong_file_is_refused_at_its_line(tmp_path: Path, old: str, new: str, place: str) -> None:
    path = tmp_path / "own.yaml"
    text = (GPUS / "v100.yaml").read_text()
    assert old in text
    path.write_text(text.replace(old, new))

    with pytest.raises(RecipeError, match=place):
        read_gpu(str(path))
