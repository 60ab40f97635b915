"""What a run tells, for those who are told."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from paceline.core.dataset import DatasetInfo
from paceline.core.results import EvalReport, EvalResult, RunResult, ThroughputResult, TimeResult
from paceline.recipe.load import Patch, load
from paceline.recipe.plan import Plan
from paceline.recipe.schema import Recipe
from paceline.training.logging.base import EvalRecord, LogSink, StepRecord

INFO = DatasetInfo("made", "train", 640, ("a", "b"), 3, (8, 8), (0.5,) * 3, (0.5,) * 3)


class Told:
    """Note all that it is told."""

    def __init__(self) -> None:
        self.calls: list[object] = []

    def started(self, plan, step) -> None:
        self.calls.append(("started", step))

    def step(self, record) -> None:
        self.calls.append(("step", record.step))

    def evaluated(self, record) -> None:
        self.calls.append(("evaluated", record.step))

    def warned(self, message) -> None:
        self.calls.append(("warned", message))

    def finished(self, result) -> None:
        self.calls.append(("finished", result.status))

    def close(self) -> None:
        self.calls.append("close")


@pytest.fixture
def told() -> Told:
    """Return a sink that notes its calls."""
    return Told()


@pytest.fixture
def recipe() -> Callable[..., Recipe]:
    """Return what reads a recipe whose evaluations have all there is, with the sinks it is given."""
    common = (
        "log.tensorboard=off",
        "data.batch_size=64",
        "train.ema.decay=0.9",
        "train.eval_train=on",
        "train.accuracy=on",
    )

    def make(*words: str) -> Recipe:
        return load("digits", Patch.parse([*common, *words])).recipe

    return make


@pytest.fixture
def plan(recipe) -> Plan:
    """Return the plan of two ranks."""
    return Plan.derive(recipe(), 2, INFO, replace(INFO, split="val"))


@pytest.fixture
def step() -> Callable[[int], StepRecord]:
    """Return what makes the record of a logged step."""
    return lambda number: StepRecord(
        number, number / 10, 64 * number, 2.0 / number, 0.1, 1000.0, 0.5 * number, 0.375, 0.875
    )


@pytest.fixture
def evaluation() -> Callable[[int], EvalRecord]:
    """Return what makes the record of an evaluation with all there is."""
    val = EvalResult(images=8, top1=0.5, top5=1.0, loss=2.0, ece=0.125, mean_class_accuracy=0.5)
    report = EvalReport(
        val=val, ema=val.model_copy(update={"top1": 0.625}), train=val.model_copy(update={"top1": 0.75})
    )
    speed = {"epoch_s": 3.75, "images_per_s": 170.0, "batch_top1": 0.4375, "batch_top5": 0.9375}
    return lambda number: EvalRecord(
        number, number / 10, 64 * number, 0.5 * number + 0.25, report, skipped=1, train_s=0.375 * number, **speed
    )


@pytest.fixture
def result() -> Callable[[str], RunResult]:
    """Return what makes a result of 20 steps."""

    def make(status: str) -> RunResult:
        return RunResult(
            status=status,
            recipe_hash="0123456789ab",
            world_size=2,
            epochs=2.0,
            steps=20,
            images_seen=1280,
            eval=EvalResult(images=8, top1=0.5, top5=1.0, loss=2.0),
            best=None,
            throughput=ThroughputResult(images_per_s=1000.0, spread=(900.0, 1100.0), n=4, excluded_s=0.0),
            time=TimeResult(wall_s=4.0, startup_s=1.0, train_s=2.0, eval_s=0, checkpoint_s=0, to_target_s=None),
            stages={},
            verdict={"bottleneck": "compute-bound"},
            lr="0.1 at 64",
            weights_sha256="ab",
            provenance={"command": ("paceline", "train")},
        )

    return make


@pytest.fixture
def attempts(plan, step, evaluation, result) -> Callable[[Callable[[int], LogSink]], None]:
    """Return what tells a run of 20 steps that is stopped at 14 and goes on from a checkpoint at 10.

    It is given what makes the sink of a process, from the step that the process starts from.
    """

    def tell(sink_from: Callable[[int], LogSink]) -> None:
        for start, end, status in [(0, 14, "preempted"), (10, 20, "completed")]:
            sink = sink_from(start)
            sink.started(plan, start)
            for number in range(start + 2, end + 1, 2):
                sink.step(step(number))
                if number % 4 == 0:
                    sink.evaluated(evaluation(number))
            sink.finished(result(status))
            sink.close()

    return tell
