"""What NCCL's flight recorder is told, so that a collective that never ends leaves a record of those before it."""

from pathlib import Path

_KEPT = "2000"  # collectives a rank remembers: some hundred steps, in less than a megabyte


def flight_recorder_environ(run: Path) -> dict[str, str]:
    """Return the variables with which NCCL writes `run`/nccl.rankN when a collective times out, which is its default.

    They are read when the process group is made; a variable that is set already should win. These are the names that
    both torch 2.11 and 2.15 know; the older ones with NCCL in them make the latter warn.
    """
    return {"TORCH_FR_BUFFER_SIZE": _KEPT, "TORCH_FR_DUMP_TEMP_FILE": str(run / "nccl.rank")}
