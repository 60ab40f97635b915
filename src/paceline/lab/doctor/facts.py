"""Facts that a rank reports about itself before any collective: place, versions, device, and findings."""

import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Self

from paceline.core.limits import PROC, rank_cores
from paceline.core.world import World
from paceline.lab.doctor.finding import DoctorFinding
from paceline.lab.doctor.links import (
    NO_INTERFACE,
    Interface,
    find_gloo_interface,
    find_interface_towards,
    list_interfaces,
    read_infiniband_bit_per_s,
)

COMPARED_VERSIONS: Final = ("paceline", "torch", "nccl", "driver", "cuda", "python", "torchvision", "numpy")
"""Versions from `describe_machine`, in the order of reports."""


@dataclass(frozen=True)
class RankFacts:
    """Facts of one rank. `machine` is equal for ranks that share a network namespace, `gpu` for ranks that share a GPU.

    `refusal` explains why the rank has no `device`. `interface` is gloo's, `towards_main` the name of the interface of
    the route to rank 0, and `read_infiniband_bit_per_s` the nominal rate of the fastest adapter (0: none).
    """

    rank: int
    host: str = ""
    machine: str = ""
    pid: int = 0
    local_rank: int = 0
    local_world_size: int = 1
    versions: dict[str, str] = field(default_factory=dict)
    device: str = "cpu"
    gpu: str = ""
    refusal: str = ""
    cores: int = 1
    interface: Interface = NO_INTERFACE
    towards_main: str = ""
    infiniband_bit_per_s: float = 0.0
    own: tuple[DoctorFinding, ...] = ()

    @property
    def label(self) -> str:
        """Label such as `rank 3 (node07)`."""
        return f"rank {self.rank} ({self.host})"

    def to_json(self) -> str:
        """Return one line of JSON, which `from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read facts; unknown fields, of ranks with another version of paceline, are ignored."""
        values = _select_known_fields(cls, json.loads(text))
        values["interface"] = Interface(
            **_select_known_fields(Interface, values.get("interface", asdict(NO_INTERFACE)))
        )
        values["own"] = tuple(
            DoctorFinding(**_select_known_fields(DoctorFinding, each)) for each in values.get("own", ())
        )
        return cls(**values)


def collect_facts(
    world: World,
    own: Sequence[DoctorFinding],
    versions: Mapping[str, Any],
    environ: Mapping[str, str],
    *,
    device: str,
    gpu: str = "",
    refusal: str = "",
) -> RankFacts:
    """Collect the facts of this rank; `versions` is from `describe_machine`, and `gpu` identifies the GPU."""
    available = list_interfaces()
    return RankFacts(
        rank=world.rank,
        host=socket.gethostname(),
        machine=identify_machine(),
        pid=os.getpid(),
        local_rank=world.local_rank,
        local_world_size=world.local_world_size,
        versions={name: str(versions[name]) for name in COMPARED_VERSIONS if versions.get(name)},
        device=device,
        gpu=gpu,
        refusal=refusal,
        cores=rank_cores(world),
        interface=find_gloo_interface(available, environ),
        towards_main=find_interface_towards(available, world.master_addr).name,
        infiniband_bit_per_s=read_infiniband_bit_per_s(),
        own=tuple(own),
    )


def identify_machine(proc: Path = PROC) -> str:
    """Return an identifier that processes in the same network namespace share; elsewhere the host's name."""
    try:
        boot = (proc / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {(proc / 'self/ns/net').readlink()}"
    except OSError:
        return socket.gethostname()


def _select_known_fields(kind: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    return {each.name: values[each.name] for each in fields(kind) if each.name in values}
