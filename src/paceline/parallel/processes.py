"""Other processes of this machine, by Linux's table of them."""

import sys
from pathlib import Path

from paceline.parallel.culprit import Condition


def process_condition(pid: int) -> Condition:
    """Return how process `pid` of this machine is, by Linux's table of processes."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "dead"
    return {"Z": "dead", "X": "dead", "T": "stopped", "t": "stopped"}.get(letter, "here")  # type: ignore[return-value]


def machine_id() -> str:
    """Return what two processes share that see one another in `/proc`, or nothing where there is no such thing."""
    if not sys.platform.startswith("linux"):
        return ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""
