"""Propose the next rung of the ladder `auto`: the first candidate that addresses the best rung's bottleneck. Pure."""

from paceline.core.results import starved_note
from paceline.core.units import share
from paceline.lab.ladder import LadderState
from paceline.lab.moves import MIN_CEILING, Hardware, find_next_candidate, parse_ceiling
from paceline.lab.rungs import Rung
from paceline.recipe.schema import Recipe


def propose_rung(recipe: Recipe, standing: LadderState) -> Rung | str:
    """Return the next rung on top of `standing`, whose recipe is `recipe`, or the reason why there is none.

    The ladder ends if the ceiling of the bottleneck is too low to measure, or if no candidate addresses the bottleneck.
    """
    result = standing.results[-1]
    verdict = result.verdict
    if starved := starved_note(standing.results):
        return f"{starved} as {standing.name} was measured, so its bottleneck is unknown"
    bottleneck, ceiling = verdict["bottleneck"], parse_ceiling(verdict)
    if ceiling is not None and ceiling < MIN_CEILING:
        return f"{standing.name} is {bottleneck}, and removing that would gain less than {share(MIN_CEILING - 1)}"
    candidate = find_next_candidate(recipe, Hardware.from_result(result), verdict, standing.tried)
    if candidate is None:
        return f"{standing.name} is {bottleneck}, and no setting is left that may help"
    return Rung(
        name=candidate.name,
        explains=candidate.explains,
        set=dict(candidate.patch.assignments),
        expects=candidate.expects,
        parity=candidate.parity,
    )
