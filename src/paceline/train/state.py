"""What a run knows about its own progress, and what a checkpoint carries of it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

from paceline.core.results import EvalReport, EvalResult
from paceline.train.attempts import Spent


@dataclass(frozen=True)
class Correct:
    """Of `images` of training batches, how many have their class first among the logits, and among the first five."""

    images: int = 0
    top1: int = 0
    top5: int = 0

    def plus(self, other: "Correct") -> "Correct":
        """Return both together."""
        return Correct(self.images + other.images, self.top1 + other.top1, self.top5 + other.top5)

    @property
    def shares(self) -> tuple[float, float] | tuple[None, None]:
        """Top-1 and top-5, from 0 to 1; None of no images."""
        return (self.top1 / self.images, self.top5 / self.images) if self.images else (None, None)


@dataclass(frozen=True)
class SinceEval:
    """The training since the newest evaluation: its steps, and its seconds without checkpoints.

    `correct` is what was counted of their images, where `train.accuracy` is on.
    """

    steps: int = 0
    train_s: float = 0.0
    correct: Correct = Correct()


@dataclass
class TrainState:
    """Progress after `step` optimizer steps: everything but weights, optimizer and schedule.

    `skipped` of the steps moved nothing, the last `skips_in_row` among them. `bad_images` could not be read
    (`train.bad_images`). `last` is the newest evaluation, `best` the best of the judged weights.
    `hits` counts evaluations in a row that met the target; `trained_s` is the time since the first step of the
    run, over all its processes, and `train_s` the same without evaluations and checkpoints; `target_s` is
    `trained_s` when the target was reached. `loss_sum` is the sum of the mean losses of the `loss_steps` steps since
    the last logged one, and `since_log` what was counted of their images. `spent` is what of `trained_s` were
    no steps, by the clock.
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
    trained_s: float = 0.0
    target_s: float | None = None
    loss_sum: float = 0.0
    loss_steps: int = 0
    bad_images: list[int] = field(default_factory=list)
    spent: Spent = field(default_factory=Spent)
    train_s: float = 0.0
    since_eval: SinceEval = SinceEval()
    since_log: Correct = Correct()

    @property
    def updates(self) -> int:
        """How many steps have moved the weights; the learning rate follows this number."""
        return self.step - self.skipped

    def advance(self, images: int) -> None:
        """Count one optimizer step over `images` images of all ranks."""
        self.step += 1
        self.images_seen += images

    def evaluated(self, report: EvalReport) -> None:
        """Keep the newest evaluation, and the best by top-1 of the judged weights."""
        self.last, self.last_step = report, self.step
        if self.best is None or report.judged.top1 > self.best.top1:
            self.best, self.best_step = report.judged, self.step

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; the classes of the last evaluation are not among them."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        values |= {name: asdict(getattr(self, name)) for name in ("spent", "since_eval", "since_log")}
        for name in ("last", "best"):
            values[name] = values[name].model_dump(mode="json") if values[name] else None
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Return the state that `to_dict` described; of before there was `train_s`, what the clock knows of it."""
        last, best, spent = values["last"], values["best"], Spent(**values.get("spent", {}))
        typed = {
            "train_s": values.get("train_s", values["trained_s"] - spent.eval_s - spent.checkpoint_s),
            "last": EvalReport.model_validate(last) if last else None,
            "best": EvalResult.model_validate(best) if best else None,
            "spent": spent,
            "since_eval": _since_eval(**values.get("since_eval", {})),
            "since_log": Correct(**values.get("since_log", {})),
        }
        return cls(**{**values, **typed})


def _since_eval(steps: int = 0, train_s: float = 0.0, correct: Mapping[str, int] | None = None) -> SinceEval:
    return SinceEval(steps, train_s, Correct(**(correct or {})))
