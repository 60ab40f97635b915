"""Compare a run with the quote that it was given: images/s and hours on its device and number of ranks."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from paceline.core.errors import RecipeError
from paceline.core.json_file import read_json
from paceline.core.quote_result import QuotedPlan, QuoteResult, QuoteTruth
from paceline.core.results import RunResult
from paceline.core.run_dir import RunDir
from paceline.core.units import count, join_few
from paceline.recipe.plan import Plan
from paceline.recipe.schema import Recipe
from paceline.recipe.schema.train import Log

_MAX_NAMED: Final = 5


def read_quote(section: Log, rundir: RunDir) -> QuoteResult | None:
    """Return the quote of `log.quote`, or the run's own copy if it has one; None if it is off.

    Raise `RecipeError` if it cannot be read.
    """
    if section.quote == "off":
        return None
    # A resumed run keeps its quote: the file may be gone, or another one by now.
    path = rundir.quote if rundir.quote.exists() else Path(section.quote).expanduser()
    try:
        return QuoteResult.model_validate(read_json(path))
    except OSError as error:
        fix = "write it with paceline quote --json, or set log.quote=off"
        raise RecipeError(f"log.quote: {path} cannot be read: {error.strerror} ({fix})") from None
    except ValueError:
        raise RecipeError(
            f"log.quote: {path} is not what this version of paceline quote --json writes (write it again)"
        ) from None


def keep_quote(section: Log, rundir: RunDir, warn: Callable[[str], None]) -> QuoteResult | str | None:
    """Return the quote of `log.quote`, and copy it into the run directory, for when the run is resumed elsewhere.

    A file that cannot be read is a warning, as a resumed run needs none; the reason is returned in place of a quote.
    """
    try:
        quote = read_quote(section, rundir)
    except RecipeError as error:
        warn(f"{error}; the run is not compared with a quote")
        return str(error)
    if quote is not None and not rundir.quote.exists():
        rundir.write_json(rundir.quote.name, quote.model_dump(mode="json"))
    return quote


def compare_with_quote(
    quote: QuoteResult | str, recipe: Recipe, plan: Plan, result: RunResult, first_startup_s: float
) -> QuoteTruth:
    """Return the quote for the run's device and number of ranks beside what was measured.

    `quote` is what `keep_quote` returns. The first process of the run took `first_startup_s` seconds to its first step.
    """
    device = _find_device(result)
    truth = QuoteTruth(device=device, ranks=result.world_size)
    if isinstance(quote, str):
        return truth.model_copy(update={"why": quote})
    if quote.work_hash != recipe.work_hash:
        settings = _list_changes(quote.work, recipe.work_values) or f"work hash {quote.work_hash}"
        why = f"the quote is of {quote.recipe} with other settings than this recipe ({settings}): quote this recipe"
        return truth.model_copy(update={"why": why})
    found = _find_plan(quote, device, plan)
    if found is None:
        known = [*dict.fromkeys(f"{each.device} on {count(each.ranks, 'rank')}" for each in quote.plans)]
        names = ", ".join(known[:_MAX_NAMED]) + (" and others" if len(known) > _MAX_NAMED else "")
        why = f"the quote is not for {device} on {count(plan.world_size, 'rank')}, but for {names}: quote what you rent"
        return truth.model_copy(update={"why": why})
    truth = truth.model_copy(update={"gpu": found.gpu})
    for name, quoted, trained in (
        ("images per rank and step", found.rank_batch, plan.rank_batch),
        ("pixels per side", found.image_size, plan.image_size),
    ):
        if quoted != trained:
            why = f"the quote is for {quoted:,} {name}, and the run had {trained:,}: quote it again"
            return truth.model_copy(update={"why": why})
    hours = None if result.goodput is None else (result.goodput.wall_s - first_startup_s) / 3600
    reasons = []
    if result.images_per_s is None:
        reasons.append("images/s were not measured, as the run had too few steps after measure.warmup_steps")
    if why := _explain_other_time(quote, found, recipe, plan, result):
        hours = None
        reasons.append(why)
    return truth.model_copy(
        update={
            "images_per_s": found.images_per_s,
            "measured_images_per_s": result.images_per_s,
            "hours": found.hours,
            "measured_hours": hours,
            "why": "; ".join(reasons),
        }
    )


def _explain_other_time(quote: QuoteResult, found: QuotedPlan, recipe: Recipe, plan: Plan, result: RunResult) -> str:
    """Return why the time of the run is not that of the quote; "" if it is to be compared."""
    if result.goodput is None:
        return "the time was not measured"
    if found.total_steps != plan.total_steps:
        return f"the quote is of {found.total_steps:,} steps, not {plan.total_steps:,}, so times differ"
    if changes := _list_changes(quote.pauses, recipe.pause_values):
        return f"the quote has other evaluations or checkpoints ({changes}), so times differ"
    if found.is_cut_short:
        return "the quote is of a run that train.max_time ends, so times differ"
    if result.status != "completed":
        return "the run did not train all of its steps, so its time is not compared"
    return ""


def _list_changes(quoted: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    """Return `model.width 0.5, here 1.0` for each setting that differs, of few."""
    paths = [path for path in dict.fromkeys([*quoted, *own]) if quoted.get(path) != own.get(path)]
    return join_few([f"{path} {quoted.get(path, 'unset')}, here {own.get(path, 'unset')}" for path in paths], "; ")


def _find_device(result: RunResult) -> str:
    """Return torch's name of the GPU of rank 0, or that of the CPU."""
    gpus = result.provenance.get("cuda_devices") if result.provenance.get("device") == "cuda" else None
    return str(gpus[0] if gpus else result.provenance.get("cpu", ""))


def _find_plan(quote: QuoteResult, device: str, plan: Plan) -> QuotedPlan | None:
    """Return the plan for `device`; the one on demand if there are several."""
    name = device.strip().casefold()
    same = (each for each in quote.plans if each.device.strip().casefold() == name and each.ranks == plan.world_size)
    return next(same, None)
