"""Select the mode of `paceline scale`, check its options, and parse those of a study."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from enum import StrEnum
from typing import Final, TypeVar

from paceline.cli.options import ScaleOptions
from paceline.core.errors import RecipeError, WorldError
from paceline.core.host import usable_cores
from paceline.core.statistics import TargetCriterion
from paceline.core.units import Duration
from paceline.lab.scaling import LR_RULES, BatchGrid, ScalingMode
from paceline.recipe.schema import Recipe
from paceline.recipe.schema.train import Train

_STUDY_NAME: Final = "a batch-size study"
ItemT = TypeVar("ItemT")


class ScaleMode(StrEnum):
    """Mode of `paceline scale`; the value is its name in messages."""

    RANKS = "measuring"
    POINTS = "--predict --points"
    RUN = "--predict RUN"
    COLLECTIVE = "--collective"


_PREDICTION_MODES: Final = (ScaleMode.POINTS, ScaleMode.RUN)
# The modes that use an option which not all modes use.
_OPTION_MODES: Final[Mapping[str, tuple[ScaleMode, ...]]] = {
    **dict.fromkeys(("--ranks", "--oversubscribe"), (ScaleMode.RANKS, ScaleMode.COLLECTIVE)),
    **dict.fromkeys(("--nodes", "--mode", "--steps", "--repeats", "--accuracy"), (ScaleMode.RANKS,)),
    **dict.fromkeys(("--batch-sizes", "--warmups", "--lr-rules", "--target", "--seeds"), (ScaleMode.RANKS,)),
    "--task": (ScaleMode.RANKS,),
    "--own-code": (ScaleMode.RANKS,),
    "--run-dir": (ScaleMode.RANKS, *_PREDICTION_MODES),
    **dict.fromkeys(("--at", "--ranks-per-node", "--rank-batch", "--images", "--price"), _PREDICTION_MODES),
    **dict.fromkeys(("--network", "--alpha-us", "--gigabytes-per-s", "--fixed-s"), (ScaleMode.RUN,)),
    **dict.fromkeys(("--epochs", "--alone"), (ScaleMode.RUN,)),
    "--out": (ScaleMode.COLLECTIVE,),
}


def select_mode(options: ScaleOptions) -> ScaleMode:
    """Return the mode. Raise `RecipeError` if options contradict each other, or have no effect in it."""
    args, points = options.args, options.points
    if options.collective and (options.predict or points is not None or args):
        raise RecipeError("--collective: times all-reduces, with neither a recipe nor --predict (leave those out)")
    if points is not None and not options.predict:
        raise RecipeError(f"--points: {points} is input for a prediction (add --predict)")
    if points is not None and args:
        raise RecipeError(f"--points: {points} and {args[0]} are both inputs for a prediction (leave one out)")
    if options.predict and points is None and len(args) != 1:
        raise RecipeError("--predict: needs a run (write paceline scale RUN --predict, or --points CSV)")
    if options.collective:
        mode = ScaleMode.COLLECTIVE
    elif not options.predict:
        mode = ScaleMode.RANKS
    else:
        mode = ScaleMode.RUN if points is None else ScaleMode.POINTS
    _refuse_other_modes(options, mode)
    return mode


def _refuse_other_modes(options: ScaleOptions, mode: ScaleMode) -> None:
    for name, value in asdict(options).items():
        option = f"--{name.replace('_', '-')}"
        modes = _OPTION_MODES.get(option, (mode,))
        if mode not in modes and value is not None and value is not False:
            needs = " or ".join(modes)
            raise RecipeError(f"{option}: {value} has no effect in this mode (leave it out; it is for {needs})")


def refuse_without_effect(options: ScaleOptions) -> None:
    """Raise `RecipeError` for the first option that has no effect."""
    if options.oversubscribe and options.nodes is not None:
        raise RecipeError("--oversubscribe: has no effect beside --nodes, where Slurm starts ranks (leave it out)")
    short: dict[str, object] = {"--steps": options.steps, "--repeats": options.repeats}
    given: dict[str, object]
    if options.is_study:
        given = {**short, "--mode": options.mode, "--accuracy": options.accuracy or None}
        beside, fix = f"on {_STUDY_NAME}, which trains full runs", "leave it out"
    elif options.accuracy:
        given = {**short, "--target": options.target}
        beside, fix = "beside --accuracy, which trains full runs", "leave it out; --seeds sets how many"
    else:
        given = {"--seeds": options.seeds, "--target": options.target}
        beside, fix = "on short runs", "add --accuracy, or --batch-sizes for a batch-size study"
    for option, value in given.items():
        if value is not None:
            raise RecipeError(f"{option}: {value} has no effect {beside} ({fix})")


def parse_mode(options: ScaleOptions) -> ScalingMode:
    """Return weak or strong. Raise `RecipeError` for another value of `--mode`."""
    match options.mode:
        case None | "weak":
            return "weak"
        case "strong":
            return "strong"
    raise RecipeError(f"--mode: {options.mode!r} is not a scaling mode (write weak or strong)")


def build_grid(options: ScaleOptions) -> BatchGrid:
    """Return the grid of a batch-size study. Raise `RecipeError` for invalid values."""
    return BatchGrid(
        batch_sizes=tuple(_parse_list("--batch-sizes", options.batch_sizes, _parse_batch_size)),
        warmups=tuple(_parse_list("--warmups", options.warmups, _parse_warmup)),
        rules=tuple(_parse_list("--lr-rules", options.lr_rules, _parse_rule)),
    )


def choose_target(options: ScaleOptions, train: Train) -> TargetCriterion | None:
    """Return the target accuracy: `--target`, or the recipe's own. Raise `RecipeError` unless in (0, 1]."""
    if options.target is not None:
        if not 0 < options.target <= 1:
            raise RecipeError(f"--target: {options.target:g} is not an accuracy (write 0.75 for 75 %)")
        return TargetCriterion(options.target)
    stop = train.stop
    return None if stop == "off" else TargetCriterion(stop.top1, stop.patience)


def read_ranks(text: str, gpus: int) -> list[int]:
    """Return the ranks per node, sorted; for `auto` powers of two up to all `gpus` or cores.

    Raise `WorldError` for an invalid list.
    """
    if text != "auto":
        return _parse_numbers("--ranks", text)
    return powers_of_two(gpus or usable_cores())


def powers_of_two(most: int) -> list[int]:
    """Return 1, 2, 4, ... and `most`."""
    return sorted({*(2**power for power in range(most.bit_length())), most})


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
        return len(build_grid(options).batch_sizes) > 1
    has_several = "auto" in options.rank_counts or "," in options.rank_counts or "," in (options.nodes or "")
    return has_several and parse_mode(options) == "weak"


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
