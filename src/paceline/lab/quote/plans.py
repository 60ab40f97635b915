"""Turn quotes into plans of whole runs: data path, evaluation, checkpoints, failures and money.

A quote has the speed of training steps alone. The time of an evaluated image is a third of a trained one's, and a
checkpoint stops training while it is copied or written. Failures are those of `core.goodput.efficiency`. What is
added has no error of its own: the interval of a plan is that of the speed of its steps.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from paceline.core.goodput import efficiency
from paceline.core.quote_result import Pricing, QuotedPlan, Verdict
from paceline.core.statistics import Interval
from paceline.lab.quote.quote import Quote
from paceline.measure.time_estimate import CHECKPOINT_BYTES_PER_S, FORWARD_SHARE, PlannedWork
from paceline.recipe.plan import Plan
from paceline.recipe.schema import Recipe

RESTART_S: Final = 600.0
"""Seconds from a failure to the next step, for a new node and the start-up of the run: an assumption."""
COPY_BYTES_PER_S: Final = 5e9
"""Speed at which a checkpoint is copied to host memory: an assumption."""
_LEAST_USEFUL: Final = 0.01
"""Share of useful time below which a plan counts as one that never ends: the formula of failures returns years."""


@dataclass(frozen=True)
class Saving:
    """A checkpoint: its bytes, the seconds that training stops for it, and those until it is on disk."""

    num_bytes: float
    stall_s: float
    write_s: float


@dataclass(frozen=True)
class Conditions:
    """What a plan meets beside its GPUs.

    `ranks_per_node` GPUs are on a node. `loader_rate` is what the data path of a node gives in images/s, `mtbf_s` the
    mean seconds between failures of a node, and `restart_s` those from a failure to the next step. The run ends after
    `max_hours`, by `train.max_time`.
    """

    ranks_per_node: int
    loader_rate: float = math.inf
    mtbf_s: float = math.inf
    restart_s: float = RESTART_S
    max_hours: float = math.inf


@dataclass(frozen=True)
class Offer:
    """A price per GPU and hour, and on spot the mean seconds until a node is taken away."""

    pricing: Pricing = ""
    per_gpu_hour: float | None = None
    mtbf_s: float = math.inf


def plan_saving(recipe: Recipe, memory_parts: Mapping[str, int]) -> Saving:
    """Return what a checkpoint costs, by assumed speeds and the `parts` of `StepMemory`.

    It holds the weights, the state of the optimizer, and with `train.ema` an average of the weights.
    """
    if recipe.checkpoint.every == "off":
        return Saving(0.0, 0.0, 0.0)
    copies = 1 if recipe.train.ema == "off" else 2  # schedule_free has its average in the optimizer's state
    num_bytes = float(copies * memory_parts["weights"] + memory_parts.get("optimizer", 0))
    write_s = num_bytes / CHECKPOINT_BYTES_PER_S
    stall_s = num_bytes / COPY_BYTES_PER_S if recipe.checkpoint.background == "on" else write_s
    return Saving(num_bytes, stall_s, write_s)


def build_plan(
    quote: Quote, device: str, plan: Plan, work: PlannedWork, saving: Saving, conditions: Conditions, offer: Offer
) -> QuotedPlan:
    """Return the plan of a whole run on `device`, whose steps are those of `quote`."""
    nodes = -(-plan.world_size // conditions.ranks_per_node)
    most = conditions.loader_rate * nodes
    failures_per_s = nodes / conditions.mtbf_s + nodes / offer.mtbf_s  # nodes fail independently of each other
    mtbf_s = 1 / failures_per_s if failures_per_s else math.inf
    speed = quote.images_per_s
    low = speed.value if speed.low is None else speed.low
    high = speed.value if speed.high is None else speed.high
    rates = (speed.value, low, high)
    each = [_plan_parts(rate, most, plan, work, saving, mtbf_s, conditions.restart_s) for rate in rates]
    is_cut_short = conditions.max_hours < math.fsum(each[0].values()) < math.inf
    each = [_cut_short(parts, conditions.max_hours) for parts in each]
    hours, longest, shortest = (math.fsum(parts.values()) for parts in each)
    # Small images of progressive resizing take less time.
    fastest = (plan.image_size / min(size for _, size in plan.train_sizes)) ** 2
    needed = speed.value * fastest / nodes
    time = Interval(value=hours, low=shortest, high=longest)
    return QuotedPlan(
        gpu=quote.gpu,
        device=device,
        ranks=plan.world_size,
        nodes=nodes,
        pricing=offer.pricing,
        rank_batch=plan.rank_batch,
        image_size=plan.image_size,
        total_steps=plan.total_steps,
        images_per_s=Interval(value=min(speed.value, most), low=min(low, most), high=min(high, most)),
        hours=time,
        parts=each[0],
        is_cut_short=is_cut_short,
        data_images_per_s=needed,
        waits_for_data=needed > conditions.loader_rate,
        memory_bytes=quote.memory_bytes,
        fits=quote.fits,
        largest_micro_batch=quote.largest_micro_batch,
        cost=None if offer.per_gpu_hour is None else _scale(time, plan.world_size * offer.per_gpu_hour),
    )


def _plan_parts(
    rate: float, most: float, plan: Plan, work: PlannedWork, saving: Saving, mtbf_s: float, restart_s: float
) -> dict[str, float]:
    """Return the hours of each part at `rate` images/s of the GPUs, of which the data path gives `most`."""
    steps_s = math.fsum(
        number * plan.batch_size / min(rate * (plan.image_size / phase.size) ** 2, most)
        for phase, number in work.steps_by_phase(0).items()
    )
    eval_rate = min(rate / FORWARD_SHARE * (plan.image_size / plan.eval_image_size) ** 2, most)
    eval_s = (work.evaluations() * work.eval_images + len(work.weigh_after) * work.weigh_images) / eval_rate
    train_s = steps_s + eval_s
    between_s = _seconds_between_saves(plan, train_s)
    saving_s = train_s / between_s * saving.stall_s
    failures_s = 0.0
    if math.isfinite(mtbf_s):
        useful = efficiency(between_s, saving.stall_s, restart_s, mtbf_s, write_s=saving.write_s)
        failures_s = max(0.0, train_s / useful - train_s - saving_s) if useful >= _LEAST_USEFUL else math.inf
    parts = {"steps": steps_s, "evaluation": eval_s, "checkpoints": saving_s, "failures": failures_s}
    return {name: each_s / 3600 for name, each_s in parts.items()}


def _seconds_between_saves(plan: Plan, train_s: float) -> float:
    """Return the seconds of work that a failure can lose; the whole run without checkpoints."""
    if plan.checkpoint_every_s:
        return min(plan.checkpoint_every_s, train_s)
    return min(1.0, (plan.checkpoint_every or plan.total_steps) / plan.total_steps) * train_s


def _cut_short(parts: dict[str, float], max_hours: float) -> dict[str, float]:
    """Return the parts of a run that `train.max_time` ends; one that never ends stays so, as it makes no progress."""
    hours = math.fsum(parts.values())
    if not max_hours < hours < math.inf:
        return parts
    return {name: each * max_hours / hours for name, each in parts.items()}


def _scale(interval: Interval, factor: float) -> Interval:
    assert interval.low is not None and interval.high is not None
    value, low, high = (each * factor if factor else 0.0 for each in (interval.value, interval.low, interval.high))
    return Interval(value=value, low=low, high=high)


def with_verdicts(plan: QuotedPlan, by_hours: float | None, budget: float | None) -> QuotedPlan:
    """Return `plan` with whether it ends within `by_hours` and costs at most `budget`, by its intervals."""
    return plan.model_copy(
        update={
            "ends_in_time": _check_limit(plan.hours, by_hours),
            "is_within_budget": _check_limit(plan.cost, budget),
        }
    )


def _check_limit(interval: Interval | None, limit: float | None) -> Verdict:
    if limit is None or interval is None or interval.low is None or interval.high is None:
        return ""
    if interval.high <= limit:
        return "yes"
    if interval.low > limit:
        return "no"
    return "likely" if interval.value <= limit else "unlikely"
