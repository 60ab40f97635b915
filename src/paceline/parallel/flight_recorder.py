"""What NCCL's flight recorder is told, so that a collective that never ends leaves a record of those before it."""

from pathlib import Path

_KEPT = "2000"  # collectives a rank remembers: some hundred steps, in less than a megabyte


def flight_recorder_environ(run: Path) -> dict[str, str]:
    """Return the variables with which NCCL writes `run`/nccl.rankN when a collective times out.

    They are read when the process group is made; a variable that is set already should win. torch 2.11 and newer
    also know them as TORCH_FR_*.
    Source: docs.pytorch.org, "PYTORCH ProcessGroupNCCL Environment Variables".
    """
    return {
        "TORCH_NCCL_TRACE_BUFFER_SIZE": _KEPT,
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": str(run / "nccl.rank"),
    }
