"""Energy that the GPUs and CPUs of a node have used, from the counters of their hardware."""

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Literal

from paceline.core.results import EnergyResult
from paceline.core.run_dir import read_lines

Kind = Literal["gpu", "cpu"]
KINDS: Final[tuple[Kind, ...]] = ("gpu", "cpu")
SOURCES: Final[Mapping[Kind, str]] = {"gpu": "NVML energy counters", "cpu": "RAPL"}
J_PER_KWH: Final = 3.6e6
# A package contains its cores and its graphics, but not always its memory. psys contains the packages.
_RAPL_ZONES: Final = ("package", "dram")


def energy_key(kind: Kind) -> str:
    """Return the key of a telemetry row for the joules since the row before."""
    return f"{kind}_energy_j"


@dataclass(frozen=True)
class EnergyCounter:
    """A counter that never falls but starts again at 0 after `limit`, if it has one; `unit_j` joules are 1."""

    kind: Kind
    read: Callable[[], int]
    unit_j: float
    limit: int = 0


def find_rapl_counters(sys: Path) -> tuple[list[EnergyCounter], str]:
    """Return the counters of the node's CPU packages and memory in sysfs at `sys`, or none and the reason.

    Source: Documentation/power/powercap/powercap.rst of the Linux kernel.
    """
    counters = []
    for zone in sorted((sys / "class" / "powercap").glob("intel-rapl:*")):
        try:
            if (zone / "name").read_text().startswith(_RAPL_ZONES):
                path, limit = zone / "energy_uj", _read_number(zone / "max_energy_range_uj")
                _read_number(path)
                counters.append(EnergyCounter("cpu", partial(_read_number, path), 1e-6, limit))
        except PermissionError:
            return (
                [],
                f"{zone.name}/energy_uj may be read by root alone (sudo chmod a+r /sys/class/powercap/*/energy_uj)",
            )
        except (OSError, ValueError) as error:
            return [], f"{zone.name} cannot be read: {error}"
    return counters, "" if counters else "the kernel has no RAPL counters here (/sys/class/powercap)"


def _read_number(path: Path) -> int:
    return int(path.read_text())


class EnergyMeter:
    """Sum what `counters` count from now on; `missing` says by kind why there are none.

    `before_j` are the joules of earlier processes of the run by kind.
    """

    def __init__(
        self,
        counters: Iterable[EnergyCounter] = (),
        missing: Mapping[Kind, str] | None = None,
        before_j: Mapping[Kind, float] | None = None,
    ) -> None:
        self.missing: Mapping[Kind, str] = {kind: why for kind, why in (missing or {}).items() if why}
        self._last = {each: _read(each) for each in counters}
        known = [each.kind for each, value in self._last.items() if value is not None]
        self.totals_j: dict[Kind, float] = {kind: (before_j or {}).get(kind, 0.0) for kind in known}
        self._sampled_j = dict(self.totals_j)

    def sample(self) -> dict[str, float]:
        """Return the joules since the last sample by `energy_key`."""
        self.update()
        used_j = {kind: total_j - self._sampled_j[kind] for kind, total_j in self.totals_j.items()}
        self._sampled_j = dict(self.totals_j)
        return {energy_key(kind): round(each_j, 3) for kind, each_j in used_j.items()}

    def update(self) -> None:
        """Read the counters, at the latest before one of them has passed its limit."""
        for counter, before in self._last.items():
            value = _read(counter)
            if value is None or before is None:
                continue
            self._last[counter] = value
            moved = value - before
            # A counter without a limit that has fallen was reset, by a new driver: what it had counted is unknown.
            self.totals_j[counter.kind] += counter.unit_j * max(0, moved + (counter.limit if moved < 0 else 0))


def _read(counter: EnergyCounter) -> int | None:
    with contextlib.suppress(Exception):  # NVML raises its own errors, and a GPU may be lost
        return counter.read()
    return None


def recorded_energy_j(files: Iterable[Path]) -> dict[Kind, float]:
    """Return the joules by kind in the telemetry `files` of a run's nodes."""
    totals_j: dict[Kind, float] = {}
    for path in files:
        for row in read_lines(path, lambda number: None):
            for kind in KINDS:
                value = row.get(energy_key(kind))
                if isinstance(value, int | float) and 0 <= value < 1e15:
                    totals_j[kind] = totals_j.get(kind, 0.0) + value
    return totals_j


def build_energy_result(
    sums: Mapping[Kind, tuple[float, int]], num_nodes: int, images: int, missing: Mapping[Kind, str]
) -> EnergyResult:
    """Return the energy of a run on `num_nodes`: `sums` has joules by kind, and how many nodes could measure them.

    `missing` says why this node could not.
    """
    known = {kind: joules / J_PER_KWH for kind, (joules, nodes) in sums.items() if nodes == num_nodes}
    partial = {
        kind: f"only {nodes} of {num_nodes} nodes could measure it" for kind, (_, nodes) in sums.items() if nodes
    }
    whole = sum(known.values())
    return EnergyResult(
        gpu_kwh=known.get("gpu"),
        cpu_kwh=known.get("cpu"),
        images_per_kwh=images / whole if whole else None,
        source=", ".join(SOURCES[kind] for kind in KINDS if kind in known),
        missing={kind: why for kind, why in {**missing, **partial}.items() if kind not in known},
    )


def find_gpu_counters(
    read_by_gpu: Mapping[int, Callable[[], int]], gpu_ids: Collection[int]
) -> tuple[list[EnergyCounter], str]:
    """Return the counters of the GPUs `gpu_ids` that ranks use, or none and the reason.

    `read_by_gpu` has, by GPU, a function that returns the millijoules since the driver was loaded.
    """
    counters = [EnergyCounter("gpu", read, 1e-3) for gpu, read in read_by_gpu.items() if gpu in gpu_ids]
    if len(counters) < len(gpu_ids):
        return [], "NVML does not list the GPUs of all ranks (MIG instances have no counter of their own)"
    try:
        for each in counters:
            each.read()
    except Exception as error:
        return [], f"NVML: {error}"
    return counters, ""
