"""Validate the options of a scaling or batch-size study."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, TypeVar

from paceline.core.errors import RecipeError, WorldError
from paceline.core.host import usable_cores
from paceline.core.statistics import TargetCriterion
from paceline.core.units import Duration
from paceline.lab.scaling import LR_RULES, BatchGrid, ScalingMode
from paceline.recipe.schema import Recipe

_STEPS: Final = 40
_REPEATS: Final = 3
_SEEDS: Final = 3
_STUDY_NAME: Final = "a batch-size study"
ItemT = TypeVar("ItemT")


@dataclass(frozen=True, kw_only=True)
class ScaleOptions:
    """Options as typed; None if omitted."""

    ranks: str = "auto"
    nodes: str | None = None
    mode: str | None = None
    steps: int | None = None
    repeats: int | None = None
    accuracy: bool = False
    batch_sizes: str | None = None
    warmups: str | None = None
    lr_rules: str | None = None
    target: float | None = None
    seeds: int | None = None
    oversubscribe: bool = False

    @property
    def is_study(self) -> bool:
        """Whether batch sizes are studied, not ranks."""
        return any(axis is not None for axis in (self.batch_sizes, self.warmups, self.lr_rules))

    @property
    def trains_fully(self) -> bool:
        """Whether runs train to the end."""
        return self.is_study or self.accuracy

    @property
    def num_steps(self) -> int:
        """Counted steps of a short run."""
        return _STEPS if self.steps is None else self.steps

    @property
    def num_repeats(self) -> int:
        """Number of runs per case: one per seed for full runs, else repeats."""
        given, default = (self.seeds, _SEEDS) if self.trains_fully else (self.repeats, _REPEATS)
        return default if given is None else given

    def refuse_without_effect(self) -> None:
        """Raise `RecipeError` for the first option that has no effect."""
        if self.oversubscribe and self.nodes is not None:
            raise RecipeError("--oversubscribe: has no effect beside --nodes, where Slurm starts ranks (leave it out)")
        short: dict[str, object] = {"--steps": self.steps, "--repeats": self.repeats}
        given: dict[str, object]
        if self.is_study:
            given = {**short, "--mode": self.mode, "--accuracy": self.accuracy or None}
            beside, fix = f"on {_STUDY_NAME}, which trains full runs", "leave it out"
        elif self.accuracy:
            given = {**short, "--target": self.target}
            beside, fix = "beside --accuracy, which trains full runs", "leave it out; --seeds sets how many"
        else:
            given = {"--seeds": self.seeds, "--target": self.target}
            beside, fix = "on short runs", "add --accuracy, or --batch-sizes for a batch-size study"
        for option, value in given.items():
            if value is not None:
                raise RecipeError(f"{option}: {value} has no effect {beside} ({fix})")

    def parse_mode(self) -> ScalingMode:
        """Return weak or strong. Raise `RecipeError` for another value of `--mode`."""
        match self.mode:
            case None | "weak":
                return "weak"
            case "strong":
                return "strong"
        raise RecipeError(f"--mode: {self.mode!r} is not a scaling mode (write weak or strong)")

    def build_grid(self) -> BatchGrid:
        """Return the grid of a batch-size study. Raise `RecipeError` for invalid values."""
        return BatchGrid(
            batch_sizes=tuple(_parse_list("--batch-sizes", self.batch_sizes, _parse_batch_size)),
            warmups=tuple(_parse_list("--warmups", self.warmups, _parse_warmup)),
            rules=tuple(_parse_list("--lr-rules", self.lr_rules, _parse_rule)),
        )

    def choose_target(self, recipe: Recipe) -> TargetCriterion | None:
        """Return the target accuracy: `--target`, or the recipe's own. Raise `RecipeError` unless in (0, 1]."""
        if self.target is not None:
            if not 0 < self.target <= 1:
                raise RecipeError(f"--target: {self.target:g} is not an accuracy (write 0.75 for 75 %)")
            return TargetCriterion(self.target)
        stop = recipe.train.stop
        return None if stop == "off" else TargetCriterion(stop.top1, stop.patience)


def read_ranks(text: str, gpus: int) -> list[int]:
    """Return the ranks per node, sorted; for `auto` powers of two up to all `gpus` or cores.

    Raise `WorldError` for an invalid list.
    """
    if text != "auto":
        return _parse_numbers("--ranks", text)
    most = gpus or usable_cores()
    return sorted({*(2**power for power in range(most.bit_length()) if 2**power <= most), most})


def read_nodes(text: str | None) -> list[int]:
    """Return the node counts, sorted; empty if omitted. Raise `WorldError` for an invalid list."""
    return [] if text is None else _parse_numbers("--nodes", text)


def single_number(option: str, numbers: list[int]) -> int:
    """Return the only number. Raise `WorldError` for several."""
    if len(numbers) > 1:
        raise WorldError(f"{option}: {_STUDY_NAME} takes one number (write {option} {numbers[-1]})")
    return numbers[0]


def refuse_recipe(recipe: Recipe, options: ScaleOptions) -> None:
    """Raise `RecipeError` for a recipe without ranks or evaluation, or that trains for unequal lengths."""
    if recipe.parallel.strategy == "dataparallel" and not options.is_study:
        fix = "set parallel.strategy=ddp"
        raise RecipeError(f"parallel.strategy: dataparallel is one process, so there are no ranks to vary ({fix})")
    if options.trains_fully and recipe.train.eval_every == "off":
        raise RecipeError("train.eval_every: off leaves no accuracy to report (set train.eval_every=1ep)")
    if options.trains_fully and recipe.train.steps != "auto" and _has_batches(options):
        raise RecipeError(
            f"train.steps: {recipe.train.steps} trains larger batches on more images, so that accuracies cannot be "
            "compared (set train.epochs)"
        )


def _has_batches(options: ScaleOptions) -> bool:
    if options.is_study:
        return len(options.build_grid().batch_sizes) > 1
    has_several = options.ranks == "auto" or "," in options.ranks or "," in (options.nodes or "")
    return has_several and options.parse_mode() == "weak"


def _parse_numbers(option: str, text: str) -> list[int]:
    items = [word.strip() for word in text.split(",")]
    wrong = next((word for word in items if not word.isdecimal() or int(word) < 1), None)
    if wrong is not None:
        raise WorldError(f"{option}: {wrong!r} is not a number of {option.removeprefix('--')} (write 1,2,4)")
    return sorted({int(word) for word in items})


def _parse_list(option: str, text: str | None, read: Callable[[str], ItemT]) -> Iterable[ItemT]:
    """Return the items of a comma-separated list, without duplicates."""
    items = [] if text is None else [word.strip() for word in text.split(",")]
    try:
        return dict.fromkeys(map(read, items))
    except ValueError as error:
        raise RecipeError(f"{option}: {error}") from None


def _parse_batch_size(word: str) -> int:
    if not word.isdecimal() or int(word) < 1:
        raise ValueError(f"{word!r} is not a batch size (write 128,512,2048)")
    return int(word)


def _parse_warmup(word: str) -> Duration:
    return Duration.parse("0ep" if word == "0" else word)


def _parse_rule(word: str) -> str:
    if word not in LR_RULES:
        raise ValueError(f"{word!r} is not a rule (write {', '.join(LR_RULES)}, or some of them)")
    return word
