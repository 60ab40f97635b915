"""`paceline quote`: how fast, how long and how much on GPUs that are not here."""

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Final

from paceline import __version__
from paceline.cli.args import split_recipe_args
from paceline.cli.compare import check_out_format, show_page
from paceline.cli.options import QuoteOptions
from paceline.cli.scale_predict import RANKS_PER_NODE, parse_ranks
from paceline.core.dataset import DatasetInfo
from paceline.core.errors import DataError, RecipeError
from paceline.core.quote_result import QuotedPlan, QuoteResult
from paceline.core.units import Duration, count, join_few, per_second, rough_duration, size
from paceline.data.loaders.sampler import count_samples
from paceline.data.sources.folds import build_run_datasets
from paceline.lab.predict.network import INTRA_NODE_LINKS, NetworkModel, build_network
from paceline.models.weights_recipe import with_weights_defaults
from paceline.recipe.consent import require_consent
from paceline.recipe.load import load
from paceline.recipe.plan import Plan
from paceline.recipe.schema import Recipe
from paceline.recipe.schema.data import Data
from paceline.report.quote_page import build_quote_page

if TYPE_CHECKING:
    from paceline.lab.quote.choice import Limits
    from paceline.lab.quote.plans import Conditions, Offer, Saving
    from paceline.lab.quote.prices import Prices
    from paceline.lab.quote.quote import Quote
    from paceline.measure.gpu import Gpu

_CLASSES: Final = 1000
_NOTES: Final = (
    "start-up and stragglers are left out, and an image is evaluated in a third of the time of training on it",
    "intervals are of the speed of the steps; failures are counted as often as they are expected",
    "memory is that of tensors; CUDA itself is taken for 0.6 GB, and a tenth of the rest is left for its libraries",
)
_NOT_COUNTED: Final[Mapping[str, tuple[str, ...]]] = {
    "model": ("lora", "unfreeze"),
    "train": ("compile", "distill"),
    "parallel": ("strategy", "compression", "bucket_mb", "sync_gradients"),
}
"""Fields of a recipe that change the time of a step, and that a quote does not consider."""
_NOT_IN_MEMORY: Final = ("train.distill", "parallel.strategy", "parallel.compression")
"""Those of them of which the memory is not counted either."""


def quote(options: QuoteOptions) -> int:
    """Run `paceline quote`, and return the exit code. Raise `RecipeError` for invalid options."""
    from paceline.lab.quote.choice import choose_plan
    from paceline.lab.quote.gpu import read_gpu
    from paceline.lab.quote.memory import MemoryCounter
    from paceline.lab.quote.plans import build_plan, plan_saving, with_verdicts
    from paceline.lab.quote.prices import read_prices
    from paceline.lab.quote.quote import count_step, find_number_format
    from paceline.lab.quote.quote import quote as quote_run
    from paceline.lab.quote.step_model import read_constants
    from paceline.training.run_timing import build_planned_work

    check_out_format(options.out)
    loaded = with_weights_defaults(load(*split_recipe_args(options.args)))
    require_consent(loaded, trust_code=options.trust_code)
    recipe = loaded.recipe
    names = [name.strip() for name in options.gpu.split(",")]
    gpus = {name: read_gpu(name) for name in (name if "." in name else name.lower() for name in names)}
    ranks = parse_ranks(options.ranks, "--ranks")
    prices = read_prices(options.prices) if options.prices else None
    missing = next((name for name in gpus if prices and name not in prices.per_gpu_hour), None)
    if missing is not None:
        raise RecipeError(f"{options.prices}: per_gpu_hour has no {missing} (add it, or leave the GPU out)")
    offers = {name: _list_offers(name, prices) for name in gpus}
    on_node = options.ranks_per_node or RANKS_PER_NODE
    limits = _read_limits(options, prices)
    has_spot = any(offer.pricing == "spot" for each in offers.values() for offer in each)
    conditions = _read_conditions(options, recipe, on_node, has_spot=has_spot)
    train, val = _read_infos(recipe.data, options)
    num_samples = count_samples(recipe.data, train.num_images)
    plans = [Plan.derive(recipe, each, train, val, num_samples) for each in ranks]
    constants = read_constants()["training"]
    counted = {}
    memory = MemoryCounter(recipe, train, val)
    works = [build_planned_work(recipe, plan) for plan in plans]
    first_format = find_number_format(recipe.train.precision, next(iter(gpus.values())))
    saving = plan_saving(recipe, memory.count(plans[0], first_format, plans[0].micro_batch).parts)
    quotes: list[Quote] = []
    whole: list[QuotedPlan] = []
    for name, gpu in gpus.items():
        number_format = find_number_format(recipe.train.precision, gpu)
        network = _find_network(options.network, gpu, on_node)
        for plan, work in zip(plans, works, strict=True):
            if number_format not in counted:
                counted[number_format] = count_step(recipe, plan, number_format)
            if plan.world_size > on_node and not network.spans_nodes:
                raise RecipeError(
                    f"--ranks: {plan.world_size} ranks need several nodes of {on_node}, and {network.name} is within "
                    "a node (add a network between nodes, such as --network ndr, or set --ranks-per-node)"
                )
            step = counted[number_format]
            each = quote_run(recipe, plan, step, name, gpu, constants, network, on_node, memory)
            quotes.append(each)
            for offer in offers[name]:
                built = build_plan(each, gpu.name, plan, work, saving, conditions, offer)
                whole.append(with_verdicts(built, limits.by_hours, limits.budget))
    answer, chosen = choose_plan(whole, limits)
    result = QuoteResult(
        recipe=loaded.name,
        recipe_hash=recipe.hash,
        work_hash=recipe.work_hash,
        work=recipe.work_values,
        pauses=recipe.pause_values,
        constants=constants.source,
        notes=(
            *_NOTES,
            *_list_notes(recipe, counted, max(ranks), is_without_compiler=memory.is_without_compiler),
            *_list_time_notes(recipe, whole),
        ),
        quotes=tuple(asdict(each) for each in quotes),
        plans=tuple(whole),
        answer=answer,
        chosen=chosen,
        assumptions=_list_assumptions(recipe, plans, saving, conditions, prices, options, has_spot=has_spot),
        currency=limits.currency,
        prices_date=prices.date if prices else "",
        by_hours=limits.by_hours,
        budget=limits.budget,
        command=("paceline", *sys.argv[1:]),
        paceline=__version__,
    )
    text, page = result.model_dump_json(indent=2), build_quote_page(result)
    show_page(text, page, options.out, as_json=options.as_json, noun="quote")
    return 0


def _list_offers(name: str, prices: "Prices | None") -> list["Offer"]:
    """Return the offers of a GPU: on demand, and on spot if the file has a price."""
    from paceline.lab.quote.plans import Offer

    if prices is None:
        return [Offer()]
    offers = [Offer("on demand", prices.per_gpu_hour[name])]
    if name in prices.spot:
        spot = prices.spot[name]
        offers.append(Offer("spot", spot.per_gpu_hour, 3600 * spot.hours_between_interruptions))
    return offers


def _read_limits(options: QuoteOptions, prices: "Prices | None") -> "Limits":
    """Return the limits of time and money. Raise `RecipeError` for one that is invalid or has no price."""
    from paceline.lab.quote.choice import Limits

    if options.budget is not None:
        if prices is None:
            raise RecipeError(f"--budget: {options.budget:g} needs prices (add --prices FILE)")
        _refuse_unless_positive("--budget", options.budget)
    by_s = None if options.by is None else _parse_time("--by", options.by, "24h or 90min")
    return Limits(None if by_s is None else by_s / 3600, options.budget, prices.currency if prices else "")


def _read_conditions(options: QuoteOptions, recipe: Recipe, on_node: int, *, has_spot: bool) -> "Conditions":
    """Return the data path and the failures of a node. Raise `RecipeError` for invalid options."""
    from paceline.lab.quote.plans import RESTART_S, Conditions

    if options.loader_rate is not None:
        _refuse_unless_positive("--loader-rate", options.loader_rate)
    if options.restart is not None and options.mtbf is None and not has_spot:
        raise RecipeError(
            f"--restart: {options.restart} has no effect without failures (add --mtbf, spot prices, or leave it out)"
        )
    return Conditions(
        on_node,
        math.inf if options.loader_rate is None else options.loader_rate,
        math.inf if options.mtbf is None else _parse_time("--mtbf", options.mtbf, "500h"),
        RESTART_S if options.restart is None else _parse_time("--restart", options.restart, "10min"),
        math.inf if recipe.train.max_time == "off" else recipe.train.max_time.seconds / 3600,
    )


def _refuse_unless_positive(option: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise RecipeError(f"{option}: {value:g} is out of range (write a number above 0)")


def _parse_time(option: str, text: str, example: str) -> float:
    """Return a wall-clock time in seconds."""
    try:
        parsed = Duration.parse(text)
    except ValueError as error:
        raise RecipeError(f"{option}: {error}") from None
    if not parsed.is_time or parsed.seconds <= 0:
        raise RecipeError(f"{option}: '{parsed}' is not a wall-clock time above 0 (write {example})")
    return parsed.seconds


def _list_assumptions(
    recipe: Recipe,
    plans: Sequence[Plan],
    saving: "Saving",
    conditions: "Conditions",
    prices: "Prices | None",
    options: QuoteOptions,
    *,
    has_spot: bool,
) -> dict[str, str]:
    """Return what the plans are computed from, by name."""
    from paceline.lab.quote.plans import COPY_BYTES_PER_S
    from paceline.measure.time_estimate import CHECKPOINT_BYTES_PER_S

    plan = plans[0]
    epochs = count(round(plan.total_steps / plan.steps_per_epoch, 2), "epoch")
    facts = {
        "model": f"{recipe.model.name} in {recipe.train.precision}, {plan.image_size} pixels",
        "length": f"{epochs} of {count(plan.train_images, 'image')}",
    }
    if len({each.rank_batch for each in plans}) == 1:
        facts["batch"] = f"{count(plan.rank_batch, 'image')} per rank"
    given = f"{per_second(conditions.loader_rate)} images/s per node, by --loader-rate"
    facts["data path"] = given if options.loader_rate is not None else "gives each plan the images/s that it needs"
    if plan.eval_every:
        stated = ", 1 per 25 training images" if options.images is not None else ""
        every = round(plan.eval_every / plan.steps_per_epoch, 2)
        facts["evaluation"] = (
            f"of {count(plan.val_images, 'image')}{stated}, every {'epoch' if every == 1 else count(every, 'epoch')}"
        )
    if recipe.checkpoint.every == "off":
        facts["checkpoints"] = "none: a failure loses the whole run"
    else:
        copy = f"copied to host memory at {size(COPY_BYTES_PER_S)}/s, and " if saving.stall_s < saving.write_s else ""
        facts["checkpoints"] = (
            f"of {size(saving.num_bytes)} every {recipe.checkpoint.every}, {copy}written at "
            f"{size(CHECKPOINT_BYTES_PER_S)}/s"
        )
    failures = [] if options.mtbf is None else [f"one in {options.mtbf} per node, by --mtbf"]
    if has_spot:
        failures.append("interruptions on spot by the price file")
    if failures:
        failures.append(f"{rough_duration(conditions.restart_s)} to the next step")
    facts["failures"] = "; ".join(failures) or "none"
    if prices is not None:
        facts["prices"] = f"of {prices.date} in {prices.currency}, by {options.prices}"
    if options.network is not None:
        facts["network"] = options.network
    return facts


def _find_network(name: str | None, gpu: "Gpu", ranks_per_node: int) -> NetworkModel:
    """Return the network of `--network`, with the GPU's own link within a node unless the name states one."""
    name = name or gpu.link
    if not ("+" in name or name in INTRA_NODE_LINKS or name.endswith(".json")):
        name = f"{gpu.link}+{name}"
    return build_network(name, ranks_per_node=ranks_per_node)


def _list_notes(
    recipe: Recipe, number_formats: Iterable[str], max_ranks: int, *, is_without_compiler: bool
) -> list[str]:
    """Return what holds for this recipe alone."""
    from paceline.lab.quote.update import is_known

    ignored: list[str] = []
    for name, fields in _NOT_COUNTED.items():
        section = getattr(recipe, name)
        defaults = type(section).model_fields
        ignored += [f"{name}.{field}" for field in fields if getattr(section, field) != defaults[field].default]
    notes = [f"images/s do not consider what the recipe sets: {', '.join(ignored)}"] if ignored else []
    without = ["train.compile"] if is_without_compiler else []
    without += [name for name in ignored if name in _NOT_IN_MEMORY]
    if without:
        notes.append(f"memory is that without {', '.join(without)}")
    full = [each for each in number_formats if each in ("fp32", "tf32")]
    if full:
        notes.append(f"constants were fitted in fp16, and corrected for {' and '.join(full)} by few figures")
    if not is_known(recipe.optim):
        notes.append(f"optim.name: {recipe.optim.name} is counted as AdamW without fusion")
    if max_ranks > 1:
        notes.append("intervals on several ranks add the network's bandwidth, and no measurement has confirmed them")
    return notes


def _list_time_notes(recipe: Recipe, plans: Sequence[QuotedPlan]) -> list[str]:
    """Return what may end a run before its last step."""
    from paceline.lab.quote.choice import name_plan

    may_end = [f"train.{name}" for name in ("stop", "patience") if getattr(recipe.train, name) != "off"]
    notes = [f"times are of all steps: {' and '.join(may_end)} may end the run earlier"] if may_end else []
    if cut := [name_plan(plan) for plan in plans if plan.is_cut_short]:
        notes.append(f"train.max_time: {recipe.train.max_time} ends these before their last step: {join_few(cut)}")
    return notes


def _read_infos(data: Data, options: QuoteOptions) -> tuple[DatasetInfo, DatasetInfo]:
    """Return what is known of the training and the validation images: of the data, or as the options say."""
    if options.images is None:
        for name in ("classes", "image_size"):
            if getattr(options, name) is not None:
                option = f"--{name.replace('_', '-')}: {getattr(options, name)}"
                raise RecipeError(f"{option} has no effect without --images (add that, or leave this out)")
        try:
            datasets = build_run_datasets(data, may_download=False)
        except (RecipeError, DataError) as error:
            raise type(error)(f"{error}; or state --images of data that is not here") from None
        return datasets.train.info, datasets.val.info
    classes = options.classes or _CLASSES
    side = options.image_size or (data.auto_image_size if data.image_size == "auto" else data.image_size)
    train = DatasetInfo(
        name=data.source.name,
        split="train",
        num_images=options.images,
        class_names=tuple(map(str, range(classes))),
        channels=3,
        image_size=(side, side),
        mean=(),
        std=(),
    )
    return train, replace(train, split="val", num_images=math.ceil(options.images / 25))
