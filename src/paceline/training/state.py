"""Training progress that a checkpoint stores, step intervals, and early stopping."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final, Self

from paceline.core.metric import Monitor
from paceline.core.results import EvalReport, EvalResult
from paceline.core.statistics import TargetCriterion
from paceline.training.goodput import TimeSpent

TOP1: Final = Monitor()
"""Top-1 accuracy, by which evaluations are compared unless a recipe names another metric."""


@dataclass(frozen=True)
class StepInterval:
    """Every `every` steps and after step `last`; 0 means never."""

    every: int
    last: int

    def is_due(self, step: int) -> bool:
        """Return whether the interval is due after `step` steps."""
        return self.every > 0 and (step % self.every == 0 or step == self.last)


@dataclass(frozen=True)
class CorrectCounts:
    """Correctly classified images (top-1, top-5) out of `images` training images."""

    images: int = 0
    top1: int = 0
    top5: int = 0

    def plus(self, other: "CorrectCounts") -> "CorrectCounts":
        """Return the sum of both counts."""
        return CorrectCounts(self.images + other.images, self.top1 + other.top1, self.top5 + other.top5)

    @property
    def shares(self) -> tuple[float, float] | tuple[None, None]:
        """Top-1 and top-5 accuracy from 0 to 1, or None without images."""
        return (self.top1 / self.images, self.top5 / self.images) if self.images else (None, None)


@dataclass(frozen=True)
class TrainingSinceEval:
    """Steps, seconds (without evaluations and checkpoints) and correct images since the last evaluation."""

    steps: int = 0
    train_s: float = 0.0
    correct: CorrectCounts = CorrectCounts()


@dataclass
class TrainState:
    """Progress after `step` optimizer steps: everything but weights, optimizer and schedule.

    `skipped` steps did not update the weights; `skips_in_row` of them, since the last update, did not only lower the
    loss scale. `bad_images` are IDs of `BadImageRegistry`. `last` is the latest evaluation, `best` the best one; the
    last `hits` ones reached the target, and the last `not_better` ones were not better than `best`.

    Times are seconds over all processes of the run: `trained_s` since the first step, `train_s` without evaluations and
    checkpoints, `target_s` until the target was reached, `spent` the part that was not steps. `loss_sum`, `loss_steps`
    and `since_log` are sums over the steps since the last log record.
    """

    step: int = 0
    skipped: int = 0
    skips_in_row: int = 0
    images_seen: int = 0
    last: EvalReport | None = None
    last_step: int = -1
    best: EvalResult | None = None
    best_step: int = -1
    hits: int = 0
    not_better: int = 0
    trained_s: float = 0.0
    target_s: float | None = None
    loss_sum: float = 0.0
    loss_steps: int = 0
    bad_images: list[int] = field(default_factory=list)
    spent: TimeSpent = field(default_factory=TimeSpent)
    train_s: float = 0.0
    since_eval: TrainingSinceEval = TrainingSinceEval()
    since_log: CorrectCounts = CorrectCounts()

    @property
    def num_updates(self) -> int:
        """Number of steps that updated the weights, by which the learning rate goes."""
        return self.step - self.skipped

    def advance(self, images: int) -> None:
        """Count one optimizer step over `images` images of all ranks."""
        self.step += 1
        self.images_seen += images

    def record_evaluation(self, report: EvalReport, monitor: Monitor = TOP1) -> None:
        """Store the latest evaluation, and the best one by the metric `monitor`."""
        self.last, self.last_step = report, self.step
        self.not_better += 1
        if monitor.is_better(report.primary, self.best):
            self.best, self.best_step, self.not_better = report.primary, self.step, 0

    def count_hits(self, target: TargetCriterion) -> None:
        """Count consecutive evaluations that reached `target`, and record when it was reached for good."""
        assert self.last is not None
        self.hits = target.count(self.hits, self.last.primary.top1)
        if target.is_reached(self.hits) and self.target_s is None:
            self.target_s = self.trained_s

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, without the per-class tables of the last evaluation."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        values |= {name: asdict(getattr(self, name)) for name in ("spent", "since_eval", "since_log")}
        for name in ("last", "best"):
            values[name] = values[name].model_dump(mode="json") if values[name] else None
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Return the state that `to_dict` described."""
        # Older versions saved no `train_s`.
        last, best, spent = values["last"], values["best"], TimeSpent(**values.get("spent", {}))
        typed = {
            "train_s": values.get("train_s", values["trained_s"] - spent.eval_s - spent.checkpoint_s),
            "last": EvalReport.model_validate(last) if last else None,
            "best": EvalResult.model_validate(best) if best else None,
            "spent": spent,
            "since_eval": _load_since_eval(**values.get("since_eval", {})),
            "since_log": CorrectCounts(**values.get("since_log", {})),
        }
        return cls(**{**values, **typed})


def _load_since_eval(
    steps: int = 0, train_s: float = 0.0, correct: Mapping[str, int] | None = None
) -> TrainingSinceEval:
    return TrainingSinceEval(steps, train_s, CorrectCounts(**(correct or {})))
