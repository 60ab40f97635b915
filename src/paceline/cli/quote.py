"""`paceline quote`: how fast, how long and how much on GPUs that are not here."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Final

from paceline.cli.args import split_recipe_args
from paceline.cli.options import QuoteOptions
from paceline.cli.scale_predict import RANKS_PER_NODE, parse_ranks
from paceline.cli.tables import print_table
from paceline.core.dataset import DatasetInfo
from paceline.core.errors import DataError, RecipeError
from paceline.core.units import duration, number, per_second, size
from paceline.data.loaders.sampler import count_samples
from paceline.data.sources.folds import build_run_datasets
from paceline.lab.predict.network import INTRA_NODE_LINKS, NetworkModel, build_network
from paceline.models.weights_recipe import with_weights_defaults
from paceline.recipe.consent import require_consent
from paceline.recipe.load import load
from paceline.recipe.plan import Plan
from paceline.recipe.schema import Recipe
from paceline.recipe.schema.data import Data

if TYPE_CHECKING:
    from paceline.lab.quote.gpu import Gpu
    from paceline.lab.quote.quote import Quote

_CLASSES: Final = 1000
_NOTES: Final = (
    "training steps alone: no evaluation, checkpoints, start-up or failures, and data that never waits",
    "memory is that of tensors; CUDA itself is taken for 0.6 GB, and a tenth of the rest is left for its libraries",
)
_NOT_COUNTED: Final[Mapping[str, tuple[str, ...]]] = {
    "model": ("checkpoint_activations", "lora", "unfreeze"),
    "train": ("compile", "distill", "ema"),
    "parallel": ("strategy", "compression", "bucket_mb", "sync_gradients"),
}
"""Fields of a recipe that change the time of a step, and that a quote does not consider."""
_NOT_IN_MEMORY: Final = ("train.compile", "train.distill", "parallel.strategy", "parallel.compression")
"""Those of them of which the memory is not counted either."""


def quote(options: QuoteOptions) -> int:
    """Run `paceline quote`, and return the exit code. Raise `RecipeError` for invalid options."""
    from paceline.lab.quote.gpu import read_gpu
    from paceline.lab.quote.memory import MemoryCounter
    from paceline.lab.quote.quote import count_step, find_number_format, read_prices
    from paceline.lab.quote.quote import quote as quote_run
    from paceline.lab.quote.step_model import read_constants

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
    train, val = _read_infos(recipe.data, options)
    num_samples = count_samples(recipe.data, train.num_images)
    plans = [Plan.derive(recipe, each, train, val, num_samples) for each in ranks]
    on_node = options.ranks_per_node or RANKS_PER_NODE
    constants = read_constants()["training"]
    counted = {}
    memory = MemoryCounter(recipe, train, val)
    quotes: list[Quote] = []
    for name, gpu in gpus.items():
        number_format = find_number_format(recipe.train.precision, gpu)
        network = _find_network(options.network, gpu, on_node)
        price = prices.per_gpu_hour[name] if prices else None
        for plan in plans:
            if number_format not in counted:
                counted[number_format] = count_step(recipe, plan, number_format)
            if plan.world_size > on_node and not network.spans_nodes:
                raise RecipeError(
                    f"--ranks: {plan.world_size} ranks need several nodes of {on_node}, and {network.name} is within "
                    "a node (add a network between nodes, such as --network ndr, or set --ranks-per-node)"
                )
            step = counted[number_format]
            each = quote_run(recipe, plan, step, name, gpu, constants, network, on_node, price, memory)
            quotes.append(each)
    notes = [*_NOTES, *_list_notes(recipe, counted, max(ranks))]
    if options.as_json:
        values = {"recipe": loaded.name, "recipe_hash": recipe.hash, "constants": constants.source, "notes": notes}
        print(json.dumps({**values, "quotes": [asdict(each) for each in quotes]}, indent=2))
        return 0
    _print_quotes(quotes, prices.currency if prices else "")
    for note in (*notes, *((f"prices of {prices.date}",) if prices else ())):
        print(f"note: {note}")
    return 0


def _find_network(name: str | None, gpu: "Gpu", ranks_per_node: int) -> NetworkModel:
    """Return the network of `--network`, with the GPU's own link within a node unless the name states one."""
    name = name or gpu.link
    if not ("+" in name or name in INTRA_NODE_LINKS or name.endswith(".json")):
        name = f"{gpu.link}+{name}"
    return build_network(name, ranks_per_node=ranks_per_node)


def _list_notes(recipe: Recipe, number_formats: Iterable[str], max_ranks: int) -> list[str]:
    """Return what holds for this recipe alone."""
    ignored: list[str] = []
    for name, fields in _NOT_COUNTED.items():
        section = getattr(recipe, name)
        defaults = type(section).model_fields
        ignored += [f"{name}.{field}" for field in fields if getattr(section, field) != defaults[field].default]
    notes = [f"images/s do not consider what the recipe sets: {', '.join(ignored)}"] if ignored else []
    if without := [name for name in ignored if name in _NOT_IN_MEMORY]:
        notes.append(f"memory is that without {', '.join(without)}")
    full = [each for each in number_formats if each in ("fp32", "tf32")]
    if full:
        notes.append(f"constants and intervals were fitted in fp16, and may not hold in {' and '.join(full)}")
    if max_ranks > 1:
        notes.append("intervals on several ranks add the network's bandwidth, and no measurement has confirmed them")
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


def _print_quotes(quotes: Sequence["Quote"], currency: str) -> None:
    rows = []
    for each in quotes:
        speed, hours = each.images_per_s, each.hours
        row = (
            each.gpu,
            f"{each.ranks:,}",
            f"{each.rank_batch:,}",
            per_second(speed.value),
            f"{per_second(speed.low)} to {per_second(speed.high)}",
            duration(3600 * hours.value),
            f"{duration(3600 * hours.low)} to {duration(3600 * hours.high)}",
            size(each.memory_bytes) + ("" if each.fits else ", too much"),
            f"{each.largest_micro_batch:,}",
        )
        cost = each.cost
        rows.append(row if cost is None else (*row, number(cost.value), f"{number(cost.low)} to {number(cost.high)}"))
    costs = (f"cost, {currency}", "cost, 90 %") if currency else ()
    headings = (
        "GPU",
        "ranks",
        "batch per rank",
        "images/s",
        "images/s, 90 %",
        "time",
        "time, 90 %",
        "memory",
        "largest micro-batch",
        *costs,
    )
    print_table("Quote", headings, rows, num_names=2)
