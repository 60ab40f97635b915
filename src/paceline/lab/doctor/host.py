"""Check one machine by a table of checks: packages, cores, GPUs, memory, limits, run directory and network."""

import contextlib
import os
import platform
import resource
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from paceline import __version__
from paceline.core.host import INFINITY, find_limits, rank_cores
from paceline.core.pixels import PixelFormat
from paceline.core.process import cpu_ticks, descendants
from paceline.core.units import count, share, size
from paceline.data.files import printable
from paceline.data.native import NATIVE_MISSING_MESSAGE, load_native
from paceline.data.workers import estimate_batch_bytes
from paceline.lab.doctor.check import (
    DoctorFinding,
    HostContext,
    Outcome,
    call_with_timeout,
    failure,
    format_os_error,
    ok,
    warning,
)
from paceline.lab.doctor.network import check_gloo, check_host_name, check_launcher, check_port
from paceline.measure.bottleneck import LOST_CPU_SHARE
from paceline.measure.machine import read_driver_version
from paceline.measure.telemetry import read_core_time
from paceline.parallel.binding import read_cores
from paceline.parallel.environ import count_gpus, has_own_gpu

_SAMPLE_S: Final = 0.5
"""Sampling time of the cores: 50 clock ticks each."""
_LOW_MEMORY_BYTES: Final = 2 * 2**30
_LOW_SHM_BYTES: Final = 2**29
"""Containers have 64 MiB by default: enough for one worker as below, but not for NCCL or larger images."""
_TYPICAL_BATCH_BYTES: Final = 2 * estimate_batch_bytes(64, PixelFormat(3), 224)
"""A rank's training and evaluation batch of 64 images of 224 px each."""
_PREFETCHED_BATCHES: Final = 2
"""Batches that a worker prefetches (`BATCHES_PER_WORKER` of `data.loaders.process`, which imports torch)."""
_MAX_WORKERS: Final = 16
_BASE_FILES: Final = 64
"""Files of a rank besides those below: the program's own, checkpoints, logs, images."""
_FILES_PER_WORKER: Final = 24
"""As in `data.workers.estimate_batch_bytes`: a training and an evaluation worker, and their batches."""
_RENDEZVOUS_FILES: Final = 21
_FILES_PER_RANK: Final = 2
"""Files of gloo: 21 + 2n for n ranks, measured with torch 2.15 by counting /proc/self/fd."""
_LOW_DISK_BYTES: Final = 5 * 10**9
_DISK_TIMEOUT_S: Final = 10.0
_MAX_GPU_MEMORY_SHARE: Final = 0.2
"""Share of a GPU's memory: a driver uses less than 1 %, and a process with a context about 0.5 GB."""
_HARDWARE_SLOWDOWN: Final = 0x8 | 0x20 | 0x40 | 0x80
"""nvmlClocksEventReason: HwSlowdown, SwThermalSlowdown, HwThermalSlowdown and HwPowerBrakeSlowdown.

Other reasons, such as an idle GPU or its power limit, are no fault. https://docs.nvidia.com/deploy/nvml-api/
"""


def check_host(host: HostContext) -> Iterator[DoctorFinding]:
    """Yield the findings on this machine, in the order in which a run would depend on them."""
    for name, check in HOST_CHECKS:
        outcome = check(host)
        if outcome is not None:
            yield DoctorFinding(name, *outcome)


def check_versions(host: HostContext) -> Outcome:
    """Check that the packages of a run are installed."""
    found, missing = [f"Python {platform.python_version()}", f"paceline {__version__}"], []
    for name in ("torch", "torchvision", "numpy"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            missing.append(name)
    if missing:
        return failure(f"{', '.join(found)}; no {', '.join(missing)}", "pip install paceline")
    return ok(", ".join(found))


def check_cores(host: HostContext) -> Outcome:
    """Check that affinity and CPU quota leave every rank of this machine a core."""
    usable, ranks = len(os.sched_getaffinity(0)), host.world.local_world_size
    found = f"{usable} of {os.cpu_count() or 1} usable"
    # A quota of whole cores works as fewer cores; a fraction throttles all threads for a part of each period.
    quota = find_limits(host.root / "proc", host.root / "sys/fs/cgroup").cores
    if quota < usable and (quota < ranks or quota % 1):
        return warning(
            f"{found}, but only {quota:g} s of CPU time per second{f' for {ranks} ranks' if ranks > 1 else ''}",
            "give the container or job whole cores, at least one per rank (docker --cpuset-cpus, an integer "
            f"Kubernetes limit); paceline uses {max(1, int(quota))}, and more would be throttled",
        )
    found += f", {quota:g} s of CPU time per second" if quota < usable else ""
    requested = host.get_env_int("SLURM_CPUS_PER_TASK", 0)
    if usable < requested and host.world.launcher == "slurm":
        advice = "start with srun --cpus-per-task=$SLURM_CPUS_PER_TASK, which srun no longer takes from the job"
        return warning(f"{found}, but {requested} per task were requested from Slurm", advice)
    # Ranks bound to cores have different ones each, so look at the launcher's affinity, too.
    together = max(usable, host.world.allocated_cpus)
    if host.world.launcher in ("local", "torchrun"):
        with contextlib.suppress(ProcessLookupError):  # the parent has exited
            together = max(together, len(os.sched_getaffinity(os.getppid())))
    if ranks > together:
        return warning(f"{found}, for {count(ranks, 'rank')}", f"start {together} per node, or request more")
    nodes = len({core.node for core in read_cores(frozenset(os.sched_getaffinity(0)), host.root / "sys")})
    if nodes > 1 and ranks > 1 and usable == together:
        found += f", on {nodes} NUMA nodes (parallel.bind=auto keeps each rank on one, next to its GPU)"
    return ok(found)


def check_load(host: HostContext) -> Outcome:
    """Check how many of the usable cores other processes, and other virtual machines, keep busy."""
    psutil, cores = host.import_module("psutil"), sorted(os.sched_getaffinity(0))
    before, own_before_s = read_core_time(psutil, cores), _read_own_cpu_s(host)
    threading.Event().wait(_SAMPLE_S)
    after, own_after_s = read_core_time(psutil, cores), _read_own_cpu_s(host)
    available_s = after.available_s - before.available_s
    if available_s <= 0:
        return ok("not reported by the kernel")
    others_s = after.busy_s - before.busy_s - (own_after_s - own_before_s)
    busy_share = min(1.0, max(0.0, others_s / available_s))
    busy_cores, load_average = busy_share * len(cores), os.getloadavg()[0]
    found = f"other processes keep {busy_cores:.1f} of {len(cores)} cores busy ({share(busy_share)})"
    found += f", load average {load_average:.2f}"
    if busy_share < LOST_CPU_SHARE:
        return ok(found)
    return warning(
        found, "stop them, or move off a shared virtual machine, before measuring: a run would share the cores"
    )


def _read_own_cpu_s(host: HostContext) -> float:
    # Ranks that `doctor --ranks` started have the same parent and do not count as other processes.
    top = os.getpid() if host.world.local_world_size == 1 else os.getppid()
    ticks = sum(cpu_ticks(pid) for pid in {os.getpid(), top, *descendants(top)})
    return ticks / os.sysconf("SC_CLK_TCK")


def check_gpus(host: HostContext) -> Outcome:
    """Check that torch sees the GPUs, and that there is one for each rank."""
    present = _count_gpus(host)
    if not present:
        hidden = count_gpus({}, host.root / "dev")
        given = host.get_env_int("SLURM_GPUS_ON_NODE", 0)
        if given:
            advice = "start with srun --gpus-per-node=N or --gpus-per-task=1"
            return warning(f"none, but Slurm allocated {given} on this node", advice)
        named = f" of {hidden} (CUDA_VISIBLE_DEVICES={host.environ.get('CUDA_VISIBLE_DEVICES')!r})" if hidden else ""
        return ok(f"none{named}: runs train on the CPU")
    torch = host.import_module("torch")
    seen, ranks = torch.cuda.device_count(), host.world.local_world_size
    names = ", ".join(sorted({torch.cuda.get_device_name(index) for index in range(seen)}))
    driver, cuda = read_driver_version(host.root / "proc"), torch.version.cuda
    parts = [f"{present} ({names})" if names else str(present)]
    parts += [f"{name} {value}" for name, value in (("driver", driver), ("CUDA", cuda)) if value]
    found = ", ".join(parts)
    if seen < present:
        why = "is built for the driver's CUDA, or renew the driver" if cuda else "is built for GPUs"
        return failure(f"{found}, torch sees {seen}", f"install a torch that {why} (https://pytorch.org/get-started)")
    if ranks > present and not has_own_gpu(host.world, present):
        advice = f"start {present} per node, or request more (with Slurm --gpus-per-node={ranks} or --gpus-per-task=1)"
        return failure(f"{found}, for {count(ranks, 'rank')}", advice)
    return ok(found)


def check_nccl(host: HostContext) -> Outcome | None:
    """Check that torch has NCCL, if there are GPUs."""
    if not _count_gpus(host):
        return None
    torch = host.import_module("torch")
    if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
        advice = "install a torch for CUDA (https://pytorch.org/get-started), or set parallel.backend=gloo, far slower"
        return failure("none in this torch", advice)
    return ok(".".join(str(part) for part in torch.cuda.nccl.version()))


def check_gpu_health(host: HostContext) -> Outcome | None:
    """Check the GPUs by NVML: https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceQueries.html."""
    if not _count_gpus(host):
        return None
    try:
        nvml = host.import_module("pynvml")
    except ImportError:
        return ok("unknown: nvidia-ml-py is not installed (pip install 'paceline[telemetry]')")
    try:
        # The driver may be absent or broken although the library is installed.
        nvml.nvmlInit()
        numbers = _list_visible_gpus(host, nvml.nvmlDeviceGetCount())
        faults = [fault for number in numbers for fault in _iter_gpu_faults(nvml, number)]
        nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        return warning(f"unknown: NVML: {error}", "run nvidia-smi for details")
    if not faults:
        return ok(f"no problems with {count(len(numbers), 'GPU')}")
    return warning("; ".join(found for found, _ in faults), "; ".join(dict.fromkeys(advice for _, advice in faults)))


def _count_gpus(host: HostContext) -> int:
    return count_gpus(host.environ, host.root / "dev")


def _list_visible_gpus(host: HostContext, num: int) -> list[int]:
    # Entries may be UUIDs, which NVML does not number: then check all GPUs.
    entries = host.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    numbers = [int(entry) for entry in entries if entry.strip().isdecimal() and int(entry) < num]
    return numbers if len(numbers) == len(entries) else list(range(num))


def _iter_gpu_faults(nvml: Any, number: int) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with a GPU, and the advice. A query that the GPU does not support finds nothing."""
    gpu, name = nvml.nvmlDeviceGetHandleByIndex(number), f"GPU {number}"
    with contextlib.suppress(nvml.NVMLError):
        memory = nvml.nvmlDeviceGetMemoryInfo(gpu)
        if memory.used > _MAX_GPU_MEMORY_SHARE * memory.total:
            used = f"{size(memory.used)} of {size(memory.total)}"
            yield f"{name}: other programs use {used}", "stop them: nvidia-smi lists them"
    with contextlib.suppress(nvml.NVMLError):
        errors = nvml.nvmlDeviceGetTotalEccErrors(gpu, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
        if errors:
            yield f"{name}: {count(errors, 'uncorrected memory error')}", "have the GPU reset, or leave it out"
    with contextlib.suppress(nvml.NVMLError):
        if nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu) & _HARDWARE_SLOWDOWN:
            yield f"{name} is throttled by its temperature or power supply", "check its cooling and power"


def check_native_core(host: HostContext) -> Outcome:
    """Check that the C extension of the data path was built."""
    core = load_native()
    if core is None:
        lost, _, advice = NATIVE_MISSING_MESSAGE.rpartition(" (")
        return warning(lost, advice.removesuffix(")"))
    return ok(f"built, uses {core.isa()}")


def check_memory(host: HostContext) -> Outcome:
    """Check the free memory of the machine, or of its container or job."""
    memory = host.import_module("psutil").virtual_memory()
    available, total, scope = memory.available, memory.total, ""
    limits = find_limits(host.root / "proc", host.root / "sys/fs/cgroup")
    if limits.memory_bytes < total:
        total, scope = int(limits.memory_bytes), " that this container or job may use"
        with contextlib.suppress(OSError, ValueError):  # the usage is unknown
            available = min(available, max(0, total - limits.used_memory_bytes()))
        available = min(available, total)
    found = f"{size(available)} free of {size(total)}{scope}"
    if available < _LOW_MEMORY_BYTES:
        return warning(found, "stop other programs, request more, or lower data.workers")
    return ok(found)


def check_shared_memory(host: HostContext) -> Outcome:
    """Check that /dev/shm holds the batches of workers, for images of a typical size."""
    folder = host.root / "dev" / "shm"
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return failure(f"no {folder}", "mount a tmpfs there, or set data.workers=0")
    ranks = host.world.local_world_size
    workers = min(_MAX_WORKERS, max(1, _count_rank_cores(host) - 1))
    # Batches of workers travel through shared memory, as do those in preparation.
    usual, least = (ranks * (_PREFETCHED_BATCHES * num + 1) * _TYPICAL_BATCH_BYTES for num in (workers, 1))
    found = f"{size(free)} free in {folder}"
    advice = "start the container with --shm-size=8g (Kubernetes: mount an emptyDir of medium Memory there)"
    if free < least:
        per_rank = f" of each of {ranks} ranks" if ranks > 1 else ""
        needed = f"one worker{per_rank} with batches of 64 images needs {size(least)}"
        return failure(f"{found}; {needed}", f"{advice}, or set data.workers=0")
    if free < max(usual, _LOW_SHM_BYTES):
        needed = f"{count(workers, 'worker')} per rank with batches of 64 images need {size(usual)}"
        return warning(f"{found}; {needed}", f"{advice}, or set data.workers lower")
    return ok(found)


def check_open_files(host: HostContext) -> Outcome:
    """Check the limit of open files against what ranks and workers open."""
    soft, hard = (INFINITY if each == resource.RLIM_INFINITY else each for each in _get_file_limits())
    ranks, workers = host.world.world_size, min(_MAX_WORKERS, _count_rank_cores(host))
    rendezvous_files = _RENDEZVOUS_FILES + _FILES_PER_RANK * ranks if ranks > 1 else 0
    needed = _BASE_FILES + rendezvous_files + _FILES_PER_WORKER * workers
    soft_text, hard_text = ("any number" if each == INFINITY else f"{each:,.0f}" for each in (soft, hard))
    found = f"{soft_text} (at most {hard_text})"
    if hard < needed:
        advice = f"raise it (ulimit -n {needed}; docker --ulimit nofile={needed}), or set data.workers=0"
        return failure(f"{found}; a rank may need {needed:,}", advice)
    if soft < needed:
        return warning(f"{found}; a rank may need {needed:,}", f"ulimit -n {needed}")
    return ok(found)


def _get_file_limits() -> tuple[int, int]:
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def _count_rank_cores(host: HostContext) -> int:
    return rank_cores(host.world, host.root / "proc", host.root / "sys/fs/cgroup")


def check_disk(host: HostContext) -> Outcome:
    """Check that the run directory is writable, on every node, and its free space."""
    folder = printable(host.folder)
    try:
        total, free = call_with_timeout(lambda: _probe_folder(host), _DISK_TIMEOUT_S)
    except OSError as error:
        found = f"{folder} cannot be written to: {format_os_error(error)}"
        return failure(found, "make it writable, or name another folder with --run-dir")
    found = f"{size(free)} free at {folder}"
    if total > 0 and free < _LOW_DISK_BYTES:  # some network file systems report 0 of 0
        return warning(found, "free some, or name another folder with --run-dir")
    return ok(found)


def _probe_folder(host: HostContext) -> tuple[int, int]:
    """Return total and free bytes. Raise `OSError` if no file can be opened there."""
    folder = host.folder.absolute()
    # The run directory may not exist yet, so probe the closest existing parent.
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if host.world.is_node_main:
        # The file has no name, so it vanishes even if this process is killed.
        tempfile.TemporaryFile(prefix=".paceline-", dir=existing).close()
    usage = shutil.disk_usage(existing)
    return usage.total, usage.free


HOST_CHECKS: Final[tuple[tuple[str, Callable[[HostContext], Outcome | None]], ...]] = (
    ("versions", check_versions),
    ("cores", check_cores),
    ("load", check_load),
    ("GPUs", check_gpus),
    ("NCCL", check_nccl),
    ("GPU health", check_gpu_health),
    ("native core", check_native_core),
    ("memory", check_memory),
    ("shared memory", check_shared_memory),
    ("open files", check_open_files),
    ("disk", check_disk),
    ("host name", check_host_name),
    ("gloo", check_gloo),
    ("launcher", check_launcher),
    ("port", check_port),
)
"""Names and functions of all checks of a machine, in the order in which a run would depend on them."""
