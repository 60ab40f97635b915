"""`paceline ladder --task K` runs a part, and the ladder without it comes to what it would have come to by itself."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import ladder as verb
from paceline.cli.options import LadderOptions
from paceline.core.errors import RecipeError
from paceline.core.results import RunResult, ThroughputResult, TimeResult
from paceline.core.run_dir import RunDir
from paceline.lab.runner import TrialError, TrialRunner
from paceline.recipe.load import Patch, load

LADDER = """\
# Two settings that stay.
recipe: digits
steps: 2
warmup_steps: 0
repeats: 2
rungs:
  - {name: base}
  - {name: gpu, on: cuda, set: {train.precision: bf16}}
  - {name: plain, keep: always, parity: free, set: {optim.nesterov: false}}
"""


class Child:
    """A training that ends at once, killed if its arguments contain `fails`."""

    def __init__(self, command: Sequence[str], fails: str) -> None:
        self._words = list(command[command.index("train") + 1 :])
        self.returncode = -9 if fails and fails in self._words else 0

    def communicate(self, *, timeout: float | None = None) -> tuple[str | None, str | None]:
        options = dict(zip(self._words, self._words[1:], strict=False))
        recipe = load(self._words[0], Patch.parse([word for word in self._words[1:] if "=" in word])).recipe
        folder = RunDir(Path(options["--run-dir"]))
        folder.path.mkdir(parents=True)
        (folder.path / "recipe.yaml").write_text("begun\n", encoding="utf-8")
        if self.returncode:
            return None, ""
        folder.write_result(
            RunResult(
                status="completed",
                recipe_hash=recipe.hash,
                world_size=int(options["--ranks"]),
                epochs=1.0,
                steps=2,
                images_seen=256,
                eval=None,
                best=None,
                throughput=ThroughputResult(images_per_s=100.0, spread=(90, 110), n=4, excluded_s=0),
                time=TimeResult(wall_s=4.0, startup_s=1.0, train_s=2.0, eval_s=0, checkpoint_s=0, to_target_s=None),
                stages={},
                verdict={"bottleneck": "unknown", "evidence": "none", "try": ""},
                lr="0.1 at 64",
                weights_sha256="ab",
                provenance={"device": "cpu", "logical_cores": 2},
            )
        )
        return None, ""

    def poll(self) -> int | None:
        return self.returncode


class Here:
    """A process that reports the machine of the runs."""

    returncode = 0

    def communicate(self, *, timeout: float | None = None) -> tuple[str | None, str | None]:
        return json.dumps({"logical_cores": 2}), ""

    def poll(self) -> int | None:
        return self.returncode


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Return the folders of the runs that were started, in the test's own folder, which has the ladder; nothing is."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("paceline.cli.report.try_write_report", lambda rundir: None)
    monkeypatch.setattr("paceline.lab.page_cache.prepare_page_cache", lambda recipe, *, is_cold: None)
    monkeypatch.setattr("paceline.cli.ladder.count_gpus", lambda environ: 0)
    (tmp_path / "own.yaml").write_text(LADDER, encoding="utf-8")
    return []


@pytest.fixture
def ladder(monkeypatch: pytest.MonkeyPatch, started: list[str]) -> Callable[..., int]:
    """Return the verb, by default in folder `found`; runs with the argument `fails` fail."""

    def work(*words: str, fails: str = "", run_dir: str | None = "found", **options: Any) -> int:
        def start(command: Sequence[str]) -> Child | Here:
            if "paceline.measure.machine" in command:
                return Here()
            started.append(Path(command[command.index("--run-dir") + 1]).name)
            return Child(command, fails)

        monkeypatch.setattr("paceline.cli.experiment.TrialRunner", partial(TrialRunner, spawn=start))
        folder = None if run_dir is None else Path(run_dir)
        return verb.ladder(LadderOptions(args=["own.yaml", *words], ranks="1", run_dir=folder, **options))

    return work


def ended(run_dir: str) -> dict[str, Any]:
    return json.loads(Path(run_dir, "experiment.json").read_text(encoding="utf-8"))


def test_tasks_in_any_order_give_the_result_of_the_ladder_alone(ladder, started, capsys) -> None:
    assert ladder(run_dir="alone") == 0
    alone = sorted(started)
    started.clear()
    for number in (6, 1, 3, 5, 2, 4):
        assert ladder(task=number) == 0
    assert sorted(started) == alone and not Path("found", "experiment.json").exists()
    started.clear()
    assert ladder() == 0
    assert started == [] and ended("found") == ended("alone")
    assert sorted(path.name for path in Path("found", "trials").iterdir()) == alone
    assert capsys.readouterr().out.count(", known: ") == len(alone)


def test_a_task_prints_a_line_per_run_even_if_reused(ladder, started, capsys) -> None:
    for known in ("", ", known"):
        ladder(task=6)
        lines = capsys.readouterr().out.splitlines()
        assert lines == [f"03 {name}, run 2 of 2{known}: 100 images/s" for name in ("plain", "below")]
    assert len(started) == 2
    ladder(task=2, as_json=True)
    out, err = capsys.readouterr()
    assert json.loads(out) == {"task": 2, "what": "gpu, repeat 1 of 2", "runs": []}
    assert err == "gpu: left out: only helps with a GPU, but there is none\n"


def test_the_next_task_replaces_a_killed_run(ladder, started) -> None:
    with pytest.raises(TrialError, match="own: plain: was killed by signal 9"):
        ladder(task=3, fails="optim.nesterov=false")
    (killed,) = [name for name in started if "plain" in name]
    assert Path("found", "trials", killed, "recipe.yaml").is_file()
    assert ladder() == 0
    assert started.count(killed) == 2
    assert ended("found")["rungs"][2]["status"] == "kept"
    assert len(set(started)) == len(started) - 1, "nothing else was run twice"


def test_a_task_of_a_ladder_that_has_ended_runs_nothing(ladder, started, capsys) -> None:
    ladder()
    count = len(started)
    assert ladder(task=1) == 0
    assert len(started) == count
    assert capsys.readouterr().out.endswith("found: has finished, so task 1 is not run\n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": 7}, r"^--task: 7 is not one of the 6 tasks \(write 1 to 6\)$"),
        ({"task": 1, "run_dir": None}, r"^--task: runs in a folder that .* \(add --run-dir DIR\)$"),
        ({"task": 1, "list_only": True}, r"^--task: 1 has no effect on a list \(leave it out\)$"),
    ],
)
def test_a_task_that_cannot_be_is_refused(ladder, started, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        ladder(**options)
    assert started == [] and not Path("found").exists()


def test_a_task_of_something_else_is_refused(ladder, started) -> None:
    ladder(task=1)
    with pytest.raises(RecipeError, match="found holds something else"):
        ladder("seed=7", task=2)
    assert len(started) == 1
