"""What is printed of measured all-reduces."""

from pathlib import Path

import pytest

from paceline.cli.allreduce import show_allreduce, time_allreduce, write_measurement
from paceline.cli.options import AllReduceOptions
from paceline.core.errors import WorldError
from paceline.lab.predict.network import AllReduceMeasurement, AllReduceTiming, fit_link, read_all_reduce_file

TIMES = [
    AllReduceTiming(bytes=size, median_s=1e-3 + size / 1e9, p10_s=1e-3, p90_s=2.0, n=5) for size in (65_536, 64_000_000)
]
FOUND = fit_link("gloo", 2, 1, TIMES)


def test_the_table_has_each_size_and_the_fit(capsys: pytest.CaptureFixture[str]):
    show_allreduce(FOUND, Path("wire.json"), as_json=False)
    out = capsys.readouterr().out
    for words in (
        "2 ranks of 1 node, gloo",
        "65.5 kB",
        "64 MB",
        "500 µs per hop and 1.000 GB/s",
        "--network wire.json",
    ):
        assert words in out, words


def test_json_on_stdout_equals_the_file(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    show_allreduce(FOUND, None, as_json=True)
    assert AllReduceMeasurement.model_validate_json(capsys.readouterr().out) == FOUND
    write_measurement(FOUND, tmp_path / "wire.json")
    assert read_all_reduce_file(tmp_path / "wire.json") == FOUND


def test_a_file_that_cannot_be_written_is_an_error_in_one_line(tmp_path: Path):
    with pytest.raises(WorldError, match="name another file"):
        write_measurement(FOUND, tmp_path / "missing" / "wire.json")


@pytest.mark.parametrize("name", ["wire", "wire.txt", "a+b.json"])
def test_a_file_that_no_network_could_be_named_by_is_refused_before_anything_is_measured(name: str):
    with pytest.raises(WorldError, match=r"^--out: .* \(name a file such as net\.json, without \+\)"):
        time_allreduce(AllReduceOptions(ranks="not even read", out=Path(name)))
