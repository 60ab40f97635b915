"""A move in a round of a search: what its runs have come to so far. What follows from that is said elsewhere."""

from dataclasses import dataclass, field

from paceline.core.experiments.ladder import ParityResult
from paceline.core.experiments.tuning import TriedResult
from paceline.core.interval import Interval, mean_of, ratio_of
from paceline.core.results import RunResult, starved_note
from paceline.core.units import count
from paceline.lab.duel import GAIN, Duel, Status, failure_of, folders_of
from paceline.lab.moves import Move
from paceline.lab.trial import Outcome, words_of


@dataclass
class Entry:
    """A move in a round, and what has become of it so far."""

    move: Move
    over: str
    round: int
    runs: list[str] = field(default_factory=list)
    trials: int = 0
    steps: int = 0
    images_per_s: float | None = None
    ratio: Interval | None = None
    parity: ParityResult | None = None
    status: Status = "no_gain"
    why: str = ""

    @property
    def value(self) -> float:
        """The ratio that is known of it; 0 where it could not be run."""
        return 0.0 if self.ratio is None else self.ratio.value

    @property
    def may_win(self) -> bool:
        """Whether it looked faster than what it was compared with, and that can be told."""
        return self.value > 1 and self.status != "starved"

    def take_short(self, outcome: Outcome, base: RunResult, steps: int) -> None:
        """Take a run of a base and of the move."""
        self.trials, self.steps = self.trials + 1, steps
        if outcome.result is None:
            self.ratio = None
            self.status, self.why = failure_of(outcome)
            return
        self.runs += folders_of([outcome])
        self.images_per_s = outcome.result.throughput.images_per_s
        self.ratio = ratio_of([self.images_per_s], [base.throughput.images_per_s])
        self.status = "no_gain" if self.value > 1 / GAIN else "lost"
        self.why = f"{self.value:.2f}x in a run of {count(steps, 'step')}"
        if starved := starved_note((base, outcome.result)):
            self.status, self.why = "starved", f"not to be told: {starved} ({self.why})"

    def take_duel(self, duel: Duel, steps: int, num_runs: int) -> None:
        """Take what pairs of runs came to."""
        self.trials, self.steps = self.trials + num_runs, steps
        self.runs += duel.runs
        self.ratio, self.parity, self.status, self.why = duel.ratio or self.ratio, duel.parity, duel.status, duel.why
        if duel.challenger:
            self.images_per_s = mean_of([each.throughput.images_per_s for each in duel.challenger]).value

    def result(self) -> TriedResult:
        """Return it as it is written down."""
        return TriedResult(
            name=self.move.name,
            patch=tuple(words_of(self.move.patch)),
            over=self.over,
            round=self.round,
            steps=self.steps,
            trials=self.trials,
            images_per_s=self.images_per_s,
            ratio=self.ratio,
            status=self.status,
            why=self.why,
            runs=tuple(self.runs),
            explains=self.move.explains,
            parity=self.parity,
        )
