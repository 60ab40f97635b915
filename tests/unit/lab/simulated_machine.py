"""A simulated machine: how fast it trains a recipe, and to which loss, are functions of the recipe."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from paceline.core.results import CPU_STARVED, CpuResult, RunResult, StageResult, ThroughputResult, TimeResult
from paceline.core.run_dir import RunDir
from paceline.lab.trial import Trial, TrialOutcome, apply_patch, build_run_name
from paceline.recipe.schema import Recipe


def compute_shares(recipe: Recipe) -> dict[str, float]:
    return {"forward": 0.4, "backward": 0.6}


def starved(result: RunResult, share: float = 0.62) -> RunResult:
    """Return the result of the same run beside programs that held the cores for `share` of the time."""
    cpu = CpuResult(
        rank=0,
        cores=2,
        ranks=1,
        threads=2,
        wall_s=10.0,
        run_s=20 * (1 - share),
        waited_s=20 * share,
        lost_s=20 * share,
        share=share,
        own_share=0.0,
        throttled_share=0.0,
        others_cores=2 * share,
        pressure=1.0,
        switches=100,
    )
    verdict = {"bottleneck": CPU_STARVED, "evidence": "Others held the cores.", "ceiling": "", "try": ""}
    return result.model_copy(update={"cpu": cpu, "verdict": verdict})


@dataclass
class Machine:
    """Runs trials over `recipe` at once; what `fails` returns is the error of a run, "" for one that ends well.

    Runs for which it `is_busy` share the cores with other programs.
    """

    recipe: Recipe
    root: Path
    speed: Callable[[Recipe], float]
    loss: Callable[[Recipe], float] = lambda recipe: 2.0
    fails: Callable[[Recipe], str] = lambda recipe: ""
    shares: Callable[[Recipe], dict[str, float]] = compute_shares
    is_busy: Callable[[Recipe], bool] = lambda recipe: False
    made: list[tuple[Trial, int]] = field(default_factory=list)

    def run(self, trial: Trial, repeat: int) -> TrialOutcome:
        """Write what a run leaves, and return how it ended."""
        self.made.append((trial, repeat))
        recipe = apply_patch(self.recipe, trial.patch)
        rundir = RunDir(self.root / "trials" / build_run_name(trial, self.recipe, 1, repeat))
        assert not rundir.path.exists(), f"{rundir.path} is two runs"
        rundir.path.mkdir(parents=True)
        error = self.fails(recipe)
        if error:
            return TrialOutcome(trial, repeat, rundir, None, error, 1, error)
        self._write_losses(rundir, recipe)
        result = self._result(recipe)
        return TrialOutcome(trial, repeat, rundir, starved(result) if self.is_busy(recipe) else result)

    def _write_losses(self, rundir: RunDir, recipe: Recipe) -> None:
        records = ({"step": step, "loss": self.loss(recipe)} for step in range(10, int(recipe.train.steps) + 1, 10))
        rundir.steps.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")

    def _result(self, recipe: Recipe) -> RunResult:
        rate = self.speed(recipe)
        return RunResult(
            status="completed",
            recipe_hash=recipe.hash,
            world_size=1,
            epochs=1.0,
            steps=int(recipe.train.steps),
            images_seen=100,
            eval=None,
            best=None,
            throughput=ThroughputResult(images_per_s=rate, spread=(rate, rate), n=3, excluded_s=0),
            time=TimeResult(wall_s=4.0, startup_s=1.0, train_s=2.0, eval_s=0, checkpoint_s=0, to_target_s=None),
            stages={
                name: StageResult(host_s=share, device_s=share, share=share)
                for name, share in self.shares(recipe).items()
            },
            verdict={"bottleneck": "compute-bound", "evidence": "made up", "ceiling": "", "try": ""},
            lr="0.1",
            weights_sha256="ab",
            provenance={"device": "cpu", "logical_cores": 4},
        )


@dataclass
class Described:
    """A process that was asked what `machine` it is on, and has said so."""

    machine: dict[str, object]
    returncode: int = 0

    def communicate(self, *, timeout: float | None = None) -> tuple[str | None, str | None]:
        return json.dumps(self.machine), ""

    def poll(self) -> int | None:
        return self.returncode
