"""What the GPUs of a node are doing, by NVML, NVIDIA's management library: of all processes, not of this one alone.

https://docs.nvidia.com/deploy/nvml-api/. The Python package is `nvidia-ml-py`, its module `pynvml`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, final


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
