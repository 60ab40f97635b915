"""Base of all checks of `paceline doctor`: findings, the host context, and calls with a timeout."""

import importlib
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from paceline.core.errors import PacelineError, WorldError
from paceline.core.units import seconds
from paceline.core.world import World
from paceline.parallel.environ import is_one_node, world_from_environ
from paceline.parallel.network_interface import interface_to

FindingState = Literal["ok", "warning", "error"]
_STATES_BY_SEVERITY: Final[tuple[FindingState, ...]] = ("ok", "warning", "error")
T = TypeVar("T")
ANSWER_TIMEOUT_S: Final = 3.0
"""Default timeout in seconds. An unresponsive name server takes half a minute, and a dead disk forever."""
GLOO_VARIABLE: Final = "GLOO_SOCKET_IFNAME"

Outcome = tuple[FindingState, str, str]
"""Result of a check: state, what was found, and advice ("" if ok)."""


@dataclass(frozen=True)
class DoctorFinding:
    """Result of the check `name`: state, what was found, and advice ("" if ok).

    `ok`: as it should be. `warning`: a run works, but slower or less safely than it could. `error`: a run would fail.
    `where` names the rank and host, "" for this machine.
    """

    name: str
    state: FindingState
    found: str
    advice: str = ""
    where: str = ""

    def __post_init__(self) -> None:
        assert (self.state == "ok") == (not self.advice), (self.name, self.state, self.advice)

    def with_location(self, where: str) -> "DoctorFinding":
        """Return the finding for a location such as `rank 3 (node07)`."""
        return replace(self, where=where)

    def to_dict(self) -> dict[str, str]:
        """Return plain values for JSON."""
        return asdict(self)


def ok(found: str) -> Outcome:
    """Return an outcome without problem."""
    return "ok", found, ""


def warning(found: str, advice: str) -> Outcome:
    """Return a warning: a run works, but less well."""
    return "warning", found, advice


def failure(found: str, advice: str) -> Outcome:
    """Return a problem: a run would fail."""
    return "error", found, advice


def failure_by(error: PacelineError) -> Outcome:
    """Return the problem that a run would fail with `error`."""
    # Every message ends with its fix: in parentheses, or after a semicolon.
    text = str(error)
    found, _, advice = text.rpartition(" (" if text.endswith(")") else "; ")
    return failure(found, advice.removesuffix(")")) if found else failure(advice, "fix it")


def find_worst_state(findings: Iterable[DoctorFinding]) -> FindingState:
    """Return the worst state of `findings`, `ok` if there are none."""
    return max((finding.state for finding in findings), key=_STATES_BY_SEVERITY.index, default="ok")


def call_with_timeout(function: Callable[[], T], timeout_s: float = ANSWER_TIMEOUT_S) -> T:
    """Return or raise what `function` does, in a thread. Raise `TimeoutError` after `timeout_s` seconds."""
    results: list[T] = []
    errors: list[Exception] = []

    def work() -> None:
        try:
            results.append(function())
        except Exception as error:
            errors.append(error)

    # A daemon thread, so that a call that hangs does not keep the process alive.
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(timeout_s)
    if results:
        return results[0]
    raise errors[0] if errors else TimeoutError(f"no answer within {seconds(timeout_s)}")


@dataclass(frozen=True)
class HostContext:
    """This process with its variables `environ`, and `folder`, where a run would write.

    `root` contains /proc, /sys and /dev, and `import_module` imports a module by name.
    """

    environ: Mapping[str, str]
    folder: Path
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

    @cached_property
    def chosen_interface(self) -> str:
        """The interface that a run would choose for gloo between nodes; "" for the one of the host's name."""
        # A batch script runs on the first node of its job, which will have rank 0.
        if self.environ.get(GLOO_VARIABLE) or not self.spans_nodes:
            return ""
        try:
            return call_with_timeout(lambda: interface_to(self.world.master_addr))
        except OSError:
            return ""

    def get_env_int(self, variable: str, default: int) -> int:
        """Return an integer variable, or `default` if it is missing or not an integer."""
        text = self.environ.get(variable, "")
        return int(text) if text.isdecimal() else default


def format_os_error(error: OSError) -> str:
    """Return the system's message of `error`, without its number."""
    return error.strerror or str(error)
