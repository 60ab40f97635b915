"""What the clock and the verdict say of a real run is what was done to it: parts sleep, and their stages show it."""

import json
import socket
from pathlib import Path
from statistics import median

import pytest

from paceline.measure import ClockSummary, StageTotal
from paceline.measure.bottleneck import find_bottleneck

SLOWED = Path(__file__).with_name("slowed.py")
WARMUP = 9
"""Steps: a whole round of the parts that sleep in turn."""
WORDS = (
    "train",
    "synthetic",
    "model.name=empty",
    "model.width=1.0",
    "data.source.num_images=300",
    "data.source.num_val_images=8",
    "data.batch_size=6",
    "data.workers=0",
    "train.epochs=auto",
    "train.eval_every=off",
    "checkpoint.every=off",
    f"measure.warmup_steps={WARMUP}",
    "measure.telemetry=off",
    "log.every=1000st",
    "log.tensorboard=off",
    "log.report=off",
    "parallel.threads=1",
)
CLASSES = {
    "data_wait": "input-bound",
    "h2d": "copy-bound",
    "device_augment": "compute-bound",
    "forward": "compute-bound",
    "loss": "compute-bound",
    "backward": "compute-bound",
    "optimizer": "compute-bound",
    "other": "unknown",
}


class Told:
    """What `slowed.py` wrote of one rank: how long its parts slept, and its clock's stages, of the same steps."""

    def __init__(self, file: Path) -> None:
        told = json.loads(file.read_text())
        self.slept_s = {part: seconds[WARMUP:] for part, seconds in told["slept_s"].items()}
        self.stages = told["stages"]
        self.step_s = told["step_s"]
        lengths = {len(seconds) for seconds in (*self.slept_s.values(), *self.stages.values(), self.step_s)}
        assert len(lengths) == 1 and lengths != {0}

    def slow_steps(self, part: str) -> list[int]:
        """Return the steps in which `part` slept; where it did not, asking took microseconds."""
        return [step for step, slept_s in enumerate(self.slept_s[part]) if slept_s > 0.01]

    def moved_s(self, part: str) -> tuple[float, float]:
        """Return by how much the stage is longer where its part slept, and how long that slept: medians."""
        slow = self.slow_steps(part)
        usual_s = median(seconds for step, seconds in enumerate(self.stages[part]) if step not in slow)
        # What a step took beside the sleep, and not the whole step, has a median that a busy machine hardly moves.
        beside_s = median(self.stages[part][step] - self.slept_s[part][step] for step in slow)
        slept_s = median(self.slept_s[part][step] for step in slow)
        return slept_s + beside_s - usual_s, slept_s

    def summary_of(self, steps: list[int]) -> ClockSummary:
        """Return the summary of a run that had only these steps."""
        wall_s = sum(self.step_s[step] for step in steps)
        totals = {name: sum(seconds[step] for step in steps) for name, seconds in self.stages.items()}
        stages = {name: StageTotal(total_s, total_s, total_s / wall_s) for name, total_s in totals.items()}
        return ClockSummary(len(steps), len(steps), wall_s, stages, 0.0, {}, 0.0, tuple(self.step_s[s] for s in steps))


@pytest.fixture(scope="module")
def told(forking, tmp_path_factory) -> Told:
    """Return what a run told whose parts slept in turn."""
    folder = tmp_path_factory.mktemp("each")
    words = [str(SLOWED), "told", "each", *WORDS, f"train.steps={WARMUP * 11}", "--run-dir", "run"]
    _, says = (process := forking.start(words, folder, {})).communicate()
    assert process.returncode == 0, says
    return Told(folder / "told")


@pytest.mark.parametrize("part", CLASSES)
def test_a_delay_moves_its_stage_by_as_much(told: Told, part: str) -> None:
    moved_s, slept_s = told.moved_s(part)

    assert len(told.slow_steps(part)) == 10
    assert moved_s == pytest.approx(slept_s, rel=0.05)  # what is promised


@pytest.mark.parametrize("part", CLASSES)
def test_a_delay_moves_no_other_stage(told: Told, part: str) -> None:
    slow = told.slow_steps(part)
    slept_s = median(told.slept_s[part][step] for step in slow)
    for stage in CLASSES.keys() - {part}:
        usual_s = median(told.stages[stage][step] for step in range(len(told.step_s)) if step not in slow)
        # A delay in the wrong place would be all of it; after a sleep a busy machine takes a little longer for all.
        assert median(told.stages[stage][step] for step in slow) - usual_s < 0.25 * slept_s


@pytest.mark.parametrize(("part", "bottleneck"), CLASSES.items())
def test_steps_with_a_delay_are_judged_by_it(told: Told, part: str, bottleneck: str) -> None:
    judged = find_bottleneck(told.summary_of(told.slow_steps(part)))

    assert judged.bottleneck == bottleneck, judged.evidence


def test_a_rank_that_is_slowed_by_a_fifth_is_named(forking, tmp_path: Path) -> None:
    """What the others wait is what it sleeps, within 10 % for three ranks that wake up on fewer cores.

    Other programs make the others wait for longer now and then, so there are three runs, and one must show it.
    """
    found = [slowed_run(forking, tmp_path / "0")]
    while abs(found[-1] - 1) > 0.1 and len(found) < 3:
        found.append(slowed_run(forking, tmp_path / str(len(found))))
    assert found[-1] == pytest.approx(1, rel=0.1), found


def slowed_run(forking, folder: Path) -> float:
    """Return what the others wait for the rank that is slowed, over what it sleeps; assert that a run names it."""
    folder.mkdir()
    words = [str(SLOWED), "told", "late", *WORDS, f"train.steps={WARMUP + 24}", "--run-dir", "run"]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    world = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    environs = [{**world, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(3)]
    ranks = [forking.start(words, folder, environ) for environ in environs]
    for rank in ranks:
        _, says = rank.communicate()
        assert rank.returncode == 0, says

    result = json.loads((folder / "run" / "result.json").read_text())
    assert (result["straggler"]["rank"], result["straggler"]["stage"]) == (1, "backward")
    assert result["verdict"]["bottleneck"] == "straggler-bound", result["verdict"]
    assert "most often rank 1, which loses it in backward" in result["verdict"]["evidence"]
    late, usual = Told(folder / "told1"), Told(folder / "told0")
    waited_s = median(usual.stages["exposed_communication"]) - median(late.stages["exposed_communication"])
    return waited_s / median(late.slept_s["backward"])
