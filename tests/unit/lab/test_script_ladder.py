"""The rungs of a script's ladder are kept, dropped, left out or failed by pairs of runs; the runs are made up here."""

from dataclasses import replace
from pathlib import Path

import pytest

from paceline.core.errors import PacelineError
from paceline.core.watch_result import WatchResult
from paceline.lab.script_ladder import NOT_REPRODUCIBLE, ScriptHost, ScriptLadderRunner
from paceline.lab.script_ladder_file import ScriptRung
from paceline.lab.script_settings import ScriptSettings
from paceline.watch.measured_run import MeasuredRun

RESULT = WatchResult(paceline="0", command=("train",), exit_code=0, verdict={}, world_size=1, hosts=("host",))


def run_of(
    step_s: float, *, loss: float = 1.0, failure: str = "", unapplied=None, ranks: int = 1, samples: int = 8
) -> MeasuredRun:
    losses = {n: loss / n for n in range(1, 9)}
    rates = {"step_s": step_s, "samples_per_s": samples / step_s}
    result = RESULT.model_copy(update={"world_size": ranks, **rates})
    return MeasuredRun(result, (step_s,) * 5, step_s, losses, None, failure, unapplied or {})


class Script:
    """A script that is as fast and trains as its settings say."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.noise = 0

    def __call__(self, settings: ScriptSettings, folder: Path) -> MeasuredRun:
        self.order.append(folder.name)
        self.noise += 1
        step_s, loss = 0.1 * (1 + 0.001 * (self.noise % 3)), 1.0
        if settings.patches.get("workers"):
            step_s /= 2
        if "--lr" in settings.command:
            step_s, loss = step_s / 2, 1.1
        if "--batch" in settings.command:  # a step of half of the samples, in 0.7 of the time
            return run_of(0.7 * step_s, samples=4)
        if "--bad" in settings.command:
            return run_of(1.0, failure="took no step: ValueError: bad")
        unapplied = {"ddp_bucket_mb": "no DistributedDataParallel was created"} if settings.patches else {}
        return run_of(step_s, loss=loss, unapplied=unapplied)


def measure(tmp_path, script, *rungs: ScriptRung, gpus: int = 0, repeats: int = 3):
    lines: list[str] = []
    settings = ScriptSettings(("python", "train.py"))
    host = ScriptHost(gpus=gpus, cores=6)
    return ScriptLadderRunner(rungs, settings, script, tmp_path, host, repeats, lines.append).run(), lines


def test_rungs_are_judged_by_speed_and_losses(tmp_path):
    script = Script()
    outcome, _ = measure(
        tmp_path,
        script,
        ScriptRung(name="bait", args={"--lr": 1}),
        ScriptRung(name="workers", patch={"workers": "auto"}),
        ScriptRung(name="broken", args={"--bad": True}),
        ScriptRung(name="ddp", patch={"ddp_bucket_mb": 50}),
        ScriptRung(name="gpu", on="cuda", patch={"pin_memory": True}),
        ScriptRung(name="ranks", on="ranks", patch={"static_graph": True}),
        ScriptRung(name="same", env={"A": "1"}),
    )
    by_name = {rung.name: rung for rung in outcome.rungs}
    statuses = {name: rung.status for name, rung in by_name.items()}
    assert statuses == {
        "as given": "kept", "bait": "dropped", "workers": "kept", "broken": "failed", "ddp": "left_out",
        "gpu": "left_out", "ranks": "left_out", "same": "dropped",
    }  # fmt: skip
    assert by_name["bait"].why.startswith("trains differently")
    assert by_name["bait"].over_below.value == pytest.approx(2, rel=0.01)
    assert by_name["ddp"].why == "not applied: no DistributedDataParallel was created"
    assert "ValueError: bad" in by_name["broken"].why
    assert by_name["same"].below == "workers"
    assert outcome.settings.patches == {"workers": 6}  # of six cores for one rank
    # The order alternates, and each rung is compared with the last one kept.
    assert script.order[3:9] == ["02-1", "02-below-1", "02-below-2", "02-2", "02-3", "02-below-3"]


def test_a_rung_of_other_batches_is_judged_per_sample(tmp_path):
    outcome, _ = measure(tmp_path, Script(), ScriptRung(name="small batch", args={"--batch": 4}, parity="free"))
    assert outcome.rungs[1].status == "dropped"
    assert outcome.rungs[1].over_below.value == pytest.approx(0.5 / 0.7, rel=0.02)


def test_a_free_rung_may_train_differently(tmp_path):
    outcome, _ = measure(tmp_path, Script(), ScriptRung(name="bait", args={"--lr": 1}, parity="free"))
    assert outcome.best == "bait"
    assert outcome.settings.command_line() == "python train.py --lr 1"


def test_one_pair_proves_nothing(tmp_path):
    outcome, _ = measure(tmp_path, Script(), ScriptRung(name="workers", patch={"workers": 2}), repeats=1)
    assert outcome.rungs[1].status == "dropped"


def test_a_script_that_is_not_reproducible_is_judged_by_speed(tmp_path):
    script = Script()

    def unseeded(settings: ScriptSettings, folder: Path) -> MeasuredRun:
        run = script(settings, folder)
        return replace(run, losses={n: loss * (1 + 0.01 * script.noise) for n, loss in run.losses.items()})

    outcome, lines = measure(tmp_path, unseeded, ScriptRung(name="bait", args={"--lr": 1}))
    assert outcome.rungs[1].status == "kept" and outcome.rungs[1].why.endswith("losses not compared")
    assert lines.count(NOT_REPRODUCIBLE) == 1 and outcome.note == NOT_REPRODUCIBLE


def test_losses_that_are_not_finite_are_dropped(tmp_path):
    script = Script()

    def diverging(settings: ScriptSettings, folder: Path) -> MeasuredRun:
        run = script(settings, folder)
        return replace(run, losses={1: 1.0, 2: float("nan")}) if "--lr" in settings.command else run

    outcome, _ = measure(tmp_path, diverging, ScriptRung(name="bait", args={"--lr": 1}))
    assert (outcome.rungs[1].status, "not finite" in outcome.rungs[1].why) == ("dropped", True)


def test_a_command_that_fails_as_given_ends_the_ladder(tmp_path):
    def fail(settings: ScriptSettings, folder: Path) -> MeasuredRun:
        return run_of(1.0, failure="took no step of a PyTorch optimizer and ended with exit code 2: error: no data")

    with pytest.raises(PacelineError, match="error: no data"):
        measure(tmp_path, fail, ScriptRung(name="workers", patch={"workers": 2}))
