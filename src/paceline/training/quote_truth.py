"""Compare a run with the quote that it was given: images/s and hours on its device and number of ranks."""

from pathlib import Path
from typing import Final

from paceline.core.errors import RecipeError
from paceline.core.json_file import read_json
from paceline.core.quote_result import QuotedPlan, QuoteResult, QuoteTruth
from paceline.core.results import GoodputResult, RunResult
from paceline.core.run_dir import RunDir
from paceline.core.units import count
from paceline.recipe.plan import Plan
from paceline.recipe.schema import Recipe
from paceline.recipe.schema.train import Log

_MAX_NAMED: Final = 5


def read_quote(section: Log, rundir: RunDir) -> QuoteResult | None:
    """Return the quote of `log.quote`, of the run's own copy if the file is gone; None if it is off.

    Raise `RecipeError` if it cannot be read.
    """
    if section.quote == "off":
        return None
    path = Path(section.quote).expanduser()
    if not path.exists() and rundir.quote.exists():
        path = rundir.quote
    try:
        return QuoteResult.model_validate(read_json(path))
    except OSError as error:
        fix = "write it with paceline quote --json, or set log.quote=off"
        raise RecipeError(f"log.quote: {path} cannot be read: {error.strerror} ({fix})") from None
    except ValueError:
        raise RecipeError(
            f"log.quote: {path} is not what this version of paceline quote --json writes (write it again)"
        ) from None


def keep_quote(section: Log, rundir: RunDir) -> QuoteResult | None:
    """Return the quote of `log.quote`, and copy it into the run directory, for when the run is resumed elsewhere."""
    quote = read_quote(section, rundir)
    if quote is not None:
        rundir.write_json(rundir.quote.name, quote.model_dump(mode="json"))
    return quote


def compare_with_quote(quote: QuoteResult, recipe: Recipe, plan: Plan, result: RunResult) -> QuoteTruth:
    """Return the quote for the run's device and number of ranks beside what was measured."""
    device = _find_device(result)
    truth = QuoteTruth(device=device, ranks=result.world_size)
    if quote.work_hash != recipe.work_hash:
        hashes = f"work hash {quote.work_hash}, here {recipe.work_hash}"
        why = f"the quote is of {quote.recipe} with other settings than this recipe ({hashes}): quote this recipe"
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
    hours, why = _measure_hours(result.goodput), ""
    if found.total_steps != plan.total_steps:
        hours, why = None, f"the quote is of {found.total_steps:,} steps, not {plan.total_steps:,}, so times differ"
    elif result.status != "completed":
        hours, why = None, "the run did not train all of its steps, so its time is not compared"
    return truth.model_copy(
        update={
            "images_per_s": found.images_per_s,
            "measured_images_per_s": result.images_per_s,
            "hours": found.hours,
            "measured_hours": hours,
            "why": why,
        }
    )


def _find_device(result: RunResult) -> str:
    """Return torch's name of the GPU of rank 0, or that of the CPU."""
    gpus = result.provenance.get("cuda_devices") if result.provenance.get("device") == "cuda" else None
    return str(gpus[0] if gpus else result.provenance.get("cpu", ""))


def _find_plan(quote: QuoteResult, device: str, plan: Plan) -> QuotedPlan | None:
    """Return the plan for `device`; the one on demand if there are several."""
    name = device.strip().casefold()
    same = (each for each in quote.plans if each.device.strip().casefold() == name and each.ranks == plan.world_size)
    return next(same, None)


def _measure_hours(goodput: GoodputResult | None) -> float | None:
    """Return the hours of all processes and between them, without the first start-up, which no quote has."""
    if goodput is None:
        return None
    return (goodput.wall_s - goodput.startup_s / max(1, goodput.starts)) / 3600
