"""The next rung of the ladder `auto`: the first move that cures what the verdict of the best rung names. Pure."""

from paceline.core.results import starved_note
from paceline.core.units import share
from paceline.lab.ladder import Standing
from paceline.lab.moves import WORTH, Place, ceiling_of, next_move
from paceline.lab.rungs import Rung
from paceline.recipe.schema import Recipe


def propose(recipe: Recipe, standing: Standing) -> Rung | str:
    """Return the next rung above one that stands, whose recipe is `recipe`; or, in words, why there is none.

    The ladder ends where what the verdict bounds is too little to be told from nothing, and where no move is left that
    cures its bottleneck. A run that computes all the time has no such bound, and ends by the latter alone.
    """
    result = standing.results[-1]
    verdict = result.verdict
    if starved := starved_note(standing.results):
        return f"{starved} as {standing.name} was measured, so nothing follows from it"
    bottleneck, ceiling = verdict["bottleneck"], ceiling_of(verdict)
    if ceiling is not None and ceiling < WORTH:
        return f"{standing.name} is {bottleneck}, and without that there are less than {share(WORTH - 1)} to win"
    move = next_move(recipe, Place.of(result), verdict, standing.tried)
    if move is None:
        return f"{standing.name} is {bottleneck}, and no setting is left that may help"
    return Rung(
        name=move.name,
        explains=move.explains,
        set=dict(move.patch.assignments),
        expects=move.expects,
        parity=move.parity,
    )
