"""Time of an all-reduce on a network of known latency and bandwidth. Pure, torch-free."""

import math

from paceline.lab.predict.networks import Link, NetworkModel


def ring_time_s(num_bytes: float, ranks: int, link: Link) -> float:
    """Return the seconds of a ring: 2 (N - 1) hops, each with an N-th of the bytes (Patarasuk and Yuan 2009).

    doi 10.1016/j.jpdc.2008.09.002
    """
    return 2 * (ranks - 1) * (link.alpha_s + num_bytes / ranks / link.bytes_per_s)


def tree_time_s(num_bytes: float, ranks: int, link: Link) -> float:
    """Return the seconds of a double binary tree: 2 log2 N hops, each tree with half of the bytes.

    Sanders, Speck and Träff 2009, doi 10.1016/j.parco.2009.09.001, as in NCCL since 2.4
    (https://developer.nvidia.com/blog/massively-scale-deep-learning-training-nccl-2-4).
    """
    return 2 * math.ceil(math.log2(ranks)) * link.alpha_s + (2 * num_bytes / link.bytes_per_s if ranks > 1 else 0.0)


def fastest_time_s(num_bytes: float, ranks: int, link: Link) -> float:
    """Return the seconds of the faster of the two, as NCCL chooses by size."""
    return min(ring_time_s(num_bytes, ranks, link), tree_time_s(num_bytes, ranks, link))


def hierarchical_time_s(num_bytes: float, ranks_per_node: int, nodes: int, inside: Link, between: Link) -> float:
    """Return the seconds of a reduction within each node, one between nodes, and the way back.

    A node of g ranks uses a ring; each of its ranks sends a g-th of the bytes between nodes, sharing the bandwidth of
    `between`.
    """
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
