"""Start real ranks that compute tensors, so that a test can compare the results of several processes."""

from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor

TIMEOUT_S = 120
FOLDER = Path(__file__).parent

TensorsByRank = list[dict[str, Tensor]]
OnRanks = Callable[[str, int, Path], TensorsByRank]


@pytest.fixture(scope="session")
def run_on_ranks(forking) -> OnRanks:
    """Return a function that calls a script's `run(rank, world_size, folder)` on gloo ranks."""

    def on_ranks(script: str, world_size: int, folder: Path) -> TensorsByRank:
        name = f"{Path(script).stem}-{world_size}"
        command = [str(FOLDER / "rank.py"), str(FOLDER / script), str(folder), name, str(world_size)]
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
