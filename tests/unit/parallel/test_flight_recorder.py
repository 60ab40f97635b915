"""NCCL's flight recorder writes where the run is."""

from pathlib import Path

from paceline.parallel.launch import flight_recorder_environ


def test_it_writes_into_the_run_directory() -> None:
    found = flight_recorder_environ(Path("runs/one"))
    assert found == {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_FR_DUMP_TEMP_FILE": "runs/one/nccl.rank"}
