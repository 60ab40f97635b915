"""Verbs that are one process's work: of the ranks that torchrun or Slurm has started, rank 0 alone does it."""

import os
import sys
from collections.abc import Callable
from functools import wraps
from typing import Final, ParamSpec

from paceline.core.errors import WorldError
from paceline.core.units import count
from paceline.core.world import World
from paceline.parallel.environ import world_from_environ

Options = ParamSpec("Options")
_USE_RANKS: Final = "train, eval, profile and doctor use ranks"


def alone(verb: str) -> Callable[[Callable[Options, int]], Callable[Options, int]]:
    """Return what makes the function of a verb one process's work: rank 0 of several says so, and the others return 0.

    They print nothing.
    """

    def decorate(function: Callable[Options, int]) -> Callable[Options, int]:
        @wraps(function)
        def work(*args: Options.args, **kwargs: Options.kwargs) -> int:
            world = _world()
            if not world.is_main:
                return 0
            if world.world_size > 1:
                print(_note(verb, world), file=sys.stderr)
            return function(*args, **kwargs)

        return work

    return decorate


def _note(verb: str, world: World) -> str:
    others = count(world.world_size - 1, "other rank")
    said = f"rank 0 does it, which leaves nothing to do for {others} ({_USE_RANKS})"
    return f"note: {verb} is the work of one process: {said}"


def _world() -> World:
    """Return this process's place, a single one's where variables contradict one another: they do not matter here."""
    try:
        return world_from_environ(os.environ)
    except WorldError:
        return World.single()
