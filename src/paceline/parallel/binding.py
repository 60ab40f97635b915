"""Bind each rank to CPU cores of its own, next to its GPU: `parallel.bind`."""

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from paceline.core.errors import WorldError
from paceline.core.process import PROC
from paceline.core.units import count
from paceline.core.world import World
from paceline.parallel.environ import has_own_gpu
from paceline.recipe.schema.train import Parallel

_SYS: Final = Path("/sys")


class Core(NamedTuple):
    """A physical core: its NUMA node, and its hardware threads."""

    node: int
    cpus: tuple[int, ...]


@dataclass(frozen=True)
class Binding:
    """The CPUs of this rank, and of all ranks of its node in order; empty if not bound, and `note` says why."""

    cpus: frozenset[int] = frozenset()
    of_ranks: tuple[str, ...] = ()
    note: str = ""

    @property
    def provenance(self) -> dict[str, list[str]]:
        """The CPUs of each rank of the node, for the run's provenance; empty if none is bound."""
        return {"bound_cpus": list(self.of_ranks)} if self.of_ranks else {}


def plan_cores(cores: Sequence[Core], local_ranks: int, gpu_nodes: Sequence[int] = ()) -> list[frozenset[int]]:
    """Return the CPUs of each of `local_ranks` ranks, as many cores for each; [] if there are fewer cores than ranks.

    `gpu_nodes` are the NUMA nodes of the ranks' GPUs, [] or -1 if unknown. A rank stays on its GPU's node, unless that
    has fewer cores than ranks.
    """
    ordered = sorted(cores)
    by_node = {node: [core for core in ordered if core.node == node] for node in {core.node for core in ordered}}
    ranks_of = {node: [rank for rank, near in enumerate(gpu_nodes) if near == node] for node in set(gpu_nodes)}
    if len(gpu_nodes) != local_ranks or any(len(by_node.get(node, [])) < len(on) for node, on in ranks_of.items()):
        by_node, ranks_of = {0: ordered}, {0: list(range(local_ranks))}
    # As many cores for all, and so as many threads: their number may change the bits of a result.
    each = min(len(by_node[node]) // len(ranks) for node, ranks in ranks_of.items())
    planned: dict[int, frozenset[int]] = {}
    for node, ranks in ranks_of.items():
        for position, rank in enumerate(ranks):
            mine = by_node[node][position * each : (position + 1) * each]
            planned[rank] = frozenset(cpu for core in mine for cpu in core.cpus)
    return [planned[rank] for rank in range(local_ranks)] if each else []


def read_cores(mask: frozenset[int], sys: Path = _SYS) -> list[Core]:
    """Return the physical cores with the hardware threads in `mask`; node 0 without NUMA."""
    node_of = {}
    for folder in (sys / "devices/system/node").glob("node[0-9]*"):
        for cpu in parse_cpus(_read(folder / "cpulist")):
            node_of[cpu] = int(folder.name.removeprefix("node"))
    cores = set()
    for cpu in mask:
        siblings = _read(sys / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.add(Core(node_of.get(cpu, 0), tuple(sorted(mask & parse_cpus(siblings) or {cpu}))))
    return sorted(cores)


def bind_rank(section: Parallel, world: World) -> Binding:
    """Bind this process and all its threads as `section.bind` says, before it reads data and starts workers.

    Raise `WorldError` if `cores` cannot be done.
    """
    if section.bind == "off":
        return Binding()
    mask = frozenset(os.sched_getaffinity(0))
    planned: list[frozenset[int]] = []
    if is_bound(world, len(mask), _launcher_cpus(world)):
        reason = f"{world.launcher} has bound the ranks already"
    elif section.bind == "auto" and world.local_world_size == 1:
        reason = "a single rank per node has all cores"
    else:
        planned = plan_cores(read_cores(mask), world.local_world_size, _gpu_nodes(section, world))
        cores = count(len(read_cores(mask)), "core")
        reason = f"{cores} for {count(world.local_world_size, 'rank')} per node"
    if not planned:
        if section.bind == "cores":
            raise WorldError(f"parallel.bind: cores: {reason} (set parallel.bind=off)")
        return Binding(note=f"parallel.bind: auto binds nothing: {reason}")
    cpus = planned[world.local_rank]
    for thread in (PROC / "self" / "task").iterdir():  # also those that torch has started already
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), cpus)
    return Binding(cpus, tuple(format_cpus(each) for each in planned))


def is_bound(world: World, own_cpus: int, launcher_cpus: int) -> bool:
    """Return whether a launcher has bound this rank: to fewer CPUs than itself or the job's part of the node has."""
    return own_cpus < max(launcher_cpus, world.allocated_cpus if world.local_tasks > 1 else 0)


def _launcher_cpus(world: World) -> int:
    """Return the number of CPUs that the launcher of this rank may use, 0 if unknown."""
    if world.launcher not in ("local", "torchrun"):
        return 0
    with contextlib.suppress(ProcessLookupError):
        return len(os.sched_getaffinity(os.getppid()))
    return 0


def _gpu_nodes(section: Parallel, world: World, sys: Path = _SYS) -> list[int]:
    """Return the NUMA node of the GPU of each rank of this node; [] for CPUs, or if this rank sees only its own."""
    import torch  # takes seconds, and `paceline doctor` only reads the cores

    available = torch.cuda.device_count() if section.device != "cpu" else 0
    if available < world.local_world_size or has_own_gpu(world, available):
        return []
    return [_gpu_node(torch.cuda.get_device_properties(index), sys) for index in range(world.local_world_size)]


def _gpu_node(properties: Any, sys: Path) -> int:
    address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    return int(_read(sys / "bus/pci/devices" / address / "numa_node") or -1)


def parse_cpus(text: str) -> frozenset[int]:
    """Return the CPUs of the kernel's list format, such as `0-3,8`."""
    ranges = (part.partition("-") for part in text.strip().split(",") if part)
    return frozenset(cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1))


def format_cpus(cpus: frozenset[int]) -> str:
    """Return `cpus` in the kernel's list format."""
    starts = sorted(cpu for cpu in cpus if cpu - 1 not in cpus)
    ends = sorted(cpu for cpu in cpus if cpu + 1 not in cpus)
    return ",".join(f"{start}-{end}" if end > start else f"{start}" for start, end in zip(starts, ends, strict=True))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
