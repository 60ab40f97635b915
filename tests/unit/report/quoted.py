"""Make the result of `paceline quote` by hand."""

from typing import Any

from paceline.core.quote_result import QuotedPlan, QuoteResult
from paceline.core.statistics import Interval

EVIL = "<script>window.hacked=1</script>"


def interval(value: float, spread: float = 0.2) -> Interval:
    """Return an interval around `value`, a fifth below and above by default."""
    return Interval(value=value, low=value * (1 - spread), high=value * (1 + spread))


def quoted_plan(gpu: str, ranks: int, hours: float, cost: float | None = None, **changes: Any) -> QuotedPlan:
    """Return a plan on one node."""
    values: dict[str, Any] = {
        "gpu": gpu,
        "device": f"Torch's {gpu}",
        "ranks": ranks,
        "nodes": 1,
        "pricing": "" if cost is None else "on demand",
        "rank_batch": 64,
        "image_size": 32,
        "total_steps": 1000,
        "images_per_s": interval(1000.0 * ranks),
        "hours": interval(hours),
        "parts": {"steps": 0.9 * hours, "evaluation": 0.05 * hours, "checkpoints": 0.05 * hours, "failures": 0.0},
        "data_images_per_s": 1000.0 * ranks,
        "waits_for_data": False,
        "memory_bytes": 4e9,
        "largest_micro_batch": 256,
        "fits": True,
        "cost": None if cost is None else interval(cost),
    }
    return QuotedPlan(**{**values, **changes})


def quote_result(*plans: QuotedPlan, **changes: Any) -> QuoteResult:
    """Return a result of `plans`."""
    values: dict[str, Any] = {
        "recipe": "made",
        "recipe_hash": "0123456789ab",
        "work_hash": "ba9876543210",
        "constants": "made",
        "notes": ("a note",),
        "quotes": (),
        "plans": plans,
        "answer": "The fastest plan is made.",
        "chosen": 0,
        "assumptions": {"length": "2 epochs of 50,000 images", "data path": EVIL},
        "command": ("paceline", "quote", "made"),
        "paceline": "1.0",
    }
    return QuoteResult(**{**values, **changes})


def priced_result() -> QuoteResult:
    """Return a result of many GPUs with prices, limits, a plan that waits for data and names that are malicious."""
    plans = [
        quoted_plan(gpu, ranks, 40.0 / speed / ranks, 10.0 + speed, ends_in_time="likely", is_within_budget="yes")
        for speed, gpu in enumerate(("t4", "l4", "a100", "h100", "h200"), start=1)
        for ranks in (1, 8)
    ]
    plans.append(
        quoted_plan(EVIL, 8, 2.0, 9.0, pricing="spot", waits_for_data=True, ends_in_time="yes", is_within_budget="yes")
    )
    plans.append(quoted_plan("v100", 1, 9.0, 3.0, fits=False, ends_in_time="yes", is_within_budget="yes"))
    return quote_result(
        *plans, chosen=10, currency="USD", prices_date="2026-11-28", by_hours=24.0, budget=14.0, answer=f"{EVIL} is it."
    )
