"""Look at a machine the way a run would: what it has, what often goes wrong, and what to do about it.

Nothing is changed, nothing is sent beyond this host but the look-up of its own name. Torch is imported only where
there are GPUs that it might not see.
"""

import contextlib
import os
import platform
import resource
import shutil
import socket
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from paceline import __version__
from paceline.core.errors import PacelineError
from paceline.parallel.environ import count_gpus, world_from_environ

_GIB = 2**30
_LITTLE_MEMORY = 2 * _GIB
_LITTLE_SHM = _GIB  # a container has 64 MiB unless told; batches of photographs need tens of MiB each
_LITTLE_DISK = 5 * _GIB
_FEW_FILES = 1024  # a rank of n needs 21 + 2n with gloo (measured with torch 2.15), and one or two for each worker
_LOOK_UP_S = 3.0
_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
_SLURM = ("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_RESTART_COUNT")


@dataclass(frozen=True)
class Check:
    """What was looked at, what was found, and what to do about it: "" where all is well."""

    name: str
    found: str
    advice: str = ""

    @property
    def is_ok(self) -> bool:
        """Whether nothing is to be done."""
        return not self.advice

    def to_dict(self) -> dict[str, str]:
        """Return plain values for JSON."""
        return {"name": self.name, "state": "ok" if self.is_ok else "look", "found": self.found, "advice": self.advice}


def machine_checks(environ: Mapping[str, str], folder: Path, root: Path = Path("/")) -> Iterator[Check]:
    """Yield what there is to know of this machine before a run in `folder`. `root` is where /proc and /sys are."""
    yield _versions()
    yield _cores(root)
    yield _threads(environ)
    yield _gpus(environ)
    yield _native_core()
    yield _memory(root)
    yield _shared_memory(root / "dev" / "shm")
    yield _open_files()
    yield _disk(folder)
    yield _host_name()
    yield _loopback()
    yield _launcher(environ)
    yield _interface(environ)


def _versions() -> Check:
    names = ("torch", "torchvision", "numpy")
    found = [f"Python {platform.python_version()}", f"paceline {__version__}"]
    missing = ""
    for name in names:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            missing = f"install {name} (pip install paceline)"
    return Check("versions", ", ".join(found), missing)


def _cores(root: Path) -> Check:
    usable, all_ = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    found = f"{usable} of {all_} usable"
    with contextlib.suppress(OSError, ValueError):
        quota, period = (root / "sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max" and int(quota) / int(period) < usable - 0.5:
            cpus = int(quota) / int(period)
            advice = f"set parallel.threads and data.workers so that they come to {max(1, int(cpus))} together"
            return Check("cores", f"{found}, but limited to the time of {cpus:g}", advice)
    return Check("cores", found)


def _threads(environ: Mapping[str, str]) -> Check:
    limits = [f"{name}={environ[name]}" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if name in environ]
    found = f"{', '.join(limits)} (set for each rank by parallel.threads)" if limits else "set for each rank"
    return Check("threads", found)


def _gpus(environ: Mapping[str, str]) -> Check:
    present = count_gpus(environ)
    if not present:
        return Check("GPUs", "none: runs train on the CPU")
    import torch

    seen = torch.cuda.device_count()
    names = ", ".join(sorted({torch.cuda.get_device_name(index) for index in range(seen)}))
    found = f"{present} ({names})" if names else str(present)
    if seen >= present:
        return Check("GPUs", found)
    return Check("GPUs", f"{found}, torch sees {seen}", "install a torch for the driver's CUDA (see pytorch.org)")


def _native_core() -> Check:
    from paceline.data.native import WHAT_IS_LOST, native

    core = native()
    return Check("native core", f"built, uses {core.isa()}") if core else Check("native core", "none", WHAT_IS_LOST)


def _memory(root: Path) -> Check:
    values = dict(line.split(":", 1) for line in _text(root / "proc/meminfo").splitlines() if ":" in line)
    if not {"MemAvailable", "MemTotal"} <= values.keys():
        return Check("memory", "unknown")
    available, total = (int(values[name].split()[0]) * 1024 for name in ("MemAvailable", "MemTotal"))
    limit = _text(root / "sys/fs/cgroup/memory.max").strip()
    if limit.isdecimal() and int(limit) < total:
        total, available = int(limit), min(available, int(limit))
    advice = "end other programs, or lower data.workers" if available < _LITTLE_MEMORY else ""
    return Check("memory", f"{_gib(available)} of {_gib(total)} free", advice)


def _shared_memory(path: Path) -> Check:
    try:
        free = shutil.disk_usage(path).free
    except OSError:
        return Check("shared memory", f"no {path}", "set data.workers=0, or mount it: workers pass batches through it")
    advice = "start the container with --shm-size=8g, or set data.workers=0" if free < _LITTLE_SHM else ""
    return Check("shared memory", f"{_gib(free)} free in {path}", advice)


def _open_files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = "any number" if hard == resource.RLIM_INFINITY else f"{hard:,}"
    found = "any number" if soft == resource.RLIM_INFINITY else f"{soft:,} (at most {most})"
    is_few = soft != resource.RLIM_INFINITY and soft < _FEW_FILES
    return Check("open files", found, f"ulimit -n {_FEW_FILES}" if is_few else "")


def _disk(folder: Path) -> Check:
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    found = f"{_gib(shutil.disk_usage(there).free)} free at {folder}"
    if not os.access(there, os.W_OK):
        return Check("disk", found, f"make {there} writable, or name another folder with --run-dir")
    is_little = shutil.disk_usage(there).free < _LITTLE_DISK
    return Check("disk", found, "free some, or name another folder with --run-dir" if is_little else "")


def _host_name() -> Check:
    """Look the host's own name up, in a thread: a name server that does not answer takes half a minute."""
    name, found = socket.gethostname(), list[str]()

    def look_up() -> None:
        with contextlib.suppress(OSError):
            found.append(str(socket.getaddrinfo(name, None)[0][4][0]))

    thread = threading.Thread(target=look_up, daemon=True)
    thread.start()
    thread.join(_LOOK_UP_S)
    if found:
        return Check("host name", f"{name} is {found[0]}")
    return Check(
        "host name", f"{name} has no address", f"add `127.0.0.1 {name}` to /etc/hosts, or ask who runs the DNS"
    )


def _loopback() -> Check:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=_LOOK_UP_S).close()
    except OSError as error:
        advice = "bring it up (ip link set lo up): ranks on one machine meet there"
        return Check("loopback", f"127.0.0.1 cannot be reached: {error.strerror or error}", advice)
    return Check("loopback", "127.0.0.1 can be reached")


def _launcher(environ: Mapping[str, str]) -> Check:
    names = [name for name in (*_LAUNCHERS, *_SLURM) if name in environ]
    found = ", ".join(f"{name}={environ[name]}" for name in names)
    try:
        world = world_from_environ(environ)
    except PacelineError as error:
        return Check("launcher", found, str(error))
    if world.launcher != "single":
        return Check("launcher", f"{world.launcher}: rank {world.rank} of {world.world_size} ({found})")
    is_batch = "SLURM_JOB_ID" in environ
    advice = "start with srun: a batch script itself is warned too late to save" if is_batch else ""
    return Check("launcher", found or "none: --ranks says how many processes", advice)


def _interface(environ: Mapping[str, str]) -> Check:
    known = {name for _, name in socket.if_nameindex()}
    asked = {name: environ[name] for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if name in environ}
    found = ", ".join(f"{name}={value}" for name, value in asked.items()) or f"chosen among {', '.join(sorted(known))}"
    plain = asked.get("GLOO_SOCKET_IFNAME", "")
    wrong = [each for each in plain.split(",") if each and each not in known]
    return Check("network", found, f"set GLOO_SOCKET_IFNAME to one of {', '.join(sorted(known))}" if wrong else "")


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / _GIB:,.1f} GiB"
