"""Start real ranks that compute and hand back tensors, so that a test compares what several processes found."""

from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor

TIMEOUT_S = 120
HERE = Path(__file__).parent

Found = list[dict[str, Tensor]]
OnRanks = Callable[[str, int, Path], Found]


@pytest.fixture(scope="session")
def run_on_ranks(forking) -> OnRanks:
    """Return a function to what `run(rank, world_size, folder)` in a script returned on each of so many gloo ranks."""

    def on_ranks(script: str, world_size: int, folder: Path) -> Found:
        name = f"{Path(script).stem}-{world_size}"
        command = [str(HERE / "rank.py"), str(HERE / script), str(folder), name, str(world_size)]
        ranks = [forking.start([*command, str(rank)], folder, {}) for rank in range(world_size)]
        try:
            errors = [rank.communicate(timeout=TIMEOUT_S)[1] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        assert [rank.returncode for rank in ranks] == [0] * world_size, "\n".join(errors)[-4000:]
        return [load_file(folder / f"{name}.rank{rank}.safetensors") for rank in range(world_size)]

    return on_ranks
