"""Run all checks of this host in order. Changes nothing and sends nothing but name lookups."""

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


def machine_findings(host: Here) -> Iterator[Finding]:
    """Yield the findings on this machine, in the order in which a run would depend on them."""
    yield _versions()
    yield from core_findings(host)
    yield load_finding(host)
    yield from gpu_findings(host)
    yield _native_core()
    yield from room_findings(host)
    yield from storage_findings(host)
    yield from network_findings(host)
    yield from meeting_findings(host)
    yield clock_finding(host)


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
