"""What a step of a run is made of, read from its run directory: the ground that a prediction stands on. Torch-free."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any, Final

from paceline.core.errors import PacelineError, RecipeError
from paceline.core.results import CommunicationResult, RunResult
from paceline.core.rundir import RunDir
from paceline.core.stages import EXPOSED
from paceline.lab.predict.simulate import Bucket, assumed, of_results

_DATA: Final = "data_wait"
_GRADIENT_BYTES: Final = 4
_WINDOW_STEPS: Final = 10
_TENTHS: Final = NormalDist().inv_cdf(0.9) - NormalDist().inv_cdf(0.1)
_LOCAL: Final = ("single", "local")


@dataclass(frozen=True)
class Step:
    """A step of a run on `ranks` ranks of `nodes` nodes, in seconds; means over its ranks and counted steps.

    `step_s` is all of it, and lies between `low_s` and `high_s`; `data_s` is waiting for data, `exposed_s` for other
    ranks and the wire. `late_s` of that is for a rank that is late again and again, `jitter_s` for now one and now
    another; `sigma_s` is how much a rank's own steps scatter. `fixed_s` is what a run takes beside its steps.
    `buckets` are none where the run does not tell of its gradients. `notes` say what was not measured.
    """

    source: str
    ranks: int
    nodes: int
    rank_batch: int
    images: int
    step_s: float
    low_s: float
    high_s: float
    data_s: float
    exposed_s: float
    late_s: float
    jitter_s: float
    sigma_s: float
    fixed_s: float
    buckets: tuple[Bucket, ...]
    notes: tuple[str, ...] = ()

    @property
    def busy_s(self) -> float:
        """What a rank works in a step, and waits for data: all but waiting for others."""
        return self.step_s - self.exposed_s

    def with_fixed(self, fixed_s: float) -> "Step":
        """Return the step of a run that takes `fixed_s` beside its steps, as an empty run was measured to."""
        return replace(self, fixed_s=fixed_s)

    @property
    def gradient_bytes(self) -> int:
        """What is averaged in a step."""
        return sum(bucket.num_bytes for bucket in self.buckets)


def read_step(path: Path, *, ranks_per_node: int) -> Step:
    """Return what a step of the run in a folder is made of. Raise `PacelineError` where the folder does not tell.

    `ranks_per_node` is of a run that was started over several nodes, whose folder does not say how many they were.
    """
    rundir = RunDir(path)
    result, plan, profile = rundir.read_result(), _json(path / "plan.json"), _json(rundir.profile)
    if result.throughput.images_per_s <= 0:
        raise RecipeError(f"{path}: no step was counted after the warm-up (profile it with more --steps)")
    step_s = plan["batch_size"] / result.throughput.images_per_s
    low_s, high_s = (plan["batch_size"] / rate if rate > 0 else step_s for rate in reversed(result.throughput.spread))
    waits = _waits(result)
    sigma_s, why = _sigma(result, waits.jitter_s, high_s - low_s)
    communication = profile.get("communication") or {}
    found = CommunicationResult.model_validate(communication) if communication else result.communication
    backward_s = _a_step(result, "backward")
    buckets, told = _buckets(found, profile.get("cost") or {}, backward_s)
    return Step(
        source=str(path),
        ranks=result.world_size,
        nodes=_nodes(result, ranks_per_node),
        rank_batch=plan["rank_batch"],
        images=plan["train_images"],
        step_s=step_s,
        low_s=min(low_s, step_s),
        high_s=max(high_s, step_s),
        data_s=_a_step(result, _DATA),
        exposed_s=waits.exposed_s,
        late_s=waits.late_s,
        jitter_s=waits.jitter_s,
        sigma_s=sigma_s,
        fixed_s=_fixed(result),
        buckets=buckets,
        notes=(*why, *told),
    )


def expected_lateness(ranks: int) -> float:
    """Return how much later than the mean the latest of `ranks` Gaussians is, in standard deviations.

    Blom 1958 (Statistical Estimates and Transformed Beta-Variables): the quantile of (N - 3/8) / (N + 1/4), within
    5 % of the truth at N = 2 and 1 % from 10 on. It comes near sqrt(2 ln N) from below.
    """
    return NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))


@dataclass(frozen=True)
class _Waits:
    exposed_s: float
    late_s: float
    jitter_s: float


def _waits(result: RunResult) -> _Waits:
    """Return what ranks wait in a step, in the mean over them, and what of it is for the latest of them.

    The clock's `lost_s` is how much later the latest is than the mean of the others, which is W / (W - 1) times how
    much later it is than the mean of all.
    """
    ranks = result.ranks
    if not ranks:
        return _Waits(_a_step(result, EXPOSED), 0.0, 0.0)
    exposed_s = math.fsum(rank.stages.get(EXPOSED, 0.0) for rank in ranks) / len(ranks)
    if result.straggler is None:
        return _Waits(exposed_s, 0.0, 0.0)
    of_mean = (len(ranks) - 1) / len(ranks)
    lost_s, late_s = result.straggler.lost_s * of_mean, max(0.0, result.straggler.late_s) * of_mean
    return _Waits(exposed_s, late_s, max(0.0, lost_s - late_s))


def _sigma(result: RunResult, jitter_s: float, span_s: float) -> tuple[float, Sequence[str]]:
    """Return how much a rank's steps scatter: from how late the latest is, or where there is one rank, from windows.

    Windows of ten steps scatter less than steps, by sqrt(10) where those are independent.
    """
    if result.straggler is not None:
        return jitter_s / expected_lateness(result.world_size), ()
    if result.throughput.n < 2:
        return 0.0, ("stragglers: nothing is known of how steps scatter (profile with more --steps)",)
    told = "stragglers: guessed from how one rank's steps scatter (profile on two ranks or more to measure them)"
    return span_s / _TENTHS * math.sqrt(_WINDOW_STEPS), (told,)


def _buckets(
    found: CommunicationResult | None, cost: dict[str, Any], backward_s: float
) -> tuple[tuple[Bucket, ...], Sequence[str]]:
    if found is not None and found.buckets:
        return of_results(found.buckets), ()
    num_bytes = _GRADIENT_BYTES * int(cost.get("parameters", 0))
    if not num_bytes:
        return (), ()
    told = "buckets: assumed as torch makes them, ready evenly in backward (profile on two ranks to measure them)"
    return assumed(num_bytes, backward_s), (told,)


def _a_step(result: RunResult, stage: str) -> float:
    """Return the seconds of a stage in a step, in the mean over ranks."""
    if result.ranks:
        return math.fsum(rank.stages.get(stage, 0.0) for rank in result.ranks) / len(result.ranks)
    steps = result.account.counted_steps if result.account else 0
    return result.stages[stage].device_s / steps if steps and stage in result.stages else 0.0


def _fixed(result: RunResult) -> float:
    """Return the seconds before the first step and after the last, which an empty run would take as well."""
    return result.time.startup_s + (result.account.finish_s if result.account else 0.0)


def _nodes(result: RunResult, ranks_per_node: int) -> int:
    is_here = result.provenance.get("launcher", "local") in _LOCAL
    return 1 if is_here else math.ceil(result.world_size / ranks_per_node)


def _json(path: Path) -> dict[str, Any]:
    """Return what a JSON file holds, nothing where there is none. Raise `PacelineError` where it cannot be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise PacelineError(f"{path}: cannot be read: {error} (run it again)") from None
    return found if isinstance(found, dict) else {}
