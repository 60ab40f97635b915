"""Check that this machine can train a recipe, with the checks that training runs before its first step."""

import contextlib
from collections.abc import Callable
from dataclasses import replace

from paceline.core.dataset import Datasets
from paceline.core.errors import DataError, PacelineError
from paceline.core.units import count
from paceline.core.world import World
from paceline.lab.doctor.check import DoctorFinding, failure_by, ok
from paceline.parallel.device import choose_device
from paceline.recipe.schema import Recipe
from paceline.training.context import RunContext


def check_recipe(recipe: Recipe, world: World, data: Callable[[], Datasets]) -> DoctorFinding:
    """Check that `recipe` can be planned for the ranks of `world`, with room for its batches on this node.

    `data` opens the datasets without downloading them.
    """
    try:
        device = choose_device(recipe.parallel, world)
        datasets = data()
        with contextlib.ExitStack() as stack:
            parts = RunContext.derive(recipe, world, device, datasets, stack)
            parts.check_worker_limits()
    except DataError as error:  # only a warning, as training may download missing data
        return replace(DoctorFinding("recipe", *failure_by(error)), state="warning")
    except PacelineError as error:
        return DoctorFinding("recipe", *failure_by(error))
    loader_text = f"batches by {parts.loader_choice.loader}, {count(parts.loader_choice.workers, 'worker')} per rank"
    return DoctorFinding("recipe", *ok(f"has room for {count(world.world_size, 'rank')}; {loader_text}"))
