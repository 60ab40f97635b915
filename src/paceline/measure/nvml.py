"""What the GPUs of a node are doing, by NVML, NVIDIA's management library: of all processes, not of this one alone.

https://docs.nvidia.com/deploy/nvml-api/. The Python package is `nvidia-ml-py`, its module `pynvml`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, final


class Gpus(Protocol):
    """Look at GPUs."""

    def look(self) -> list[dict[str, Any]]:
        """Return a row a GPU; a value that cannot be had is left out."""
        ...

    def close(self) -> None:
        """Let go of the library."""
        ...


class NoGpus:
    """For nodes without any, and runs that use none."""

    def look(self) -> list[dict[str, Any]]:
        """Return none."""
        return []

    def close(self) -> None:
        """Do nothing."""


@final
class Nvml:
    """Look at the GPUs of `handles`, which are by NVML's own numbers; `nvml` is module `pynvml`, already begun.

    `utilisation` is the share of the last moments, up to a second, in which a kernel ran at all, 0 to 1.
    """

    def __init__(self, nvml: Any, handles: Mapping[int, Any]) -> None:
        self._nvml = nvml
        self._handles = dict(handles)
        self._names = {index: _known(nvml, nvml.nvmlDeviceGetName, handle) for index, handle in handles.items()}

    def look(self) -> list[dict[str, Any]]:
        """Return `index`, `name`, `utilisation`, `power_w`, `sm_clock_mhz`, `memory_used_bytes`,
        `memory_total_bytes` and `temperature_c` of each."""
        return [self._row(index, handle) for index, handle in self._handles.items()]

    def close(self) -> None:
        """Let go of the library."""
        _known(self._nvml, self._nvml.nvmlShutdown)

    def _row(self, index: int, handle: Any) -> dict[str, Any]:
        nvml = self._nvml
        rates = _known(nvml, nvml.nvmlDeviceGetUtilizationRates, handle)
        power_mw = _known(nvml, nvml.nvmlDeviceGetPowerUsage, handle)
        memory = _known(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
        row = {
            "index": index,
            "name": self._names[index],
            "utilisation": None if rates is None else rates.gpu / 100,
            "power_w": None if power_mw is None else power_mw / 1000,
            "sm_clock_mhz": _known(nvml, nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
            "memory_used_bytes": None if memory is None else memory.used,
            "memory_total_bytes": None if memory is None else memory.total,
            "temperature_c": _known(nvml, nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
        }
        return {name: value for name, value in row.items() if value is not None}


def build_gpus(wanted: Sequence[int] | Literal["all"], load: Callable[[str], Any]) -> tuple[Gpus, str]:
    """Return what looks at the `wanted` GPUs, by NVML's numbers, and why it does not where it does not.

    `load` imports a module by its name.
    """
    if not wanted:
        return NoGpus(), ""
    try:
        nvml = load("pynvml")
    except ImportError:
        return NoGpus(), "nvidia-ml-py is not installed (pip install 'paceline[telemetry]')"
    try:
        nvml.nvmlInit()
        indices = range(nvml.nvmlDeviceGetCount()) if wanted == "all" else wanted
        handles = {index: _known(nvml, nvml.nvmlDeviceGetHandleByIndex, index) for index in indices}
    except nvml.NVMLError as error:
        return NoGpus(), f"NVML: {error}"
    return Nvml(nvml, {index: handle for index, handle in handles.items() if handle is not None}), ""


def _known(nvml: Any, ask: Callable[..., Any], *arguments: Any) -> Any:
    """Return the answer to `ask`, or None where the GPU or its driver has none."""
    try:
        return ask(*arguments)
    except nvml.NVMLError:
        return None
