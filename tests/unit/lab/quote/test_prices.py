"""A file of prices: on demand and on spot, and what is wrong in it by its line."""

from pathlib import Path

import pytest

from paceline.core.errors import RecipeError
from paceline.lab.quote.prices import read_prices


def test_prices_on_demand_and_on_spot(tmp_path: Path) -> None:
    path = tmp_path / "prices.yaml"
    path.write_text(
        "date: '2026-11-01'\ncurrency: EUR\nper_gpu_hour: {t4: 0.5}\n"
        "spot:\n  t4: {per_gpu_hour: 0.2, hours_between_interruptions: 12}\n"
    )
    prices = read_prices(path)
    assert prices.currency == "EUR" and prices.per_gpu_hour == {"t4": 0.5}
    assert (prices.spot["t4"].per_gpu_hour, prices.spot["t4"].hours_between_interruptions) == (0.2, 12)


def test_names_are_those_of_the_gpu_option_in_any_case(tmp_path: Path) -> None:
    path = tmp_path / "prices.yaml"
    path.write_text(
        "date: '2026-11-01'\nper_gpu_hour: {A100: 2, Own.yaml: 1}\n"
        "spot: {a100: {per_gpu_hour: 1, hours_between_interruptions: 12}}\n"
    )
    prices = read_prices(path)
    assert prices.per_gpu_hour == {"a100": 2, "Own.yaml": 1} and [*prices.spot] == ["a100"]


@pytest.mark.parametrize(
    ("line", "place"),
    [
        ("per_gpu_hour: {t4: -1}", ":2: per_gpu_hour.t4: -1"),
        ("per_gpu_hour: {t4: free}", ":2: per_gpu_hour.t4"),
        ("per_gpu_hour: {t4: 1}\nspot: {t4: {per_gpu_hour: 1}}", "spot.t4.hours_between_interruptions"),
        (
            "per_gpu_hour: {t4: 1}\nspot: {t4: {per_gpu_hour: 1, hours_between_interruptions: 0}}",
            "spot.t4.hours_between_interruptions",
        ),
        ("per_gpu_hour: {t4: 1}\nspott: {}", "spott"),
        ("per_gpu_hour: {t4: 1}\ncurrency: ''", ":3: currency"),
        (
            "per_gpu_hour: {t4: 1}\nspot:\n  l4: {per_gpu_hour: 1, hours_between_interruptions: 1}",
            ":4: spot.l4: has no price in per_gpu_hour",
        ),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, line: str, place: str) -> None:
    path = tmp_path / "prices.yaml"
    path.write_text(f"date: '2026-11-01'\n{line}\n")
    with pytest.raises(RecipeError) as caught:
        read_prices(path)
    assert place in str(caught.value) and str(path) in str(caught.value)
