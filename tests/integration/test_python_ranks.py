"""`paceline.train(ranks=2)`: the same run as `paceline train --ranks 2`, errors that name the rank, and no orphans."""

import json
import os
import subprocess
import sys
from pathlib import Path

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


if __name__ == "__main__":
    request = json.loads(sys.argv[1])
    try:
        result = paceline.train(request["recipe"], *request["overrides"], model=Net, run_dir="run", ranks=2)
        print(json.dumps({"sha": result.weights_sha256, "ranks": result.world_size, "dir": str(result.run_dir)}))
    except paceline.core.errors.PacelineError as error:
        print(json.dumps({"error": str(error), "code": error.exit_code}))
"""
SRC = Path(__file__).parents[2] / "src"
SMALL = ("train.epochs=1", "parallel.threads=1", "log.tensorboard=off", "log.report=off")


def run_script(tmp_path: Path, recipe: object, *overrides: str) -> dict:
    (tmp_path / "script_net.py").write_text(SCRIPT)
    request = json.dumps({"recipe": recipe, "overrides": overrides})
    command, environ = [sys.executable, "script_net.py", request], {**os.environ, "PYTHONPATH": str(SRC)}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_script_trains_as_the_command_does(paceline, tmp_path: Path) -> None:
    found = run_script(tmp_path, {"extends": "digits"}, *SMALL)
    args = ("model.name=script_net:Net", *SMALL, "--ranks", "2", "--run-dir", "command", "--json")
    expected = paceline("train", "digits", *args, PYTHONPATH=f"{SRC}:{tmp_path}").result
    assert found == {"sha": expected["weights_sha256"], "ranks": 2, "dir": "run"}
    recipes = [(tmp_path / run / "recipe.yaml").read_text().splitlines()[1:] for run in ("run", "command")]
    assert recipes[0] == recipes[1]


def test_an_error_of_a_rank_is_raised_with_its_rank(tmp_path: Path) -> None:
    found = run_script(tmp_path, "digits", *SMALL, "model.args.fail=1")
    assert "rank 1" in found["error"] and "lost" in found["error"]
