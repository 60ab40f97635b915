"""A run that is killed again and again, at any moment, ends as if nothing had happened.

This is `benchmarks/chaos.py` with few kills; the full form is its `--kills 100`, recorded in `benchmarks/results`.
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


class Ended(NamedTuple):
    """A run that was killed all along and has ended, beside one that was left alone, both below `folder`."""

    setting: Any
    folder: Path
    summary: dict[str, Any]
    kills: list[Any]


@pytest.fixture(scope="module")
def chaos() -> Iterator[ModuleType]:
    """The benchmark; it imports its neighbours by name, as a program does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield importlib.import_module("chaos")


@pytest.fixture(scope="module")
def completed(chaos: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """A run on two ranks; the record is of three too, and so is the run that torchrun starts again."""
    setting, folder = chaos.Setting(ranks=2, steps=30, every=5), tmp_path_factory.mktemp("chaos")
    summary, kills = chaos.chaos(setting, KILLS, folder, SEED)
    return Ended(setting, folder, summary, kills)


# matrix: 10
# matrix: 11
# matrix: 12
# matrix: 15
# matrix: 16
def test_a_run_that_is_killed_five_times_ends_as_if_nothing_had_happened(completed: Ended) -> None:
    assert len(completed.kills) == KILLS
    assert sum(kill.done is not None for kill in completed.kills) >= 2  # these had something to lose
    output = [text for path in sorted(completed.folder.glob("*.err")) if "Traceback" in (text := path.read_text())]
    assert [name for name, holds in completed.summary["checks"].items() if not holds] == [], output


def without_a_sample(run: Path) -> None:
    path = run / "steps.rank1.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


def another_loss(run: Path) -> None:
    path = run / "evals.jsonl"
    *before, last = path.read_text().splitlines(keepends=True)
    row = json.loads(last)
    path.write_text("".join(before) + json.dumps({**row, "loss": row["loss"] + 1e-12}))


def another_result(run: Path) -> None:
    path = run / "result.json"
    path.write_text(path.read_text().replace('"weights_sha256": "', '"weights_sha256": "0'))


def an_older_checkpoint(run: Path) -> None:
    older, newest = sorted((run / "checkpoints").glob("step-*"))[-2:]
    shutil.rmtree(newest)
    shutil.copytree(older, newest)


def half_a_checkpoint(run: Path) -> None:
    (run / "checkpoints" / ".step-00000035.tmp").mkdir()


def a_warning(run: Path) -> None:
    run.with_name(f"{run.name}-0099.err").write_text("warning: checkpoints/step-00000005: is damaged")


def a_traceback(run: Path) -> None:
    run.with_name(f"{run.name}-0099.err").write_text("Traceback (most recent call last):")


@pytest.mark.parametrize(
    ("harm", "check"),
    [
        (without_a_sample, "same_samples_each_once"),
        (another_loss, "same_records"),
        (another_result, "same_result"),
        (an_older_checkpoint, "same_weights_optimizer_and_average"),
        (half_a_checkpoint, "nothing_half_written_left"),
        (a_warning, "no_checkpoint_found_damaged"),
        (a_traceback, "no_traceback"),
    ],
)
def test_what_is_lost_is_seen(
    chaos: ModuleType, completed: Ended, tmp_path: Path, harm: Callable[[Path], None], check: str
) -> None:
    uninterrupted, killed = (completed.folder / f"{name}-{completed.setting.ranks}" for name in ("whole", "killed"))
    shutil.copytree(killed, tmp_path / "killed")
    harm(tmp_path / "killed")
    checks = chaos.verdicts(completed.setting, uninterrupted, tmp_path / "killed", completed.kills)
    assert [name for name, holds in checks.items() if not holds] == [check]


def test_going_on_from_elsewhere_and_losing_too_much_is_seen(chaos: ModuleType, completed: Ended) -> None:
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


def test_kills_are_spread_over_the_run_and_over_all_moments_and_victims(chaos: ModuleType) -> None:
    kills = chaos.plan_kills(100, chaos.Setting(3, steps=600, every=5), random.Random(0))
    assert [kill.step for kill in kills] == sorted(kill.step for kill in kills)
    assert kills[0].step < 60 and 540 < kills[-1].step <= 590
    assert {kill.moment for kill in kills} == {"start", "step", "save"}
    assert {kill.victim for kill in kills} == {"rank", "launcher", "all"}
    assert {kill.rank for kill in kills} == {0, 1, 2}
    assert {kill.workers for kill in kills} == {0, 2}
