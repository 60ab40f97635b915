"""Check and parse the options of `paceline scale`, `batch-study` and `predict-scaling`."""

from collections.abc import Callable, Iterable
from typing import TypeVar

from paceline.cli.options import BatchStudyOptions, PredictScalingOptions, ScaleOptions
from paceline.core.errors import RecipeError, WorldError
from paceline.core.host import usable_cores
from paceline.core.statistics import TargetCriterion
from paceline.core.units import Duration
from paceline.lab.scaling import LR_RULES, BatchGrid, ScalingMode
from paceline.recipe.schema import Recipe
from paceline.recipe.schema.train import Train

ItemT = TypeVar("ItemT")


def refuse_without_effect(options: ScaleOptions) -> None:
    """Raise `RecipeError` for the first option that has no effect."""
    if options.oversubscribe and options.nodes is not None:
        raise RecipeError("--oversubscribe: has no effect beside --nodes, where Slurm starts ranks (leave it out)")
    given: dict[str, object]
    if options.accuracy:
        given = {"--steps": options.steps, "--repeats": options.repeats}
        beside, fix = "beside --accuracy, which trains full runs", "leave it out; --seeds sets how many"
    else:
        given = {"--seeds": options.seeds}
        beside, fix = "on short runs", "add --accuracy"
    for option, value in given.items():
        if value is not None:
            raise RecipeError(f"{option}: {value} has no effect {beside} ({fix})")


def refuse_prediction_options(options: PredictScalingOptions) -> None:
    """Raise `RecipeError` unless there is a run or a table, and for options without effect on a table."""
    if options.run is None and options.points is None:
        raise RecipeError("RUN: is missing (name a run directory, or give a table with --points CSV)")
    if options.run is not None and options.points is not None:
        raise RecipeError(f"--points: {options.points} and {options.run} are both inputs (leave one out)")
    of_runs = ("network", "alpha_us", "gigabytes_per_s", "fixed_s", "epochs", "alone")
    for name in of_runs if options.points is not None else ():
        value = getattr(options, name)
        if value is not None:
            option = f"--{name.replace('_', '-')}"
            raise RecipeError(f"{option}: {value} has no effect on a table (leave it out; it is for a run)")


def parse_mode(options: ScaleOptions) -> ScalingMode:
    """Return weak or strong. Raise `RecipeError` for another value of `--mode`."""
    match options.mode:
        case "weak":
            return "weak"
        case "strong":
            return "strong"
    raise RecipeError(f"--mode: {options.mode!r} is not a scaling mode (write weak or strong)")


def build_grid(options: BatchStudyOptions) -> BatchGrid:
    """Return the grid of a batch-size study. Raise `RecipeError` for invalid values."""
    return BatchGrid(
        batch_sizes=tuple(_parse_list("--batch-sizes", options.batch_sizes, _parse_batch_size)),
        warmups=tuple(_parse_list("--warmups", options.warmups, _parse_warmup)),
        rules=tuple(_parse_list("--lr-rules", options.lr_rules, _parse_rule)),
    )


def choose_target(options: BatchStudyOptions, train: Train) -> TargetCriterion | None:
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


def refuse_recipe(recipe: Recipe, options: ScaleOptions | BatchStudyOptions) -> None:
    """Raise `RecipeError` for a recipe without ranks or evaluation, or that trains for unequal lengths."""
    if recipe.parallel.strategy == "dataparallel" and isinstance(options, ScaleOptions):
        fix = "set parallel.strategy=ddp"
        raise RecipeError(f"parallel.strategy: dataparallel is one process, so there are no ranks to vary ({fix})")
    if options.trains_fully and recipe.train.eval_every == "off":
        raise RecipeError("train.eval_every: off leaves no accuracy to report (set train.eval_every=1ep)")
    if options.trains_fully and recipe.train.steps != "auto" and _has_batches(options):
        raise RecipeError(
            f"train.steps: {recipe.train.steps} trains larger batches on more images, so that accuracies cannot be "
            "compared (set train.epochs)"
        )


def _has_batches(options: ScaleOptions | BatchStudyOptions) -> bool:
    if isinstance(options, BatchStudyOptions):
        return len(build_grid(options).batch_sizes) > 1
    has_several = "auto" in options.ranks or "," in options.ranks or "," in (options.nodes or "")
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
