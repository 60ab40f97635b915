"""Whether this machine has what a recipe needs, by what training itself checks before its first step."""

import contextlib
from collections.abc import Callable
from dataclasses import replace

from paceline.core.dataset import Datasets
from paceline.core.errors import DataError, PacelineError
from paceline.core.units import count
from paceline.core.world import World
from paceline.lab.doctor.finding import Finding
from paceline.parallel.device import choose_device
from paceline.recipe.schema import Recipe
from paceline.train.parts import Parts


def recipe_finding(recipe: Recipe, world: World, data: Callable[[], Datasets]) -> Finding:
    """Return whether `recipe` can be planned on the ranks of `world`, and has room for its batches on this node.

    `data` looks for the recipe's without fetching it, which training might: so it is worth a look where it is not here.
    """
    try:
        device = choose_device(recipe.parallel, world)
        datasets = data()
        with contextlib.ExitStack() as held:
            parts = Parts.derive(recipe, world, device, datasets, held)
            parts.check_room()
    except DataError as error:
        return replace(Finding.refused("recipe", error), state="look")
    except PacelineError as error:
        return Finding.refused("recipe", error)
    made_by = f"batches by {parts.choice.loader}, {count(parts.choice.workers, 'worker')} a rank"
    return Finding.ok("recipe", f"has room for {count(world.world_size, 'rank')}; {made_by}")
