"""Look at this machine the way a run would: what it has, what often goes wrong, and what to do about it.

Nothing is changed, nothing stays in the folder, and nothing is sent beyond this host but the look-up of names. Torch is
imported only where there are GPUs.
"""

import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from paceline import __version__
from paceline.data.native import WHAT_IS_LOST, native
from paceline.lab.doctor.cores import core_findings
from paceline.lab.doctor.finding import Finding
from paceline.lab.doctor.gpus import gpu_findings
from paceline.lab.doctor.here import Here
from paceline.lab.doctor.load import load_finding
from paceline.lab.doctor.meeting import meeting_findings
from paceline.lab.doctor.network import network_findings
from paceline.lab.doctor.room import room_findings
from paceline.lab.doctor.storage import storage_findings
from paceline.lab.doctor.timekeeping import clock_finding


def machine_findings(here: Here) -> Iterator[Finding]:
    """Yield what there is to know of this machine before a run, in the order in which a run would need it."""
    yield _versions()
    yield from core_findings(here)
    yield load_finding(here)
    yield from gpu_findings(here)
    yield _native_core()
    yield from room_findings(here)
    yield from storage_findings(here)
    yield from network_findings(here)
    yield from meeting_findings(here)
    yield clock_finding(here)


def _versions() -> Finding:
    found = [f"Python {platform.python_version()}", f"paceline {__version__}"]
    missing = []
    for name in ("torch", "torchvision", "numpy"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            missing.append(name)
    if missing:
        return Finding.wrong("versions", f"{', '.join(found)}; no {', '.join(missing)}", "pip install paceline")
    return Finding.ok("versions", ", ".join(found))


def _native_core() -> Finding:
    core = native()
    if core is None:
        lost, _, advice = WHAT_IS_LOST.rpartition(" (")
        return Finding.look("native core", lost, advice.removesuffix(")"))
    return Finding.ok("native core", f"built, uses {core.isa()}")
