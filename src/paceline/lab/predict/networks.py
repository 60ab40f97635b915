"""Networks by name: latency per hop and bandwidth, with the source of each number. Torch-free.

The numbers are observed rates of collectives, not nominal ones; measure your own with `paceline scale --collective`.
"""

from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Final, Literal

from paceline.core.errors import RecipeError
from paceline.core.units import number
from paceline.lab.predict.measured import AllReduceMeasurement, read_all_reduce_file

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

    def scale_bandwidth(self, factor: float) -> "Link":
        """Return the link with `factor` times the bandwidth, as of several adapters."""
        return replace(self, bytes_per_s=self.bytes_per_s * factor, low=self.low * factor, high=self.high * factor)


@dataclass(frozen=True)
class NetworkModel:
    """Links of an all-reduce: `intra_node` a node, and `inter_node` nodes, the latter shared by a node's ranks.

    `collective` is `ring` if it was measured as a ring over all ranks, else `best` of those that NCCL chooses from.
    Without `spans_nodes` the network between nodes is unknown, and `inter_node` is `intra_node`.
    """

    name: str
    intra_node: Link
    inter_node: Link
    collective: Literal["ring", "best"] = "best"
    spans_nodes: bool = True

    def with_bandwidth(self, which: Literal["low", "high"]) -> "NetworkModel":
        """Return the network at the lowest, or highest, bandwidth of its links."""
        inside, between = (
            replace(each, bytes_per_s=getattr(each, which)) for each in (self.intra_node, self.inter_node)
        )
        return replace(self, intra_node=inside, inter_node=between)

    def __str__(self) -> str:
        inside, between = (f"{number(each.bytes_per_s / GIGA)} GB/s" for each in (self.intra_node, self.inter_node))
        if not self.spans_nodes:
            return f"{self.name} ({inside} and {number(self.intra_node.alpha_s / MICRO)} us a hop within a node)"
        hop_us = number(self.inter_node.alpha_s / MICRO)
        return f"{self.name} ({inside} within a node, {between} and {hop_us} us a hop between nodes)"


def _build_link(name: str, alpha_us: float, low: float, typical: float, high: float, source: str) -> Link:
    return Link(name, alpha_us * MICRO, typical * GIGA, low * GIGA, high * GIGA, source)


# A small all-reduce takes 46 us on 16 GPUs of two nodes (github.com/NVIDIA/nccl/issues/1244). Assumed: half of it is
# spent in the 14 hops of a ring of 8 within nodes, and half in the two hops of a tree of 2 between them.
_NVLINK_HOP_US: Final = 23 / 14
_INFINIBAND_HOP_US: Final = 23 / 2
_TCP_HOP_US: Final = 30.0  # from memory: sockets through the kernel, both ways of a hop of NCCL's; measure yours
_NCCL_ISSUES: Final = "github.com/NVIDIA/nccl/issues"
_NCCL_TESTS_ISSUES: Final = "github.com/NVIDIA/nccl-tests/issues"

INTRA_NODE_LINKS: Final = {
    each.name: each
    for each in (
        _build_link(
            "nvlink4",
            _NVLINK_HOP_US,
            340,
            370,
            480,
            f"H200, 8 GPUs; 475-480 with NVLS: {_NCCL_TESTS_ISSUES}/272 and 212",
        ),
        _build_link("nvlink3", _NVLINK_HOP_US, 210, 232, 240, f"A100, 8 GPUs: {_NCCL_TESTS_ISSUES}/175"),
        _build_link("nvlink2", _NVLINK_HOP_US, 100, 125, 135, "V100, 8 GPUs: from memory"),
        _build_link("pcie4", 5.0, 10, 20, 25, "x16 without NVLink: from memory"),
    )
}
INTER_NODE_LINKS: Final = {
    each.name: each
    for each in (
        _build_link(
            "ndr",
            _INFINIBAND_HOP_US,
            28,
            47,
            48,
            f"46-48 an adapter: {_NCCL_TESTS_ISSUES}/290; 28 set up badly: {_NCCL_ISSUES}/2409",
        ),
        _build_link(
            "hdr", _INFINIBAND_HOP_US, 15, 24, 24.5, f"24, or 15-16 without GPUDirect: {_NCCL_ISSUES}/412 and 1576"
        ),
        _build_link(
            "edr", _INFINIBAND_HOP_US, 9, 11, 12, "102 MB in 9.3 ms, fitted to Oneflow-Inc/DLPerf on V100 nodes"
        ),
        _build_link("100gbe", _TCP_HOP_US, 7, 11, 11.8, "from memory"),
        _build_link("25gbe", _TCP_HOP_US, 2.2, 2.7, 2.95, "from memory"),
        _build_link(
            "10gbe", _TCP_HOP_US, 0.9, 1.1, 1.18, "94 % of the line are bytes of messages: headers of 1,538 bytes"
        ),
    )
}
_DEFAULT_INTRA_NODE: Final = {"ndr": "nvlink4", "hdr": "nvlink3", "edr": "nvlink2"}
"""Links within nodes that have such adapters; nvlink4 for others."""
_ADAPTER_PER_GPU: Final = ("ndr", "hdr")
_CUSTOM_NAME: Final = "own"
_CUSTOM_LINK: Final = _build_link(_CUSTOM_NAME, _TCP_HOP_US, 1, 1, 1, "given")
"""A link between nodes whose bandwidth, and perhaps latency, the user sets."""


def build_network(
    name: str | None, *, ranks_per_node: int, alpha_us: float | None = None, gigabytes_per_s: float | None = None
) -> NetworkModel:
    """Return the network named `[INSIDE+][COUNTx]BETWEEN`, such as `ndr`, `1xndr` or `nvlink3+25gbe`.

    COUNT is the number of adapters per node: one per GPU for ndr and hdr, else one. INSIDE alone means a single node. A
    file of `paceline scale --collective` can replace the whole or a part. `alpha_us` and `gigabytes_per_s` override the
    links between nodes, for all adapters together. Raise `RecipeError` for an unknown name.
    """
    if name is None and gigabytes_per_s is None:
        raise RecipeError(f"--network: is not set (use one of {', '.join(INTER_NODE_LINKS)}, or set --gigabytes-per-s)")
    network = (
        _find_network(name, ranks_per_node)
        if name
        else NetworkModel(_CUSTOM_NAME, INTRA_NODE_LINKS["nvlink4"], _CUSTOM_LINK)
    )
    if not network.spans_nodes:
        if gigabytes_per_s is None and alpha_us is not None:
            fix = "add --gigabytes-per-s, or leave it out"
            raise RecipeError(
                f"--alpha-us: {alpha_us:g} has no effect on {network.name}, which is within a node ({fix})"
            )
        if gigabytes_per_s is not None:
            network = replace(network, inter_node=_CUSTOM_LINK, spans_nodes=True)
    between = network.inter_node
    if alpha_us is not None:
        between = replace(between, alpha_s=alpha_us * MICRO)
    if gigabytes_per_s is not None:
        given = gigabytes_per_s * GIGA
        between = replace(between, bytes_per_s=given, low=given, high=given)
    return replace(network, inter_node=between)


def build_measured_network(measured: AllReduceMeasurement) -> NetworkModel:
    """Return the network of measured all-reduces, for ranks that are placed alike.

    Modeled as a ring, as it was fitted, whatever algorithm the library used.
    """
    link = Link(measured.backend, measured.alpha_s, measured.bytes_per_s, measured.low, measured.high, measured.source)
    return NetworkModel(f"{measured.backend} as measured", link, link, "ring", spans_nodes=measured.nodes > 1)


def _find_network(name: str, ranks_per_node: int) -> NetworkModel:
    inside_name, plus, between_name = name.rpartition("+")
    if not plus and between_name in INTRA_NODE_LINKS:
        return NetworkModel(name, INTRA_NODE_LINKS[between_name], INTRA_NODE_LINKS[between_name], spans_nodes=False)
    if not plus and between_name.endswith(".json"):
        return replace(build_measured_network(read_all_reduce_file(Path(between_name))), name=between_name)
    between, kind = _find_inter_node_link(between_name, ranks_per_node)
    inside_name = inside_name or _DEFAULT_INTRA_NODE.get(kind, "nvlink4")
    if inside_name.endswith(".json"):
        return NetworkModel(name, build_measured_network(read_all_reduce_file(Path(inside_name))).intra_node, between)
    if inside_name not in INTRA_NODE_LINKS:
        raise _unknown_network_error(inside_name, tuple(INTRA_NODE_LINKS))
    return NetworkModel(name, INTRA_NODE_LINKS[inside_name], between)


def _find_inter_node_link(name: str, ranks_per_node: int) -> tuple[Link, str]:
    """Return the link of all adapters of a node, and the name of one adapter."""
    count, x, kind = name.rpartition("x")
    if kind not in INTER_NODE_LINKS or (x and not (count.isdecimal() and int(count) > 0)):
        raise _unknown_network_error(name, tuple(INTER_NODE_LINKS))
    adapters = int(count) if x else ranks_per_node if kind in _ADAPTER_PER_GPU else 1
    return INTER_NODE_LINKS[kind].scale_bandwidth(adapters), kind


def _unknown_network_error(name: str, known: tuple[str, ...]) -> RecipeError:
    near = get_close_matches(name, known, n=1)
    fix = f"did you mean {near[0]}?" if near else f"use one of {', '.join(known)}, or set --gigabytes-per-s"
    return RecipeError(f"--network: {name!r} is unknown ({fix})")
