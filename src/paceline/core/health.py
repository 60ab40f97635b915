"""Find problems of what a run has learned, such as overfitting or predicting a single class.

`docs/explanation/health.md` documents the rules. A rule needs evidence: two accuracies differ if their 95 % intervals
are disjoint, and runs of fewer than `MIN_STEPS` steps have no findings.
"""

import itertools
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, NamedTuple, Self

from paceline.core.results import FINISHED, BatchNormCheck, ClassCount, EvalReport, EvalResult, Finding, Status
from paceline.core.statistics import CONFIDENCE, NORMAL_QUANTILE, wilson_interval
from paceline.core.units import accuracy, count

MIN_STEPS: Final = 50
"""Fewest optimizer steps of a run with findings: shipped recipes leave chance level within 20 (measured)."""
NEARLY_ALL: Final = 0.8
"""Share of the images of all other classes that must be predicted as one class for a finding."""
ERROR_GROWTH: Final = 1.5
"""Ratio of error rates from which an evaluation counts as far below a better one."""
SKILL_LEFT: Final = 2 / 3
"""Share of the better accuracy below which the worse one is far below too: an error near 100 % cannot grow by half."""
LOSS_RISE: Final = 1.1
"""Ratio to its minimum from which a validation loss counts as rising."""
MIN_RISING: Final = 4
"""Evaluations after the lowest loss that make a trend: four rise in a row by chance with probability 1 / 4!."""
FEW_SKIPS: Final = 20
"""Steps that float16's loss scale may skip at the start: it begins at 65,536 and halves at each overflow."""
SCALE_INTERVAL: Final = 2000
"""Steps after which the loss scale doubles, so that one more step may be skipped."""
_MAX_TREND: Final = 200  # evaluations in the trend test, which is quadratic
_MAX_IMAGES: Final = 10**12  # a damaged record may hold any number
_MAX_NAMES: Final = 5
_LARGEST: Final = sys.float_info.max
Severity = Literal["error", "warning", "note"]
_SEVERITY_ORDER: Final[tuple[Severity, ...]] = ("error", "warning", "note")


@dataclass(frozen=True)
class EvalPoint:
    """One evaluation of a run. `top1` and `loss` are of the averaged weights if there are any, else of the raw ones."""

    step: int
    epoch: float
    images: int
    top1: float
    loss: float
    raw_top1: float
    ema_top1: float | None = None
    train_top1: float | None = None

    @property
    def correct(self) -> int:
        """Number of correctly classified images."""
        return round(self.top1 * self.images)

    @classmethod
    def of(cls, report: EvalReport, step: int = 0, epoch: float = 0.0) -> Self:
        """Return the point of an evaluation after `step` steps."""
        chosen, ema, train = report.primary, report.ema, report.train
        return cls(
            step=step,
            epoch=epoch,
            images=chosen.images,
            top1=chosen.top1,
            loss=chosen.loss,
            raw_top1=report.val.top1,
            ema_top1=None if ema is None else ema.top1,
            train_top1=None if train is None else train.top1,
        )

    @classmethod
    def read(cls, row: Mapping[str, Any]) -> Self | None:
        """Return the point of a record of `evals.jsonl`, or None if the record lacks a value."""
        try:
            top1, loss, ema = row["top1"], row["loss"], row.get("ema_top1")  # no top-1: several labels per image
            return cls(
                step=int(row["step"]),
                epoch=float(row["epoch"]),
                images=int(row["images"]),
                top1=_parse_share(top1 if ema is None else ema),
                loss=float(loss if ema is None else row["ema_loss"]),
                raw_top1=_parse_share(top1),
                ema_top1=None if ema is None else _parse_share(ema),
                train_top1=None if row.get("train_top1") is None else _parse_share(row["train_top1"]),
            )
        except (KeyError, TypeError, ValueError, OverflowError):
            return None


@dataclass(frozen=True)
class RunHistory:
    """The evaluations, losses and checkpoints of a run."""

    points: Sequence[EvalPoint]  # in order
    status: Status | None = None  # None for an unfinished run, and with `is_alone`
    is_alone: bool = False  # weights that are evaluated without their run
    losses: Sequence[tuple[int, float]] = ()  # (step, logged training loss)
    has_cross_entropy: bool = True  # whether `losses` are cross-entropies, which can be compared with guessing
    classes: Sequence[ClassCount] = ()  # of the last evaluation, as is `confusion`
    confusion: Sequence[Sequence[int]] = ()
    steps: int = 0
    skipped: int = 0
    scales_loss: bool = False  # float16 loss scaling, which may skip steps
    best: EvalResult | None = None  # unless it is among `points`
    best_step: int | None = None
    best_kept: bool | None = None  # whether its checkpoint is on disk; None if unknown
    batch_norm: BatchNormCheck | None = None

    @property
    def last(self) -> EvalPoint | None:
        """The last evaluation."""
        return self.points[-1] if self.points else None

    @property
    def has_trained_enough(self) -> bool:
        """Whether there is an evaluation after enough training for its accuracy to mean anything."""
        if self.last is None or self.is_alone:
            return self.last is not None
        return self.last.step >= MIN_STEPS and not self.is_too_short

    @property
    def is_running(self) -> bool:
        """Whether the run has not finished."""
        return not self.is_alone and self.status not in FINISHED

    @property
    def is_too_short(self) -> bool:
        """Whether an unfinished run has trained too little even for a drop of accuracy to mean anything."""
        return self.is_running and self.last is not None and (self.last.step < MIN_STEPS or self.last.epoch < 1)


def eval_points(rows: Iterable[Mapping[str, Any]]) -> tuple[EvalPoint, ...]:
    """Return the evaluations in records of `evals.jsonl`, skipping unreadable ones."""
    return tuple(each for each in map(EvalPoint.read, rows) if each is not None and 0 < each.images < _MAX_IMAGES)


def training_losses(rows: Iterable[Mapping[str, Any]]) -> tuple[tuple[int, float], ...]:
    """Return (step, training loss) of records of `steps.jsonl`, skipping non-finite ones."""
    pairs = ((row.get("step"), row.get("loss")) for row in rows)
    return tuple(
        (int(step), float(loss))
        for step, loss in pairs
        if isinstance(step, int | float)
        and isinstance(loss, int | float)
        and abs(step) <= _LARGEST
        and abs(loss) <= _LARGEST
    )


class Diagnosis(NamedTuple):
    """What a rule has found; `severity` replaces that of the rule."""

    evidence: str
    advice: str
    numbers: dict[str, float]
    severity: Severity | None = None


def find_problems(history: RunHistory) -> tuple[Finding, ...]:
    """Return the findings about a run, the most severe first."""
    found = []
    for name, severity, diagnose in RULES:
        diagnosis = diagnose(history)
        if diagnosis is not None:
            values = diagnosis._asdict() | {"severity": diagnosis.severity or severity}
            found.append(Finding(name=name, **values))
    return tuple(sorted(found, key=lambda each: _SEVERITY_ORDER.index(each.severity)))


def is_suspicious(history: RunHistory) -> bool:
    """Return whether the last evaluation is so bad that BatchNorm's running statistics should be checked."""
    return _is_useless(history) or _diagnose_drop(history) is not None


def _is_useless(history: RunHistory) -> bool:
    return _diagnose_one_class(history) is not None or _diagnose_chance(history) is not None


def _diagnose_one_class(history: RunHistory) -> Diagnosis | None:
    classes, confusion = history.classes, history.confusion
    if not history.has_trained_enough or len(classes) < 2 or len(confusion) != len(classes):
        return None
    predicted = [sum(column) for column in zip(*confusion, strict=True)]
    chosen = max(range(len(classes)), key=predicted.__getitem__)
    total = sum(predicted)
    others = total - sum(confusion[chosen])
    wrong = predicted[chosen] - confusion[chosen][chosen]
    if not others or not wilson_interval(wrong, others).is_above(NEARLY_ALL):
        return None
    return Diagnosis(
        f"{predicted[chosen]:,} of {total:,} images are classified as {classes[chosen].name!r}, "
        f"{wrong:,} of the {others:,} images of other classes among them. {_compare_with_majority(classes)}",
        _why_useless(history),
        {"predicted": predicted[chosen], "images": total, "wrong": wrong, "of_other_classes": others},
    )


def _diagnose_chance(history: RunHistory) -> Diagnosis | None:
    last, classes = history.last, history.classes
    if last is None or not history.has_trained_enough or _diagnose_one_class(history) or not _are_guesses(classes):
        return None
    return Diagnosis(
        f"The model is no better than guessing. {_compare_with_majority(classes)}",
        _why_useless(history),
        {"top1": last.top1, "guess": _majority_share(classes), "images": last.images},
    )


def _are_guesses(classes: Sequence[ClassCount]) -> bool:
    """Return whether neither top-1 nor the mean per-class accuracy is above always predicting the largest class."""
    nonempty = [each for each in classes if each.images]
    if len(nonempty) < 2:
        return False
    total, chance = sum(each.images for each in nonempty), _majority_share(nonempty)
    # With too few images even a useful accuracy (twice chance, or halfway to 100 %) would not differ from chance.
    useful = min(2 * chance, (1 + chance) / 2)
    correct = sum(each.correct for each in nonempty)
    if not wilson_interval(round(useful * total), total).is_above(chance) or wilson_interval(correct, total).is_above(
        chance
    ):
        return False
    # With imbalanced classes, a model that recognizes rare classes may have a top-1 below the largest class's share.
    mean = math.fsum(each.accuracy for each in nonempty) / len(nonempty)
    # Agresti and Coull 1998, doi 10.2307/2685469: two successes and two failures more keep 0 of n from being certain.
    shares = [((each.correct + 2) / (each.images + 4), each.images + 4) for each in nonempty]
    error = math.sqrt(math.fsum(share * (1 - share) / images for share, images in shares)) / len(nonempty)
    return mean - NORMAL_QUANTILE * error <= 1 / len(nonempty)


def _majority_share(classes: Sequence[ClassCount]) -> float:
    return max(each.images for each in classes) / sum(each.images for each in classes)


def _compare_with_majority(classes: Sequence[ClassCount]) -> str:
    top1 = sum(each.correct for each in classes) / sum(each.images for each in classes)
    return (
        f"Top-1 is {accuracy(top1)}; naming the most frequent class always gives {accuracy(_majority_share(classes))}."
    )


def _why_useless(history: RunHistory) -> str:
    # Cross-entropy of a uniform prediction, in nats.
    chance = math.log(max(2, sum(each.images > 0 for each in history.classes)))
    if history.batch_norm is not None and _is_lagging(history.batch_norm):
        return "The weights are not lost: see batch norm lags."
    if not history.losses or not history.has_cross_entropy:
        return "Check the labels, data.mean and data.std, and lower optim.lr."
    end = _mean_before(history.losses, history.losses[-1][0])
    if end >= 0.95 * chance:
        return (
            f"Nothing was learned: the training loss is {end:.2f}, and guessing gives {chance:.2f}. Lower optim.lr, "
            "and check that the labels fit the images."
        )
    return (
        f"Training did learn (its loss is {end:.2f}, guessing gives {chance:.2f}), so evaluation sees something else: "
        "check that validation images and labels are of the same kind as those trained on, and batch norm's running "
        "statistics (paceline eval measures them)."
    )


def _diagnose_missed_classes(history: RunHistory, *, is_predicted: bool) -> Diagnosis | None:
    """Find the classes without one correct image, unless chance explains that at the accuracy over all classes."""
    nonempty = [(number, each) for number, each in enumerate(history.classes) if each.images]
    if not history.has_trained_enough or len(nonempty) < 3 or _is_useless(history):
        return None
    top1 = sum(each.correct for _, each in nonempty) / sum(each.images for _, each in nonempty)
    level = (1 - CONFIDENCE) / len(nonempty)  # Bonferroni correction for many classes
    has_matrix = len(history.confusion) == len(history.classes)
    missed = [
        each
        for number, each in nonempty
        if not each.correct
        and (1 - top1) ** each.images < level
        and is_predicted == (not has_matrix or any(row[number] for row in history.confusion))
    ]
    if not missed:
        return None
    what = "never right" if is_predicted else "never predicted, for any image"
    return Diagnosis(
        f"{_class_list(missed)} {what}. Top-1 of all is {accuracy(top1)}.",
        "Check their labels, and how many training images they have (paceline data inspect); "
        "train.class_weights=balanced or data.sampler=balanced makes rare classes count.",
        {"classes": len(missed), "of": len(nonempty)},
    )


def _class_list(classes: Sequence[ClassCount]) -> str:
    shown = [f"{each.name!r} ({count(each.images, 'image')})" for each in classes[:_MAX_NAMES]]
    more = f" and {len(classes) - _MAX_NAMES} more" if len(classes) > _MAX_NAMES else ""
    return f"{', '.join(shown)}{more} {'is' if len(classes) == 1 else 'are'}"


def _diagnose_batch_norm(history: RunHistory) -> Diagnosis | None:
    check = history.batch_norm
    if check is None or history.last is None or history.is_too_short or not _is_lagging(check):
        return None
    running, batch = check.running / check.images, check.batch / check.images
    return Diagnosis(
        f"On the same {count(check.images, 'training image')} top-1 is {accuracy(batch)} with batch norm's "
        f"statistics of those images, as in training, and {accuracy(running)} with its running statistics, as in "
        "evaluation. The running ones average over past steps, whose weights were others.",
        "The weights are sound. Evaluation recovers as the learning rate falls: train to the end of the "
        "schedule, let it end lower (schedule.final), or lower optim.lr (and optim.sgd_lr of muon). In a model of your "
        "own, check the momentum of its batch norms.",
        {"images": check.images, "running_top1": running, "batch_top1": batch},
    )


def _is_lagging(check: BatchNormCheck) -> bool:
    """Return whether accuracy is far better with batch statistics than with running statistics."""
    return _is_far_below(check.running, check.batch, check.images)


def _diagnose_drop(history: RunHistory) -> Diagnosis | None:
    last = history.last
    best_top1, step = _best_point(history)
    if last is None or history.is_too_short or best_top1 is None or step is None or step == last.step:
        return None
    if not _is_far_below(last.correct, round(best_top1 * last.images), last.images):
        return None
    if history.best_kept:
        kept, advice = " Its checkpoint was kept.", "Use it: add --checkpoint best to paceline eval, predict or export."
    elif history.best_kept is None:
        kept, advice = "", "See whether --checkpoint best has it."
    else:
        kept = " Its weights were not saved."
        advice = "Set checkpoint.keep_best=on, and checkpoint.every no longer than train.eval_every, and train again."
    if history.is_running:
        advice = f"The run has not ended: resume it, and look again. {advice}"
    return Diagnosis(
        f"Top-1 was {accuracy(best_top1)} after step {step:,} and is {accuracy(last.top1)} at the end.{kept}",
        advice,
        {"best_top1": best_top1, "best_step": step, "last_top1": last.top1, "last_step": last.step},
    )


def _best_point(history: RunHistory) -> tuple[float | None, int | None]:
    if history.best is not None:
        return history.best.top1, history.best_step
    if len(history.points) < 2:
        return None, None
    best = max(history.points, key=lambda each: each.top1)
    return best.top1, best.step


def _is_far_below(worse: int, better: int, images: int) -> bool:
    """Return whether one accuracy is far below another: disjoint intervals, and half as many errors again."""
    low, high = wilson_interval(worse, images), wilson_interval(better, images)
    if high.low is None or not low.is_below(high.low):
        return False
    # At a high learning rate accuracy usually varies by a point or two, which is significant but no problem.
    return 1 - low.value >= ERROR_GROWTH * (1 - high.value) or low.value <= SKILL_LEFT * high.value


@dataclass(frozen=True)
class _Rise:
    """A validation loss above its `lowest` point: risen within one evaluation interval (`is_sudden`), or steadily."""

    lowest: EvalPoint
    last: EvalPoint
    is_sudden: bool
    is_trend: bool


def _rise(points: Sequence[EvalPoint]) -> _Rise | None:
    finite = [each for each in points if math.isfinite(each.loss)]
    if len(finite) < 2:
        return None
    number = min(range(len(finite)), key=lambda each: finite[each].loss)
    lowest, last = finite[number], finite[-1]
    if last.loss < LOSS_RISE * lowest.loss or last is lowest:
        return None
    since = [each.loss for each in finite[number:]]
    steps = [later - earlier for earlier, later in itertools.pairwise(since)]
    is_trend = len(since) > MIN_RISING and _is_rising(since[1:])
    # A trend that rises by half of all within one of few intervals is still a trend where it never fell.
    is_sudden = max(steps) >= 0.5 * (last.loss - lowest.loss) and not (is_trend and min(steps) > 0)
    return _Rise(lowest, last, is_sudden, is_trend)


def _is_rising(values: Sequence[float]) -> bool:
    """Return whether values rise, by the test of Mann 1945 (doi 10.2307/1907187), one-sided at 5 %."""
    thinned = values[:: max(1, len(values) // _MAX_TREND)]
    num = len(thinned)
    if num < MIN_RISING:
        return False
    pairs = itertools.combinations(thinned, 2)
    score = sum((later > earlier) - (later < earlier) for earlier, later in pairs)
    std = math.sqrt(num * (num - 1) * (2 * num + 5) / 18)
    return (score - 1) / std > 1.645  # 1: continuity correction; 1.645: 95 % quantile of the normal distribution


def _training_loss_change(losses: Sequence[tuple[int, float]], first: int, last: int) -> tuple[float, float] | None:
    """Return the training loss at steps `first` and `last`, each a mean of up to five records; None if unknown."""
    if not any(first < step <= last for step, _ in losses) or not any(step <= first for step, _ in losses):
        return None
    return _mean_before(losses, first), _mean_before([each for each in losses if each[0] > first], last)


def _mean_before(losses: Sequence[tuple[int, float]], step: int) -> float:
    recent = [loss for at, loss in losses if at <= step][-5:]
    return math.fsum(recent) / len(recent)


def _diagnose_collapse(history: RunHistory) -> Diagnosis | None:
    rise, training = _rise_while_training_loss_fell(history)
    is_lost = _diagnose_drop(history) is not None or _is_useless(history)
    if history.last is None or rise is None or training is None or not rise.is_sudden or not is_lost:
        return None
    train_top1 = history.last.train_top1
    on_training = (
        "" if train_top1 is None else f" On training images, evaluated alike, top-1 is {accuracy(train_top1)}."
    )
    cause = " Batch norm's running statistics are not the cause." if history.batch_norm is not None else ""
    advice = "Check the data of validation, and lower optim.lr."
    if history.batch_norm is None:
        advice = "Run paceline eval, which measures whether batch norm's running statistics lag behind the weights."
    return Diagnosis(
        f"{_both_losses(rise, training)}{on_training} Most of the rise came within one evaluation interval: "
        f"that is no overfitting, which comes slowly.{cause}",
        advice,
        _loss_numbers(rise, training),
    )


def _diagnose_overfitting(history: RunHistory) -> Diagnosis | None:
    rise, training = _rise_while_training_loss_fell(history)
    if history.last is None or rise is None or training is None or not rise.is_trend:
        return None
    if history.last.epoch <= 1 or _diagnose_collapse(history):  # in the first epoch every image is new
        return None
    is_accuracy_lost = _diagnose_drop(history) is not None
    ending = "" if is_accuracy_lost else " Top-1 has not suffered: the model is too confident where it is wrong."
    return Diagnosis(
        f"{_both_losses(rise, training)}{ending}",
        "Train for fewer epochs, or regularize: data.augment, optim.weight_decay, train.label_smoothing.",
        _loss_numbers(rise, training),
        "warning" if is_accuracy_lost else "note",
    )


def _rise_while_training_loss_fell(history: RunHistory) -> tuple[_Rise | None, tuple[float, float] | None]:
    """Return a rise of the validation loss that lagging batch norm does not explain, and the training loss."""
    rise = _rise(history.points)
    if rise is None or history.is_too_short or _diagnose_batch_norm(history):
        return None, None
    training = _training_loss_change(history.losses, rise.lowest.step, rise.last.step)
    return (rise, training) if training is not None and training[1] < training[0] else (None, None)


def _both_losses(rise: _Rise, training: tuple[float, float]) -> str:
    lowest, last = rise.lowest, rise.last
    return (
        f"Validation loss rose from {lowest.loss:.3g} after step {lowest.step:,} to {last.loss:.3g} after step "
        f"{last.step:,}, while training loss fell from {training[0]:.3g} to {training[1]:.3g}."
    )


def _loss_numbers(rise: _Rise, training: tuple[float, float]) -> dict[str, float]:
    return {
        "lowest_loss": rise.lowest.loss,
        "lowest_step": rise.lowest.step,
        "last_loss": rise.last.loss,
        "train_loss_before": training[0],
        "train_loss_after": training[1],
    }


def _diagnose_averages(history: RunHistory, *, is_raw_worse: bool) -> Diagnosis | None:
    """Find whether one of raw and averaged weights is far worse; an unfinished run may still change that."""
    last = history.last
    if last is None or last.ema_top1 is None or not history.has_trained_enough or history.is_running:
        return None
    raw, averaged = round(last.raw_top1 * last.images), round(last.ema_top1 * last.images)
    worse, better = (raw, averaged) if is_raw_worse else (averaged, raw)
    # Averaging is expected to reduce errors by a third, so only a large gap is a finding.
    if not _is_far_below(worse, better, last.images) or (is_raw_worse and raw > SKILL_LEFT * averaged):
        return None
    what = "The averaged ones are those that predict, export and compare use."
    advice = "The average reaches further back than the run has learned: lower train.ema.decay, or train longer."
    if is_raw_worse:
        what = "The last steps still move the raw weights far."
        advice = "Nothing is lost, as the averaged weights are used. Let the learning rate end lower "
        advice += "(schedule.final), or lower optim.lr."
    both = f"Top-1 of the averaged weights is {accuracy(last.ema_top1)}, of the raw ones {accuracy(last.raw_top1)}."
    numbers = {"top1": last.raw_top1, "averaged_top1": last.ema_top1, "images": last.images}
    return Diagnosis(f"{both} {what}", advice, numbers)


def _diagnose_skipped_steps(history: RunHistory) -> Diagnosis | None:
    # Loss scaling skips a step whenever the scale is too large.
    usual = FEW_SKIPS + history.steps / SCALE_INTERVAL if history.scales_loss else 0
    if history.skipped <= usual or not history.steps:
        return None
    share = history.skipped / history.steps
    return Diagnosis(
        f"{count(history.skipped, 'step')} of {history.steps:,} ({100 * share:.2g} %) moved nothing: the loss "
        "or gradient was NaN or infinite.",
        "Lower optim.lr, set train.clip_norm, or look for broken images (paceline data verify).",
        {"skipped": history.skipped, "steps": history.steps},
        "warning" if share >= 0.01 else "note",
    )


def _parse_share(value: object) -> float:
    share = float(value)  # type: ignore[arg-type]
    if not 0 <= share <= 1:
        raise ValueError(f"{share} is no share")
    return share


RULES: Final[tuple[tuple[str, Severity, Callable[[RunHistory], Diagnosis | None]], ...]] = (
    ("one_class_predicted", "error", _diagnose_one_class),
    ("at_chance", "error", _diagnose_chance),
    ("classes_never_predicted", "warning", partial(_diagnose_missed_classes, is_predicted=False)),
    ("classes_never_right", "warning", partial(_diagnose_missed_classes, is_predicted=True)),
    ("batch_norm_lags", "warning", _diagnose_batch_norm),
    ("validation_collapsed", "warning", _diagnose_collapse),
    ("overfitting", "note", _diagnose_overfitting),
    ("best_above_last", "warning", _diagnose_drop),
    ("averaged_below_raw", "warning", partial(_diagnose_averages, is_raw_worse=False)),
    ("raw_below_averaged", "note", partial(_diagnose_averages, is_raw_worse=True)),
    ("steps_skipped", "note", _diagnose_skipped_steps),
)
"""Name, severity and test of every finding."""
