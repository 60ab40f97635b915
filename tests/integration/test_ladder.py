"""A ladder of real runs: what it writes, and that it goes on where it was stopped."""

import json
import os
import subprocess
import sys
from pathlib import Path

from paceline.core.experiments.folder import ExperimentDir
from paceline.core.rundir import RunDir

LADDER = """# One rung over another.
recipe: digits
steps: 4
warmup_steps: 2
repeats: 1
rungs:
  - name: base
    set: {model.name: empty, model.width: 1.0, data.batch_size: 16, log.every: 2st, log.tensorboard: "off"}
  - name: loop
    explains: a kernel a parameter, which computes the same
    set: {optim.implementation: loop}
    expects: [optimizer]
"""
PROGRAM = """
import sys
from pathlib import Path
from paceline.cli.ladder import ladder
words, folder = [sys.argv[1]], Path(sys.argv[2])
sys.exit(ladder(words, "1", folder, recipe=None, steps=None, repeats=None, list_only=False, as_json=True))
"""


def climb(tmp_path: Path) -> tuple[dict, str]:
    """Climb the ladder in a process of its own; return its JSON, and what it said on the way."""
    (tmp_path / "own.yaml").write_text(LADDER, encoding="utf-8")
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "own.yaml"), str(tmp_path / "out")]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environ, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def test_a_ladder_measures_its_rungs_and_goes_on_where_it_was_stopped(tmp_path):
    """A single pair proves no gain; the same arithmetic in another order of kernels trains to the same loss."""
    found, said = climb(tmp_path)
    base, loop = found["rungs"]
    assert (base["status"], loop["status"], loop["below"]) == ("kept", "dropped", "base")
    assert abs(loop["parity"]["gap"]["value"]) < 1e-5  # float32 sums in another order, six steps long
    assert found["batch_size"] == 16
    assert said.count("images/s") == 3

    folder = ExperimentDir(tmp_path / "out")
    assert folder.table.is_file()
    assert folder.markdown.is_file()
    assert not folder.data.exists()
    runs = [folder.path / run for run in (*base["runs"], *loop["runs"])]
    assert len({RunDir(run).read_result().recipe_hash for run in runs}) == 2

    folder.result.unlink()  # as if it had been stopped in the last run
    (runs[-1] / "result.json").unlink()
    again, said = climb(tmp_path)
    assert said.count(", known: ") == 2
    assert again["rungs"][0] == base
    assert again["rungs"][1]["runs"] == loop["runs"]
