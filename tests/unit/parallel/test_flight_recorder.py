"""NCCL's flight recorder writes where the run is."""

from pathlib import Path

from paceline.parallel.flight_recorder import flight_recorder_environ


def test_it_writes_into_the_run_directory_when_a_collective_times_out() -> None:
    assert flight_recorder_environ(Path("runs/one")) == {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_FR_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": "runs/one/nccl.rank",
    }
