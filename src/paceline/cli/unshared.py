"""Verbs whose work ranks do not share: where a launcher has started several, each does it, and rank 0 says so."""

import os
import sys
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

from paceline.core.errors import WorldError
from paceline.core.world import World
from paceline.parallel.environ import ends_with_parent, world_from_environ

Options = ParamSpec("Options")


def unshared(verb: str) -> Callable[[Callable[Options, int]], Callable[Options, int]]:
    """Return what makes the function of a verb say that it is not shared, where torchrun or Slurm has started several.

    Each of them does it all the same: in a script that `srun` starts, each may have work of its own.
    """

    def decorate(function: Callable[Options, int]) -> Callable[Options, int]:
        @wraps(function)
        def work(*args: Options.args, **kwargs: Options.kwargs) -> int:
            world = _launched()
            if world.is_main and world.world_size > 1:
                print(_note(verb, world), file=sys.stderr)
            return function(*args, **kwargs)

        return work

    return decorate


def _note(verb: str, world: World) -> str:
    return (
        f"note: {verb} is one process's work, and each of {world.world_size} ranks does all of it "
        f"(start one, or give each its own)"
    )


def _launched() -> World:
    """Return this process's place among those that a launcher has started; a single one's where none has.

    RANK and WORLD_SIZE may be left over in a shell, or contradict one another, which is for verbs that use them.
    """
    try:
        world = world_from_environ(os.environ)
    except WorldError:
        return World.single()
    return world if ends_with_parent(os.environ, world) else World.single()
