"""Build a profile from a base run and its probes: throughput, ceilings, efficiency, and `profile.json`."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch

from paceline.core.json_file import read_json
from paceline.core.results import CPU_STARVED, CommunicationResult, RunResult, starved_note, throughput_spread
from paceline.core.run_dir import RunDir
from paceline.lab.probes import BASE, BUCKETS, TRACE, SkippedProbe
from paceline.lab.repeat import collect_runs
from paceline.lab.trial import Trial, TrialOutcome, format_patch
from paceline.measure.bottleneck import Ceilings
from paceline.measure.chrome_trace import trace_totals
from paceline.measure.profiler import PROFILER_WARMUP_STEPS
from paceline.measure.roofline import Peak, measure_peak, peak_of, roofline
from paceline.models.build import build_model
from paceline.models.flops import ModelCost, count_cost
from paceline.recipe.schema import Recipe
from paceline.recipe.schema.model import Model
from paceline.recipe.schema.train import Parallel
from paceline.training.measurements import trace_file_name

_BUCKET_FIELDS = ("bytes", "wire_s", "overlap", "buckets")
SCHEMA_VERSION: Final = 1
_INSTRUMENTED_RUNS: Final = (TRACE, BUCKETS)
"""Instrumented runs, which are slower and are not probes."""
Spread = tuple[float, float]


def merge_bucket_timings(base: RunResult, instrumented: RunResult | None) -> CommunicationResult | None:
    """Return the communication of `base` with the bucket timings of the instrumented run; None without
    communication.
    """
    timed = instrumented.communication if instrumented else None
    if base.communication is None or timed is None or timed.wire_s is None:
        return base.communication
    # Take the overlap from the instrumented run, too: a ratio must be of a single run.
    return base.communication.model_copy(update={name: getattr(timed, name) for name in _BUCKET_FIELDS})


def compute_trace_share(trace: Path, traced: RunResult, warmup_steps: int, length: int) -> float | None:
    """Return the seconds of all stages in rank 0's trace over those of its clock; 1 if they agree.

    None without a trace, or if the traced steps are not those that the clock measured.
    """
    counted = traced.account.counted_steps if traced.account else 0
    if length < counted or warmup_steps < PROFILER_WARMUP_STEPS or not trace.is_file():
        return None
    clock_s = sum(stage.host_s for stage in traced.stages.values())
    totals_s = trace_totals(trace)
    return sum(totals_s.get(name, 0.0) for name in traced.stages) / clock_s if clock_s > 0 else None


def compute_efficiency(recipe: Recipe, rundir: RunDir, result: RunResult, images_per_s: float) -> dict[str, Any]:
    """Return cost per image and efficiency as numbers by name.

    `images_per_s` is over all devices; FLOP/s and shares are per device, and None if the peak is unknown. Raise any
    exception of a model that cannot be counted.
    """
    cost = _count_model_cost(recipe.model, rundir)
    devices = count_devices(recipe.parallel, result)
    device_images_per_s = images_per_s / devices  # a peak is of one device
    values: dict[str, Any] = {
        "parameters": cost.params,
        "flops_per_image": cost.training_flops,
        "achieved_flops_per_s": cost.training_flops * device_images_per_s,
        "peak_flops_per_s": None,
        "peak_source": "",
        "mfu": None,
        "roofline_images_per_s": None,
        "roofline_share": None,
    }
    peak = _find_peak(recipe.train.precision, result.provenance)
    if peak is None:
        return values
    line = roofline(cost.training, device_images_per_s, peak)
    return values | {
        "peak_flops_per_s": peak.flops_per_s,
        "peak_source": f"{peak.device}, {peak.precision}: {peak.source}",
        "mfu": line.mfu,
        "roofline_images_per_s": line.bound_images_per_s * devices,
        "roofline_share": line.share,
    }


def count_devices(section: Parallel, result: RunResult) -> int:
    """Return the number of devices of a run: one per rank, or all visible GPUs for `dataparallel`."""
    if section.strategy == "dataparallel":
        return max(1, len(result.provenance.get("cuda_devices", ())))
    return result.world_size


def _count_model_cost(section: Model, rundir: RunDir) -> ModelCost:
    plan = read_json(rundir.path / "plan.json")
    sizes = {name: plan[name] for name in ("num_classes", "channels", "image_size")}
    model = build_model(section, **sizes)
    return count_cost(model, plan["channels"], plan["image_size"], plan["image_size"])


def _find_peak(precision: str, provenance: dict[str, Any]) -> Peak | None:
    if provenance["device"] != "cpu":
        return peak_of(provenance["cuda_devices"][0], precision)
    # A CPU has no table: measure it now, with as many threads as the rank had.
    before = torch.get_num_threads()
    torch.set_num_threads(provenance["threads"])
    try:
        return measure_peak(precision)
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class ThroughputSummary:
    """Median images/s of `n` runs over all ranks, and in `spread` the lowest and highest.

    The spread of a single run is the 10th and 90th percentile of its windows (`ThroughputResult`).
    """

    images_per_s: float
    spread: Spread
    n: int

    @classmethod
    def from_results(cls, results: Sequence[RunResult]) -> "ThroughputSummary":
        """Return the summary of at least one run."""
        rates = [result.throughput.images_per_s for result in results]
        return cls(median(rates), throughput_spread(results), len(rates))


@dataclass(frozen=True)
class ProbeResult:
    """A measured probe: its median speedup over the base, and the range over turns (None for one turn).

    `is_inconclusive` if it was not faster in every turn, or in every window of a single turn.
    """

    trial: Trial
    rate: ThroughputSummary
    ratio: float
    ratio_spread: Spread | None
    is_inconclusive: bool

    @classmethod
    def from_runs(cls, runs: Mapping[int, RunResult], base: Mapping[int, RunResult], trial: Trial) -> "ProbeResult":
        """Compare runs with those of the base, both by turn, with at least one turn in common."""
        # Compare runs of the same turn only, so that drift of the machine affects both.
        ratios = [
            runs[turn].throughput.images_per_s / base[turn].throughput.images_per_s
            for turn in sorted({*runs} & {*base})
        ]
        spread = (min(ratios), max(ratios)) if len(ratios) > 1 else None
        rate = ThroughputSummary.from_results([runs[turn] for turn in sorted(runs)])
        lowest = spread[0] if spread else 0.0
        if not spread:
            highest_base = ThroughputSummary.from_results(list(base.values())).spread[1]
            lowest = rate.spread[0] / highest_base if highest_base else 0.0
        return cls(trial, rate, median(ratios), spread, is_inconclusive=lowest <= 1)

    def to_dict(self) -> dict[str, Any]:
        """Return the entry in `profile.json`."""
        return {
            "name": self.trial.name,
            "patch": format_patch(self.trial.patch),
            **asdict(self.rate),
            "ratio": self.ratio,
            "ratio_spread": self.ratio_spread,
            "explains": self.trial.explains,
        }


@dataclass(frozen=True)
class Profile:
    """Results of a profile.

    `recipe` is the hash of the user's recipe, `steps` the measured steps per run, and `result` that of the first base
    run. `cost` is empty if unknown. `timed_run` is the run whose bucket timings are in `communication`. `trace_share`
    is the seconds of a trace's stages over the clock's. `starved` is a note if other processes used the cores, "" if
    not.
    """

    recipe: str
    steps: int
    ranks: int
    result: RunResult
    base: ThroughputSummary
    probes: tuple[ProbeResult, ...]
    left_out: tuple[SkippedProbe, ...]
    ceilings: Ceilings
    cost: dict[str, Any]
    communication: CommunicationResult | None = None
    timed_run: str = ""
    trace_share: float | None = None
    starved: str = ""

    @property
    def verdict(self) -> dict[str, str]:
        """Bottleneck of the base, with measured ceilings; without ceiling or advice if other processes used the
        cores.
        """
        if self.starved:
            evidence = f"{self.starved[0].upper()}{self.starved[1:]}. Profile again on an idle machine."
            return {"bottleneck": CPU_STARVED, "evidence": evidence, "ceiling": "", "try": ""}
        measured = str(self.ceilings)
        if not measured:
            return self.result.verdict
        unsure = ", ".join(probe.trial.name for probe in self.probes if probe.is_inconclusive)
        doubt = f" (not distinguishable from 1.0x: {unsure})" if unsure else ""
        return {**self.result.verdict, "ceiling": f"{measured}{doubt}"}

    def to_dict(self) -> dict[str, Any]:
        """Return the values of `profile.json`."""
        copied = self.result.host_to_device
        return {
            "schema_version": SCHEMA_VERSION,
            "recipe": self.recipe,
            "steps": self.steps,
            "ranks": self.ranks,
            "base": asdict(self.base),
            "probes": [probe.to_dict() for probe in self.probes],
            "left_out": [asdict(each) for each in self.left_out],
            "ceilings": {name: ratio for name, ratio in asdict(self.ceilings).items() if ratio is not None},
            "starved": self.starved,
            "cost": self.cost,
            "communication": self.communication and self.communication.model_dump(mode="json"),
            "timed_run": self.timed_run,
            "host_to_device": copied and copied.model_dump(mode="json"),
            "trace_share": self.trace_share,
            "verdict": self.verdict,
        }


def build_profile(
    outcomes: Sequence[TrialOutcome], recipe: Recipe, *, recipe_hash: str, steps: int, left_out: Sequence[SkippedProbe]
) -> Profile:
    """Return the profile of a base and its probes; every base run has a result.

    `recipe` is the measured one, `recipe_hash` that of the user's; `left_out` are probes that did not fit.
    """
    trials = {outcome.trial.name: outcome.trial for outcome in outcomes}
    runs = {name: found for name in trials if (found := collect_runs(name, outcomes).results)}
    # Instrumented runs are slower by their instrumentation, so they are no probes.
    base = runs[BASE]
    probes = tuple(
        ProbeResult.from_runs(runs[name], base, trial)
        for name, trial in trials.items()
        if name in runs and name not in (BASE, *_INSTRUMENTED_RUNS)
    )
    failed = (SkippedProbe(outcome.trial.name, outcome.error) for outcome in outcomes if outcome.result is None)
    rate = ThroughputSummary.from_results([base[turn] for turn in sorted(base)])
    cost, uncounted = _measure_efficiency(outcomes, recipe, rate)
    starved = starved_note(outcome.result for outcome in outcomes if outcome.result is not None)
    ratios = {probe.trial.name.replace("-", "_"): probe.ratio for probe in probes}  # fields of `Ceilings`
    instrumented = next((name for name in _INSTRUMENTED_RUNS if name in runs), "")
    merged = merge_bucket_timings(base[1], runs[instrumented][1] if instrumented else None)
    return Profile(
        recipe=recipe_hash,
        steps=steps,
        ranks=base[1].world_size,
        result=base[1],
        base=rate,
        probes=probes,
        left_out=(*left_out, *failed, *uncounted),
        ceilings=Ceilings(**ratios) if not starved else Ceilings(),
        cost=cost,
        communication=merged,
        timed_run=instrumented if merged and merged.wire_s is not None else "",
        trace_share=_read_trace_share(outcomes, recipe.measure.warmup_steps),
        starved=starved,
    )


def _read_trace_share(outcomes: Sequence[TrialOutcome], warmup_steps: int) -> float | None:
    # The traces were moved from the traced run into the folder of the profile, which is the base's.
    folder = outcomes[0].rundir.trace
    for outcome in outcomes:
        if outcome.trial.name == TRACE and outcome.result is not None:
            length = outcome.trial.patch.values()["measure"]["trace"]
            return compute_trace_share(folder / trace_file_name(0), outcome.result, warmup_steps, length)
    return None


def _measure_efficiency(
    outcomes: Sequence[TrialOutcome], recipe: Recipe, rate: ThroughputSummary
) -> tuple[dict[str, Any], list[SkippedProbe]]:
    base = next(outcome for outcome in outcomes if outcome.trial.name == BASE)
    assert base.result is not None
    try:
        return compute_efficiency(recipe, base.rundir, base.result, rate.images_per_s), []
    except Exception as error:  # a plugin may raise anything on the meta device
        reason = " ".join(str(error).split())[:160]
        return {}, [SkippedProbe("cost", f"{recipe.model.name} cannot be counted: {type(error).__name__}: {reason}")]
