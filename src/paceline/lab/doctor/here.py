"""Where `paceline doctor` looks: who this process is, where a run would write, and the kernel's files."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from paceline.core.errors import WorldError
from paceline.core.world import World
from paceline.parallel.environ import is_one_node, world_from_environ


@dataclass(frozen=True)
class Here:
    """This process, of which `environ` are the variables, and `folder`, where a run would write.

    `now` gives seconds of a clock that is never set, `unix_s` is the time since 1970 began, `root` is where /proc,
    /sys and /dev are, and `load` imports a module by its name.
    """

    environ: Mapping[str, str]
    folder: Path
    now: Callable[[], float]
    unix_s: float
    root: Path = Path("/")
    load: Callable[[str], Any] = importlib.import_module

    @cached_property
    def world(self) -> World:
        """This process's place; that of a single one where variables contradict, which `launcher` tells of."""
        try:
            return world_from_environ(self.environ)
        except WorldError:
            return World.single()

    @cached_property
    def spans_nodes(self) -> bool:
        """Whether the ranks may be on several nodes: those that there are, or those that this job is to start."""
        if self.world.launcher != "single":
            return not is_one_node(self.environ, self.world)
        return self.number("SLURM_JOB_NUM_NODES", 1) > 1

    def number(self, variable: str, default: int) -> int:
        """Return a variable that is a whole number, `default` where it is none or not there."""
        text = self.environ.get(variable, "")
        return int(text) if text.isdecimal() else default

    def text(self, path: str) -> str:
        """Return what is in a file below `root`, "" where it cannot be read."""
        try:
            return (self.root / path).read_text(errors="replace").strip()
        except OSError:
            return ""


def reason(error: OSError) -> str:
    """Return what the system says of `error`, without its number."""
    return error.strerror or str(error)
