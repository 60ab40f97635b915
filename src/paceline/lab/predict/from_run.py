"""From a step of a run to steps on ranks that were not run: what is computed, sent and waited for. Pure, torch-free.

    step(N) = busy + exposed(N) + late + sigma e(N) + left
    T(N) = images / (N b) step(N) + F

`busy` is what a rank does by itself. `exposed` is what of sending its buckets over a network does not hide behind
backward (`simulate`), `late` what a slow rank costs, sigma e(N) what the latest of N scattering ranks does
(`step.expected_lateness`), and `left` what a measured step has beside all that: it is charged to each step of more than
one rank, as it is to the ranks that were measured. Where a run of one rank is known too, what sending takes from
computing is the difference, which grows as the bytes do that a rank sends.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from paceline.core.errors import RecipeError
from paceline.core.experiments.prediction import MeasuredPoint, Predicted, PredictionResult
from paceline.core.units import share
from paceline.lab.predict.asked import Asked
from paceline.lab.predict.collectives import all_reduce_s
from paceline.lab.predict.networks import Network
from paceline.lab.predict.simulate import exposed_s
from paceline.lab.predict.step import Step, expected_lateness

FORM: Final = "images / (N b) x (busy + exposed(N) + late + sigma e(N) + left) + F"
COMPUTE: Final = "compute"
DATA: Final = "data"
COMMUNICATION: Final = "communication"
STRAGGLERS: Final = "stragglers"
LEFT: Final = "overhead"
FIXED: Final = "start_up"
_HOUR_S: Final = 3600.0
_FORM_DOUBT: Final = 0.05
"""How far off this form is 4 to 8 times beyond what was measured (docs/explanation/prediction.md)."""
_FIXED_DOUBT: Final = 0.5


@dataclass(frozen=True)
class Model:
    """A step that was measured, and what is left of it that this model does not explain.

    `contention_s` is what sending as many bytes as two ranks do takes from computing, 0 where that is not known apart.
    """

    step: Step
    network: Network
    busy_s: float
    contention_s: float
    left_s: float

    @property
    def data_s(self) -> float:
        """What of `busy_s` is waiting for data, of which a run alone may have had less."""
        return min(self.step.data_s, self.busy_s)

    def fitted_s(self) -> float:
        """Return what the model says of the step that was measured."""
        step = self.step
        as_measured = Asked((step.ranks,), math.ceil(step.ranks / step.nodes), step.rank_batch, step.images)
        return math.fsum(self.parts(step.ranks, as_measured).values())

    def parts(self, ranks: int, asked: Asked, network: Network | None = None, sigmas: float = 1.0) -> dict[str, float]:
        """Return the seconds of a step on `ranks` ranks, by what they are spent on."""
        if ranks == 1:
            return self._alone(asked)
        step, network = self.step, network or self.network
        larger = asked.rank_batch / step.rank_batch
        # What a network within nodes explains too much tells nothing of one between them, nor the other way round.
        is_same_level = (_nodes(ranks, asked) > 1) == (step.nodes > 1)
        left_s = self.left_s if is_same_level else max(0.0, self.left_s)
        buckets = [replace(bucket, ready_s=bucket.ready_s * larger) for bucket in step.buckets]
        sent_s = exposed_s(buckets, lambda size: all_reduce_s(size, ranks, asked.ranks_per_node, network))
        waits_s = step.late_s * larger + step.sigma_s * larger * expected_lateness(ranks) * sigmas
        return {
            **self._alone(asked),
            COMPUTE: (self.busy_s - self.data_s) * larger + self.contention_s * _sent(ranks),
            COMMUNICATION: sent_s,
            STRAGGLERS: waits_s,
            LEFT: max(left_s, -sent_s - waits_s),
        }

    def _alone(self, asked: Asked) -> dict[str, float]:
        larger = asked.rank_batch / self.step.rank_batch
        return {COMPUTE: (self.busy_s - self.data_s) * larger, DATA: self.data_s * larger}


def build_model(step: Step, network: Network, alone: Step | None = None) -> Model:
    """Return the model of a measured step; `alone` is a run of one rank, of the same recipe and rank batch.

    Raise `RecipeError` where that is another, and for a step of which nobody knows what it sends.
    """
    if not step.buckets:
        fix = "run `paceline profile` on it, or train with measure.communication=on on two ranks"
        raise RecipeError(f"{step.source}: says nothing of its gradients, not even how many bytes they are ({fix})")
    if alone is not None and (alone.ranks, alone.rank_batch) != (1, step.rank_batch):
        found = f"{alone.ranks} ranks of {alone.rank_batch} images"
        raise RecipeError(f"{alone.source}: has {found} (name a run of one rank of {step.rank_batch})")
    if step.ranks == 1:
        return Model(step, network, step.busy_s, 0.0, 0.0)
    busy_s = step.busy_s if alone is None else min(alone.busy_s, step.busy_s)
    contention_s = (step.busy_s - busy_s) / _sent(step.ranks)
    bare = Model(step, network, busy_s, contention_s, 0.0)
    return replace(bare, left_s=step.step_s - bare.fitted_s())


def predict(model: Model, asked: Asked) -> PredictionResult:
    """Return the prediction for all ranks that are asked for, with what it rests on.

    Raise `RecipeError` for ranks of several nodes where nobody knows what is between them.
    """
    step = model.step
    beyond = [ranks for ranks in asked.at if _nodes(ranks, asked) > 1]
    if beyond and not model.network.spans_nodes:
        fix = f"add what is between, such as {model.network.name}+ndr, or set --ranks-per-node"
        raise RecipeError(
            f"--network: {model.network.name} is within a node, and {beyond[0]} ranks are on more ({fix})"
        )
    point = MeasuredPoint(
        ranks=step.ranks,
        nodes=step.nodes,
        rank_batch=step.rank_batch,
        images=step.ranks * step.rank_batch,
        time_s=step.step_s,
        fitted_s=model.fitted_s(),
    )
    terms = {
        "busy_s": model.busy_s,
        "contention_s": model.contention_s,
        "late_s": step.late_s,
        "sigma_s": step.sigma_s,
        "left_s": model.left_s,
        "fixed_s": step.fixed_s,
    }
    return PredictionResult(
        basis="run",
        source=step.source,
        form=FORM,
        terms=terms,
        points=(point,),
        predictions=tuple(_predicted(model, asked, ranks) for ranks in asked.at),
        network=str(model.network),
        notes=tuple(_notes(model, asked)),
    )


def _predicted(model: Model, asked: Asked, ranks: int) -> Predicted:
    parts = model.parts(ranks, asked)
    step_s = math.fsum(parts.values())
    num_steps = asked.images / (ranks * asked.rank_batch)
    time_s = num_steps * step_s + model.step.fixed_s
    below, above = _doubt(model, asked, ranks, num_steps)
    alone_s = asked.images / asked.rank_batch * math.fsum(model.parts(1, asked).values())
    gpu_hours = ranks * time_s / _HOUR_S
    of_run = {name: num_steps * each_s for name, each_s in parts.items()} | {FIXED: model.step.fixed_s}
    return Predicted(
        ranks=ranks,
        nodes=_nodes(ranks, asked),
        rank_batch=asked.rank_batch,
        images=asked.images,
        time_s=time_s,
        low_s=max(time_s - below, 0.0),
        high_s=time_s + above,
        step_s=step_s,
        images_per_s=ranks * asked.rank_batch / step_s,
        efficiency=(alone_s + model.step.fixed_s) / (ranks * time_s),
        speedup=(alone_s + model.step.fixed_s) / time_s,
        gpu_hours=gpu_hours,
        cost=None if asked.price is None else gpu_hours * asked.price,
        parts=of_run,
        dominates=max((name for name in of_run if name != COMPUTE), key=lambda name: of_run[name]),
    )


def _doubt(model: Model, asked: Asked, ranks: int, num_steps: float) -> tuple[float, float]:
    """Return how many seconds less, and more, a run may take: doubts that have nothing to do with one another, squared.

    Those are the step as it was measured, the bandwidth of the network, how ranks scatter (none, or twice as much),
    the fixed cost, and the form itself, which is the less to be trusted the further it goes.
    """
    step = model.step
    larger = asked.rank_batch / step.rank_batch

    def run_s(network: Network, sigmas: float = 1.0) -> float:
        return num_steps * math.fsum(model.parts(ranks, asked, network, sigmas).values())

    at_s = run_s(model.network)
    further = max(0.0, math.log(ranks / step.ranks) / math.log(8)) if ranks > step.ranks else 0.0
    either = (_FIXED_DOUBT * step.fixed_s, _FORM_DOUBT * further * at_s)
    low, high = model.network.with_bandwidth("low"), model.network.with_bandwidth("high")
    below = (num_steps * larger * (step.step_s - step.low_s), at_s - run_s(high), at_s - run_s(model.network, 0.0))
    above = (num_steps * larger * (step.high_s - step.step_s), run_s(low) - at_s, run_s(model.network, 2.0) - at_s)
    return math.hypot(*either, *below), math.hypot(*either, *above)


def _notes(model: Model, asked: Asked) -> Iterator[str]:
    step = model.step
    yield from step.notes
    if asked.rank_batch != step.rank_batch:
        yield (
            f"rank batch: {asked.rank_batch} was not measured, {step.rank_batch} was; a step is taken to grow with it, "
            "what it takes whatever the batch included"
        )
    on_node = math.ceil(step.ranks / step.nodes)
    if on_node != asked.ranks_per_node and max(asked.at) > on_node:
        yield (
            f"data: measured with {on_node} on a node, where {asked.ranks_per_node} are to share its cores, disk and "
            "memory, which this does not know of (profile on a full node)"
        )
    if step.data_s > _FORM_DOUBT * step.step_s:
        yield f"data: {share(step.data_s / step.step_s)} of the measured step waits for data, and so is predicted to"
    if abs(model.left_s) > _FORM_DOUBT * step.step_s:
        yield f"overhead: {share(model.left_s / step.step_s)} of the measured step is not explained by this network"


def _sent(ranks: int) -> float:
    """Return how many times the gradients a rank sends in a ring: 2 (N - 1) / N."""
    return 2 * (ranks - 1) / ranks


def _nodes(ranks: int, asked: Asked) -> int:
    return math.ceil(ranks / asked.ranks_per_node)
