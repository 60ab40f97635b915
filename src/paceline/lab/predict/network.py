"""Model the network: named links, measured all-reduces, and the time of an all-reduce over them. Torch-free."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist
from typing import Final, Literal

import numpy as np
from pydantic import Field, ValidationError

from paceline.core.errors import RecipeError, suggest_similar
from paceline.core.json_file import ResultModel
from paceline.core.statistics import NORMAL_QUANTILE
from paceline.core.units import number

_QUANTILE: Final = 0.975
_P10_TO_P90_SIGMAS: Final = NormalDist().inv_cdf(0.9) - NormalDist().inv_cdf(0.1)
"""Standard deviations between the 10th and 90th percentile of a normal distribution."""
MICRO: Final = 1e-6
GIGA: Final = 1e9
# A small all-reduce takes 46 us on 16 GPUs of two nodes (github.com/NVIDIA/nccl/issues/1244). Assumed: half of it is
# spent in the 14 hops of a ring of 8 within nodes, and half in the two hops of a tree of 2 between them.
_NVLINK_HOP_US: Final = 23 / 14
_INFINIBAND_HOP_US: Final = 23 / 2
_TCP_HOP_US: Final = 30.0  # from memory: sockets through the kernel, both ways of a hop of NCCL's; measure yours
_NCCL_ISSUES: Final = "github.com/NVIDIA/nccl/issues"
_NCCL_TESTS_ISSUES: Final = "github.com/NVIDIA/nccl-tests/issues"
_DEFAULT_INTRA_NODE: Final = {"ndr": "nvlink4", "hdr": "nvlink3", "edr": "nvlink2"}
"""Links within nodes that have such adapters; nvlink4 for others."""
_ADAPTER_PER_GPU: Final = ("ndr", "hdr")
_CUSTOM_NAME: Final = "own"


class AllReduceTiming(ResultModel):
    """An all-reduce of `bytes`, timed `n` times: median, 10th and 90th percentile of the slowest rank's seconds."""

    bytes: int
    median_s: float = Field(gt=0)
    p10_s: float
    p90_s: float
    n: int


class AllReduceMeasurement(ResultModel):
    """All-reduces of several sizes on `ranks` ranks of `nodes` nodes, and the fitted link between ranks.

    `alpha_s` is seconds per hop of a ring. `bytes_per_s` is the bus bandwidth as in nccl-tests: bytes a rank sends in a
    ring, 2 (N - 1) / N of the buffer, per second; `low` and `high` bound it with 95 % confidence.
    """

    kind: Literal["collective"] = "collective"
    schema_version: int = 1
    backend: str
    ranks: int
    nodes: int
    times: tuple[AllReduceTiming, ...]
    alpha_s: float
    bytes_per_s: float
    low: float
    high: float
    source: str = "measured"


def fit_link(backend: str, ranks: int, nodes: int, times: Sequence[AllReduceTiming]) -> AllReduceMeasurement:
    """Fit a ring: T = 2 (N - 1) alpha + 2 (N - 1) / N bytes / bandwidth; at least two ranks and two sizes.

    Hockney's model of a message (1994, doi 10.1016/S0167-8191(06)80021-9) for each hop of a ring (Patarasuk and Yuan
    2009, doi 10.1016/j.jpdc.2008.09.002), by non-negative least squares of relative errors. The interval of the
    bandwidth adds Student's interval of the residuals and the scatter of each size in squares.
    """
    assert ranks > 1 and len({each.bytes for each in times}) > 1, "a line needs two ranks and two sizes"
    # Absolute errors would ignore small messages. Two sizes leave no residuals, so the scatter alone counts then.
    fixed_s, per_byte_s, error_s = _fit_line(times)
    bandwidth = 2 * (ranks - 1) / ranks / per_byte_s
    doubt = error_s / per_byte_s
    return AllReduceMeasurement(
        backend=backend,
        ranks=ranks,
        nodes=nodes,
        times=tuple(times),
        alpha_s=fixed_s / (2 * (ranks - 1)),
        bytes_per_s=bandwidth,
        low=bandwidth / (1 + doubt),
        high=bandwidth * (1 + doubt),
    )


def read_all_reduce_file(path: Path) -> AllReduceMeasurement:
    """Read the output of `paceline allreduce`. Raise `RecipeError` if it is invalid."""
    try:
        return AllReduceMeasurement.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise RecipeError(f"--network: {path}: cannot be read: {error.strerror} (name another file)") from None
    except (ValidationError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        fix = "write one with `paceline allreduce`"
        raise RecipeError(f"--network: {path}: is not a measured collective: {reason} ({fix})") from None


def _fit_line(times: Sequence[AllReduceTiming]) -> tuple[float, float, float]:
    """Return a and b of T = a + b x by least squares of (a + b x) / T - 1, and the 95 % error of b."""
    from scipy.special import stdtrit  # type: ignore[import-untyped]  # loading it takes a tenth of a second

    medians = np.array([each.median_s for each in times])
    columns = np.array([[1.0, each.bytes] for each in times]) / medians[:, None]
    # The pseudoinverse has the influence of each size on a and b, which are linear in T, relative to its own time.
    inverse = np.linalg.pinv(columns)
    if (inverse.sum(axis=1) <= 0).any():  # at the bound a = 0 the best fit is b alone
        columns = columns[:, 1:]
        inverse = np.linalg.pinv(columns)
    fitted, influence, freedom = inverse.sum(axis=1), inverse[-1], len(times) - len(inverse)
    error = 0.0
    if freedom:
        residual = float(np.square(columns @ fitted - 1).sum()) / freedom
        error = float(stdtrit(freedom, _QUANTILE)) * math.sqrt(residual * np.square(influence).sum())
    relative_scatter = np.array([each.p90_s - each.p10_s for each in times]) / _P10_TO_P90_SIGMAS / medians
    scatter = NORMAL_QUANTILE * float(np.linalg.norm(influence * relative_scatter))
    return float(fitted[0]) if len(fitted) > 1 else 0.0, float(fitted[-1]), math.hypot(error, scatter)


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
    """Links of an all-reduce: within a node and between nodes; the ranks of a node share `inter_node`.

    `collective` is `ring` if it was measured as a ring over all ranks, else `best` of NCCL's algorithms. Without
    `spans_nodes` the network between nodes is unknown, and `inter_node` is `intra_node`.
    """

    name: str
    intra_node: Link
    inter_node: Link
    collective: Literal["ring", "best"] = "best"
    spans_nodes: bool = True

    def with_bandwidth(self, which: str) -> "NetworkModel":
        """Return the network at the `low`, or `high`, bandwidth of its links."""
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


# Name, microseconds per hop, and lowest, typical and highest GB/s: observed rates of collectives, not nominal ones.
# Measure your own with `paceline allreduce`.
_INTRA_NODE_ROWS: Final = (
    ("nvlink4", _NVLINK_HOP_US, 340, 370, 480, f"H200, 8 GPUs; 475-480 with NVLS: {_NCCL_TESTS_ISSUES}/272 and 212"),
    ("nvlink3", _NVLINK_HOP_US, 210, 232, 240, f"A100, 8 GPUs: {_NCCL_TESTS_ISSUES}/175"),
    ("nvlink2", _NVLINK_HOP_US, 100, 125, 135, "V100, 8 GPUs: from memory"),
    ("pcie4", 5.0, 10, 20, 25, "x16 without NVLink: from memory"),
    ("pcie3", 5.0, 5, 10, 12.5, "x16 without NVLink: half of pcie4"),
)
_NDR_SOURCE: Final = f"46-48 an adapter: {_NCCL_TESTS_ISSUES}/290; 28 set up badly: {_NCCL_ISSUES}/2409"
_HDR_SOURCE: Final = f"24, or 15-16 without GPUDirect: {_NCCL_ISSUES}/412 and 1576"
_EDR_SOURCE: Final = "102 MB in 9.3 ms, fitted to Oneflow-Inc/DLPerf on V100 nodes"
_INTER_NODE_ROWS: Final = (
    ("ndr", _INFINIBAND_HOP_US, 28, 47, 48, _NDR_SOURCE),
    ("hdr", _INFINIBAND_HOP_US, 15, 24, 24.5, _HDR_SOURCE),
    ("edr", _INFINIBAND_HOP_US, 9, 11, 12, _EDR_SOURCE),
    ("100gbe", _TCP_HOP_US, 7, 11, 11.8, "from memory"),
    ("25gbe", _TCP_HOP_US, 2.2, 2.7, 2.95, "from memory"),
    ("10gbe", _TCP_HOP_US, 0.9, 1.1, 1.18, "94 % of the line are bytes of messages: headers of 1,538 bytes"),
)
INTRA_NODE_LINKS: Final = {row[0]: _build_link(*row) for row in _INTRA_NODE_ROWS}
INTER_NODE_LINKS: Final = {row[0]: _build_link(*row) for row in _INTER_NODE_ROWS}
_CUSTOM_LINK: Final = _build_link(_CUSTOM_NAME, _TCP_HOP_US, 1, 1, 1, "given")
"""A link between nodes whose bandwidth, and perhaps latency, the user sets."""


def build_network(
    name: str | None, *, ranks_per_node: int, alpha_us: float | None = None, gigabytes_per_s: float | None = None
) -> NetworkModel:
    """Return the network named `[INSIDE+][COUNTx]BETWEEN`, such as `ndr`, `1xndr` or `nvlink3+25gbe`.

    COUNT is the number of adapters per node: one per GPU for ndr and hdr, else one. INSIDE alone means a single node. A
    file of `paceline allreduce` can replace the whole or a part. `alpha_us` and `gigabytes_per_s` override the
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
    # The user's numbers replace those of the name, and have no interval.
    between = network.inter_node
    if alpha_us is not None:
        between = replace(between, alpha_s=alpha_us * MICRO)
    if gigabytes_per_s is not None:
        given = gigabytes_per_s * GIGA
        between = replace(between, bytes_per_s=given, low=given, high=given)
    return replace(network, inter_node=between)


def build_measured_network(measured: AllReduceMeasurement) -> NetworkModel:
    """Return the network of measured all-reduces, for the same placement of ranks."""
    # A ring, as it was fitted, whatever algorithm the library used.
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
    count, x, kind = name.rpartition("x")
    if kind not in INTER_NODE_LINKS or (x and not (count.isdecimal() and int(count) > 0)):
        raise _unknown_network_error(name, tuple(INTER_NODE_LINKS))
    # Nodes with ndr or hdr usually have an adapter per GPU, the others one for all.
    adapters = int(count) if x else ranks_per_node if kind in _ADAPTER_PER_GPU else 1
    return INTER_NODE_LINKS[kind].scale_bandwidth(adapters), kind


def _unknown_network_error(name: str, known: tuple[str, ...]) -> RecipeError:
    fix = suggest_similar(name, known) or f" (use one of {', '.join(known)}, or set --gigabytes-per-s)"
    return RecipeError(f"--network: {name!r} is unknown{fix}")


def ring_time_s(num_bytes: float, ranks: int, link: Link) -> float:
    """Return the seconds of a ring: 2 (N - 1) hops, each with an N-th of the bytes (doi 10.1016/j.jpdc.2008.09.002)."""
    return 2 * (ranks - 1) * (link.alpha_s + num_bytes / ranks / link.bytes_per_s)


def tree_time_s(num_bytes: float, ranks: int, link: Link) -> float:
    """Return the seconds of a double binary tree: 2 log2 N hops, each tree with half of the bytes.

    Sanders, Speck and Träff 2009, doi 10.1016/j.parco.2009.09.001, as in NCCL since 2.4
    (https://developer.nvidia.com/blog/massively-scale-deep-learning-training-nccl-2-4).
    """
    return 2 * math.ceil(math.log2(ranks)) * link.alpha_s + (2 * num_bytes / link.bytes_per_s if ranks > 1 else 0.0)


def fastest_time_s(num_bytes: float, ranks: int, link: Link) -> float:
    """Return the seconds of the faster of ring and tree, as NCCL chooses by size."""
    return min(ring_time_s(num_bytes, ranks, link), tree_time_s(num_bytes, ranks, link))


def hierarchical_time_s(num_bytes: float, ranks_per_node: int, nodes: int, inside: Link, between: Link) -> float:
    """Return the seconds of an all-reduce in two levels: a ring within each node, then all nodes."""
    # Each of the g ranks of a node sends a g-th of the bytes between nodes, and they share the bandwidth.
    return ring_time_s(num_bytes, ranks_per_node, inside) + fastest_time_s(num_bytes, nodes, between)


def all_reduce_time_s(num_bytes: float, ranks: int, ranks_per_node: int, network: NetworkModel) -> float:
    """Return the seconds of an all-reduce over `ranks`, `ranks_per_node` on each node; 0 for one rank."""
    if ranks == 1:
        return 0.0
    # A partially filled node counts as full: the others wait for it as if it were.
    nodes = math.ceil(ranks / ranks_per_node)
    if network.collective == "ring":
        return ring_time_s(num_bytes, ranks, network.inter_node if nodes > 1 else network.intra_node)
    if nodes == 1:
        return fastest_time_s(num_bytes, ranks, network.intra_node)
    return hierarchical_time_s(num_bytes, min(ranks, ranks_per_node), nodes, network.intra_node, network.inter_node)
