"""Prices of GPUs on demand and on spot, from a dated file of the user's."""

from pathlib import Path

from pydantic import Field

from paceline.core.errors import RecipeError
from paceline.lab.quote.gpu import read_checked
from paceline.recipe.schema.base import Section


class SpotPrice(Section):
    """Price of a GPU that may be taken away."""

    per_gpu_hour: float = Field(ge=0)
    """Price per GPU and hour."""
    hours_between_interruptions: float = Field(gt=0)
    """Mean hours until a node is taken away."""


class Prices(Section):
    """Prices of GPUs on a day."""

    date: str
    """Day on which the prices held."""
    currency: str = "USD"
    """Currency of the prices."""
    per_gpu_hour: dict[str, float]
    """Price on demand per GPU and hour by the name of `--gpu`."""
    spot: dict[str, SpotPrice] = Field({})
    """Prices on spot by the name of `--gpu`."""


def read_prices(path: Path) -> Prices:
    """Read a file of prices. Raise `RecipeError` if it is invalid."""
    if not path.is_file():
        raise RecipeError(f"--prices: {path}: is not a file (write one with date, currency and per_gpu_hour)")
    prices, _ = read_checked(path, Prices)
    wrong = next((name for name, price in prices.per_gpu_hour.items() if not price >= 0), None)
    if wrong is not None:
        raise RecipeError(f"{path}: per_gpu_hour.{wrong}: {prices.per_gpu_hour[wrong]:g} is below 0 (set a price)")
    return prices
