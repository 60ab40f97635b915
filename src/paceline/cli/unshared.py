"""Verbs that do not distribute their work: under a launcher every rank does all of it, and rank 0 prints a note."""

import os
import sys
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

from paceline.core.errors import WorldError
from paceline.core.world import World
from paceline.parallel.environ import ends_with_parent, world_from_environ

VerbParams = ParamSpec("VerbParams")


def not_distributed(verb: str) -> Callable[[Callable[VerbParams, int]], Callable[VerbParams, int]]:
    """Return a decorator that prints a note if torchrun or Slurm started several ranks of `verb`."""

    def decorate(function: Callable[VerbParams, int]) -> Callable[VerbParams, int]:
        @wraps(function)
        def work(*args: VerbParams.args, **kwargs: VerbParams.kwargs) -> int:
            world = _launched_world()
            # Only a note: in a script that srun starts, each rank may have work of its own.
            if world.is_main and world.world_size > 1:
                print(_duplicate_work_note(verb, world), file=sys.stderr)
            return function(*args, **kwargs)

        return work

    return decorate


def _duplicate_work_note(verb: str, world: World) -> str:
    return (
        f"note: {verb} is not distributed: each of {world.world_size} ranks does all of the work "
        f"(start one process, or give each its own input)"
    )


def _launched_world() -> World:
    """Return the world that a launcher started, or a single process if none did."""
    try:
        world = world_from_environ(os.environ)
    except WorldError:  # variables left over in a shell, which matter only to verbs that use them
        return World.single()
    return world if ends_with_parent(os.environ, world) else World.single()
