"""What is measured of ranks while they train, by one start of them: `listening` and `straggling`. Read by `rank.py`."""

from pathlib import Path

import listening
import straggling
from torch import Tensor


def run(rank: int, world_size: int, folder: Path) -> dict[str, Tensor]:
    late = {f"late/{name}": each for name, each in straggling.run(rank, world_size).items()}
    return late | listening.run(rank, world_size)
