"""`paceline.train(ranks=2)`: the same run as `paceline train --ranks 2`, errors that name the rank, and no orphans."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, sys
import torch
import paceline


class Net(torch.nn.Sequential):
    def __init__(self, num_classes, in_channels, fail=-1):
        super().__init__(torch.nn.Flatten(), torch.nn.Linear(256, num_classes))
        self.fail = fail

    def forward(self, images):
        if self.training and self.fail == (torch.distributed.get_rank() if torch.distributed.is_initialized() else 0):
            raise KeyError("lost")
        return super().forward(images)


def train(run_dir, recipe, overrides):
    try:
        result = paceline.train(recipe, *overrides, model=Net, run_dir=run_dir, ranks=2)
        return {"sha": result.weights_sha256, "ranks": result.world_size, "dir": str(result.run_dir)}
    except paceline.core.errors.PacelineError as error:
        return {"error": str(error), "code": error.exit_code}


if __name__ == "__main__":
    print(json.dumps({run: train(run, **request) for run, request in json.loads(sys.argv[1]).items()}))
"""
SRC = Path(__file__).parents[2] / "src"
SMALL = ("train.epochs=1", "parallel.threads=1", "log.tensorboard=off", "log.report=off")
REQUESTS = {
    "run": {"recipe": {"extends": "digits"}, "overrides": SMALL},
    "failed": {"recipe": "digits", "overrides": [*SMALL, "model.args.fail=1"]},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the script."""
    folder = tmp_path_factory.mktemp("script")
    (folder / "script_net.py").write_text(SCRIPT)
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, dict]:
    """Return what the script prints of each request; each starts two ranks."""
    command, environ = [sys.executable, "script_net.py", json.dumps(REQUESTS)], {**os.environ, "PYTHONPATH": str(SRC)}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_script_trains_as_the_command_does(paceline_in, folder: Path, found: dict[str, dict]) -> None:
    args = ("model.name=script_net:Net", *SMALL, "--ranks", "2", "--run-dir", "command", "--json")
    expected = paceline_in(folder)("train", "digits", *args, PYTHONPATH=f"{SRC}:{folder}").result
    assert found["run"] == {"sha": expected["weights_sha256"], "ranks": 2, "dir": "run"}
    recipes = [(folder / run / "recipe.yaml").read_text().splitlines()[1:] for run in ("run", "command")]
    assert recipes[0] == recipes[1]


def test_an_error_of_a_rank_is_raised_with_its_rank(found: dict[str, dict]) -> None:
    assert "rank 1" in found["failed"]["error"] and "lost" in found["failed"]["error"]
