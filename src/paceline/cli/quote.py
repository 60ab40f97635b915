"""`paceline quote`: how fast, how long and how much on GPUs that are not here."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Final

from paceline.cli.args import split_recipe_args
from paceline.cli.options import QuoteOptions
from paceline.cli.scale_predict import RANKS_PER_NODE, parse_ranks
from paceline.cli.tables import print_table
from paceline.core.dataset import DatasetInfo
from paceline.core.errors import RecipeError
from paceline.core.units import duration, number, per_second, size
from paceline.data.sources.folds import build_run_datasets
from paceline.lab.predict.network import build_network
from paceline.models.weights_recipe import with_weights_defaults
from paceline.recipe.consent import require_consent
from paceline.recipe.load import load
from paceline.recipe.plan import Plan
from paceline.recipe.schema.data import Data

if TYPE_CHECKING:
    from paceline.lab.quote.quote import Quote

_CLASSES: Final = 1000
_NOTES: Final = (
    "training steps alone: no evaluation, checkpoints, start-up or failures, and data that never waits",
    "without torch.compile, whatever the recipe sets",
    "memory is an estimate that no measurement has confirmed",
)


def quote(options: QuoteOptions) -> int:
    """Run `paceline quote`, and return the exit code. Raise `RecipeError` for invalid options."""
    from paceline.lab.quote.gpu import read_gpu
    from paceline.lab.quote.quote import count_step, find_number_format, read_prices
    from paceline.lab.quote.quote import quote as quote_run
    from paceline.lab.quote.step_model import read_constants

    loaded = with_weights_defaults(load(*split_recipe_args(options.args)))
    require_consent(loaded, trust_code=options.trust_code)
    recipe = loaded.recipe
    gpus = {name: read_gpu(name) for name in dict.fromkeys(word.strip() for word in options.gpu.split(","))}
    ranks = parse_ranks(options.ranks, "--ranks")
    prices = read_prices(options.prices) if options.prices else None
    missing = next((name for name in gpus if prices and name not in prices.per_gpu_hour), None)
    if missing is not None:
        raise RecipeError(f"{options.prices}: per_gpu_hour has no {missing} (add it, or leave the GPU out)")
    train, val = _read_infos(recipe.data, options)
    plans = [Plan.derive(recipe, each, train, val) for each in ranks]
    constants = read_constants()["training"]
    counted = {}
    quotes: list[Quote] = []
    for name, gpu in gpus.items():
        number_format = find_number_format(recipe.train.precision, gpu)
        network = build_network(options.network or gpu.link, ranks_per_node=options.ranks_per_node or RANKS_PER_NODE)
        price = prices.per_gpu_hour[name] if prices else None
        for plan in plans:
            if number_format not in counted:
                counted[number_format] = count_step(recipe, plan, number_format)
            on_node = options.ranks_per_node or (RANKS_PER_NODE if network.spans_nodes else plan.world_size)
            each = quote_run(recipe, plan, counted[number_format], name, gpu, constants, network, on_node, price)
            quotes.append(each)
    if options.as_json:
        values = {"recipe": loaded.name, "recipe_hash": recipe.hash, "constants": constants.source, "notes": _NOTES}
        print(json.dumps({**values, "quotes": [asdict(each) for each in quotes]}, indent=2))
        return 0
    _print_quotes(quotes, prices.currency if prices else "")
    for note in (*_NOTES, *((f"prices of {prices.date}",) if prices else ())):
        print(f"note: {note}")
    return 0


def _read_infos(data: Data, options: QuoteOptions) -> tuple[DatasetInfo, DatasetInfo]:
    """Return what is known of the training and the validation images: of the data, or as the options say."""
    if options.images is None:
        datasets = build_run_datasets(data, may_download=False)
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
        )
        cost = each.cost
        rows.append(row if cost is None else (*row, number(cost.value), f"{number(cost.low)} to {number(cost.high)}"))
    costs = (f"cost, {currency}", "90 %") if currency else ()
    headings = ("GPU", "ranks", "batch per rank", "images/s", "90 %", "time", "90 %", "memory", *costs)
    print_table("Quote", headings, rows, num_names=2)
