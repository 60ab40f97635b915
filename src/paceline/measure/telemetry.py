"""Sample CPU, memory, disks, network and GPUs of a node in a background thread."""

import contextlib
import importlib
import os
import threading
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, Self, TypeVar, final

from paceline.core.host import CgroupLimits, find_limits
from paceline.core.process import cpu_ticks, descendants
from paceline.core.units import Duration
from paceline.measure.energy import EnergyMeter, Kind, find_gpu_counters, find_rapl_counters
from paceline.measure.throughput import unix_s
from paceline.measure.timer import now_s

T = TypeVar("T")
SYS: Final = Path("/sys")
Counters = dict[str, dict[str, int]]
"""Bytes since the node started, by rate and device."""
SAMPLES_PER_DOUBLING: Final = 1000
"""The sampling interval doubles after this many samples."""
LAST_SAMPLE_S: Final = 2.0
"""Time limit for the last sample at the end of a run: a driver whose GPU is lost may never return."""
_MIN_INTERVAL_S: Final = 0.5
"""Minimum seconds between the last two samples; rates over less are noise."""
_ENERGY_INTERVAL_S: Final = 120.0
"""Maximum seconds between two readings of energy counters. One of 32 bits passes its limit of 65 kJ after three minutes
at 360 W, and usual ones of 262 kJ after twelve."""
WriteRow = Callable[[dict[str, Any]], None]
"""Write a row: `unix_s`, the values of `NodeSampler.sample`, and in `gpus` the rows of `NvmlSampler.sample`."""


class CoreTime(NamedTuple):
    """Cumulative CPU seconds: used, and available."""

    busy_s: float
    available_s: float


def read_core_time(psutil: Any, numbers: Sequence[int]) -> CoreTime:
    """Return the CPU seconds of the cores with these `numbers` (none: all cores), used by any process."""
    cores = [core._asdict() for core in psutil.cpu_times(percpu=True)]
    if numbers and max(numbers) < len(cores):  # else some are off, and the list does not say which
        cores = [cores[number] for number in numbers]
    # Time of guests is in user and nice already: proc(5), /proc/stat.
    total_s = sum(s for core in cores for kind, s in core.items() if kind not in ("guest", "guest_nice"))
    return CoreTime(total_s - sum(core["idle"] + core.get("iowait", 0.0) for core in cores), total_s)


@final
class NvmlSampler:
    """Sample the GPUs of `handles`, keyed by NVML's indices; `nvml` is the initialized module `pynvml`."""

    def __init__(self, nvml: Any, handles: Mapping[int, Any]) -> None:
        self._nvml = nvml
        self._handles = dict(handles)
        self._names = {index: _read_or_none(nvml.nvmlDeviceGetName, handle) for index, handle in handles.items()}

    def sample(self) -> list[dict[str, Any]]:
        """Return a row per GPU; `utilisation` is the share of up to a second in which any kernel ran, 0 to 1."""
        return [self._row(index, handle) for index, handle in self._handles.items()]

    def energy_readers(self) -> dict[int, Callable[[], int]]:
        """Return functions that read the millijoules since the driver was loaded, by `gpu_id` of the GPU."""
        uuids = {handle: _read_or_none(self._nvml.nvmlDeviceGetUUID, handle) for handle in self._handles.values()}
        read = self._nvml.nvmlDeviceGetTotalEnergyConsumption
        return {gpu_id(uuid): partial(read, handle) for handle, uuid in uuids.items() if isinstance(uuid, str)}

    def close(self) -> None:
        """Release the library."""
        _read_or_none(self._nvml.nvmlShutdown)

    def _row(self, index: int, handle: Any) -> dict[str, Any]:
        nvml = self._nvml
        rates = _read_or_none(nvml.nvmlDeviceGetUtilizationRates, handle)
        power_mw = _read_or_none(nvml.nvmlDeviceGetPowerUsage, handle)
        memory = _read_or_none(nvml.nvmlDeviceGetMemoryInfo, handle)
        row = {
            "index": index,
            "name": self._names[index],
            "utilisation": None if rates is None else rates.gpu / 100,
            "power_w": None if power_mw is None else power_mw / 1000,
            "sm_clock_mhz": _read_or_none(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
            "memory_used_bytes": None if memory is None else memory.used,
            "memory_total_bytes": None if memory is None else memory.total,
            "temperature_c": _read_or_none(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
        }
        return {name: value for name, value in row.items() if value is not None}


def gpu_id(uuid: str) -> int:
    """Return a number for a GPU's UUID, which torch writes without the `GPU-` of NVML."""
    return zlib.crc32(uuid.removeprefix("GPU-").lower().encode())


def build_gpu_sampler(
    wanted: Sequence[int] | Literal["all"], load: Callable[[str], Any]
) -> tuple[NvmlSampler | None, str]:
    """Return the sampler of the `wanted` GPUs (NVML's indices), or None and the reason."""
    if not wanted:
        return None, ""
    try:
        nvml = load("pynvml")
    except ImportError:
        return None, "nvidia-ml-py is not installed (pip install 'paceline[telemetry]')"
    try:
        nvml.nvmlInit()
        indices = range(nvml.nvmlDeviceGetCount()) if wanted == "all" else wanted
        handles = {index: _read_or_none(nvml.nvmlDeviceGetHandleByIndex, index) for index in indices}
    except nvml.NVMLError as error:
        return None, f"NVML: {error}"
    return NvmlSampler(nvml, {index: handle for index, handle in handles.items() if handle is not None}), ""


def _read_or_none(read: Callable[..., T], *arguments: Any) -> T | None:
    try:
        return read(*arguments)
    except Exception:  # psutil and NVML raise nearly anything on kernels, containers and GPUs that lack a value
        return None


class _NodeSample(NamedTuple):
    """Cumulative counts at `at_s` seconds."""

    at_s: float
    cpu: CoreTime | None
    own_s: float
    counters: Counters


@final
class NodeSampler:
    """Sample a node on which the processes `ranks` belong to a run; unknown values are left out.

    `psutil` is that module, `now` a monotonic clock in seconds, `sys` the mount point of sysfs.
    """

    def __init__(
        self, psutil: Any, ranks: Sequence[int], limits: CgroupLimits, now: Callable[[], float], sys: Path = SYS
    ) -> None:
        self._psutil, self._limits, self._now, self._sys = psutil, limits, now, sys
        self._pids, self._ticks_per_s = tuple(ranks), os.sysconf("SC_CLK_TCK")
        found = (_read_or_none(psutil.Process, pid) for pid in ranks)
        self._ranks = [rank for rank in found if rank is not None]
        numbers = sorted(
            {core for rank in self._ranks for core in _read_or_none(lambda rank=rank: rank.cpu_affinity()) or ()}
        )
        self._cores = numbers
        self._has_tight_quota = limits.cores < (len(numbers) or psutil.cpu_count() or 1)
        self._before = self._count()

    def sample(self) -> dict[str, Any]:
        """Return the state of the node, and rates since the last sample.

        `cpu` is the busy share, 0 to 1, of the cores that the ranks may use, by any process, or of a tighter CPU quota;
        `others_cpu` the part of it outside of the ranks and their descendants. `memory_bytes` of `memory_total_bytes`
        cannot be had without swapping; in a container with a limit, its own. `ranks_memory_bytes` is the resident
        memory of the ranks without loader workers. Disk and network rates are bytes per second.
        """
        before, self._before = self._before, self._count()
        after = self._before
        passed_s = after.at_s - before.at_s
        row = {**_cpu_shares(before, after), **self._memory()}
        if passed_s > 0:
            row |= {
                name: round(moved / passed_s) for name, moved in _bytes_moved(before.counters, after.counters).items()
            }
        return {name: value for name, value in row.items() if value is not None}

    def _count(self) -> _NodeSample:
        own_s = sum(cpu_ticks(pid) for rank in self._pids for pid in (rank, *descendants(rank))) / self._ticks_per_s
        return _NodeSample(
            self._now(),
            _read_or_none(self._core_time),
            own_s,
            {**(_read_or_none(self._disks) or {}), **(_read_or_none(self._network) or {})},
        )

    def _core_time(self) -> CoreTime:
        if self._has_tight_quota:
            return CoreTime(self._limits.cpu_s(), self._now() * self._limits.cores)
        return read_core_time(self._psutil, self._cores)

    def _memory(self) -> dict[str, int | None]:
        machine = _read_or_none(self._psutil.virtual_memory)
        used_bytes, total_bytes = (machine.total - machine.available, machine.total) if machine else (None, None)
        if machine and self._limits.memory_bytes < machine.total:
            used_bytes, total_bytes = _read_or_none(self._limits.used_memory_bytes), round(self._limits.memory_bytes)
        # Without loader workers: they share most memory with their rank, and separating it takes the kernel longer than
        # all other values together.
        resident = [_read_or_none(rank.memory_info) for rank in self._ranks]
        ranks_bytes = sum(each.rss for each in resident if each)
        return {
            "memory_bytes": used_bytes,
            "memory_total_bytes": total_bytes,
            "ranks_memory_bytes": ranks_bytes or None,
        }

    def _disks(self) -> Counters:
        disks = self._psutil.disk_io_counters(perdisk=True, nowrap=False) or {}  # nowrap takes a lock
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
        # A volume, bond or bridge would count the bytes of its devices again.
        known = list(names)
        physical = [name for name in known if (self._sys / folder / name.replace("/", "!") / "device").exists()]
        return physical or known


def _cpu_shares(before: _NodeSample, after: _NodeSample) -> dict[str, float]:
    if before.cpu is None or after.cpu is None:
        return {}
    available_s = after.cpu.available_s - before.cpu.available_s
    if available_s <= 0:  # the kernel's 10 ms clock has not advanced
        return {}
    busy_s = after.cpu.busy_s - before.cpu.busy_s
    seconds = {"cpu": busy_s}
    if before.own_s:
        seconds["others_cpu"] = busy_s - max(0.0, after.own_s - before.own_s)
    # A quota may be exceeded for a moment.
    return {name: round(min(1.0, max(0.0, used_s / available_s)), 4) for name, used_s in seconds.items()}


def _bytes_moved(before: Counters, after: Counters) -> dict[str, int]:
    # A device that appeared, vanished or was reset in between counts 0.
    return {
        name: sum(max(0, num_bytes - before[name].get(device, num_bytes)) for device, num_bytes in devices.items())
        for name, devices in after.items()
        if name in before and devices
    }


@final
class NodeTelemetry:
    """Sample `node` and `gpus` every `every_s` seconds, and pass the row to `write`, which may raise `OSError`.

    The interval doubles after each `SAMPLES_PER_DOUBLING` samples, counting `samples_before` of earlier processes. Rows
    that cannot be written give one `warn`, from the sampling thread. The end of the context takes a last sample, and
    waits up to `last_sample_s` seconds for it. `missing` is what is not sampled though requested, and why. `energy` is
    counted from the start of this object.
    """

    def __init__(
        self,
        node: NodeSampler,
        gpus: NvmlSampler | None,
        every_s: float,
        write: WriteRow,
        warn: Callable[[str], None],
        *,
        missing: str = "",
        energy: EnergyMeter | None = None,
        samples_before: int = 0,
        now: Callable[[], float] = now_s,
        last_sample_s: float = LAST_SAMPLE_S,
    ) -> None:
        self.missing, self.energy = missing, energy or EnergyMeter()
        self._node, self._gpus, self._every_s, self._write, self._warn = node, gpus, every_s, write, warn
        self._now, self._last_sample_s = now, last_sample_s
        self._num_samples = samples_before
        self._has_failed = False
        self._closes = threading.Event()
        # A daemon: a driver that hangs must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name="paceline-telemetry", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closes.set()
        self._thread.join(self._last_sample_s)

    def _run(self) -> None:
        with contextlib.closing(self._gpus) if self._gpus else contextlib.nullcontext():
            sampled_s = self._now()
            while not self._wait(sample_interval_s(self._every_s, self._num_samples)):
                sampled_s = self._now()
                self._write_sample()
            # A last sample at the end, so that a run shorter than the interval has one.
            if self._now() - sampled_s >= _MIN_INTERVAL_S:
                self._write_sample()

    def _wait(self, interval_s: float) -> bool:
        """Wait for the next sample, and return whether there is none; read energy counters meanwhile."""
        while interval_s > _ENERGY_INTERVAL_S:
            if self._closes.wait(_ENERGY_INTERVAL_S):
                return True
            self.energy.update()
            interval_s -= _ENERGY_INTERVAL_S
        return self._closes.wait(interval_s)

    def _write_sample(self) -> None:
        self._num_samples += 1
        sampled = {**self._node.sample(), **self.energy.sample()}
        row = {"unix_s": round(unix_s(), 3), **sampled, "gpus": self._gpus.sample() if self._gpus else []}
        try:
            self._write(row)
        except OSError as error:
            if not self._has_failed:
                what = error.strerror or str(error)
                self._warn(f"measure.telemetry: a sample cannot be written: {what} (training goes on)")
            self._has_failed = True


def sample_interval_s(every_s: float, num_samples: int) -> float:
    """Return the seconds until the next sample, after `num_samples` samples."""
    return every_s * 2.0 ** min(num_samples // SAMPLES_PER_DOUBLING, 20)  # 60 days at 5 s; longer waits overflow


def build_telemetry(
    every: Duration | Literal["off"],
    write: WriteRow,
    warn: Callable[[str], None],
    *,
    ranks: Sequence[int] = (),
    gpus: Sequence[int] | Literal["all"] = "all",
    used_gpus: Collection[int] = (),
    energy_before_j: Mapping[Kind, float] | None = None,
    samples_before: int = 0,
    sys: Path = SYS,
    load: Callable[[str], Any] = importlib.import_module,
) -> NodeTelemetry | None:
    """Return the telemetry of this node, None if `measure.telemetry` is off.

    `ranks` are the process ids of the run's ranks on this node (none: this process), `gpus` NVML's indices of the GPUs
    to sample, `used_gpus` the `gpu_id` of those that the ranks use, of which energy is counted. `energy_before_j` and
    `samples_before` are of rows that earlier processes of the run wrote. `load` imports a module by name.
    """
    if every == "off":
        return None
    gpu_sampler, missing = build_gpu_sampler(gpus, load)
    node = NodeSampler(load("psutil"), ranks or (os.getpid(),), find_limits(), now_s)
    energy = _build_energy_meter(gpu_sampler, missing, used_gpus, energy_before_j, sys)
    return NodeTelemetry(
        node, gpu_sampler, every.seconds, write, warn, missing=missing, energy=energy, samples_before=samples_before
    )


def _build_energy_meter(
    gpus: NvmlSampler | None, no_gpus: str, used: Collection[int], before_j: Mapping[Kind, float] | None, sys: Path
) -> EnergyMeter:
    of_gpus, no_gpu = find_gpu_counters(gpus.energy_readers(), used) if gpus and used else ([], no_gpus)
    of_cpus, no_cpu = find_rapl_counters(sys)
    return EnergyMeter([*of_gpus, *of_cpus], {"gpu": no_gpu, "cpu": no_cpu}, before_j)
