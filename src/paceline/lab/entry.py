"""A candidate in a round of a search, with the results of its runs so far."""

from dataclasses import dataclass, field

from paceline.core.experiments.ladder import ParityResult
from paceline.core.experiments.tuning import TriedResult
from paceline.core.interval import Interval, mean_interval, ratio_interval
from paceline.core.results import RunResult, starved_note
from paceline.core.units import count
from paceline.lab.duel import MIN_GAIN, ABResult, ABStatus, classify_failure, format_run_folders
from paceline.lab.moves import Candidate
from paceline.lab.trial import TrialOutcome, format_patch


@dataclass
class TriedCandidate:
    """A candidate in a round, and its results so far."""

    candidate: Candidate
    over: str
    round: int
    runs: list[str] = field(default_factory=list)
    trials: int = 0
    steps: int = 0
    images_per_s: float | None = None
    ratio: Interval | None = None
    parity: ParityResult | None = None
    status: ABStatus = "no_gain"
    why: str = ""

    @property
    def speedup(self) -> float:
        """Latest known speedup; 0 if it could not be run."""
        return 0.0 if self.ratio is None else self.ratio.value

    @property
    def can_win(self) -> bool:
        """Whether it looked faster than its baseline, in runs that are valid."""
        return self.speedup > 1 and self.status != "starved"

    def record_short_run(self, outcome: TrialOutcome, base: RunResult, steps: int) -> None:
        """Record a short run, compared with the run `base`."""
        self.trials, self.steps = self.trials + 1, steps
        if outcome.result is None:
            self.ratio = None
            self.status, self.why = classify_failure(outcome)
            return
        self.runs += format_run_folders([outcome])
        self.images_per_s = outcome.result.throughput.images_per_s
        self.ratio = ratio_interval([self.images_per_s], [base.throughput.images_per_s])
        self.status = "no_gain" if self.speedup > 1 / MIN_GAIN else "lost"
        self.why = f"{self.speedup:.2f}x in a run of {count(steps, 'step')}"
        if starved := starved_note((base, outcome.result)):
            self.status, self.why = "starved", f"unknown: {starved} ({self.why})"

    def record_ab_test(self, ab_result: ABResult, steps: int, num_runs: int) -> None:
        """Record an A/B test of `num_runs` runs."""
        self.trials, self.steps = self.trials + num_runs, steps
        self.runs += ab_result.runs
        self.ratio, self.parity, self.status, self.why = (
            ab_result.ratio or self.ratio,
            ab_result.parity,
            ab_result.status,
            ab_result.why,
        )
        if ab_result.candidate:
            self.images_per_s = mean_interval([each.throughput.images_per_s for each in ab_result.candidate]).value

    def to_result(self) -> TriedResult:
        """Return the serializable result."""
        return TriedResult(
            name=self.candidate.name,
            patch=tuple(format_patch(self.candidate.patch)),
            over=self.over,
            round=self.round,
            steps=self.steps,
            trials=self.trials,
            images_per_s=self.images_per_s,
            ratio=self.ratio,
            status=self.status,
            why=self.why,
            runs=tuple(self.runs),
            explains=self.candidate.explains,
            parity=self.parity,
        )
