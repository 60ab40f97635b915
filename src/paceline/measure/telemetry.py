"""Sample CPU, memory, disks, network and GPUs of a node in the background, ever more rarely as a run grows."""

import contextlib
import importlib
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, Protocol, Self, TypeVar, final

from paceline.core.host import CgroupLimits, find_limits
from paceline.core.process import cpu_ticks, descendants
from paceline.core.units import Duration
from paceline.measure.cpu import CoreTime, build_core_time_reader, busy_share
from paceline.measure.throughput import unix_s
from paceline.measure.timer import now_s


class GpuSampler(Protocol):
    """Look at GPUs."""

    def sample(self) -> list[dict[str, Any]]:
        """Return a row a GPU; a value that cannot be had is left out."""
        ...

    def close(self) -> None:
        """Let go of the library."""
        ...


class NoGpuSampler:
    """For nodes without any, and runs that use none."""

    def sample(self) -> list[dict[str, Any]]:
        """Return none."""
        return []

    def close(self) -> None:
        """Do nothing."""


@final
class NvmlSampler:
    """Look at the GPUs of `handles`, which are by NVML's own numbers; `nvml` is module `pynvml`, already begun.

    `utilisation` is the share of the last moments, up to a second, in which a kernel ran at all, 0 to 1.
    """

    def __init__(self, nvml: Any, handles: Mapping[int, Any]) -> None:
        self._nvml = nvml
        self._handles = dict(handles)
        self._names = {index: _read_or_none(nvml, nvml.nvmlDeviceGetName, handle) for index, handle in handles.items()}

    def sample(self) -> list[dict[str, Any]]:
        """Return `index`, `name`, `utilisation`, `power_w`, `sm_clock_mhz`, `memory_used_bytes`,
        `memory_total_bytes` and `temperature_c` of each."""
        return [self._row(index, handle) for index, handle in self._handles.items()]

    def close(self) -> None:
        """Let go of the library."""
        _read_or_none(self._nvml, self._nvml.nvmlShutdown)

    def _row(self, index: int, handle: Any) -> dict[str, Any]:
        nvml = self._nvml
        rates = _read_or_none(nvml, nvml.nvmlDeviceGetUtilizationRates, handle)
        power_mw = _read_or_none(nvml, nvml.nvmlDeviceGetPowerUsage, handle)
        memory = _read_or_none(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
        row = {
            "index": index,
            "name": self._names[index],
            "utilisation": None if rates is None else rates.gpu / 100,
            "power_w": None if power_mw is None else power_mw / 1000,
            "sm_clock_mhz": _read_or_none(nvml, nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
            "memory_used_bytes": None if memory is None else memory.used,
            "memory_total_bytes": None if memory is None else memory.total,
            "temperature_c": _read_or_none(nvml, nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
        }
        return {name: value for name, value in row.items() if value is not None}


def build_gpu_sampler(wanted: Sequence[int] | Literal["all"], load: Callable[[str], Any]) -> tuple[GpuSampler, str]:
    """Return what looks at the `wanted` GPUs, by NVML's numbers, and why it does not where it does not.

    `load` imports a module by its name.
    """
    if not wanted:
        return NoGpuSampler(), ""
    try:
        nvml = load("pynvml")
    except ImportError:
        return NoGpuSampler(), "nvidia-ml-py is not installed (pip install 'paceline[telemetry]')"
    try:
        nvml.nvmlInit()
        indices = range(nvml.nvmlDeviceGetCount()) if wanted == "all" else wanted
        handles = {index: _read_or_none(nvml, nvml.nvmlDeviceGetHandleByIndex, index) for index in indices}
    except nvml.NVMLError as error:
        return NoGpuSampler(), f"NVML: {error}"
    return NvmlSampler(nvml, {index: handle for index, handle in handles.items() if handle is not None}), ""


def _read_or_none(nvml: Any, read: Callable[..., Any], *arguments: Any) -> Any:
    """Return the answer to `read`, or None where the GPU or its driver has none."""
    try:
        return read(*arguments)
    except nvml.NVMLError:
        return None


SYS: Final = Path("/sys")
Counters = dict[str, dict[str, int]]
"""Bytes since the node was started, by rate and device."""
T = TypeVar("T")


class _NodeSample(NamedTuple):
    """What had been counted, after `at_s` seconds."""

    at_s: float
    cpu: CoreTime | None
    own_s: float
    counters: Counters


@final
class NodeSampler:
    """Look at a node, of which processes `ranks` are those of a run; a value that cannot be had is left out.

    `psutil` is that module, `now` seconds of a clock that is never set, and `sys` the kernel's tree of devices.
    """

    def __init__(
        self, psutil: Any, ranks: Sequence[int], limits: CgroupLimits, now: Callable[[], float], sys: Path = SYS
    ) -> None:
        self._psutil, self._limits, self._now, self._sys = psutil, limits, now, sys
        self._pids, self._ticks_per_s = tuple(ranks), os.sysconf("SC_CLK_TCK")
        found = (_read_or_empty(psutil.Process, pid) for pid in ranks)
        self._ranks = [rank for rank in found if rank is not None]
        numbers = sorted(
            {core for rank in self._ranks for core in _read_or_empty(lambda rank=rank: rank.cpu_affinity()) or ()}
        )
        self._cpu = build_core_time_reader(psutil, numbers, limits, now)
        self._before = self._count()

    def sample(self) -> dict[str, Any]:
        """Return what the node is doing, and what it has done since the last look.

        `cpu` is the busy share, 0 to 1, of the cores that the ranks may use, whoever is busy there; or, where a quota
        of CPU time is tighter, the share of that. `others_cpu` is what of it was neither the ranks nor processes below
        them. `read_memory_bytes`, of `memory_total_bytes`, is what can be had by
        swapping alone; of a container with a limit, its own. `ranks_memory_bytes` is what is resident of the ranks
        themselves. Their loaders' workers are not in it: most of their memory is the ranks' own, and to tell it apart
        takes the kernel longer than all the rest. Disks and network are in bytes a second, of the physical devices
        where those are known, else of all but the loopback.
        """
        before, self._before = self._before, self._count()
        after = self._before
        passed_s = after.at_s - before.at_s
        row = {
            "cpu": _busy_share(before.cpu, after.cpu),
            "others_cpu": _other_processes_share(before, after),
            **self._memory(),
        }
        if passed_s > 0:
            row |= {
                name: round(moved / passed_s) for name, moved in _bytes_moved(before.counters, after.counters).items()
            }
        return {name: value for name, value in row.items() if value is not None}

    def _count(self) -> _NodeSample:
        own_s = sum(cpu_ticks(pid) for rank in self._pids for pid in (rank, *descendants(rank))) / self._ticks_per_s
        return _NodeSample(
            self._now(),
            _read_or_empty(self._cpu),
            own_s,
            {**(_read_or_empty(self._disks) or {}), **(_read_or_empty(self._network) or {})},
        )

    def _memory(self) -> dict[str, int | None]:
        machine = _read_or_empty(self._psutil.virtual_memory)
        used_bytes, total_bytes = (machine.total - machine.available, machine.total) if machine else (None, None)
        if machine and self._limits.memory_bytes < machine.total:
            used_bytes, total_bytes = _read_or_empty(self._limits.used_memory_bytes), round(self._limits.memory_bytes)
        resident = [_read_or_empty(rank.memory_info) for rank in self._ranks]
        ranks_bytes = sum(each.rss for each in resident if each)
        return {
            "memory_bytes": used_bytes,
            "memory_total_bytes": total_bytes,
            "ranks_memory_bytes": ranks_bytes or None,
        }

    def _disks(self) -> Counters:
        disks = self._psutil.disk_io_counters(perdisk=True, nowrap=False) or {}  # nowrap would take a lock
        real = self._physical(disks, "block")
        return {
            "disk_read_bytes_per_s": {name: disks[name].read_bytes for name in real},
            "disk_written_bytes_per_s": {name: disks[name].write_bytes for name in real},
        }

    def _network(self) -> Counters:
        cards = self._psutil.net_io_counters(pernic=True, nowrap=False) or {}
        real = self._physical((name for name in cards if name not in ("lo", "lo0")), "class/net")
        return {
            "net_sent_bytes_per_s": {name: cards[name].bytes_sent for name in real},
            "net_received_bytes_per_s": {name: cards[name].bytes_recv for name in real},
        }

    def _physical(self, names: Iterable[str], folder: str) -> list[str]:
        """Return the physical devices, whose bytes a volume, bond or bridge above them counts again; else all."""
        known = list(names)
        physical = [name for name in known if (self._sys / folder / name.replace("/", "!") / "device").exists()]
        return physical or known


def _busy_share(before: CoreTime | None, after: CoreTime | None) -> float | None:
    busy = busy_share(before, after) if before and after else None
    return None if busy is None else round(busy, 4)


def _other_processes_share(before: _NodeSample, after: _NodeSample) -> float | None:
    """Return the share of the cores that was kept busy by others; None where a rank's own time is not known."""
    if before.cpu is None or after.cpu is None or not before.own_s:
        return None
    there_were_s = after.cpu.available_s - before.cpu.available_s
    others_s = after.cpu.busy_s - before.cpu.busy_s - max(0.0, after.own_s - before.own_s)
    return round(min(1.0, max(0.0, others_s / there_were_s)), 4) if there_were_s > 0 else None


def _bytes_moved(before: Counters, after: Counters) -> dict[str, int]:
    """Return the bytes of all devices; one that has come, gone or been reset in between has moved none."""
    return {
        name: sum(max(0, num_bytes - before[name].get(device, num_bytes)) for device, num_bytes in devices.items())
        for name, devices in after.items()
        if name in before and devices
    }


def _read_or_empty(read: Callable[..., T], *arguments: Any) -> T | None:
    """Return the answer to `read`, or None where it has none."""
    try:
        return read(*arguments)
    except Exception:  # a kernel that tells other facts, or none, makes psutil raise nearly anything
        return None


SAMPLES_PER_DOUBLING: Final = 1000
"""After so many looks the time between two of them is doubled."""
LAST_SAMPLE_S: Final = 2.0
"""How long the end of a run waits for a look that has begun: a driver whose GPU is lost may not return at all."""
_MIN_INTERVAL_S: Final = 0.5
"""Seconds that the last look is after the one before at least; rates of fewer are a matter of chance."""

WriteRow = Callable[[dict[str, Any]], None]
"""Take a row: `unix_s`, the values of `NodeSampler.sample`, and in `gpus` the rows of `NvmlSampler.sample`."""


class Telemetry(Protocol):
    """Look at the node between `start` and `close`; also a context."""

    missing: str
    """What is not looked at though it was asked for, and why; mostly nothing."""

    def start(self) -> None:
        """Begin to look."""
        ...

    def close(self) -> None:
        """Look a last time, and no more."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...


@final
class NoTelemetry:
    """Look at nothing."""

    def __init__(self, missing: str = "") -> None:
        self.missing = missing

    def start(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass


@final
class NodeTelemetry:
    """Look at `node` and `gpus` every `every_s` seconds, and hand the row to `write`, which may raise `OSError`.

    After each `SAMPLES_PER_DOUBLING` looks, with the `looks_before` of earlier processes, that time is doubled.

    One `warn`, from the thread that looks, stands for all rows that `write` refuses. The last look is at the end, so
    that a run that is shorter than `every_s` has one; `close` waits `last_look_s` seconds for it.
    """

    def __init__(
        self,
        node: NodeSampler,
        gpus: GpuSampler,
        every_s: float,
        write: WriteRow,
        warn: Callable[[str], None],
        *,
        missing: str = "",
        looks_before: int = 0,
        now: Callable[[], float] = now_s,
        last_look_s: float = LAST_SAMPLE_S,
    ) -> None:
        self.missing = missing
        self._node, self._gpus, self._every_s, self._write, self._warn = node, gpus, every_s, write, warn
        self._now, self._last_look_s = now, last_look_s
        self._num_looks = looks_before
        self._has_failed = False
        self._closes = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-telemetry", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def close(self) -> None:
        """Look a last time, and wait for that, but not for ever."""
        self._closes.set()
        self._thread.join(self._last_look_s)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _run(self) -> None:
        with contextlib.closing(self._gpus):
            looked_s = self._now()
            while not self._closes.wait(sample_interval_s(self._every_s, self._num_looks)):
                looked_s = self._now()
                self._write_sample()
            if self._now() - looked_s >= _MIN_INTERVAL_S:
                self._write_sample()

    def _write_sample(self) -> None:
        self._num_looks += 1
        row = {"unix_s": round(unix_s(), 3), **self._node.sample(), "gpus": self._gpus.sample()}
        try:
            self._write(row)
        except OSError as error:
            if not self._has_failed:
                what = error.strerror or str(error)
                self._warn(f"measure.telemetry: a look cannot be written: {what} (training goes on)")
            self._has_failed = True


def sample_interval_s(every_s: float, num_looks: int) -> float:
    """Return how many seconds to wait for the next look, after `num_looks`."""
    return every_s * 2.0 ** min(num_looks // SAMPLES_PER_DOUBLING, 20)  # 60 days at 5 s; a thread cannot wait for ever


def build_telemetry(
    every: Duration | Literal["off"],
    write: WriteRow,
    warn: Callable[[str], None],
    *,
    ranks: Sequence[int] = (),
    gpus: Sequence[int] | Literal["all"] = "all",
    looks_before: int = 0,
    load: Callable[[str], Any] = importlib.import_module,
) -> Telemetry:
    """Return what looks at this node; nothing where `measure.telemetry` is off or psutil is not installed.

    `ranks` are the process ids of the run's ranks on this node (none: this process), `gpus` NVML's numbers of the
    GPUs to look at, none for a run on the CPU; `looks_before` are the rows that earlier processes of the run have
    written. `load` imports a module by its name.
    """
    if every == "off":
        return NoTelemetry()
    try:
        psutil = load("psutil")
    except ImportError:
        return NoTelemetry("psutil is not installed (pip install 'paceline[telemetry]')")
    looks_at, missing = build_gpu_sampler(gpus, load)
    node = NodeSampler(psutil, ranks or (os.getpid(),), find_limits(), now_s)
    return NodeTelemetry(node, looks_at, every.seconds, write, warn, missing=missing, looks_before=looks_before)
