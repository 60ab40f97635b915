"""Run `comm_wait_script` and `straggler_script` with one start of the ranks; run by `rank.py`."""

from pathlib import Path

import comm_wait_script
import straggler_script
from torch import Tensor


def run(rank: int, world_size: int, folder: Path) -> dict[str, Tensor]:
    late = {f"late/{name}": each for name, each in straggler_script.run(rank, world_size).items()}
    return late | comm_wait_script.run(rank, world_size)
