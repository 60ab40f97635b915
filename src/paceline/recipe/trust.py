"""Whether code that a finished run names may run: whoever uses the run says so, and never the run itself.

It imports none of it; that is `paceline.recipe.own`.
"""

from collections.abc import Collection

from paceline.core.errors import RecipeError
from paceline.recipe.own import Own, own_parts
from paceline.recipe.schema import Recipe


def permitted(recipe: Recipe, run: Recipe, paths: Collection[str], *, own_code: bool) -> tuple[Own, ...]:
    """Return the parts at `paths` of `recipe` that are somebody's code, to use a run that `run` is the recipe of.

    Raise `RecipeError` for one that the run names, unless `own_code` says that its code may run. What a user has laid
    over the run's recipe is a word of their own.
    """
    named = {(part.path, part.name) for part in own_parts(run)}
    needed = tuple(part for part in own_parts(recipe) if part.path in paths)
    for part in needed:
        if not own_code and (part.path, part.name) in named:
            raise RecipeError(
                f"{part.path}.name: {part.name} is code that the run names (add --own-code where you trust whoever "
                "wrote it)"
            )
    return needed
