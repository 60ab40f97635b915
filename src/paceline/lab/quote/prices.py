"""On-demand and spot prices of GPUs, from a dated file of the user's."""

from pathlib import Path
from typing import Annotated

from pydantic import Field

from paceline.core.errors import RecipeError
from paceline.recipe.errors import validate_document
from paceline.recipe.schema.base import Section
from paceline.recipe.yaml import read_yaml_file

Price = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class SpotPrice(Section):
    """Price of a GPU that the provider may take away."""

    per_gpu_hour: Price
    """Price per GPU and hour."""
    hours_between_interruptions: float = Field(gt=0)
    """Mean hours until a node is taken away."""


class Prices(Section):
    """Prices of GPUs on a day."""

    date: str
    """Day on which the prices held."""
    currency: str = Field("USD", min_length=1)
    """Currency of the prices."""
    per_gpu_hour: dict[str, Price]
    """On-demand price per GPU and hour, by the name of `--gpu`."""
    spot: dict[str, SpotPrice] = Field({})
    """Spot prices, by the name of `--gpu`."""


def read_prices(path: Path) -> Prices:
    """Read a price file; names of GPUs become lower case, except files. Raise `RecipeError` if it is invalid."""
    if not path.is_file():
        raise RecipeError(f"--prices: {path}: is not a file (write one with date, currency and per_gpu_hour)")
    document = read_yaml_file(path)
    prices = validate_document(document, path, Prices)
    on_demand = {_normalize(name): price for name, price in prices.per_gpu_hour.items()}
    for name in prices.spot:
        if _normalize(name) not in on_demand:
            line = document.find_line(f"spot.{name}")
            raise RecipeError(f"{path}:{line}: spot.{name}: has no price in per_gpu_hour (add per_gpu_hour.{name})")
    spot = {_normalize(name): price for name, price in prices.spot.items()}
    return prices.model_copy(update={"per_gpu_hour": on_demand, "spot": spot})


def _normalize(name: str) -> str:
    return name if "." in name else name.lower()  # `--gpu` does the same
