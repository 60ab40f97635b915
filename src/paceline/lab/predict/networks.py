"""Networks by name: latency per hop and bandwidth, with the source of each number. Torch-free.

The numbers are observed rates of collectives, not nominal ones; measure your own with `paceline scale --collective`.
"""

from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Final, Literal

from paceline.core.errors import RecipeError
from paceline.core.units import number
from paceline.lab.predict.measured import Measured, read_collective

MICRO: Final = 1e-6
GIGA: Final = 1e9


@dataclass(frozen=True)
class Link:
    """A link: `alpha_s` seconds per hop, and `bytes_per_s`, between `low` and `high`.

    Within a node this is the bus bandwidth of a GPU as in nccl-tests
    (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md), between nodes that of one network adapter.
    """

    name: str
    alpha_s: float
    bytes_per_s: float
    low: float
    high: float
    source: str

    def times(self, factor: float) -> "Link":
        """Return the link with `factor` times the bandwidth, as of several adapters."""
        return replace(self, bytes_per_s=self.bytes_per_s * factor, low=self.low * factor, high=self.high * factor)


@dataclass(frozen=True)
class Network:
    """Links of an all-reduce: `inside` a node, and `between` nodes, the latter shared by a node's ranks.

    `collective` is `ring` if it was measured as a ring over all ranks, else `best` of those that NCCL chooses from.
    Without `spans_nodes` the network between nodes is unknown, and `between` is `inside`.
    """

    name: str
    inside: Link
    between: Link
    collective: Literal["ring", "best"] = "best"
    spans_nodes: bool = True

    def with_bandwidth(self, which: Literal["low", "high"]) -> "Network":
        """Return the network at the lowest, or highest, bandwidth of its links."""
        inside, between = (replace(each, bytes_per_s=getattr(each, which)) for each in (self.inside, self.between))
        return replace(self, inside=inside, between=between)

    def __str__(self) -> str:
        inside, between = (f"{number(each.bytes_per_s / GIGA)} GB/s" for each in (self.inside, self.between))
        if not self.spans_nodes:
            return f"{self.name} ({inside} and {number(self.inside.alpha_s / MICRO)} us a hop within a node)"
        hop_us = number(self.between.alpha_s / MICRO)
        return f"{self.name} ({inside} within a node, {between} and {hop_us} us a hop between nodes)"


def _link(name: str, alpha_us: float, low: float, typical: float, high: float, source: str) -> Link:
    return Link(name, alpha_us * MICRO, typical * GIGA, low * GIGA, high * GIGA, source)


# A small all-reduce takes 46 us on 16 GPUs of two nodes (github.com/NVIDIA/nccl/issues/1244). Assumed: half of it is
# spent in the 14 hops of a ring of 8 within nodes, and half in the two hops of a tree of 2 between them.
_NVLINK_HOP_US: Final = 23 / 14
_INFINIBAND_HOP_US: Final = 23 / 2
_TCP_HOP_US: Final = 30.0  # from memory: sockets through the kernel, both ways of a hop of NCCL's; measure yours
_NCCL: Final = "github.com/NVIDIA/nccl/issues"
_TESTS: Final = "github.com/NVIDIA/nccl-tests/issues"

INSIDE: Final = {
    each.name: each
    for each in (
        _link("nvlink4", _NVLINK_HOP_US, 340, 370, 480, f"H200, 8 GPUs; 475-480 with NVLS: {_TESTS}/272 and 212"),
        _link("nvlink3", _NVLINK_HOP_US, 210, 232, 240, f"A100, 8 GPUs: {_TESTS}/175"),
        _link("nvlink2", _NVLINK_HOP_US, 100, 125, 135, "V100, 8 GPUs: from memory"),
        _link("pcie4", 5.0, 10, 20, 25, "x16 without NVLink: from memory"),
    )
}
BETWEEN: Final = {
    each.name: each
    for each in (
        _link("ndr", _INFINIBAND_HOP_US, 28, 47, 48, f"46-48 an adapter: {_TESTS}/290; 28 set up badly: {_NCCL}/2409"),
        _link("hdr", _INFINIBAND_HOP_US, 15, 24, 24.5, f"24, or 15-16 without GPUDirect: {_NCCL}/412 and 1576"),
        _link("edr", _INFINIBAND_HOP_US, 9, 11, 12, "102 MB in 9.3 ms, fitted to Oneflow-Inc/DLPerf on V100 nodes"),
        _link("100gbe", _TCP_HOP_US, 7, 11, 11.8, "from memory"),
        _link("25gbe", _TCP_HOP_US, 2.2, 2.7, 2.95, "from memory"),
        _link("10gbe", _TCP_HOP_US, 0.9, 1.1, 1.18, "94 % of the line are bytes of messages: headers of 1,538 bytes"),
    )
}
_BESIDE: Final = {"ndr": "nvlink4", "hdr": "nvlink3", "edr": "nvlink2"}
"""Links within nodes that have such adapters; nvlink4 for others."""
_ONE_A_GPU: Final = ("ndr", "hdr")
_ONE: Final = "own"
_OWN: Final = _link(_ONE, _TCP_HOP_US, 1, 1, 1, "given")
"""A link between nodes whose bandwidth, and perhaps latency, the user sets."""


def build_network(
    name: str | None, *, ranks_per_node: int, alpha_us: float | None = None, gigabytes_per_s: float | None = None
) -> Network:
    """Return the network named `[INSIDE+][COUNTx]BETWEEN`, such as `ndr`, `1xndr` or `nvlink3+25gbe`.

    COUNT is the number of adapters per node: one per GPU for ndr and hdr, else one. INSIDE alone means a single node. A
    file of `paceline scale --collective` can replace the whole or a part. `alpha_us` and `gigabytes_per_s` override the
    links between nodes, for all adapters together. Raise `RecipeError` for an unknown name.
    """
    if name is None and gigabytes_per_s is None:
        raise RecipeError(f"--network: is not set (use one of {', '.join(BETWEEN)}, or set --gigabytes-per-s)")
    network = _named(name, ranks_per_node) if name else Network(_ONE, INSIDE["nvlink4"], _OWN)
    if not network.spans_nodes:
        if gigabytes_per_s is None and alpha_us is not None:
            fix = "add --gigabytes-per-s, or leave it out"
            raise RecipeError(
                f"--alpha-us: {alpha_us:g} has no effect on {network.name}, which is within a node ({fix})"
            )
        if gigabytes_per_s is not None:
            network = replace(network, between=_OWN, spans_nodes=True)
    between = network.between
    if alpha_us is not None:
        between = replace(between, alpha_s=alpha_us * MICRO)
    if gigabytes_per_s is not None:
        given = gigabytes_per_s * GIGA
        between = replace(between, bytes_per_s=given, low=given, high=given)
    return replace(network, between=between)


def from_measured(measured: Measured) -> Network:
    """Return the network of measured all-reduces, for ranks that are placed alike.

    Modeled as a ring, as it was fitted, whatever algorithm the library used.
    """
    link = Link(measured.backend, measured.alpha_s, measured.bytes_per_s, measured.low, measured.high, measured.source)
    return Network(f"{measured.backend} as measured", link, link, "ring", spans_nodes=measured.nodes > 1)


def _named(name: str, ranks_per_node: int) -> Network:
    inside_name, plus, between_name = name.rpartition("+")
    if not plus and between_name in INSIDE:
        return Network(name, INSIDE[between_name], INSIDE[between_name], spans_nodes=False)
    if not plus and between_name.endswith(".json"):
        return replace(from_measured(read_collective(Path(between_name))), name=between_name)
    between, kind = _between(between_name, ranks_per_node)
    inside_name = inside_name or _BESIDE.get(kind, "nvlink4")
    if inside_name.endswith(".json"):
        return Network(name, from_measured(read_collective(Path(inside_name))).inside, between)
    if inside_name not in INSIDE:
        raise _unknown(inside_name, tuple(INSIDE))
    return Network(name, INSIDE[inside_name], between)


def _between(name: str, ranks_per_node: int) -> tuple[Link, str]:
    """Return the link of all adapters of a node, and the name of one adapter."""
    count, x, kind = name.rpartition("x")
    if kind not in BETWEEN or (x and not (count.isdecimal() and int(count) > 0)):
        raise _unknown(name, tuple(BETWEEN))
    adapters = int(count) if x else ranks_per_node if kind in _ONE_A_GPU else 1
    return BETWEEN[kind].times(adapters), kind


def _unknown(name: str, known: tuple[str, ...]) -> RecipeError:
    near = get_close_matches(name, known, n=1)
    fix = f"did you mean {near[0]}?" if near else f"use one of {', '.join(known)}, or set --gigabytes-per-s"
    return RecipeError(f"--network: {name!r} is unknown ({fix})")
