"""Start real ranks that compute and hand back tensors, so that a test compares what several processes found."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor

TIMEOUT_S = 120
HERE = Path(__file__).parent

Found = list[dict[str, Tensor]]
OnRanks = Callable[[str, int, Path], Found]


def on_ranks(script: str, world_size: int, folder: Path) -> Found:
    """Return what `run(rank, world_size, folder)` in `script` returned on each of `world_size` gloo ranks."""
    name = f"{Path(script).stem}-{world_size}"
    command = [sys.executable, str(HERE / "rank.py"), str(HERE / script), str(folder), name, str(world_size)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([*command, str(rank)], stderr=subprocess.PIPE, text=True, env=environ)
        for rank in range(world_size)
    ]
    try:
        errors = [rank.communicate(timeout=TIMEOUT_S)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0] * world_size, "\n".join(errors)[-4000:]
    return [load_file(folder / f"{name}.rank{rank}.safetensors") for rank in range(world_size)]


@pytest.fixture(scope="session")
def run_on_ranks() -> Iterator[OnRanks]:
    yield on_ranks
