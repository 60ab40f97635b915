"""Runs in the test's process, which share what would be found again each time."""

from collections.abc import Iterator

import pytest

from paceline.models.validate import check_model
from paceline.recipe.plan import Plan
from paceline.recipe.schema.base import is_plugin_name
from paceline.recipe.schema.model import Model


@pytest.fixture(scope="session", autouse=True)
def _one_trial_pass_per_model() -> Iterator[None]:
    """Check a model once for all runs that train it on the same batches, which takes a third of a short run."""
    known: dict[str, tuple[str, ...]] = {}

    def check(section: Model, plan: Plan, **options: object) -> tuple[str, ...]:
        sizes = plan.image_size, plan.eval_image_size, sorted({size for _, size in plan.train_sizes})
        batches = plan.micro_batch, plan.eval_batch, plan.channels, plan.num_classes, plan.unfreeze_step
        key = f"{section!r} {sizes} {batches} {options}"
        if key not in known or is_plugin_name(section.name):  # whose code may be another
            known[key] = check_model(section, plan, **options)  # type: ignore[arg-type]
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paceline.training.precision.check_model", check)
        yield
