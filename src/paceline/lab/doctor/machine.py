"""Run all checks of this host in order. Changes nothing and sends nothing but name lookups."""

import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from paceline import __version__
from paceline.data.native import NATIVE_MISSING_MESSAGE, load_native
from paceline.lab.doctor.cores import check_cores
from paceline.lab.doctor.finding import DoctorFinding
from paceline.lab.doctor.gpus import check_gpus
from paceline.lab.doctor.here import HostContext
from paceline.lab.doctor.load import check_load
from paceline.lab.doctor.meeting import check_rendezvous
from paceline.lab.doctor.network import check_network
from paceline.lab.doctor.room import check_memory_and_limits
from paceline.lab.doctor.storage import check_storage
from paceline.lab.doctor.timekeeping import check_clock


def check_host(host: HostContext) -> Iterator[DoctorFinding]:
    """Yield the findings on this machine, in the order in which a run would depend on them."""
    yield _check_versions()
    yield from check_cores(host)
    yield check_load(host)
    yield from check_gpus(host)
    yield _check_native_core()
    yield from check_memory_and_limits(host)
    yield from check_storage(host)
    yield from check_network(host)
    yield from check_rendezvous(host)
    yield check_clock(host)


def _check_versions() -> DoctorFinding:
    found = [f"Python {platform.python_version()}", f"paceline {__version__}"]
    missing = []
    for name in ("torch", "torchvision", "numpy"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            missing.append(name)
    if missing:
        return DoctorFinding.problem("versions", f"{', '.join(found)}; no {', '.join(missing)}", "pip install paceline")
    return DoctorFinding.ok("versions", ", ".join(found))


def _check_native_core() -> DoctorFinding:
    core = load_native()
    if core is None:
        lost, _, advice = NATIVE_MISSING_MESSAGE.rpartition(" (")
        return DoctorFinding.warning("native core", lost, advice.removesuffix(")"))
    return DoctorFinding.ok("native core", f"built, uses {core.isa()}")
