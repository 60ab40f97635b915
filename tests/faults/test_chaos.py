"""A run that is killed repeatedly at random moments ends with the state of an uninterrupted one.

This is `benchmarks/chaos.py` with few kills; the full form, `--kills 100`, is recorded in `benchmarks/results`.
"""

import importlib
import json
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

pytestmark = pytest.mark.long
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
KILLS, SEED = 5, 6


class ChaosResult(NamedTuple):
    """A completed run that was killed repeatedly and an uninterrupted one, both in `folder`."""

    setting: Any
    folder: Path
    summary: dict[str, Any]
    kills: list[Any]


@pytest.fixture(scope="module")
def chaos() -> Iterator[ModuleType]:
    """The benchmark; it imports its neighbors by name, like a program."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield importlib.import_module("chaos")


@pytest.fixture(scope="module")
def completed(chaos: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> ChaosResult:
    """The result of two ranks; the recorded benchmark also has three ranks, and restarts by torchrun."""
    setting, folder = chaos.Setting(ranks=2, steps=30, every=5), tmp_path_factory.mktemp("chaos")
    summary, kills = chaos.chaos(setting, KILLS, folder, SEED)
    return ChaosResult(setting, folder, summary, kills)


# matrix: 10
# matrix: 11
# matrix: 12
# matrix: 15
# matrix: 16
def test_a_run_killed_five_times_equals_an_uninterrupted_one(completed: ChaosResult) -> None:
    assert len(completed.kills) == KILLS
    assert sum(kill.done is not None for kill in completed.kills) >= 2  # runs that had a checkpoint to lose
    output = [text for path in sorted(completed.folder.glob("*.err")) if "Traceback" in (text := path.read_text())]
    assert [name for name, holds in completed.summary["checks"].items() if not holds] == [], output


def drop_a_sample(run: Path) -> None:
    path = run / "steps.rank1.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


def change_a_loss(run: Path) -> None:
    path = run / "evals.jsonl"
    *before, last = path.read_text().splitlines(keepends=True)
    row = json.loads(last)
    path.write_text("".join(before) + json.dumps({**row, "loss": row["loss"] + 1e-12}))


def change_the_result(run: Path) -> None:
    path = run / "result.json"
    path.write_text(path.read_text().replace('"weights_sha256": "', '"weights_sha256": "0'))


def replace_the_newest_checkpoint(run: Path) -> None:
    older, newest = sorted((run / "checkpoints").glob("step-*"))[-2:]
    shutil.rmtree(newest)
    shutil.copytree(older, newest)


def leave_a_partial_checkpoint(run: Path) -> None:
    (run / "checkpoints" / ".step-00000035.tmp").mkdir()


def write_a_warning(run: Path) -> None:
    run.with_name(f"{run.name}-0099.err").write_text("warning: checkpoints/step-00000005: is damaged")


def write_a_traceback(run: Path) -> None:
    run.with_name(f"{run.name}-0099.err").write_text("Traceback (most recent call last):")


@pytest.mark.parametrize(
    ("harm", "check"),
    [
        (drop_a_sample, "same_samples_each_once"),
        (change_a_loss, "same_records"),
        (change_the_result, "same_result"),
        (replace_the_newest_checkpoint, "same_weights_optimizer_and_average"),
        (leave_a_partial_checkpoint, "nothing_half_written_left"),
        (write_a_warning, "no_checkpoint_found_damaged"),
        (write_a_traceback, "no_traceback"),
    ],
)
def test_every_kind_of_loss_is_detected(
    chaos: ModuleType, completed: ChaosResult, tmp_path: Path, harm: Callable[[Path], None], check: str
) -> None:
    uninterrupted, killed = (completed.folder / f"{name}-{completed.setting.ranks}" for name in ("whole", "killed"))
    shutil.copytree(killed, tmp_path / "killed")
    harm(tmp_path / "killed")
    checks = chaos.verdicts(completed.setting, uninterrupted, tmp_path / "killed", completed.kills)
    assert [name for name, holds in checks.items() if not holds] == [check]


def test_resuming_elsewhere_and_losing_too_much_are_detected(chaos: ModuleType, completed: ChaosResult) -> None:
    uninterrupted, killed = (completed.folder / f"{name}-{completed.setting.ranks}" for name in ("whole", "killed"))
    at = next(number for number, kill in enumerate(completed.kills) if kill.done is not None)
    kills = [
        *completed.kills[:at],
        replace(completed.kills[at], kept=-5, done=1, in_save=False),
        *completed.kills[at + 1 :],
    ]
    kills[-1] = replace(kills[-1], kept=7, started_from=8)
    checks = chaos.verdicts(completed.setting, uninterrupted, killed, kills)
    names = ["goes_on_from_the_newest_checkpoint", "no_more_lost_than_the_interval_unless_in_a_save"]
    assert [name for name, holds in checks.items() if not holds] == names


def test_kills_are_spread_over_steps_moments_and_victims(chaos: ModuleType) -> None:
    kills = chaos.plan_kills(100, chaos.Setting(3, steps=600, every=5), random.Random(0))
    assert [kill.step for kill in kills] == sorted(kill.step for kill in kills)
    assert kills[0].step < 60 and 540 < kills[-1].step <= 590
    assert {kill.moment for kill in kills} == {"start", "step", "save"}
    assert {kill.victim for kill in kills} == {"rank", "launcher", "all"}
    assert {kill.rank for kill in kills} == {0, 1, 2}
    assert {kill.workers for kill in kills} == {0, 2}
