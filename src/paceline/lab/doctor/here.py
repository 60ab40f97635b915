"""Context of the checks: this process, where a run would write, and the kernel's files."""

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
class HostContext:
    """This process with its variables `environ`, and `folder`, where a run would write.

    `now` returns monotonic seconds, `unix_s` is seconds since 1970, `root` contains /proc, /sys and /dev, and `import_module`
    imports a module by name.
    """

    environ: Mapping[str, str]
    folder: Path
    now: Callable[[], float]
    unix_s: float
    root: Path = Path("/")
    import_module: Callable[[str], Any] = importlib.import_module

    @cached_property
    def world(self) -> World:
        """World of this process; a single rank if its variables contradict each other, which `launcher` reports."""
        try:
            return world_from_environ(self.environ)
        except WorldError:
            return World.single()

    @cached_property
    def spans_nodes(self) -> bool:
        """Whether the ranks, started or to be started by this job, may be on several nodes."""
        if self.world.launcher != "single":
            return not is_one_node(self.environ, self.world)
        return self.get_env_int("SLURM_JOB_NUM_NODES", 1) > 1

    def get_env_int(self, variable: str, default: int) -> int:
        """Return an integer variable, or `default` if it is missing or not an integer."""
        text = self.environ.get(variable, "")
        return int(text) if text.isdecimal() else default

    def read_text(self, path: str) -> str:
        """Return the content of a file below `root`, or "" if it is unreadable."""
        try:
            return (self.root / path).read_text(errors="replace").strip()
        except OSError:
            return ""


def format_os_error(error: OSError) -> str:
    """Return the system's message of `error`, without its number."""
    return error.strerror or str(error)
