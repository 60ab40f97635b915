"""What a rank says of itself before any collective: who and where it is, what it runs on, and what is amiss with it."""

import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Self

from paceline.core.limits import PROC, rank_cores
from paceline.core.world import World
from paceline.lab.doctor.finding import Finding
from paceline.lab.doctor.links import NO_INTERFACE, Interface, chosen_by_gloo, infiniband_bit_per_s, interfaces, towards

VERSIONS: Final = ("paceline", "torch", "nccl", "driver", "cuda", "python", "torchvision", "numpy")
"""Those of `describe_machine`, in the order in which they are told."""


@dataclass(frozen=True)
class Facts:
    """One rank. `machine` is the same for ranks that talk over no wire, and `gpu` for those that share a GPU.

    `refusal` says why the rank has no `device`. `interface` is the one that gloo listens on, `towards_main` the name of
    the one on the way to rank 0, and `infiniband_bit_per_s` what the fastest adapter is made for (0: there is none).
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
    own: tuple[Finding, ...] = ()

    @property
    def where(self) -> str:
        """Return who this is, in words."""
        return f"rank {self.rank} ({self.host})"

    def to_json(self) -> str:
        """Return one line, which `from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what a rank wrote; one that runs another paceline may say more than we know, or less."""
        values = _known(cls, json.loads(text))
        values["interface"] = Interface(**_known(Interface, values.get("interface", asdict(NO_INTERFACE))))
        values["own"] = tuple(Finding(**_known(Finding, each)) for each in values.get("own", ()))
        return cls(**values)


def facts_of(
    world: World,
    own: Sequence[Finding],
    versions: Mapping[str, Any],
    environ: Mapping[str, str],
    *,
    device: str,
    gpu: str = "",
    refusal: str = "",
) -> Facts:
    """Return what this rank is; `versions` is what `describe_machine` returns, `gpu` what tells GPUs apart."""
    there = interfaces()
    return Facts(
        rank=world.rank,
        host=socket.gethostname(),
        machine=machine_of(),
        pid=os.getpid(),
        local_rank=world.local_rank,
        local_world_size=world.local_world_size,
        versions={name: str(versions[name]) for name in VERSIONS if versions.get(name)},
        device=device,
        gpu=gpu,
        refusal=refusal,
        cores=rank_cores(world),
        interface=chosen_by_gloo(there, environ),
        towards_main=towards(there, world.master_addr).name,
        infiniband_bit_per_s=infiniband_bit_per_s(),
        own=tuple(own),
    )


def machine_of(proc: Path = PROC) -> str:
    """Return what two processes share that have one network: of a container, its own. The host's name elsewhere."""
    try:
        boot = (proc / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {(proc / 'self/ns/net').readlink()}"
    except OSError:
        return socket.gethostname()


def _known(kind: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    return {each.name: values[each.name] for each in fields(kind) if each.name in values}
